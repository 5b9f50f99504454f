"""The command line. Everything heavy is imported inside the command that needs it: `atoll status` must be instant."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from node.cli.errors import one_sentence
from node.errors import OperatorError
from node.home import Home, default_home

app = typer.Typer(
    name="atoll",
    help="Train one model on many machines joined by the ordinary internet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run_app = typer.Typer(help="Define runs.", no_args_is_help=True)
app.add_typer(run_app, name="run")

HomeOption = Annotated[
    Optional[Path],  # noqa: UP045 (typer evaluates it)
    typer.Option("--home", help="Everything of this node lives here.", envvar="ATOLL_HOME", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]
Strings = Optional[list[str]]  # noqa: UP045

# The options of `daemon` and `join`. None: not given; the environment, config.toml or the default decides.
JoinOption = Annotated[Strings, typer.Option("--join", metavar="MULTIADDR", help="A member's address. Repeatable.")]
ListenOption = Annotated[
    Strings, typer.Option("--listen", metavar="MULTIADDR", help="Where to listen: /ip4/0.0.0.0/tcp/4001. Repeatable.")
]
AnnounceOption = Annotated[
    Strings, typer.Option("--announce", metavar="MULTIADDR", help="What to tell others instead. Repeatable.")
]
AnnounceDataOption = Annotated[
    Strings,
    typer.Option(
        "--announce-data",
        metavar="HOST:PORT",
        help="Likewise for --data-port, if a router forwards another. Repeatable.",
    ),
]
DataPortOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--data-port", metavar="PORT", help="TCP port of the data channels; 0: any."),
]
HttpOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--http", metavar="HOST:PORT", help="Serve status and metrics here, or `off` (default)."),
]
DeviceOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--device", help="auto, cpu, cuda, cuda:N, or none: a trainer of yours attaches."),
]
NoTrainerOption = Annotated[bool, typer.Option("--no-trainer", help="The same as --device none.")]
MaxRoundsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-rounds", metavar="N", help="Leave after this many rounds."),
]
NameOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--name", help="What people call this machine."),
]
ThreadsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--threads", metavar="N", help="CPU threads; 0: as the libraries choose."),
]
MaxDiskOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--max-disk", metavar="SIZE", help="Disk for results and snapshots."),
]
MaxRelayOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--max-relay",
        metavar="SIZE",
        help="A second, passed on for pairs that cannot dial each other (10MB); 0: none.",
    ),
]
AllowFunctionOption = Annotated[
    Strings,
    typer.Option("--allow-function", metavar="MODULE:FUNCTION", help="Code the run may name. Repeatable."),
]
LogLevelOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--log-level", help="debug, info, warning or error."),
]
LogJsonOption = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--log-json/--log-text", help="The log as JSON lines.", show_default=False),
]


def main() -> None:
    app()


def _home(home: Path | None) -> Home:
    return Home(home.expanduser().absolute()) if home is not None else Home(default_home())


def _version(shown: bool) -> None:
    if shown:
        from node import __version__

        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train one model on many machines joined by the ordinary internet."""


@app.command()
@one_sentence
def init(home: HomeOption = None) -> None:
    """Make this node's identity and its config file."""
    from node.cli.config_file import write_template
    from node.daemon.identity import ensure_identity

    place = _home(home)
    identity = ensure_identity(place)
    write_template(place)
    typer.echo(f"peer id  {identity.peer_id}")
    typer.echo(f"home     {place.path}")


@run_app.command("create")
@one_sentence
def run_create(
    run: Annotated[str, typer.Argument(metavar="RUN.toml", help="A TOML file, or a preset: tiny, micro, gpu-150m.")],
    set_: Annotated[Strings, typer.Option("--set", metavar="KEY=VALUE", help="Change a key. Repeatable.")] = None,
    founder: Annotated[
        Strings, typer.Option("--founder", metavar="PEER_ID", help="Members from round 0 on. Repeatable.")
    ] = None,
    allow_function: AllowFunctionOption = None,
    home: HomeOption = None,
) -> None:
    """Check a run's definition, sign its manifest and print its id."""
    from node.cli import runs

    created = runs.obtain(
        _home(home),
        run,
        overrides=tuple(set_ or ()),
        founders=tuple(founder or ()),
        allow_functions=tuple(allow_function or ()),
        report=_report,
    )
    typer.echo(created.run_id.hex())


@app.command()
@one_sentence
def daemon(
    run: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--run", metavar="RUN.toml", help="Start this run: a preset, a TOML file, or a run id."),
    ] = None,
    set_: Annotated[
        Strings, typer.Option("--set", metavar="KEY=VALUE", help="With --run: change a key of it. Repeatable.")
    ] = None,
    join: JoinOption = None,
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    announce_data: AnnounceDataOption = None,
    data_port: DataPortOption = None,
    http: HttpOption = None,
    device: DeviceOption = None,
    no_trainer: NoTrainerOption = False,
    max_rounds: MaxRoundsOption = None,
    name: NameOption = None,
    threads: ThreadsOption = None,
    max_disk: MaxDiskOption = None,
    max_relay: MaxRelayOption = None,
    allow_function: AllowFunctionOption = None,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = None,
    home: HomeOption = None,
) -> None:
    """Run this node in the foreground. Without --run or --join: go on with the run of its home."""
    _launch(
        _home(home),
        run=run,
        set=set_,
        join=join,
        listen=listen,
        announce=announce,
        announce_data=announce_data,
        data_port=data_port,
        http=http,
        device="none" if no_trainer else device,
        max_rounds=max_rounds,
        name=name,
        threads=threads,
        max_disk=max_disk,
        max_relay=max_relay,
        allow_function=allow_function,
        log_level=log_level,
        log_json=log_json,
    )


