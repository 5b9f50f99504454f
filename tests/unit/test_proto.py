"""The code in protocol/pb is what scripts/generate-proto makes of proto/."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "protocol" / "pb"


def has_tools() -> bool:
    plugin = shutil.which("protoc-gen-mypy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    return importlib.util.find_spec("grpc_tools") is not None and plugin is not None


@pytest.mark.slow
@pytest.mark.skipif(not has_tools(), reason="needs grpcio-tools and mypy-protobuf: install the extra `dev`")
def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "generate-proto", tmp_path],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made
    kept = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2.py*")}
    assert sorted(made) == sorted(kept), "run scripts/generate-proto"
    for name, content in made.items():
        assert kept[name] == content, f"{name} is stale: run scripts/generate-proto"


def test_every_proto_file_has_its_module() -> None:
    for proto in (ROOT / "proto").glob("*.proto"):
        assert (GENERATED / f"{proto.stem}_pb2.py").exists()
        assert (GENERATED / f"{proto.stem}_pb2.pyi").exists()
