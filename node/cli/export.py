"""`atoll export DIR`: the newest state of a home as a model that others can load (design section 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.cli import runs
from node.cli.control import Control
from node.cli.runs import HomeRun
from node.errors import AtollError, OperatorError
from node.home import Home
from node.supervisor import lock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    run_name: str
    round: int
    state_hash: str


def export_model(home: Home, directory: Path, *, allow_functions: Sequence[str] = ()) -> Exported:
    """Write the model into `directory`. A live daemon is asked for its current state, else the newest snapshot counts.

    Raises `OperatorError`.
    """
    if lock.holder(home) is not None:
        point = Control(home).export_point()
        run = runs.load(home, bytes.fromhex(point.run_id))
        found = [Path(point.snapshot)]
    else:
        run = runs.current(home)
        found = snapshots(home, run) if run else []
    if run is None:
        raise OperatorError(f"the home {home.path} has no run: join one, or name another home by --home")
    if not found:
        raise OperatorError(
            f"the home {home.path} has no snapshot of the run {run.manifest.name!r} yet: start it by `atoll daemon`"
        )
    problems = []
    for snapshot in found:
        try:
            theta = read_theta(run, snapshot)
        except SnapshotDamaged as error:
            problems.append(str(error))
            continue
        return _write(home, run, theta, snapshot, directory, allow_functions)
    raise OperatorError(f"no snapshot can be used: {'; '.join(problems)}; start the daemon, and it gets a good one")


class SnapshotDamaged(Exception):
    """One sentence; the next older snapshot may be whole."""


def snapshots(home: Home, run: HomeRun) -> list[Path]:
    """Complete snapshots of the run, newest first."""
    complete = []
    for path in home.engine_directory(run.run_id).joinpath("snapshots").glob("*-*"):
        number, _, state_hash = path.name.partition("-")
        if number.isdigit() and len(state_hash) == 64:
            complete.append((int(number), path))
    return [path for _, path in sorted(complete, reverse=True)]


def read_theta(run: HomeRun, snapshot: Path) -> NDArray[np.float32]:
    """θ [N] of a snapshot folder, mapped, after its bytes were checked against the hash in its name."""
    import numpy as np

    from protocol.state_hash import state_hash

    layout = run.manifest.layout
    expected = layout.elements + layout.elements - layout.buffer_elements
    try:
        data: NDArray[np.float32] = np.memmap(snapshot / "data", dtype="<f4", mode="r")
    except (OSError, ValueError) as error:
        raise SnapshotDamaged(f"{snapshot} cannot be read ({error})") from error
    if data.size != expected:
        raise SnapshotDamaged(f"{snapshot} holds {data.size} numbers instead of {expected}")
    theta, momentum = data[: layout.elements], data[layout.elements :]
    if state_hash(theta, momentum).hex() != snapshot.name.partition("-")[2]:
        raise SnapshotDamaged(f"{snapshot} does not have the hash of its name")
    return theta


def _write(
    home: Home,
    run: HomeRun,
    theta: NDArray[np.float32],
    snapshot: Path,
    directory: Path,
    allow_functions: Sequence[str],
) -> Exported:
    from node.trainer.export import export

    artifacts = home.engine_directory(run.run_id) / "artifacts"
    try:
        export(run.manifest, artifacts, theta, directory, allow_functions=allow_functions)
    except AtollError as error:
        raise OperatorError(f"the model cannot be exported: {error}") from error
    except OSError as error:
        raise OperatorError(f"{directory} cannot be written ({error.strerror}); choose another directory") from error
    number, _, state_hash = snapshot.name.partition("-")
    return Exported(run_name=run.manifest.name, round=int(number), state_hash=state_hash)
