"""What lies between the hosts of a benchmark, as a TOML file says it, and how fast bytes can cross it at best.

mtu_bytes = 9000                    # of every path
congestion_control = "bbr"          # of the hosts' TCP
round_trip_ms = 100.0               # between any two hosts, unless said otherwise
loss_percent = 0.0

[[hosts]]
name = "a0"
up_mbit_s = 1000.0                  # its own line; 0: no limit
down_mbit_s = 1000.0
site = "A"

[[sites]]                           # what its hosts share to everybody else
name = "A"
up_mbit_s = 100.0
down_mbit_s = 100.0
round_trip_ms = 1.0                 # inside

[[links]]                           # one pair that differs
between = ["a0", "b0"]
round_trip_ms = 30.0
loss_percent = 0.1
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from node.errors import OperatorError
from scripts.wanlab.wan import MAX_HOSTS, Wan

LABS = Path(__file__).with_name("labs")

BytesMatrix: TypeAlias = npt.NDArray[np.float64]
"""[hosts, hosts] Bytes from each host (row) to each other (column)."""

ROUND_TRIPS = 2
"""Of a round's least time: one until the first contribution has come, one until the last result is down everywhere."""


class HostLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host and its own line; 0: no limit."""

    name: str
    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    site: str = ""


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that share one line to all others; 0: no limit."""

    name: str
    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    round_trip_ms: float | None = None
    """Between its hosts."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pair that differs from the rest."""

    between: tuple[str, str]
    round_trip_ms: float | None = None
    loss_percent: float | None = None


