"""Results of creating a run that take long to make, kept by what they were made from.

    FOLDER/artifacts/HASH         content-addressed bytes
    FOLDER/stages/STAGE-KEY.json  what a stage made, naming artifacts; KEY hashes the stage's inputs and versions

Losing any of it costs time and nothing else; a damaged file is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from node import artifacts
from node.artifacts import ArtifactError
from node.manifest import Artifact

StageT = TypeVar("StageT", bound=msgspec.Struct)


class RunCache:
    def __init__(self, folder: Path) -> None:
        self._stages = folder / "stages"
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir(parents=True, exist_ok=True)

    def stage(self, kind: type[StageT], inputs: object, build: Callable[[], StageT]) -> StageT:
        """What `build` returns for these inputs (anything JSON can hold), from disk when it was built before."""
        key = blake3(msgspec.json.encode(inputs, order="deterministic")).hexdigest()[:32]
        path = self._stages / f"{kind.__name__.lower()}-{key}.json"
        found = self._load(kind, path)
        if found is None:
            found = build()
            artifacts.write_atomically(msgspec.json.encode(found), path)
        return found

    def _load(self, kind: type[StageT], path: Path) -> StageT | None:
        try:
            stage = msgspec.json.decode(path.read_bytes(), type=kind)
            for name in stage.__struct_fields__:
                value = getattr(stage, name)
                if isinstance(value, Artifact):
                    artifacts.verified(value, self.artifacts)
        except (FileNotFoundError, msgspec.DecodeError, ArtifactError):
            return None
        return stage
