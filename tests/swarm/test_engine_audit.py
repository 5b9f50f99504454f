"""Recomputing committed parts between real engines: right ones, wrong ones, and bytes that are not to be had."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from node.engine import api
from protocol.plan import Plan, Shard
from tests.swarm.engine_lab import Lab, LabEngine, Round, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

OTHER_HASH = bytes(32)


def request(turn: Round, encoded: list[api.Encoded], ref: api.PartRef) -> api.Recompute:
    exchange = turn.requests(encoded)[0]
    return api.Recompute(
        id=0,
        base=exchange.base,
        part=ref.part,
        bitmap_bytes=ref.bitmap_bytes,
        result_hash=ref.hash,
        peers=exchange.peers,
        contributing_bytes=exchange.contributing_bytes,
        tokens=exchange.tokens,
        shards=exchange.shards,
        parts_roots=exchange.parts_roots,
        weight_cap_ratio=exchange.weight_cap_ratio,
        sources=(),
        yields=False,
        timeout_s=20.0,
    )


async def finished(swarm: Lab, turn: Round) -> tuple[list[api.Encoded], list[api.PartRef]]:
    rng = np.random.default_rng(turn.number)
    for engine in turn.engines:
        engine.delta[:] = rng.standard_normal(swarm.sizes.elements).astype(np.float32)
    encoded = await turn.encode()
    await turn.start()
    refs = [ref for ref in await turn.finish() if ref is not None]
    assert len(refs) == swarm.sizes.part_count
    return encoded, refs


async def verdict(engine: LabEngine, asked: api.Recompute) -> api.Recomputed:
    return await engine.ask.recompute(asked)


def test_every_part_is_recomputed_to_the_bit_and_a_lie_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, 3) as swarm:
                turn = flat_round(swarm, 0)
                encoded, refs = await finished(swarm, turn)
                for ref in refs:
                    answer = await verdict(turn.engines[ref.part % 3], request(turn, encoded, ref))
                    assert (answer.verdict, answer.why) == ("right", "")
                    part_bytes = ref.length
                    assert 2 * part_bytes <= answer.bytes_received <= 2 * (part_bytes + 15 * 32), "its own is at hand"
                lie = msgspec.structs.replace(request(turn, encoded, refs[0]), result_hash=OTHER_HASH)
                assert (await verdict(turn.engines[0], lie)).verdict == "wrong"
                fewer = msgspec.structs.replace(request(turn, encoded, refs[0]), bitmap_bytes=bytes([0b011]))
                assert (await verdict(turn.engines[0], fewer)).verdict == "wrong"
                # A round later the bytes are still there; two rounds later they are not.
                await finished(swarm, flat_round(swarm, 1))
                assert (await verdict(turn.engines[0], request(turn, encoded, refs[1]))).verdict == "right"
                await finished(swarm, flat_round(swarm, 2))
                gone = await verdict(turn.engines[0], request(turn, encoded, refs[2]))
                assert gone.verdict == "unknown"
                assert "cannot be had" in gone.why

    trio.run(main)


def test_a_tree_is_recomputed_in_its_own_order_of_sums(tmp_path: Path) -> None:
    """Root 0, below it 1 and 2; below 1 two leaves: partial sums are rounded by the sum codec on their way."""

    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, 5) as swarm:
                flat = flat_round(swarm, 0)
                plan = Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 1, 1)), Shard(share=1, parents=(1, 2, -1, 2, 3))))
                turn = Round(lab=swarm, number=0, engines=flat.engines, tokens=flat.tokens, plan=plan)
                encoded, refs = await finished(swarm, turn)
                for ref in refs:
                    assert ref.bitmap == 0b11111
                    answer = await verdict(turn.engines[ref.part % 5], request(turn, encoded, ref))
                    assert (answer.verdict, answer.why) == ("right", ""), ref.part

    trio.run(main)


def test_an_audit_gives_way_to_an_exchange_and_a_claim_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, 2) as swarm:
                turn = flat_round(swarm, 0)
                encoded, refs = await finished(swarm, turn)
                claim = request(turn, encoded, refs[0])
                audit = msgspec.structs.replace(claim, yields=True)
                assert (await verdict(turn.engines[0], audit)).verdict == "right"
                # Its partner has not been told of the next round: this exchange has its work before it.
                later = flat_round(swarm, 1)
                await later.engines[0].ask.exchange(later.requests(await later.encode())[0])
                late = await verdict(turn.engines[0], audit)
                assert (late.verdict, late.why) == ("unknown", "an exchange began before it was done")
                assert (await verdict(turn.engines[0], claim)).verdict == "right"

    trio.run(main)


def test_who_found_a_lie_serves_what_shows_it(tmp_path: Path) -> None:
    """The culprit keeps its own contribution to itself once it is accused; the accuser has it by then."""

    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, 3) as swarm:
                turn = flat_round(swarm, 0)
                encoded, refs = await finished(swarm, turn)
                culprit, accuser, other = turn.engines
                lie = msgspec.structs.replace(request(turn, encoded, refs[0]), result_hash=OTHER_HASH)
                assert (await verdict(accuser, lie)).verdict == "wrong"
                culprit.kill()
                alone = await verdict(other, lie)
                assert alone.verdict == "unknown"
                assert culprit.peer_id in alone.why
                told = msgspec.structs.replace(lie, sources=(accuser.peer_id,))
                assert (await verdict(other, told)).verdict == "wrong"
                await culprit.start()
                await swarm.introduce()

    trio.run(main)


def test_other_bytes_than_the_committed_ones_do_not_count(tmp_path: Path) -> None:
    """A contribution that went bad on its leaf's disk is not to be had, and nobody is blamed for a wrong mean."""

    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, 2) as swarm:
                turn = flat_round(swarm, 0)
                encoded, refs = await finished(swarm, turn)
                leaf = turn.engines[1]
                path = leaf.directory / "outbox" / f"{turn.base.hex()}.data"
                data = bytearray(path.read_bytes())
                data[0] ^= 1
                path.write_bytes(data)
                answer = await verdict(turn.engines[0], request(turn, encoded, refs[0]))
                assert answer.verdict == "unknown"
                assert leaf.peer_id in answer.why

    trio.run(main)
