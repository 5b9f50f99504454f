"""Recomputing committed parts beside the rounds (protocol section 7): never in their way, always with an answer.

An audit by lot gives way to the next exchange and is then counted as skipped; a claim of another peer is looked into
whatever else goes on, since a vote may wait for it. One recomputation runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.observations import Observations
from node.daemon.requests import recompute_request
from protocol.events import PartRecomputed, RecomputePart, Verdict
from protocol.rules import Rules

AUDIT_S = 20.0
CLAIM_S = 10.0

log = structlog.get_logger()


class Auditor:
    def __init__(
        self,
        *,
        rules: Rules,
        engine: EngineClient,
        observations: Observations,
        post: Callable[[PartRecomputed], None],
    ) -> None:
        self._rules = rules
        self._engine = engine
        self._observations = observations
        self._post = post
        self._one_at_a_time = trio.Lock()
        self._audit: trio.CancelScope | None = None
        self.exchanging = False
        """An exchange or a vote is under way: no audit begins."""

    def make_way(self) -> None:
        """An exchange begins: what was drawn by lot can wait for another lot."""
        if self._audit is not None:
            self._audit.cancel()

    async def recompute(self, effect: RecomputePart) -> None:
        """Carry it out and tell the machine what came of it."""
        header = effect.commit.headers[effect.part]
        assert header is not None
        base = effect.commit.roster.message.base
        verdict, why = Verdict.UNKNOWN, "an exchange began before it was done"
        started_s, received = trio.current_time(), 0
        with trio.CancelScope() as scope:
            if effect.audit:
                self._audit = scope
                if self.exchanging:
                    scope.cancel()
            else:
                self.make_way()
            async with self._one_at_a_time:
                request = recompute_request(effect, self._rules, AUDIT_S if effect.audit else CLAIM_S)
                try:
                    answer = await self._engine.recompute(request)
                    verdict, why, received = Verdict(answer.verdict), answer.why, answer.bytes_received
                except EngineFailed as error:
                    why = str(error)
                except trio.BrokenResourceError:
                    return  # the machine ends with its engine
        if self._audit is scope:
            self._audit = None
        self._post(PartRecomputed(base=base.digest(), part=effect.part, verdict=verdict))
        seconds = trio.current_time() - started_s
        self._observations.saw_recomputation(verdict, why, seconds=seconds, received=received, audit=effect.audit)
        if verdict is Verdict.WRONG:
            log.error("a committed part is not the mean", round=base.round, part=effect.part, root=header.sender)
        else:
            log.debug("a part is recomputed", round=base.round, part=effect.part, verdict=verdict.value, why=why)
