"""One node's part in the exchange of one roster (protocol section 4, rules 4 to 8).

The machine decides what to accept, when to stop waiting and in which order to sum; the engine moves bytes, computes
and asks for signatures. Time is passed in, in seconds of any clock that only goes forward. A part's way through it:

    on_up (header came)  →  on_up_done (payload checked, kept encoded)  …  →  poll: SendPartial | Reduce | LeaveEmpty
    on_down (header came)  →  on_down_done (payload verified, durable; forward it to `receivers`)

A frame that is refused, or whose payload turns out bad (`on_up_bad`), leaves its slot open for another try until the
slot's time is over. After every call, act on `poll`; then sleep until `next_wakeup_s`, at the latest.

Waiting ends, per part `p` and level, at `max(D·(p+1)/parts, min(D, level·progress_s)) + slack_s` from the roster's
receipt, `D` the level's duration: without the second term the first parts of a long vector would have to arrive sooner
than their sender may be silent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from protocol.stations import ExchangeView, Station
from protocol.weights import bits, total


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a frame is welcome; true when it is."""

    why: str = ""
    """Empty: accepted. Else the rule that it breaks, for the log; what it carries must be dropped."""

    def __bool__(self) -> bool:
        return not self.why


ACCEPTED = Verdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPartial:
    """Sum in `order`, encode with the sum codec, send UP to `parent` with `bitmap`."""

    part: int
    order: tuple[int, ...]
    """Whose contributions or partial sums to add, one after another; my own index stands for my contribution."""
    bitmap: int
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Sum in `order`, divide by `weight`, encode with the codec, have the header signed, send DOWN to `receivers`."""

    part: int
    order: tuple[int, ...]
    bitmap: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveEmpty:
    """I am its root and hold less than half of the roster's weight: no header. Free what is kept for it."""

    part: int
    bitmap: int


Decision: TypeAlias = SendPartial | Reduce | LeaveEmpty


class _Parts:
    """Parts still open, ascending, with the first at hand; amortised constant time."""

    def __init__(self, parts: Iterable[int]) -> None:
        self._order = tuple(parts)
        self._open = set(self._order)
        self._next = 0

    def __contains__(self, part: object) -> bool:
        return part in self._open

    def __iter__(self) -> Iterator[int]:
        return (part for part in self._order[self._next :] if part in self._open)

    def discard(self, part: int) -> None:
        self._open.discard(part)

    def clear(self) -> None:
        self._open.clear()

    @property
    def first(self) -> int | None:
        while self._next < len(self._order) and self._order[self._next] not in self._open:
            self._next += 1
        return self._order[self._next] if self._next < len(self._order) else None


