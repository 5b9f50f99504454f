"""Engines that die or lie in the middle of an exchange: the others finish, and every part is exact over its bitmap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from node.engine import api, handshake
from node.engine.frames import Header, Kind, UpMeta, pack_want
from node.engine.handshake import Stream
from protocol.plan import Plan, Shard
from protocol.planning import deal
from protocol.state_hash import state_hash
from protocol.weights import part_weights
from tests import reference
from tests.swarm.engine_lab import Lab, LabEngine, Proxy, Round, Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

MANY_PARTS = Sizes(elements=1_500_000, buffer_elements=0, part_elements=4096, codec="fp32")


def expected_state(
    turn: Round, theta: np.ndarray, deltas: Sequence[np.ndarray], refs: tuple[api.PartRef | None, ...]
) -> bytes:
    """Plain NumPy over exactly the contributions that each bitmap names; EMPTY parts stay as they are."""
    sizes = turn.lab.sizes
    tokens = [runs[0][1] if runs else 0 for runs in turn.tokens]
    weights = part_weights(tokens, 3.0)
    new_theta, new_momentum = theta.copy(), np.zeros(sizes.elements - sizes.buffer_elements, np.float32)
    for part, ref in enumerate(refs):
        if ref is None:
            continue
        start, stop = part * sizes.part_elements, min((part + 1) * sizes.part_elements, sizes.elements)
        acc, total = np.zeros(stop - start, np.float32), 0
        for index, delta in enumerate(deltas):
            if ref.bitmap >> index & 1:
                decoded = reference.decode(sizes.codec, reference.encode(sizes.codec, delta[start:stop]), stop - start)
                acc = acc + np.float32(weights[index]) * decoded
                total += weights[index]
        g = reference.decode(sizes.codec, reference.encode(sizes.codec, acc / np.float32(total)), stop - start)
        new_theta[start:stop], new_momentum[start:stop] = reference.outer_step(
            theta[start:stop], np.zeros(stop - start, np.float32), g, 0.6, 0.9
        )
    return state_hash(new_theta, new_momentum)


def fill(turn: Round, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    for engine in turn.engines:
        engine.delta[:] = 0.01 * rng.standard_normal(turn.lab.sizes.elements).astype(np.float32)
    return [np.array(engine.delta) for engine in turn.engines]


@pytest.mark.parametrize("victim", [0, 3])
def test_one_of_four_is_killed_in_the_exchange(tmp_path: Path, victim: int) -> None:
    async def main() -> None:
        with trio.fail_after(90):
            async with lab(tmp_path, 4, MANY_PARTS) as swarm:
                theta = np.zeros(MANY_PARTS.elements, np.float32)
                await swarm.load_initial(theta)
                turn = flat_round(swarm, 0, duration_s=30.0, progress_s=3.0)
                deltas = fill(turn, 7)
                await turn.start()
                dead = turn.engines[victim]
                await dead.until("some parts", lambda: len(dead.held) > 20)
                dead.kill()
                assert dead.process is not None
                survivors = [engine for engine in turn.engines if engine is not dead]
                started = trio.current_time()
                refs = await turn.finish(survivors)
                assert trio.current_time() - started < 15
                whole = (1 << 4) - 1
                bitmaps = {ref.bitmap for ref in refs if ref is not None}
                assert bitmaps <= {whole, whole & ~(1 << victim)}
                assert sum(ref is not None for ref in refs) >= MANY_PARTS.part_count / 2
                roots = {ref.root for ref in refs if ref is not None and ref.bitmap != whole}
                assert dead.peer_id not in roots
                for engine in survivors:
                    assert dead.peer_id in engine.ended[turn.roster_id].failed_edges
                applied = await turn.apply(refs, survivors)
                expected = expected_state(turn, theta, deltas, refs)
                assert {answer.state_hash for answer in applied} == {expected}
                for engine, answer in zip(survivors, applied, strict=True):
                    check_increments(turn, engine, theta, refs, answer)

    trio.run(main)


def test_broken_connections_between_two_that_live_cost_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(90):
            async with lab(tmp_path, 1, MANY_PARTS) as swarm, trio.open_nursery() as nursery:
                proxy = Proxy()
                await nursery.start(proxy.run)
                first = swarm.engines[0]
                proxy.target_port, first.seen_port = first.port, proxy.port
                await swarm.add(dialable=False)  # so that every connection goes through the proxy
                await swarm.load_initial(np.zeros(MANY_PARTS.elements, np.float32))
                turn = flat_round(swarm, 0, progress_s=5.0, duration_s=30.0)
                deltas = fill(turn, 13)
                await turn.start()
                for cut in range(3):
                    await proxy.until((cut + 1) * 2_000_000)
                    await proxy.cut()
                refs = await turn.finish()
                assert proxy.connections >= 8
                assert {ref.bitmap for ref in refs if ref is not None} == {0b11}
                assert all(refs)
                applied = await turn.apply(refs)
                expected = expected_state(turn, np.zeros(MANY_PARTS.elements, np.float32), deltas, refs)
                assert {answer.state_hash for answer in applied} == {expected}
                nursery.cancel_scope.cancel()

    trio.run(main)


def check_increments(
    turn: Round,
    engine: LabEngine,
    theta: np.ndarray,
    refs: tuple[api.PartRef | None, ...],
    answer: api.Applied,
) -> None:
    """Delta holds the step where this engine was not counted, zeros elsewhere (protocol section 8)."""
    index, sizes = turn.engines.index(engine), turn.lab.sizes
    for part, ref in enumerate(refs):
        start, stop = part * sizes.part_elements, min((part + 1) * sizes.part_elements, sizes.elements)
        counted = ref is not None and bool(ref.bitmap >> index & 1)
        assert answer.counted[part] == counted
        increment = engine.theta[start:stop] - theta[start:stop]
        assert np.array_equal(engine.delta[start:stop], np.zeros_like(increment) if counted else increment)


def test_who_does_not_contribute_receives_and_keeps_its_delta(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            sizes = Sizes(codec="fp16")
            async with lab(tmp_path, 3, sizes) as swarm:
                theta = np.zeros(sizes.elements, np.float32)
                await swarm.load_initial(theta)
                turn = flat_round(swarm, 0, tokens=[100, 0, 300])
                fill(turn, 3)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap for ref in refs if ref is not None} == {0b101}
                applied = await turn.apply(refs)
                assert len({answer.state_hash for answer in applied}) == 1
                assert not any(applied[1].counted)
                for engine, answer in zip(turn.engines, applied, strict=True):
                    check_increments(turn, engine, theta, refs, answer)

    trio.run(main)


def test_a_grouped_plan_sums_twice_and_all_agree(tmp_path: Path) -> None:
    """0 and 1 under 2, 2 and 4 under 3 for one shard; a chain for the other: partial sums travel in the sum codec."""

    async def main() -> None:
        with trio.fail_after(60):
            sizes = Sizes(elements=64 * 1024, buffer_elements=0, part_elements=1024, codec="fp32")
            async with lab(tmp_path, 5, sizes) as swarm:
                theta = np.zeros(sizes.elements, np.float32)
                await swarm.load_initial(theta)
                turn = flat_round(swarm, 0, tokens=[100, 200, 300, 0, 250])
                turn.plan = Plan(
                    shards=(
                        Shard(share=1, parents=(2, 2, -1, 4, 2)),
                        Shard(share=2, parents=(-1, 0, 1, 2, 1)),
                    )
                )
                deltas = fill(turn, 11)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap for ref in refs if ref is not None} == {0b10111}
                applied = await turn.apply(refs)
                assert len({answer.state_hash for answer in applied}) == 1
                weights = part_weights([100, 200, 300, 0, 250], 3.0)
                mean = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True)) / sum(weights)
                stepped = -0.6 * 1.9 * mean
                assert np.abs(turn.engines[0].theta - stepped).max() < 2e-3 * np.abs(stepped).max()

    trio.run(main)


class Liar:
    """A member that speaks the data channel by itself: what it sends is up to the test."""

    def __init__(self, swarm: Lab, engine: LabEngine) -> None:
        self.swarm = swarm
        self.engine = engine
        """The identity that it uses; its own process was killed."""

    async def dial(self, to: LabEngine, token: bytes = bytes(range(32))) -> Stream:
        await to.ask.accept_token(peer_id=self.engine.peer_id, token=token, expires_s=10)
        return await handshake.dial(
            f"127.0.0.1:{to.port}",
            certificate_sha256=to.certificate[2],
            peer_id=self.engine.peer_id,
            token=token,
            lane=0,
            lanes=1,
        )


def test_a_member_that_lies_is_dropped_counted_and_named(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=8 * 1024, buffer_elements=0, part_elements=1024, codec="fp32")
        with trio.fail_after(60):
            async with lab(tmp_path, 3, sizes) as swarm:
                await swarm.load_initial(np.zeros(sizes.elements, np.float32))
                turn = flat_round(swarm, 0, progress_s=2.0, duration_s=8.0)
                deltas = fill(turn, 5)
                evil = turn.engines[2]
                honest = turn.engines[:2]
                requests = turn.requests(await turn.encode())
                evil.kill()
                for engine, request in zip(honest, requests, strict=False):
                    await engine.ask.exchange(request)
                stream = await tell_lies(Liar(swarm, evil), turn, honest[0], deltas[2])
                refs = await turn.finish(honest)
                await trio.aclose_forcefully(stream.transport_stream)
                assert {ref.bitmap for ref in refs if ref is not None} == {0b011}
                ended = honest[0].ended[turn.roster_id]
                assert evil.peer_id in ended.excluded
                dropped = (await honest[0].ask.inventory()).dropped
                for reason in (
                    "wrong length",
                    "no such slot",
                    "bitmap is empty or reaches outside",
                    "a part that does not exist",
                    "do not decode or are beyond the declared bound",
                    "not those that its READY binds",
                ):
                    assert any(reason in key for key in dropped), (reason, dropped)
                applied = await turn.apply(refs, honest)
                assert len({answer.state_hash for answer in applied}) == 1

    trio.run(main)


async def tell_lies(liar: Liar, turn: Round, target: LabEngine, delta: np.ndarray) -> Stream:
    stream = await liar.dial(target)
    target_index, me = turn.engines.index(target), 2
    mine = [ref for ref in range(turn.lab.sizes.part_count) if root_of(turn, ref) == target_index]
    part = mine[0]
    good = delta[part * 1024 : (part + 1) * 1024].tobytes()
    nan = np.full(1024, np.nan, np.float32).tobytes()
    huge = np.full(1024, 3e38, np.float32).tobytes()
    bits = bytes([1 << me])

    async def send(payload: bytes, *, slot: int = me, bitmap: bytes = bits, number: int = part) -> None:
        meta = msgspec.msgpack.encode(UpMeta(bitmap, bytes(64)))
        header = Header(
            kind=Kind.UP,
            id=turn.roster_id,
            part=number,
            slot=slot,
            meta_bytes=len(meta),
            payload_bytes=len(payload),
        )
        await stream.send_all(header.pack() + meta + payload)

    want = pack_want(0, 0, turn.lab.sizes.part_count)
    await stream.send_all(Header(kind=Kind.WANT, id=turn.roster_id, payload_bytes=len(want)).pack() + want)
    await send(good[:-4])
    await send(good, slot=0)
    await send(good, bitmap=b"\x01")
    await send(good, bitmap=b"\x00")
    await send(good, number=60_000)
    await send(nan)
    await send(huge)
    await send(good)  # without a proof
    return stream


def root_of(turn: Round, part: int) -> int:
    return turn.plan.shards[deal(turn.base, turn.lab.sizes.part_count, turn.plan)[part]].root
