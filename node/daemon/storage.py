"""Whether this node's disk takes what it is given: said in heartbeats (`able`), in `status`, the log and the metrics.

A full disk stops no process. What must be durable before anything follows from it (votes, a new lineage) is held back
until it is; heartbeats go on and say that this node cannot take part, so the others' rounds do not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from node.daemon.observations import Observations
from protocol import events
from protocol.messages import Heartbeat

MAX_HELD_SENDS = 256
"""Messages kept for when the disk works again: they may be lost, and all that matters is repeated."""

log = structlog.get_logger()


class Storage:
    """One a session. `post` takes the news to the state machine, if there is one."""

    def __init__(self, *, observations: Observations, post: Callable[[events.Event], None]) -> None:
        self._observations = observations
        self._post = post
        self._refused: dict[str, str] = {}
        """What cannot be stored, and why."""

    @property
    def able(self) -> bool:
        return not self._refused

    def refused(self, what: str, why: str) -> None:
        """`what` ("the vote journal") could not be written; told once until it can be."""
        if what in self._refused:
            return
        self._refused[what] = why
        log.critical("the disk refuses what must not be forgotten: free some space", what=what, why=why)
        self._observations.count([f"not stored: {what}"])
        self._tell()

    def works(self, what: str) -> None:
        """`what` was written."""
        if self._refused.pop(what, None) is not None:
            log.warning("the disk takes it again", what=what)
            self._tell()

    def forget(self, what: str) -> None:
        """Nothing waits for `what` any more: whether the disk takes it is seen when it is written next."""
        if self._refused.pop(what, None) is not None:
            self._tell()

    def _tell(self) -> None:
        self._observations.storage = None
        if self._refused:
            what, why = next(iter(self._refused.items()))
            self._observations.storage = (
                f"the disk refuses {what} ({why}): free some space; this node takes part in no round until then, and "
                "keeps what it has"
            )
        self._post(events.StorageAble(able=self.able))


class HeldEffects:
    """Effects behind one that the disk refused, in their order."""

    def __init__(self) -> None:
        self._effects: deque[events.Effect] = deque()

    def __bool__(self) -> bool:
        return bool(self._effects)

    @staticmethod
    def may_pass(effect: events.Effect) -> bool:
        """Whether `effect` promises nothing, so that it need not wait for the journal."""
        match effect:
            case events.Send():
                return effect.replaces == Heartbeat.__name__
            case events.StopExchange() | events.CatchUp() | events.Misbehaved() | events.Alarm():
                return True
            case events.StateCorrupt() | events.Finished():
                return True
        return False

    def add(self, effect: events.Effect) -> None:
        if isinstance(effect, events.Persist) and self._replace_journal(effect):
            return
        if isinstance(effect, events.Send):
            self._make_room_for(effect)
        self._effects.append(effect)

    def take(self) -> list[events.Effect]:
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _replace_journal(self, newest: events.Persist) -> bool:
        """A journal holds all that the one before it held, so that what waits for either may wait for the newest.

        Not across the birth of a lineage, which must be on disk before a journal speaks of it.
        """
        for place in range(len(self._effects) - 1, -1, -1):
            held = self._effects[place]
            if isinstance(held, events.NewLineage):
                return False
            if isinstance(held, events.Persist):
                self._effects[place] = newest
                return True
        return False

    def _make_room_for(self, send: events.Send) -> None:
        sends = [held for held in self._effects if isinstance(held, events.Send)]
        for old in sends:
            if send.replaces is not None and (old.to, old.replaces) == (send.to, send.replaces):
                self._effects.remove(old)
                return
        if len(sends) >= MAX_HELD_SENDS:
            self._effects.remove(sends[0])
