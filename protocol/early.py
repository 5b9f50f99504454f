"""Messages of peers that are a moment ahead: they wait here for my own commit."""

from __future__ import annotations

from collections import deque
from typing import Any

from protocol.fields import MAX_PEERS
from protocol.messages import Commit, Reformed, Signed
from protocol.names import Base, PeerId

KEPT = 32
"""Messages per sender; the oldest makes room."""
SENDERS = MAX_PEERS
BYTES = 64 * 1024 * 1024


class EarlyMail:
    """Verified messages for bases that I have not reached, bounded in senders, number and bytes."""

    def __init__(self) -> None:
        self._of: dict[PeerId, deque[Signed[Any]]] = {}
        self._bytes = 0

    def keep(self, signed: Signed[Any]) -> None:
        mail = self._of.get(signed.sender)
        if mail is None:
            if len(self._of) >= SENDERS:
                return
            mail = self._of[signed.sender] = deque()
        if len(mail) >= KEPT:
            self._bytes -= len(mail.popleft().body)
        if self._bytes + len(signed.body) <= BYTES:
            self._bytes += len(signed.body)
            mail.append(signed)

    def release(self, base: Base) -> list[Signed[Any]]:
        """What was for `base`, in the order of arrival per sender; what is older is dropped."""
        before, self._of, self._bytes = self._of, {}, 0
        released = []
        for mail in before.values():
            for signed in mail:
                its_base = base_of(signed)
                if its_base == base:
                    released.append(signed)
                elif its_base.round >= base.round:
                    self.keep(signed)
        return released


def base_of(signed: Signed[Any]) -> Base:
    """The place in the chain that a message belongs to (every kind but FETCH, HAVE and part headers has one)."""
    match signed.message:
        case Reformed():
            return signed.message.reform.base
        case Commit():
            return signed.message.roster.message.base
        case _:
            base: Base = signed.message.base
            return base
