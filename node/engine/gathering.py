"""Getting many pieces of one content from several peers at once: who is asked for what, and who is not asked again.

Whoever is faster gives more: each peer is asked for a few pieces at a time, and for the next when one has come. A piece
that a peer keeps for much longer than the others take is asked for elsewhere as well, so that no slow peer holds up the
end; whoever is overtaken again and again, fails, or sends something else than it was asked for is dropped, and the next
in line takes its place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

from node.engine.dialling import Unreachable
from node.engine.drops import Drops
from node.engine.link import Link
from node.engine.requests import Lied, NoAnswer, NotThere

ASKS_PER_SOURCE = 4
SOURCES_AT_ONCE = 8
"""More would only make more connections; at 1 MiB a piece these are 32 MiB under way."""
STRIKES = 4
"""Failures in a row, or pieces in a row that another source was faster with, after which a source is dropped."""
LIES = 2
"""Pieces that are not what they should be, after which a source is dropped: one may be a bad sector."""
OVERDUE_S = 2.0
OVERDUE_RATIO = 4.0
"""A piece is asked for elsewhere too when it takes this many times the mean so far, at least `OVERDUE_S`."""

log = logging.getLogger("atoll.engine")

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Piece(Generic[Item]):
    item: Item
    lacking: set[str] = field(default_factory=set)
    """Sources that do not have it, or sent something else."""
    asked: dict[str, trio.CancelScope] = field(default_factory=dict)
    """Sources that are asked for it now, the first one first."""
    since_s: float = 0.0
    """When the first of them was asked."""


class Gathering(Generic[Item]):
    """One download. `run` gives back what no source gave."""

    def __init__(
        self,
        items: Sequence[Item],
        sources: Sequence[str],
        *,
        reach: Callable[[str], Awaitable[Link]],
        get: Callable[[Link, Item], Awaitable[None]],
        dropped: Drops,
    ) -> None:
        """`get` asks one peer for one piece, checks and stores it; it raises `NoAnswer`, or `OSError` for the disk."""
        self._open = [_Piece(item) for item in items]
        """Not got yet; asked for in this order."""
        self._sources = iter(dict.fromkeys(sources))
        self._reach = reach
        self._get = get
        self._dropped = dropped
        self._strikes: Counter[str] = Counter()
        self._lies: Counter[str] = Counter()
        self._broke: dict[str, Link] = {}
        """The last link of a source that broke: all that was asked for over it failed at once, which is one failure."""
        self._out: set[str] = set()
        """Sources that are not asked any more."""
        self._changed = trio.lowlevel.ParkingLot()
        self._seconds = 0.0
        self._broken: OSError | None = None
        self.got: Counter[str] = Counter()
        """Pieces by the source that gave them."""
        self.why: list[str] = []
        """Why sources did not give, one sentence each."""

    async def run(self) -> list[Item]:
        """The pieces that no source gave. Raises `OSError` when what came cannot be written."""
        async with trio.open_nursery() as nursery:
            for _ in range(SOURCES_AT_ONCE):
                nursery.start_soon(self._seat, nursery.cancel_scope)
        if self._broken is not None:
            raise self._broken
        return [piece.item for piece in self._open]

    async def _seat(self, scope: trio.CancelScope) -> None:
        """One source after another, each until it can give nothing more."""
        for source in self._sources:
            async with trio.open_nursery() as nursery:
                for _ in range(ASKS_PER_SOURCE):
                    nursery.start_soon(self._pull, source)
            if self._broken is not None:
                scope.cancel()
            if not self._open:
                return

    async def _pull(self, source: str) -> None:
        while source not in self._out and self._broken is None:
            piece = self._next_for(source)
            if piece is not None:
                await self._ask(source, piece)
                self._changed.unpark_all()
            elif any(source not in piece.lacking for piece in self._open):
                # Others are asked for all that is left: it may come back, or become overdue there.
                with trio.move_on_after(OVERDUE_S / 4):
                    await self._changed.park()
            else:
                return

    def _next_for(self, source: str) -> _Piece[Item] | None:
        overdue: _Piece[Item] | None = None
        for piece in self._open:
            if source in piece.lacking or source in piece.asked:
                continue
            if not piece.asked:
                return piece
            if overdue is None and len(piece.asked) == 1 and trio.current_time() - piece.since_s > self._patience_s:
                overdue = piece
        return overdue

    @property
    def _patience_s(self) -> float:
        got = self.got.total()
        return max(OVERDUE_S, OVERDUE_RATIO * self._seconds / got) if got else OVERDUE_S * OVERDUE_RATIO

    async def _ask(self, source: str, piece: _Piece[Item]) -> None:
        began_s = trio.current_time()
        if not piece.asked:
            piece.since_s = began_s
        scope = piece.asked[source] = trio.CancelScope()
        got = False
        link: Link | None = None
        try:
            with scope:
                link = await self._reach(source)
                await self._get(link, piece.item)
                got = True
        except NotThere:
            piece.lacking.add(source)
        except Lied as error:
            piece.lacking.add(source)
            self._dropped.count(str(error), source)
            self._lies[source] += 1
            if self._lies[source] >= LIES:
                self._drop(source, str(error))
        except NoAnswer as error:
            if link is None or not link.closed:
                self._strike(source, str(error))
            elif self._broke.get(source) is not link:
                self._broke[source] = link
                self._strike(source, str(error))
        except Unreachable as error:
            # Dialling has its own retries: who cannot be reached is not asked again in this download.
            self._drop(source, str(error))
        except OSError as error:
            self._broken = self._broken or error
        finally:
            del piece.asked[source]
        if got and piece in self._open:
            self._strikes[source] = 0
            self._seconds += trio.current_time() - began_s
            self.got[source] += 1
            self._open.remove(piece)
            for slower, others_scope in list(piece.asked.items()):
                others_scope.cancel()
                self._strike(slower, "others were faster with what it was asked for")

    def _strike(self, source: str, why: str) -> None:
        self._strikes[source] += 1
        self.why.append(f"{source}: {why}")
        if self._strikes[source] >= STRIKES:
            self._drop(source, why)

    def _drop(self, source: str, why: str) -> None:
        if source not in self._out:
            self._out.add(source)
            self.why.append(f"{source}: {why}")
            log.info("%s is not asked any more in this download: %s", source, why)
