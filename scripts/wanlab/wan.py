"""A wide-area network on one Linux machine: hosts of their own for real processes, and the internet between them.

with Wan(4) as wan:
    wan.link(delay_s=0.05, jitter_s=0.005, loss=0.01)
    wan.rate(wan.hosts[3], up_bytes_s=1e6, down_bytes_s=4e6)
    subprocess.Popen([*wan.hosts[0].prefix, "atoll", "daemon", ...])
    wan.cut(wan.hosts[:1], wan.hosts[1:])
    wan.heal()

A host is a network namespace without a name, held by one process: `wanlab.c`, compiled when a lab is made. That process
ends with this one, and the lab is gone with it, whatever becomes of either. Nothing of this machine's own network is
touched. Delay, rate and loss are that process's doing: the kernel needs TUN devices, nothing else.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from node.errors import AtollError

SOURCE = Path(__file__).with_name("wanlab.c")
MAX_HOSTS = 64
COMPILE_S = 60.0
ANSWER_S = 20.0
"""For the network's process to obey: it moves packets in between."""
END_S = 5.0


class WanError(AtollError):
    """The network cannot be made or steered: one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of the network."""

    index: int
    address: str
    """Its IPv4 address; the network's hosts share a /24 network."""
    namespace: str
    """Path of its network namespace, while it is there."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to write before a command so that it runs on this host; the process keeps its id."""
        return ("nsenter", f"--net={self.namespace}", "--")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Packets of some pairs, each direction for itself."""

    delivered: int
    lost: int
    """To the loss that was asked for."""
    full: int
    """A line's queue had no room."""
    cut: int
    delivered_bytes: int = 0
    """Of whole packets."""

    @property
    def sent(self) -> int:
        """But for what was cut, and for what is on its way."""
        return self.delivered + self.lost + self.full

    @property
    def loss(self) -> float:
        """Share lost of what was sent."""
        return self.lost / max(1, self.sent)


