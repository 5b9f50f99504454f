"""`atoll daemon`: checks everything that can be checked, then becomes the supervisor.

What an operator can get wrong is refused here, in this process, before anything is allocated or started.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from node.artifacts import write_atomically
from node.cli import runs
from node.cli.options import OperatorSettings
from node.cli.runs import HomeRun
from node.daemon.addresses import Address, check_can_listen, parse_host_port, parse_own_address, parse_peer_address
from node.daemon.identity import ensure_identity
from node.engine.hivemind.environment import check_engine
from node.errors import OperatorError
from node.home import Home
from node.memory import Shortage, disk_needed, disk_shortage, memory_needed, memory_shortage
from node.settings import SETTINGS_VARIABLE, DaemonSettings
from node.supervisor import lock
from node.supervisor.roles import python

ANY_HOST = "0.0.0.0"


def launch(home: Home, operator: OperatorSettings, report: Callable[[str], None]) -> None:
    """Does not return: this process goes on as the supervisor, with the same process id. Raises `OperatorError`."""
    held = lock.acquire(home)
    try:
        settings = prepare(home, operator, report)
    except BaseException:
        os.close(held)
        raise
    os.set_inheritable(held, True)
    environment = os.environ | {
        "ATOLL_HOME": str(home.path),
        SETTINGS_VARIABLE: settings.to_json(),
        lock.LOCK_VARIABLE: str(held),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    command = python("node.supervisor")
    # From here to its event loop a signal would end a process that has begun to make things: it waits for that loop.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    os.execve(command[0], command, environment)


def prepare(home: Home, operator: OperatorSettings, report: Callable[[str], None]) -> DaemonSettings:
    """The settings of the node; afterwards the home has an identity and, unless it joins one, its run."""
    join = [parse_peer_address(text) for text in operator.join]
    for text in operator.announce:
        parse_own_address(text, "--announce")
    for text in operator.announce_data:
        parse_host_port(text, "--announce-data")
    listen = _listen_addresses(home, operator)
    _check_ports(operator, listen)
    ensure_identity(home)
    previous, lost = _previous(home, report)
    run = None if lost is not None and operator.run is None else _run_of(home, operator, previous, report)
    if run is not None:
        check_engine(run.manifest, operator.hivemind_python)
        _check_resources(home, run, operator.device)
        runs.make_current(home, run.run_id)
    return DaemonSettings(
        home=str(home.path),
        run_id=run.run_id.hex() if run else lost.hex() if lost is not None and not join else None,
        resume_run_id=previous.run_id.hex() if run is None and previous else None,
        join=tuple(str(address) for address in join),
        listen=tuple(str(address) for address in listen),
        announce=operator.announce,
        announce_data=operator.announce_data,
        data_port=operator.data_port,
        http=operator.http,
        device=operator.device,
        max_rounds=operator.max_rounds,
        name=operator.name,
        threads=operator.threads,
        max_disk_bytes=operator.max_disk,
        hivemind_python=operator.hivemind_python,
        max_relay_bytes_s=operator.max_relay,
        allow_functions=operator.allow_function,
        log_level=operator.log_level,
        log_json=operator.log_json,
    )


def _previous(home: Home, report: Callable[[str], None]) -> tuple[HomeRun | None, bytes | None]:
    """The run of last time; or, where its manifest was damaged, the id of the run that the peers must send it of.

    What is damaged is set aside. Raises `OperatorError` when it cannot be known which run it was.
    """
    try:
        return runs.current(home), None
    except runs.DamagedFile as error:
        known = runs.all_of(home) if error.run_id is None else []
        if error.run_id is None and len(known) != 1:
            raise
        aside = error.path.with_name(f"{error.path.name}.damaged")
        error.path.replace(aside)
        report(f"{error.path} {error.why}: it is set aside as {aside.name}")
        if known:
            runs.make_current(home, known[0].run_id)
            return known[0], None
        return None, error.run_id


def _run_of(
    home: Home, operator: OperatorSettings, previous: HomeRun | None, report: Callable[[str], None]
) -> HomeRun | None:
    """None: it comes from the peers to join."""
    if operator.run is not None:
        return runs.obtain(
            home,
            operator.run,
            overrides=operator.set,
            allow_functions=operator.allow_function,
            report=report,
        )
    if operator.set:
        raise OperatorError("--set changes a run that is being created: name that run by --run")
    if operator.join:
        return None
    if previous is None:
        raise OperatorError(
            f"the home {home.path} has no run yet: start one by `atoll daemon --run tiny`, "
            "or join one by `atoll join MULTIADDR`"
        )
    return previous


def _check_resources(home: Home, run: HomeRun, device: str) -> None:
    """Before anything is allocated. Raises `OperatorError` naming what is needed and what there is."""
    elements, limits = run.manifest.layout.elements, run.manifest.limits
    engine = run.manifest.rounds.engine
    memory = memory_shortage(memory_needed(elements, trains_on_cpu=_trains_on_cpu(device), engine=engine))
    disk: Shortage | None = None
    if not home.engine_directory(run.run_id).joinpath("snapshots").exists():  # else most of it is taken already
        needed = disk_needed(elements, keep_snapshots=limits.keep_snapshots, keep_rounds=limits.keep_rounds)
        disk = disk_shortage(home.path, needed)
    for shortage, fix in (
        (memory, "free memory, or choose a smaller model"),
        (disk, "free disk, or choose another home by --home"),
    ):
        if shortage is not None:
            raise OperatorError(f"the run {run.manifest.name!r} does not fit on this machine: {shortage}; {fix}")


def _trains_on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not any(Path("/dev").glob("nvidia[0-9]*")))


# ---------------------------------------------------------------- ports


def _listen_addresses(home: Home, operator: OperatorSettings) -> list[Address]:
    """As the operator said, else the port of last time: others remember it, and after a power cut it must be found."""
    if operator.listen:
        return [parse_own_address(text, "--listen") for text in operator.listen]
    remembered = home.path / "listen_port"
    try:
        port = int(remembered.read_text(encoding="ascii"))
        address = Address("ip4", ANY_HOST, port)
        check_can_listen(address)
    except (FileNotFoundError, ValueError, OperatorError):
        address = Address("ip4", ANY_HOST, _free_port())
        write_atomically(str(address.port).encode(), remembered)
    return [address]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ANY_HOST, 0))
        return int(probe.getsockname()[1])


def _check_ports(operator: OperatorSettings, listen: list[Address]) -> None:
    for address in listen:
        check_can_listen(address)
    if operator.data_port:
        if any(address.port == operator.data_port for address in listen):
            raise OperatorError(
                f"--data-port {operator.data_port} is the port of --listen too; choose another one, or 0 for any"
            )
        _check_plain(
            listen[0].host, operator.data_port, f"--data-port {operator.data_port}", "another one, or 0 for any"
        )
    if operator.http != "off":
        host, _, port = operator.http.rpartition(":")
        if int(port):
            _check_plain(host.strip("[]"), int(port), f"--http {operator.http}", "another port, or off")


def _check_plain(host: str, port: int, flag: str, otherwise: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OperatorError(f"{flag} cannot be listened on ({error.strerror or error}); choose {otherwise}") from error
