"""Which engine is opened: the one that the manifest names, or none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.engine import api
from node.engine.engine import Engine
from node.engine.engines import ENGINES, engine_named
from node.engine.service import serve_daemon
from node.manifest_checks import ENGINES as NAMES_IN_MANIFESTS


def test_every_engine_that_a_manifest_may_name_is_there() -> None:
    assert set(ENGINES) == set(NAMES_IN_MANIFESTS)
    assert engine_named("atoll") is Engine


def test_an_unknown_engine_is_refused_in_one_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        client = EngineClient(ours)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_daemon, theirs)
                nursery.start_soon(client.run)
                with pytest.raises(EngineFailed, match=r"names the engine 'magic', which this version does not have"):
                    await client.open(_request(tmp_path, "magic"), fds=_memory())
                client.close()

    trio.run(main)
    assert not list(tmp_path.iterdir()), "nothing was made for it"


def _request(directory: Path, engine: str) -> api.Open:
    return api.Open(
        id=0,
        directory=str(directory / "engine"),
        peer_id="somebody",
        certificate_pem=b"",
        key_pem=b"",
        listen_host="127.0.0.1",
        listen_port=0,
        elements=512,
        buffer_elements=0,
        part_elements=256,
        codec="int8",
        sum_codec="sum16",
        momentum=0.9,
        keep_rounds=2,
        keep_snapshots=1,
        disk_limit_bytes=0,
        threads=1,
        engine=engine,
    )


def _memory() -> tuple[int, int, int]:
    first, second, third = (os.memfd_create("engines", os.MFD_CLOEXEC) for _ in range(3))
    return first, second, third
