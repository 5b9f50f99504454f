"""Where this node tells peers to dial it: both of its ports, as the operator says or as it was found."""

from __future__ import annotations

from collections.abc import Sequence

from node.daemon.addresses import Address, announced

MAX_ANNOUNCED = 16


class OwnAddresses:
    def __init__(self, *, announce: Sequence[Address], announce_data: Sequence[str]) -> None:
        """`announce`, `announce_data`: the operator's, if there are any; nothing else is told then."""
        self.operators = tuple(announce)
        self.listening: list[Address] = []
        """Where the host listens, with the ports that the system chose."""
        self.control: list[Address] = list(announce)
        """What peers are told, best first."""
        self._operators_data = tuple(announce_data)
        self._found_hosts: dict[str, None] = {}
        """Where this node is reached although none of its interfaces has that address: peers have dialled it."""
        self._data_port: int | None = None

    @property
    def data(self) -> tuple[str, ...]:
        """`host:port` of the engine; empty: there is none yet."""
        if self._data_port is None:
            return ()
        port = self._data_port
        found = self._operators_data or (Address(one.kind, one.host, port).host_port for one in self.control)
        return tuple(dict.fromkeys(found))[:MAX_ANNOUNCED]

    def engine_listens(self, port: int) -> None:
        self._data_port = port

    def found(self, host: str) -> None:
        """Peers dialled this node at `host`, from which they see it come: a router leads there."""
        if not self.operators and len(self._found_hosts) < MAX_ANNOUNCED:
            self._found_hosts.setdefault(host)

    def look(self) -> bool:
        """Find out what to tell; whether that is something else than before."""
        found = announced(self.listening, self.operators)
        everywhere = [one for one in self.listening if one.ip is not None and one.ip.is_unspecified]
        for host in self._found_hosts:
            for one in everywhere:
                outside = Address("ip6" if ":" in host else "ip4", host, one.port)
                if outside.kind == one.kind and outside not in found:
                    found.append(outside)
        changed = found[:MAX_ANNOUNCED] != self.control
        self.control = found[:MAX_ANNOUNCED]
        return changed