@app.command("join")
@one_sentence
def join_(
    address: Annotated[list[str], typer.Argument(metavar="MULTIADDR...", help="Addresses of members of the run.")],
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    announce_data: AnnounceDataOption = None,
    data_port: DataPortOption = None,
    http: HttpOption = None,
    device: DeviceOption = None,
    no_trainer: NoTrainerOption = False,
    max_rounds: MaxRoundsOption = None,
    name: NameOption = None,
    threads: ThreadsOption = None,
    max_disk: MaxDiskOption = None,
    max_relay: MaxRelayOption = None,
    allow_function: AllowFunctionOption = None,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = None,
    home: HomeOption = None,
) -> None:
    """Join a run by one member's address, with a new identity if this home has none."""
    from node.cli.config_file import write_template

    place = _home(home)
    write_template(place)
    _launch(
        place,
        join=address,
        listen=listen,
        announce=announce,
        announce_data=announce_data,
        data_port=data_port,
        http=http,
        device="none" if no_trainer else device,
        max_rounds=max_rounds,
        name=name,
        threads=threads,
        max_disk=max_disk,
        max_relay=max_relay,
        allow_function=allow_function,
        log_level=log_level,
        log_json=log_json,
    )


def _launch(home: Home, **flags: Any) -> None:
    from node.cli.launch import launch
    from node.cli.options import resolve

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
    launch(home, resolve(home, {key: value for key, value in given.items() if value not in (None, ())}), _report)


@app.command()
@one_sentence
def status(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    home: HomeOption = None,
) -> None:
    """What the daemon of this home is doing, and what it waits for."""
    from node.cli.control import Control

    control = Control(_home(home))
    if json and not watch:
        sys.stdout.write(control.request("GET", "/status").decode() + "\n")
    elif watch:
        from node.cli.watch import watch as follow

        follow(control, as_json=json)
    else:
        from node.cli.show import print_status

        print_status(control.status())


@app.command()
@one_sentence
def peers(json: JsonOption = False, home: HomeOption = None) -> None:
    """The peers that this node knows."""
    from node.cli.control import Control

    control = Control(_home(home))
    if json:
        sys.stdout.write(control.request("GET", "/peers").decode() + "\n")
    else:
        from node.cli.show import print_peers

        print_peers(control.peers())


@app.command("id")
@one_sentence
def id_(home: HomeOption = None) -> None:
    """This node's peer id, and the addresses that others can join by while it runs."""
    from node.daemon.identity import load_identity

    place = _home(home)
    identity = load_identity(place)
    if identity is None:
        raise OperatorError(f"the home {place.path} has no identity yet: make one by `atoll init`")
    typer.echo(identity.peer_id)
    for address in _live_addresses(place):
        typer.echo(address)


def _live_addresses(home: Home) -> list[str]:
    import json as json_module

    from node.supervisor import lock

    if lock.holder(home) is None:
        return []
    try:
        return [str(address) for address in json_module.loads(home.daemon_file.read_text())["addresses"]]
    except (OSError, ValueError, KeyError):
        return []


@app.command()
@one_sentence
def stop(home: HomeOption = None) -> None:
    """Let the daemon of this home leave its run, and wait until it is gone."""
    from node.cli.stop import stop as stop_daemon

    stop_daemon(_home(home))


@app.command()
@one_sentence
def swarm(
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, metavar="N", help="How many.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="R", help="After how many rounds to end.")] = 10,
    run: Annotated[str, typer.Option("--run", metavar="RUN.toml", help="A preset or a TOML file.")] = "tiny",
    set_: Annotated[Strings, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of it. Repeatable.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N, for every node.")] = "auto",
    json: JsonOption = False,
    directory: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--directory", metavar="DIR", help="Where the homes are made (a temporary directory)."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the homes there.")] = False,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--timeout", metavar="SECONDS", help="Give up after this long."),
    ] = None,
) -> None:
    """A whole swarm on this machine, as real processes. Exit status 0: all ended on the same state."""
    from node.cli.swarm import run_swarm

    sys.exit(
        run_swarm(
            nodes=nodes,
            rounds=rounds,
            run=run,
            overrides=tuple(set_ or ()),
            device=device,
            as_json=json,
            directory=directory,
            keep=keep,
            timeout_s=timeout,
        )
    )


@app.command()
@one_sentence
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made, or overwritten file by file.")],
    allow_function: AllowFunctionOption = None,
    home: HomeOption = None,
) -> None:
    """Write the current model in Hugging Face format."""
    from node.cli.export import export_model

    exported = export_model(_home(home), directory, allow_functions=tuple(allow_function or ()))
    typer.echo(f"round {exported.round} of {exported.run_name} is in {directory}")


def _report(text: str) -> None:
    """Progress of what takes long, before the node's own lines begin."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
