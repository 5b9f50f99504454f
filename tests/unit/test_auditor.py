"""The daemon's audits: one at a time, in nobody's way, and every question is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import pytest
import trio
import trio.testing
from chain_samples import make_rules, peers, plain_commit

from node.daemon.auditor import Auditor
from node.daemon.engine_client import EngineClient, EngineFailed, EngineGone
from node.daemon.observations import Observations
from node.engine import api
from protocol import chain
from protocol.events import PartRecomputed, RecomputePart, Verdict

RULES = make_rules(peers(3))
COMMIT = plain_commit(chain.genesis(RULES), RULES)
AUDIT = RecomputePart(commit=COMMIT, part=1, audit=True)
CLAIM = RecomputePart(commit=COMMIT, part=1, audit=False, sources=peers(1))

Answer = Callable[[api.Recompute], Awaitable[str]]


class Bench:
    def __init__(self, answer: Answer) -> None:
        self.asked: list[api.Recompute] = []
        self.posted: list[PartRecomputed] = []
        self.seen = Observations()
        self._answer = answer
        self.auditor = Auditor(
            rules=RULES, engine=cast(EngineClient, self), observations=self.seen, post=self.posted.append
        )

    async def recompute(self, request: api.Recompute) -> api.Recomputed:
        self.asked.append(request)
        return api.Recomputed(id=1, verdict=await self._answer(request), why="", bytes_received=100)


async def right(_: api.Recompute) -> str:
    return "right"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_what_the_engine_finds_is_passed_on_and_counted(verdict: Verdict) -> None:
    async def main() -> None:
        async def answer(_: api.Recompute) -> str:
            return verdict.value

        bench = Bench(answer)
        await bench.auditor.recompute(AUDIT)
        (posted,) = bench.posted
        assert (posted.base, posted.part, posted.verdict) == (COMMIT.roster.message.base.digest(), 1, verdict)
        counted = bench.seen.audits
        assert (counted.right, counted.wrong) == (verdict is Verdict.RIGHT, verdict is Verdict.WRONG)
        assert sum(counted.skipped.values()) == (verdict is Verdict.UNKNOWN)
        assert counted.bytes_received == 100

    trio.run(main)


def test_a_request_says_what_the_part_should_be_and_whether_it_yields() -> None:
    async def main() -> None:
        bench = Bench(right)
        await bench.auditor.recompute(AUDIT)
        await bench.auditor.recompute(CLAIM)
        header = COMMIT.headers[1]
        assert header is not None
        for asked, yields in zip(bench.asked, (True, False), strict=True):
            assert (asked.part, asked.result_hash, asked.bitmap) == (1, header.message.hash, header.message.bitmap)
            assert asked.parts_roots == tuple(ready.message.parts_root for ready in COMMIT.roster.message.readys)
            assert asked.yields is yields
        assert bench.asked[1].sources == peers(1)

    trio.run(main)


def test_no_audit_begins_in_an_exchange_but_a_claim_does() -> None:
    async def main() -> None:
        bench = Bench(right)
        bench.auditor.exchanging = True
        await bench.auditor.recompute(AUDIT)
        assert bench.asked == []
        assert bench.posted[0].verdict is Verdict.UNKNOWN
        assert bench.seen.audits.skipped == {"an exchange began before it was done": 1}
        await bench.auditor.recompute(CLAIM)
        assert bench.posted[1].verdict is Verdict.RIGHT

    trio.run(main)


@pytest.mark.parametrize("first", ["exchange", "claim"])
def test_an_audit_gives_way_to_what_is_urgent(first: str) -> None:
    async def main() -> None:
        async def never_for_audits(request: api.Recompute) -> str:
            if request.yields:
                await trio.sleep_forever()
            return "right"

        bench = Bench(never_for_audits)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.auditor.recompute, AUDIT)
                await trio.testing.wait_all_tasks_blocked()
                if first == "exchange":
                    bench.auditor.make_way()
                else:
                    await bench.auditor.recompute(CLAIM)
        verdicts = [posted.verdict for posted in bench.posted]
        assert sorted(verdicts) == sorted(
            [Verdict.UNKNOWN] if first == "exchange" else [Verdict.UNKNOWN, Verdict.RIGHT]
        )

    trio.run(main)


def test_an_engine_that_cannot_or_is_gone() -> None:
    async def main() -> None:
        async def fails(_: api.Recompute) -> str:
            raise EngineFailed("the disk is gone")

        async def dies(_: api.Recompute) -> str:
            raise EngineGone("its process ended")

        bench = Bench(fails)
        await bench.auditor.recompute(AUDIT)
        assert bench.posted[0].verdict is Verdict.UNKNOWN
        assert bench.seen.audits.skipped == {"the disk is gone": 1}
        gone = Bench(dies)
        await gone.auditor.recompute(AUDIT)
        assert gone.posted == [], "the next machine asks anew"

    trio.run(main)