class Lab(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    name: str = ""
    hosts: tuple[HostLine, ...]
    sites: tuple[Site, ...] = ()
    links: tuple[Link, ...] = ()
    round_trip_ms: float = 0.0
    loss_percent: float = 0.0
    mtu_bytes: int = 1500
    congestion_control: str = "bbr"

    def check(self) -> str | None:
        """Why such a lab cannot be made, in one sentence; None: it can."""
        names, sites = [host.name for host in self.hosts], [site.name for site in self.sites]
        if not 2 <= len(names) <= MAX_HOSTS:
            return f"a lab of {len(names)} hosts exchanges nothing: 2 to {MAX_HOSTS} do"
        for kind, listed in (("host", names), ("site", sites)):
            twice = next((name for name in listed if listed.count(name) > 1), None)
            if twice is not None:
                return f"two {kind}s are called {twice!r}"
        for host in self.hosts:
            if host.site and host.site not in sites:
                return f"host {host.name!r} is of site {host.site!r}, which is not described"
        for link in self.links:
            stranger = next((name for name in link.between if name not in names), None)
            if stranger is not None or link.between[0] == link.between[1]:
                return f"the link between {' and '.join(link.between)} is not of two hosts of this lab"
        figures = [self.round_trip_ms, self.loss_percent]
        lines: list[HostLine | Site] = [*self.hosts, *self.sites]
        figures += [rate for line in lines for rate in (line.up_mbit_s, line.down_mbit_s)]
        if any(not 0 <= figure < float("inf") for figure in figures) or self.loss_percent > 100:
            return "rates, round trips and losses are not negative, and a loss is 100 percent at most"
        if not 576 <= self.mtu_bytes <= 65_535:
            return f"an MTU of {self.mtu_bytes} bytes is not between 576 and 65,535"
        return None

    # ---------------------------------------------------------------- making it

    def lay(self, wan: Wan) -> None:
        """Give `wan`, which has as many hosts, these lines. Raises `WanError`."""
        wan.link(delay_s=self.round_trip_ms / 2e3, loss=self.loss_percent / 100)
        for host, line in zip(wan.hosts, self.hosts, strict=True):
            wan.rate(host, up_bytes_s=_bytes_s(line.up_mbit_s), down_bytes_s=_bytes_s(line.down_mbit_s))
        for number, site in enumerate(self.sites):
            inside = [host for host, line in zip(wan.hosts, self.hosts, strict=True) if line.site == site.name]
            wan.site(number, inside, up_bytes_s=_bytes_s(site.up_mbit_s), down_bytes_s=_bytes_s(site.down_mbit_s))
            if site.round_trip_ms is not None and len(inside) > 1:
                wan.link(inside, inside, delay_s=site.round_trip_ms / 2e3)
        place = {line.name: host for host, line in zip(wan.hosts, self.hosts, strict=True)}
        for link in self.links:
            a, b = (place[name] for name in link.between)
            wan.link(
                [a],
                [b],
                delay_s=None if link.round_trip_ms is None else link.round_trip_ms / 2e3,
                loss=None if link.loss_percent is None else link.loss_percent / 100,
            )

    # ---------------------------------------------------------------- what it allows

    @property
    def round_trips_s(self) -> dict[frozenset[str], float]:
        """Of each pair."""
        trips: dict[frozenset[str], float] = {}
        for index, a in enumerate(self.hosts):
            for b in self.hosts[index + 1 :]:
                site = next((one for one in self.sites if a.site == b.site == one.name), None)
                inside = None if site is None else site.round_trip_ms
                trips[frozenset((a.name, b.name))] = self.round_trip_ms if inside is None else inside
        for link in self.links:
            if link.round_trip_ms is not None:
                trips[frozenset(link.between)] = link.round_trip_ms
        return {pair: trip_ms / 1e3 for pair, trip_ms in trips.items()}

    @property
    def longest_round_trip_s(self) -> float:
        """Of any pair."""
        return max(self.round_trips_s.values())

    def limit_s(self, traffic: BytesMatrix) -> float:
        """The least time in which `traffic` can cross: its busiest line at full rate, and `ROUND_TRIPS` round trips."""
        return self.busiest_s(traffic) + ROUND_TRIPS * self.longest_round_trip_s

    def busiest_s(self, traffic: BytesMatrix) -> float:
        """Seconds that the busiest line is busy with `traffic`, headers of packets and protocols not counted."""
        sites = np.array([host.site for host in self.hosts])
        seconds = [0.0]
        for index, host in enumerate(self.hosts):
            seconds.append(_line_s(traffic[index].sum(), host.up_mbit_s))
            seconds.append(_line_s(traffic[:, index].sum(), host.down_mbit_s))
        for site in self.sites:
            inside = sites == site.name
            seconds.append(_line_s(traffic[np.ix_(inside, ~inside)].sum(), site.up_mbit_s))
            seconds.append(_line_s(traffic[np.ix_(~inside, inside)].sum(), site.down_mbit_s))
        return max(seconds)

    @property
    def words(self) -> str:
        """In a line."""
        rates = {(host.up_mbit_s, host.down_mbit_s) for host in self.hosts}
        lines = ", ".join(_rate_words(*rate) for rate in sorted(rates))
        parts = [f"{len(self.hosts)} hosts, {lines}"]
        parts += [f"site {site.name} {_rate_words(site.up_mbit_s, site.down_mbit_s)}" for site in self.sites]
        parts.append(f"{self.longest_round_trip_s * 1e3:g} ms round trip")
        if self.loss_percent or any(link.loss_percent for link in self.links):
            parts.append(f"{self.loss_percent:g} % of the packets lost")
        parts.append(f"MTU {self.mtu_bytes}, {self.congestion_control}")
        return ", ".join(parts)


def _bytes_s(mbit_s: float) -> float:
    return mbit_s * 1e6 / 8


def _line_s(size: float, mbit_s: float) -> float:
    return float(size) / _bytes_s(mbit_s) if mbit_s else 0.0


def _rate_words(up_mbit_s: float, down_mbit_s: float) -> str:
    if not up_mbit_s and not down_mbit_s:
        return "unlimited"
    if up_mbit_s == down_mbit_s:
        return f"{up_mbit_s:g} Mbit/s"
    return f"{up_mbit_s:g} up, {down_mbit_s:g} down Mbit/s"


# ---------------------------------------------------------------- finding one


def even_lab(hosts: int, mbit_s: float, *, name: str = "", round_trip_ms: float = 100.0) -> Lab:
    """Hosts whose lines are all alike."""
    return Lab(
        name=name or f"{hosts} × {mbit_s:g} Mbit/s",
        hosts=tuple(HostLine(name=f"w{index}", up_mbit_s=mbit_s, down_mbit_s=mbit_s) for index in range(hosts)),
        round_trip_ms=round_trip_ms,
        mtu_bytes=9000,
    )


def shipped() -> list[str]:
    """Names of the labs that come with the benchmark."""
    return sorted(path.stem for path in LABS.glob("*.toml"))


def load(name: str) -> Lab:
    """A shipped lab by its name, or one of a file. Raises `OperatorError`."""
    path = LABS / f"{name}.toml" if name in shipped() else Path(name)
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Lab)
    except OSError as error:
        raise OperatorError(
            f"there is no lab {name!r} ({error.strerror}): name a TOML file, or one of {', '.join(shipped())}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} describes no lab: {error}") from error
    lab = msgspec.structs.replace(found, name=found.name or path.stem)
    if why := lab.check():
        raise OperatorError(f"{path}: {why}")
    return lab
