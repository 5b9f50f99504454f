"""Content-addressed files: each lies in a folder under the hex BLAKE3 of its bytes (design section 4).

A file of such a folder may have come from a stranger or through a bad disk, so whoever reads one verifies it first.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from blake3 import blake3

from node.errors import AtollError
from node.manifest import Artifact

_CHUNK_BYTES = 1 << 20


class ArtifactError(AtollError):
    """An artifact that is missing, or whose bytes are not what its hash says."""


def hash_file(path: Path) -> str:
    """Hex BLAKE3 of a file, in constant memory."""
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def store(data: bytes, folder: Path) -> Artifact:
    """Write `data` under its hash, durably and at once; writing the same again changes nothing."""
    artifact = Artifact(hash=blake3(data).hexdigest(), length=len(data))
    path = folder / artifact.hash
    if not _holds(path, artifact):
        write_atomically(data, path)
    return artifact


def adopt(temporary: Path, folder: Path) -> Artifact:
    """Move a finished file, in `folder`'s filesystem, to the name of its hash."""
    artifact = Artifact(hash=hash_file(temporary), length=temporary.stat().st_size)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / artifact.hash)
    return artifact


def verified(artifact: Artifact, folder: Path) -> Path:
    """The path of `artifact` after its bytes were checked. Raises `ArtifactError`."""
    path = folder / artifact.hash
    if not path.is_file():
        raise ArtifactError(f"the artifact {artifact.hash} is not in {folder}: fetch it from a peer again")
    length = path.stat().st_size
    if length != artifact.length:
        raise ArtifactError(f"{path} has {length} bytes, not {artifact.length}: remove it and fetch it again")
    if hash_file(path) != artifact.hash:
        raise ArtifactError(f"{path} does not have the hash of its name: remove it and fetch it again")
    return path


def place(artifact: Artifact, source: Path, target: Path) -> Path:
    """Make `artifact` of the folder `source` appear in `target` too, without a copy where the filesystem can."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / artifact.hash
    if _holds(path, artifact):
        return path
    origin = verified(artifact, source)
    temporary = target / f".{artifact.hash}.{secrets.token_hex(4)}"
    try:
        os.link(origin, temporary)
    except OSError:  # another filesystem, or one without links
        shutil.copyfile(origin, temporary)
    temporary.replace(path)
    return path


def _holds(path: Path, artifact: Artifact) -> bool:
    return path.is_file() and path.stat().st_size == artifact.length and hash_file(path) == artifact.hash


def write_atomically(data: bytes, path: Path) -> None:
    """Readers see the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
