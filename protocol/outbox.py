"""What the parts of a peer's machine write into while one event is handled: effects in order, and when to wake."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from protocol import wire
from protocol.events import Effect, Send
from protocol.messages import Heartbeat, Message, MessageT, Proposal, Ready, Roster, Signed
from protocol.names import Keyring, PeerId


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Effects of the event in hand, and the earliest time at which something is due without any event."""

    me: PeerId
    keyring: Keyring
    now_s: float = 0.0
    wakeup_s: float = math.inf
    effects: list[Effect] = field(default_factory=list)

    def sign(self, message: MessageT) -> Signed[MessageT]:
        return wire.sign(self.keyring, self.me, message)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def broadcast(self, signed: Signed[Any]) -> None:
        self.emit(Send(to=None, data=wire.encode(signed), replaces=self._key(signed)))

    def send(self, to: PeerId, signed: Signed[Any]) -> None:
        self.emit(Send(to=to, data=wire.encode(signed), replaces=self._key(signed)))

    def _key(self, signed: Signed[Any]) -> str | None:
        """Of my own messages that are repeated until they are outdated, a slow link needs only the newest."""
        repeated = isinstance(signed.message, Heartbeat | Ready | Roster | Proposal) and signed.sender == self.me
        return type(signed.message).__name__ if repeated else None

    def tell(self, to: PeerId, message: Message) -> None:
        self.send(to, self.sign(message))

    def due(self, at_s: float) -> bool:
        """Whether `at_s` has come; if not, the machine wakes then."""
        if self.now_s >= at_s:
            return True
        if at_s < self.wakeup_s:
            self.wakeup_s = at_s
        return False

    def take(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