class ExchangeMachine(Station):
    """See the module; `Station` answers what the plan says. Events may come in any order, repeated, or never."""

    def __init__(self, view: ExchangeView, now_s: float) -> None:
        """`now_s`: when this node received the roster."""
        super().__init__(view)
        self.excluded: dict[int, str] = {}
        """Peers of which a slot closed without them, as seen here, and why."""
        self.dropped: Counter[str] = Counter()
        """Refused frames and payloads by reason."""
        self._start_s = now_s
        # When bytes of any kind last came from a peer. The roster takes its time to arrive there, too.
        self._heard_s = [now_s + view.slack_s] * len(view.tokens)
        self._decisions: list[Decision] = []
        """Closed parts that `poll` has yet to hand out."""
        self._open: dict[int, _Parts] = {}
        """Shard → parts that I have yet to sum."""
        self._missing: dict[tuple[int, int], _Parts] = {}
        """(shard, slot) → parts for which I wait for this slot. Empty for good once the slot missed one."""
        self._waiting: dict[int, int] = {}
        """Open part → slots for which it waits."""
        self._arriving: set[tuple[int, int]] = set()
        """(part, slot) of payloads on their way."""
        self._filled: dict[int, dict[int, int]] = {}
        """Open part → slot → bitmap of what it brought."""
        self._downs: dict[int, _Parts] = {}
        """Shard → parts that have yet to come down to me."""
        self._held: set[int] = set()
        """Parts that came down."""

        me = view.my_index
        parts_of: list[list[int]] = [[] for _ in self._trees]
        for part, shard in enumerate(view.dealt):
            parts_of[shard].append(part)
        for shard, (tree, parts) in enumerate(zip(self._trees, parts_of, strict=True)):
            if tree.root != me:
                self._downs[shard] = _Parts(parts)
            if tree.root == me or tree.slots[me]:
                self._open[shard] = _Parts(parts)
                self._missing |= {(shard, slot): _Parts(parts) for slot in tree.slots[me]}
                self._waiting |= dict.fromkeys(parts, len(tree.slots[me]))
        for part in [part for part, slots in self._waiting.items() if slots == 0]:
            self._close(part)

    # ------------------------------------------------------------ events

    def on_up(self, sender: int, part: int, slot: int, bitmap: int, length: int, now_s: float) -> Verdict:
        """An UP's header came, over the authenticated connection of READY `sender`; no payload byte is buffered yet.

        `slot` is the child's index in the roster. Accepted: announce the payload's end by `on_up_done` or `on_up_bad`.
        """
        self.on_progress(sender, now_s)
        if not 0 <= part < len(self.view.dealt):
            return self._drop("UP for a part that does not exist")
        if slot != sender or slot not in self.slots(part):
            return self._drop("UP from a peer that has no such slot")
        if length != self.up_bytes(slot, part):
            return self._drop("UP of the wrong length")
        if bitmap <= 0 or bitmap & ~self._tree(part).subtrees[slot]:
            return self._drop("UP whose bitmap is empty or reaches outside its slot's subtree")
        closed = self._why_closed(part, slot)
        if closed is not None:
            return self._drop(closed)
        if (part, slot) in self._arriving:
            return self._drop("UP for a slot whose payload is already on its way")
        self._arriving.add((part, slot))
        return ACCEPTED

    def on_up_done(self, sender: int, part: int, bitmap: int, now_s: float) -> Verdict:
        """The payload of an accepted UP is here and passed its checks. Refused: its time was over meanwhile."""
        self.on_progress(sender, now_s)
        if (part, sender) not in self._arriving:
            return self._drop("UP that was not accepted")
        self._arriving.discard((part, sender))
        closed = self._why_closed(part, sender)
        if closed is not None:
            return self._drop(closed)
        self._filled.setdefault(part, {})[sender] = bitmap
        self._missing[self.view.dealt[part], sender].discard(part)
        self._count_down(part)
        return ACCEPTED

    def on_up_bad(self, sender: int, part: int, why: str) -> None:
        """The payload of an accepted UP broke off or failed its checks: the slot is open again."""
        if (part, sender) in self._arriving:
            self._arriving.discard((part, sender))
            self._drop(why)

    def on_down(self, sender: int, part: int, bitmap: int, length: int, now_s: float) -> Verdict:
        """A DOWN's header came, its root's signature verified. Welcome also after I stopped waiting for it."""
        self.on_progress(sender, now_s)
        if not 0 <= part < len(self.view.dealt):
            return self._drop("DOWN for a part that does not exist")
        if sender != self.down_source(part):
            return self._drop("DOWN from a peer that is not my parent")
        if length != self.down_bytes(part):
            return self._drop("DOWN of the wrong length")
        if bitmap & ~self.view.contributing or not self._weights.enough(part, bitmap):
            return self._drop("DOWN whose bitmap holds strangers or less than half of the weight")
        if part in self._held:
            return self._drop("DOWN of a part that I hold")
        return ACCEPTED

    def on_down_done(self, part: int, now_s: float) -> None:
        """The part is verified and held, wherever it came from."""
        self._held.add(part)
        if self.view.dealt[part] in self._downs:
            self._downs[self.view.dealt[part]].discard(part)

    def on_progress(self, peer: int, now_s: float) -> None:
        """Any byte of the exchange came from this peer."""
        self._heard_s[peer] = max(self._heard_s[peer], now_s)

    def on_connection_lost(self, peer: int) -> None:
        """Payloads on their way are lost; the slots wait for a new connection while the peer's silence allows."""
        for part, slot in [key for key in self._arriving if key[1] == peer]:
            self.on_up_bad(slot, part, "UP that broke off")

    def on_redial_failed(self, peer: int) -> None:
        """The connection died and one redial failed: nothing is expected from this peer any more."""
        self.on_connection_lost(peer)
        self._give_up_peer(peer, "its connection died and could not be made again")

    def on_slots_lost(self, peer: int, why: str) -> None:
        """Nothing more of this peer is summed here: its slots close with what came. Its DOWN may still come."""
        for shard, slot in self._missing:
            if slot == peer:
                self._give_up_slot(shard, slot, why)

    def poll(self, now_s: float) -> list[Decision]:
        """Close what is out of time; hand out all that was decided since the last call, by ascending part."""
        for shard, slot in self._missing:
            if now_s >= self._silent_at_s(shard, slot):
                self._give_up_peer(slot, f"it delivered nothing for {self.view.progress_s:g} s")
        for shard, parts in self._open.items():
            level = self._trees[shard].heights[self.view.my_index]
            while (part := parts.first) is not None and now_s >= self._deadline_s(part, level):
                for slot in self.slots(part):
                    if part in self._missing[shard, slot]:
                        self._give_up_slot(shard, slot, f"its bytes of part {part} came too late")
        for parts in self._downs.values():
            while (part := parts.first) is not None and now_s >= self._deadline_s(part, self._down_level):
                parts.discard(part)
        decisions, self._decisions = sorted(self._decisions, key=lambda decision: decision.part), []
        return decisions

    # ------------------------------------------------------------ state

    @property
    def expected_downs(self) -> tuple[int, ...]:
        """Parts that may still come down in time, ascending."""
        return tuple(sorted(part for parts in self._downs.values() for part in parts))

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Peers whose UP or DOWN I still await, ascending: for `reason`."""
        me = self.view.my_index
        parents = {self._trees[shard].parents[me] for shard, parts in self._downs.items() if parts.first is not None}
        return tuple(
            sorted(parents.union(slot for (_, slot), parts in self._missing.items() if parts.first is not None))
        )

    @property
    def finished(self) -> bool:
        """Every sum is decided and handed out, every part held or given up. (Work under way is the engine's.)"""
        open_parts = (*self._open.values(), *self._downs.values())
        return not self._decisions and all(parts.first is None for parts in open_parts)

    def next_wakeup_s(self) -> float:
        """When `poll` must be called if nothing happens before; infinity when finished."""
        if self._decisions:
            return self._start_s
        times = [self._silent_at_s(shard, slot) for shard, slot in self._missing]
        for shard, parts in self._open.items():
            if parts.first is not None:
                times.append(self._deadline_s(parts.first, self._trees[shard].heights[self.view.my_index]))
        for parts in self._downs.values():
            if parts.first is not None:
                times.append(self._deadline_s(parts.first, self._down_level))
        return min(times, default=math.inf)

    # ------------------------------------------------------------ inside

    @property
    def _down_level(self) -> int:
        return len(self.view.durations_s)

    def _deadline_s(self, part: int, level: int) -> float:
        duration_s = self.view.durations_s[level - 1]
        share_s = duration_s * (part + 1) / len(self.view.dealt)
        return self._start_s + max(share_s, min(duration_s, level * self.view.progress_s)) + self.view.slack_s

    def _silent_at_s(self, shard: int, slot: int) -> float:
        """When this slot's silence has lasted too long; infinity when I do not wait for it.

        An inner node has nothing to send while it waits for its own slots, so its clock starts at its own deadline.
        """
        part = self._missing[shard, slot].first
        if part is None:
            return math.inf
        level = self._trees[shard].heights[slot]
        since_s = self._heard_s[slot] if level == 0 else max(self._heard_s[slot], self._deadline_s(part, level))
        return since_s + self.view.progress_s

    def _why_closed(self, part: int, slot: int) -> str | None:
        shard = self.view.dealt[part]
        if part not in self._open[shard]:
            return "UP for a part that is closed"
        if slot in self._filled.get(part, ()):
            return "UP for a slot that is filled"
        if part not in self._missing[shard, slot]:
            return "UP for a slot that missed an earlier part"
        return None

    def _give_up_peer(self, peer: int, why: str) -> None:
        self.on_slots_lost(peer, why)
        for shard, parts in self._downs.items():
            if self._trees[shard].parents[self.view.my_index] == peer:
                parts.clear()

    def _give_up_slot(self, shard: int, slot: int, why: str) -> None:
        """A slot missed once is skipped for the rest of the roster; what it brought before still counts."""
        missed = tuple(self._missing[shard, slot])
        if not missed:
            return
        self.excluded.setdefault(slot, why)
        self._missing[shard, slot].clear()
        for part in missed:
            self._count_down(part)

    def _count_down(self, part: int) -> None:
        self._waiting[part] -= 1
        if self._waiting[part] == 0:
            self._close(part)

    def _close(self, part: int) -> None:
        """Decide the part with what has come. Closed for good: nothing that arrives later can change it."""
        tree, me = self._tree(part), self.view.my_index
        filled = self._filled.pop(part, {})
        self._open[self.view.dealt[part]].discard(part)
        del self._waiting[part]
        bitmap = 1 << me
        for brought in filled.values():
            bitmap |= brought
        if tree.root != me:
            order = (me, *sorted(filled))
            self._decisions.append(SendPartial(part=part, order=order, bitmap=bitmap, parent=tree.parents[me]))
            return
        for index in bits(tree.subtrees[me] & ~bitmap):
            self.excluded.setdefault(index, "it is in no partial sum that reached the root")
        if self._weights.enough(part, bitmap):
            order, weight = tuple(sorted((me, *filled))), total(self.weights(part), bitmap)
            self._decisions.append(Reduce(part=part, order=order, bitmap=bitmap, weight=weight))
        else:
            self._decisions.append(LeaveEmpty(part=part, bitmap=bitmap))

    def _drop(self, why: str) -> Verdict:
        self.dropped[why] += 1
        return Verdict(why)
