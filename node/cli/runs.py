"""The runs of a home: created here, joined before, or named on the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from node import __version__
from node.errors import OperatorError
from node.home import Home, cache_directory
from node.manifest import Manifest, ManifestError, SignedManifest, decode_signed
from node.peer_id import verify

_RUN_ID = re.compile(r"^[0-9a-f]{64}$")


class DamagedFile(OperatorError):
    """A file that names a run of the home cannot be believed."""

    def __init__(self, path: Path, why: str, run_id: bytes | None) -> None:
        super().__init__(f"{path} {why}; remove it, and join the run again")
        self.path = path
        self.why = why
        self.run_id = run_id
        """The run that it is about, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRun:
    """A run whose signed manifest lies in the home."""

    run_id: bytes
    manifest: Manifest


def load(home: Home, run_id: bytes) -> HomeRun | None:
    """None when the home has no such run. Raises `DamagedFile`."""
    path = home.manifest_file(run_id)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        _, manifest = decode_signed(data, verify)
    except ManifestError as error:
        raise DamagedFile(path, f"is damaged ({error})", run_id) from error
    if manifest.run_id() != run_id:
        raise DamagedFile(path, "holds another run's manifest", run_id)
    return HomeRun(run_id=run_id, manifest=manifest)


def current(home: Home) -> HomeRun | None:
    """The run that plain `atoll daemon` resumes; None when there is none, or its manifest never arrived.

    Raises `DamagedFile`, or `OperatorError`.
    """
    try:
        text = home.current_run_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperatorError(f"{home.current_run_file} cannot be read ({error}); make it readable") from error
    except UnicodeDecodeError as error:
        raise DamagedFile(home.current_run_file, f"is damaged ({error})", None) from error
    if not _RUN_ID.match(text):
        raise DamagedFile(home.current_run_file, f"holds {text[:80]!r}, not a run id", None)
    if not home.run_directory(bytes.fromhex(text)).is_dir():
        raise DamagedFile(home.current_run_file, f"names the run {text}, which this home has no folder of", None)
    return load(home, bytes.fromhex(text))


def all_of(home: Home) -> list[HomeRun]:
    """The runs whose manifests are whole."""
    found = []
    for folder in sorted((home.path / "runs").glob("*")):
        if _RUN_ID.match(folder.name):
            with contextlib.suppress(DamagedFile):
                if (run := load(home, bytes.fromhex(folder.name))) is not None:
                    found.append(run)
    return found


def make_current(home: Home, run_id: bytes) -> None:
    from node.artifacts import write_atomically

    write_atomically(run_id.hex().encode() + b"\n", home.current_run_file)


def obtain(
    home: Home,
    named: str,
    *,
    overrides: Sequence[str] = (),
    founders: Sequence[str] = (),
    allow_functions: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> HomeRun:
    """The run that `named` means: one of the home's by id, or what a preset or TOML file defines.

    The same definition by the same creator is the same run: it is created once, and found again afterwards. Raises
    `OperatorError`.
    """
    if _RUN_ID.match(named):
        run = load(home, bytes.fromhex(named))
        if run is None:
            raise OperatorError(f"the home {home.path} has no run {named}: join it by one member's address")
        return run
    return _create(home, named, overrides, founders, allow_functions, report)


def _create(
    home: Home,
    named: str,
    overrides: Sequence[str],
    founders: Sequence[str],
    allow_functions: Sequence[str],
    report: Callable[[str], None],
) -> HomeRun:
    # Expensive imports; `atoll status` never comes here.
    from node import run_config
    from node.artifacts import write_atomically
    from node.daemon.identity import ensure_identity

    changes: Mapping[str, object] = dict(run_config.parse_override(text) for text in overrides)
    config = run_config.load(named, changes)
    identity = ensure_identity(home)
    definition = config.model_dump(mode="json", exclude_unset=True)
    key = blake3(
        msgspec.json.encode(
            [__version__, identity.peer_id, sorted(founders), str(config.directory), definition], order="deterministic"
        )
    ).hexdigest()
    known = home.path / "manifests" / key
    if known.exists():
        run = load(home, bytes.fromhex(known.read_text(encoding="ascii")))
        if run is not None:
            return run

    from node.run_create import create

    # The artifacts belong in the folder of a run whose id is known only at the end.
    draft = home.path / "manifests" / f"{key}.artifacts"
    draft.mkdir(parents=True, exist_ok=True)
    report(f"creating the run {config.name!r}")
    signed = create(
        config,
        identity_sign=identity.sign,
        creator=identity.peer_id,
        founders=tuple(founders),
        artifacts_directory=draft,
        cache=cache_directory(),
        allow_functions=tuple(allow_functions),
        report=report,
    )
    run = _store(home, signed)
    artifacts = home.engine_directory(run.run_id) / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    for path in draft.iterdir():
        path.replace(artifacts / path.name)
    draft.rmdir()
    write_atomically(run.run_id.hex().encode(), known)
    return run


def _store(home: Home, signed: SignedManifest) -> HomeRun:
    from node.artifacts import write_atomically

    data = msgspec.msgpack.encode(signed)
    _, manifest = decode_signed(data, verify)
    run_id = manifest.run_id()
    write_atomically(data, home.manifest_file(run_id))
    return HomeRun(run_id=run_id, manifest=manifest)
