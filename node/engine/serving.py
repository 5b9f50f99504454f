"""Large answers on their way out: snapshot and artifact chunks for joiners, within bounds that no round notices.

A few at a time over all links together, by turns; only one while an exchange of this node has work to do. Payloads are
read when they are sent, so whoever asks costs a small description until it is its turn. A peer that does not read what
it asked for loses its turn to the others, and gets no more before it has.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import trio

from node.engine.drops import Drops
from node.engine.link import Link, Outgoing

SERVED_AT_ONCE = 8
SERVED_AT_ONCE_IN_EXCHANGE = 1
SERVED_PER_LINK = 2
TURN_S = 10.0
"""A chunk of 1 MiB that is not taken within this time (a peer below 0.8 Mbit/s) holds up nobody else's."""
LOOK_AGAIN_S = 0.2
"""How soon the end of an exchange is noticed."""


class Serving:
    def __init__(self, *, exchanging: Callable[[], bool], dropped: Drops) -> None:
        """`exchanging`: whether a round's exchange has work to do on this node."""
        self._exchanging = exchanging
        self._dropped = dropped
        self._waiting: OrderedDict[Link, deque[Outgoing]] = OrderedDict()
        self._under_way: dict[Link, dict[Outgoing, float]] = {}
        """Per link: the answers that it was given and has not taken, and since when."""
        self._wake = trio.Event()

    def put(self, link: Link, answer: Outgoing) -> None:
        answer.sent = lambda: self._sent(link, answer)
        self._waiting.setdefault(link, deque()).append(answer)
        self._wake.set()

    def link_down(self, link: Link) -> None:
        self._waiting.pop(link, None)
        self._under_way.pop(link, None)
        self._wake.set()

    @property
    def waiting(self) -> int:
        """Answers owed and not handed to a link yet."""
        return sum(len(answers) for answers in self._waiting.values())

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                self._hand_over()
                with trio.move_on_after(LOOK_AGAIN_S):
                    await self._wake.wait()
                self._wake = trio.Event()

    def _hand_over(self) -> None:
        """To links in turn, as long as there is a place."""
        places = SERVED_AT_ONCE_IN_EXCHANGE if self._exchanging() else SERVED_AT_ONCE
        overdue_s = trio.current_time() - TURN_S
        for taken in self._under_way.values():
            places -= sum(1 for since_s in taken.values() if since_s > overdue_s)
        passed = 0
        while places > 0 and passed < len(self._waiting):
            link, answers = next(iter(self._waiting.items()))
            if link.closed:
                del self._waiting[link]
                continue
            self._waiting.move_to_end(link)
            if len(self._under_way.get(link, ())) >= SERVED_PER_LINK:
                passed += 1
                continue
            passed = 0
            answer = answers.popleft()
            if not answers:
                del self._waiting[link]
            self._under_way.setdefault(link, {})[answer] = trio.current_time()
            link.send(answer, later=True)
            places -= 1

    def _sent(self, link: Link, answer: Outgoing) -> None:
        taken = self._under_way.get(link)
        since_s = None if taken is None else taken.pop(answer, None)
        if since_s is not None and trio.current_time() - since_s > TURN_S:
            self._dropped.count("a download that was read too slowly to wait for", link.peer_id)
        if taken is not None and not taken:
            del self._under_way[link]
        self._wake.set()
