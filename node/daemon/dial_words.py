"""What peers said when they tried to dial this node, what follows from it, and the sentence for its operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.daemon.addresses import Address
from protocol.names import PeerId

AGAIN_S = 5.0
"""Between two questions while the answer is open, or was no once."""
RENEWED_S = 300.0
"""How long a peer's word is good; a router forgets a forward, and an operator makes one."""
NOTHING_SAID_S = 60.0
"""Until a peer that could not tell is asked again."""
NO_IS_SAID = 2
"""Failed dials until this node counts as not reachable: one may be a peer's trouble, or a busy minute."""
MAX_VERDICTS = 64


@dataclass(slots=True, kw_only=True)
class _Word:
    """Of one peer."""

    at_s: float
    local: bool
    """It came over one of this node's own networks: says little of the rest of the world."""
    host: str = ""
    """Where it saw this node."""
    yes: bool | None = None
    failures: int = 0
    """In a row."""
    why: str = ""


@dataclass(slots=True)
class Words:
    """What peers found when they dialled one of this node's two ports."""

    by_peer: dict[PeerId, _Word] = field(default_factory=dict)

    def say(self, peer: PeerId, now_s: float, *, local: bool, host: str = "", why: str | None) -> None:
        """`why` it could not be dialled; empty: it was; None: the peer cannot tell, and what it said before holds."""
        before = self.by_peer.pop(peer, None)
        word = self.by_peer[peer] = _Word(at_s=now_s, local=local, host=host)
        if why is None and before is not None:
            word.host, word.yes, word.why, word.failures = before.host, before.yes, before.why, before.failures
        elif why is not None:
            word.yes, word.why = not why, why
            word.failures = 0 if not why else 1 + (before.failures if before is not None else 0)
        for gone in [one for one, said in self.by_peer.items() if said.at_s < now_s - 2 * RENEWED_S]:
            del self.by_peer[gone]  # it is not there to be asked again
        while len(self.by_peer) > MAX_VERDICTS:
            del self.by_peer[next(iter(self.by_peer))]

    @property
    def verdict(self) -> bool | None:
        """Of the majority, of those from elsewhere if there are any; None: nobody knows, or no was said only once."""
        told = [word for word in self.by_peer.values() if word.yes is not None]
        told = [word for word in told if not word.local] or told
        yes = sum(word.yes is True for word in told)
        if yes and 2 * yes >= len(told):
            return True
        return False if sum(word.failures for word in told) >= NO_IS_SAID else None

    def due(self, peer: PeerId, now_s: float) -> bool:
        word = self.by_peer.get(peer)
        if word is None:
            return True
        if word.yes is None:
            return now_s >= word.at_s + NOTHING_SAID_S
        settled = word.yes or word.failures >= NO_IS_SAID
        return now_s >= word.at_s + (RENEWED_S if settled else AGAIN_S)


def closed_ports(
    *,
    seen_at: str,
    own: set[str],
    listening: Address,
    control_port: int,
    data_port: int,
    closed: Sequence[int],
    announced: bool,
) -> str:
    """The sentence for a node whose `closed` ports cannot be dialled at `seen_at`. `own`: this machine's addresses."""
    ports = " and ".join(str(port) for port in dict.fromkeys(closed))
    plural = "s" if len(set(closed)) > 1 else ""
    if seen_at in own:
        door = f"open TCP port{plural} {ports} in this machine's firewall"
    else:
        door = f"forward TCP port{plural} {ports} of the router at {seen_at} to this machine"
    flags = [f"--listen /{listening.kind}/{listening.host}/tcp/{control_port}", f"--data-port {data_port}"]
    if seen_at not in own and not announced:
        flags.append(f"--announce /{'ip6' if ':' in seen_at else 'ip4'}/{seen_at}/tcp/{control_port}")
    return f"peers cannot dial this node: {door}, and start it with {' '.join(flags)}; until then it dials them"