def unavailable() -> str | None:
    """Why this machine makes no lab, in one sentence; None: it does."""
    if sys.platform != "linux":
        return "a wide-area lab needs Linux"
    if os.geteuid() != 0:
        return "a wide-area lab makes network namespaces, which only root may"
    for tool, package in (("cc", "a C compiler"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            return f"a wide-area lab needs `{tool}` ({package})"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a wide-area lab needs /dev/net/tun"
    return None


def congestion_control() -> str:
    """What TCP uses on hosts of a lab that was not asked for another: `cubic`, `bbr` and so on."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


class Wan:
    """Made by `with`. Everything is unlimited, immediate and lossless until told otherwise.

    Args:
        hosts: how many, at most 64.
        mtu_bytes: of every path. TCP sends no larger packets, so loss is counted in these.
        congestion_control: what TCP uses (`cubic`, `bbr`, ...); None: this machine's default.
        seed: of losses and jitter. Which packet is the n-th is the kernel's affair all the same.

    Raises `WanError`, here and in every method.
    """

    def __init__(
        self, hosts: int, *, mtu_bytes: int = 1500, congestion_control: str | None = None, seed: int = 1
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise WanError(f"a lab of {hosts} hosts cannot be made: 1 to {MAX_HOSTS} can")
        self._count = hosts
        self._mtu_bytes = mtu_bytes
        self._congestion_control = congestion_control
        self._seed = seed
        self._unread = b""
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Wan:
        if why := unavailable():
            raise WanError(f"{why}.")
        network = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        with tempfile.TemporaryDirectory(prefix="wanlab-") as folder:
            program = str(Path(folder) / "wanlab")
            compiler = subprocess.run(
                ["cc", "-O2", "-o", program, str(SOURCE)],
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                check=False,
            )
            if compiler.returncode != 0:
                raise WanError(f"{SOURCE.name} does not compile: {compiler.stderr.strip()[:500]}")
            self._process = subprocess.Popen(
                [program, network, str(self._count), str(self._mtu_bytes), str(self._seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # an interrupt at the keyboard is for who uses the lab; it then ends in order
            )
            try:
                self.hosts = self._started(network)
                if self._congestion_control is not None:
                    self._use_congestion_control(network, self._congestion_control)
            except BaseException:
                self.close()
                raise
        return self

    @property
    def process_id(self) -> int:
        """Of what moves the packets."""
        return self._process.pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The hosts' networks end; processes that still run on them have none any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _started(self, network: str) -> tuple[Host, ...]:
        hosts: list[Host] = []
        while (line := self._line()) != "ready":
            word, _, namespace = line.partition(" ")
            if word != "host":
                raise WanError(f"the network's process said {line!r}")
            hosts.append(Host(index=len(hosts), address=f"{network}.{len(hosts) + 1}", namespace=namespace))
        return tuple(hosts)

    def _use_congestion_control(self, network: str, name: str) -> None:
        """By the route: a new namespace must not choose among all that the kernel has, a route may."""
        for host in self.hosts:
            route = ["route", "replace", f"{network}.0/24", "dev", "wan0", "scope", "link", "src", host.address]
            done = subprocess.run(
                [*host.prefix, "ip", *route, "congctl", name], capture_output=True, text=True, timeout=20, check=False
            )
            if done.returncode != 0:
                raise WanError(f"this kernel's TCP has no congestion control {name!r}: {done.stderr.strip()}")

    # ------------------------------------------------------------ changing it

    def link(
        self,
        some: Sequence[Host] | None = None,
        others: Sequence[Host] | None = None,
        *,
        delay_s: float | None = None,
        jitter_s: float = 0.0,
        loss: float | None = None,
        one_way: bool = False,
    ) -> None:
        """Change the paths between `some` and `others` (None: all hosts), both ways unless `one_way`.

        `delay_s` is of one way, half a round trip; it wanders within ± `jitter_s`, and packets keep their order.
        `loss` is the share of packets lost, each by itself. What is None stays as it is.
        """
        for a, b in self._pairs(some, others, one_way=one_way):
            if delay_s is not None:
                self._tell(f"delay {a} {b} {delay_s} {jitter_s}")
            if loss is not None:
                self._tell(f"loss {a} {b} {loss}")

    def rate(self, *hosts: Host, up_bytes_s: float = 0.0, down_bytes_s: float = 0.0) -> None:
        """The rate of these hosts' lines; 0: unlimited."""
        for host in hosts:
            self._tell(f"rate {host.index} {up_bytes_s} {down_bytes_s}")

    def queue(self, seconds: float) -> None:
        """How long a packet may wait for a line before it is dropped; 0.1 s at first."""
        self._tell(f"queue {seconds}")

    def site(self, number: int, hosts: Sequence[Host], *, up_bytes_s: float, down_bytes_s: float) -> None:
        """These hosts share one line to all that are not of their site."""
        for host in hosts:
            self._tell(f"site {host.index} {number}")
        self._tell(f"line {number} {up_bytes_s} {down_bytes_s}")

    def cut(self, some: Sequence[Host], others: Sequence[Host] | None = None, *, one_way: bool = False) -> None:
        """Nothing passes from `some` to `others` (None: all but `some`) nor, unless `one_way`, back; nobody is told."""
        if others is None:
            others = [host for host in self.hosts if host not in some]
        for a, b in self._pairs(some, others, one_way=one_way):
            self._tell(f"cut {a} {b} 1")

    def heal(self) -> None:
        """All cuts are over."""
        for a, b in self._pairs(None, None, one_way=False):
            self._tell(f"cut {a} {b} 0")

    def counts(self, some: Sequence[Host] | None = None, others: Sequence[Host] | None = None) -> Counts:
        """What has passed from `some` to `others` and back since the lab began."""
        return self._counted(self._pairs(some, others, one_way=False))

    def delivered_bytes(self) -> list[list[int]]:
        """[hosts][hosts] What has come from each host (row) to each other since the lab began."""
        numbers = range(len(self.hosts))
        return [[self._counted([(a, b)]).delivered_bytes if a != b else 0 for b in numbers] for a in numbers]

    def _counted(self, pairs: Sequence[tuple[int, int]]) -> Counts:
        total = [0, 0, 0, 0, 0]
        for a, b in pairs:
            total = [sum(both) for both in zip(total, map(int, self._tell(f"counts {a} {b}").split()), strict=True)]
        return Counts(delivered=total[0], lost=total[1], full=total[2], cut=total[3], delivered_bytes=total[4])

    def _pairs(
        self, some: Sequence[Host] | None, others: Sequence[Host] | None, *, one_way: bool
    ) -> list[tuple[int, int]]:
        sources = self.hosts if some is None else some
        targets = self.hosts if others is None else others
        pairs = {(a.index, b.index): None for a in sources for b in targets if a != b}
        if not one_way:
            pairs |= {(b, a): None for a, b in pairs}
        return list(pairs)

    def _tell(self, command: str) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise WanError(f"the network's process has ended ({error.strerror})") from error
        word, _, rest = self._line().partition(" ")
        if word != "ok":
            raise WanError(f"the lab does not obey {command!r}: {rest}")
        return rest

    def _line(self) -> str:
        """One line of the process's output."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + ANSWER_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise WanError(f"the network's process did not answer within {ANSWER_S:.0f} s")
            more = os.read(self._process.stdout.fileno(), 4096)
            if not more:
                assert self._process.stderr is not None
                raise WanError(
                    f"the lab cannot be made: {self._process.stderr.read().decode(errors='replace').strip()}"
                )
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()
