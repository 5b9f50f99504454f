"""The engine's places and lies.

Places, each counted per round: `encode` (the trainer has handed over), `exchange` (a roster's exchange begins), `up`
(a contribution is about to be sent), `up-received` (one was accepted, as root), `reduced` (a sum of ours is made, its
header not yet signed), `down-received`; for a snapshot's round `chunk-served` (a chunk was read for a peer) and
`chunk-got` (one that came was verified and stored).

Lies about each UP that is sent: `ups-flipped` (one bit of the payload), `ups-nan` and `ups-inf` (a scale),
`ups-beyond` (values a million times larger than declared), `ups-short` (a byte less), `ups-greedy` (a bitmap that
claims everybody).

A lie about each result of which it is the root: `means-fabricated` (one bit of the mean; its header signs the lie).

What every round's contribution was is kept as `leaves/BASE.data` in the home, for whoever recomputes the means.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from node.engine import api
from node.engine.engine import Engine
from node.engine.exchange import Exchange
from node.engine.exchange_sums import WaitingSums
from node.engine.snapshots import SnapshotStore
from protocol.exchange import Reduce, SendPartial
from protocol.fields import bitmap_bytes
from protocol.state_hash import chunk_hash
from tests.chaos.bent import bends
from tests.chaos.bent.strikes import Striker

LEAVES_KEPT = 40


def bend() -> None:
    home = Path(os.environ["ATOLL_HOME"])
    striker = Striker()
    here = {"round": 0}

    change_state = Engine._change_state
    start_exchange = Engine._start_exchange
    run, load_up = Exchange.run, Exchange._load_up
    receive_up, receive_down, publish = Exchange._receive_up, Exchange._receive_down, Exchange._publish

    async def bent_change_state(self: Engine, request: Any) -> Any:
        if isinstance(request, api.Encode):
            striker.passing("encode", here["round"])
        answer = await change_state(self, request)
        match request:
            case api.Apply():
                here["round"] = request.new_round
            case api.LoadSnapshot() | api.ResumeState():
                here["round"] = request.round
            case api.LoadInitial():
                here["round"] = 0
        return answer

    async def bent_start_exchange(self: Engine, request: api.Exchange) -> Any:
        answer = await start_exchange(self, request)
        keep_leaf(Path(self._request.directory) / "outbox" / f"{request.base.hex()}.data", home / "leaves")
        return answer

    async def bent_run(self: Exchange) -> None:
        striker.passing("exchange", here["round"])
        await run(self)

    async def bent_load_up(self: Exchange, part: int) -> Any:
        striker.passing("up", here["round"])
        loaded = await load_up(self, part)
        return loaded if loaded is None else bent_payload(self, part, *loaded)

    async def bent_receive_up(self: Exchange, *arguments: Any) -> None:
        await receive_up(self, *arguments)
        striker.passing("up-received", here["round"])

    async def bent_receive_down(self: Exchange, *arguments: Any) -> None:
        await receive_down(self, *arguments)
        striker.passing("down-received", here["round"])

    async def bent_publish(self: Exchange, *arguments: Any) -> None:
        striker.passing("reduced", here["round"])
        await publish(self, *arguments)

    add_up = WaitingSums.add_up

    async def bent_add_up(self: WaitingSums, decision: Reduce | SendPartial) -> tuple[bytes, bytes]:
        data, data_hash = await add_up(self, decision)
        if not data or not isinstance(decision, Reduce) or "means-fabricated" not in bends.active():
            return data, data_hash
        lying = bytearray(data)
        lying[-1] ^= 1
        return bytes(lying), chunk_hash(lying)

    WaitingSums.add_up = bent_add_up  # type: ignore[method-assign]
    read_chunk, put_chunk = SnapshotStore.read_chunk, SnapshotStore.put_chunk

    def bent_read_chunk(self: SnapshotStore, round_number: int, *arguments: Any) -> bytes | None:
        chunk = read_chunk(self, round_number, *arguments)
        if chunk is not None:
            striker.passing("chunk-served", round_number)
        return chunk

    def bent_put_chunk(self: SnapshotStore, round_number: int, *arguments: Any) -> None:
        put_chunk(self, round_number, *arguments)
        striker.passing("chunk-got", round_number)

    SnapshotStore.read_chunk, SnapshotStore.put_chunk = bent_read_chunk, bent_put_chunk  # type: ignore[method-assign]
    Engine._change_state, Engine._start_exchange = bent_change_state, bent_start_exchange  # type: ignore[method-assign]
    Exchange.run, Exchange._load_up = bent_run, bent_load_up  # type: ignore[method-assign]
    Exchange._receive_up, Exchange._receive_down = bent_receive_up, bent_receive_down  # type: ignore[method-assign]
    Exchange._publish = bent_publish  # type: ignore[method-assign]


def keep_leaf(encoded: Path, leaves: Path) -> None:
    leaves.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError, FileExistsError):  # no contribution; a later attempt of the same one
        os.link(encoded, leaves / encoded.name)
    for old in sorted(leaves.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-LEAVES_KEPT]:
        old.unlink()


def bent_payload(exchange: Exchange, part: int, meta: bytes, data: bytes) -> tuple[bytes, bytes]:
    lies = bends.active()
    lying = bytearray(data)
    if "ups-flipped" in lies:
        lying[-1] ^= 1
    if "ups-nan" in lies:
        lying[:4] = struct.pack("<f", float("nan"))
    if "ups-inf" in lies:
        lying[:4] = struct.pack("<f", float("inf"))
    if "ups-beyond" in lies:
        lying[:4] = struct.pack("<f", 1e6 * struct.unpack("<f", lying[:4])[0] + 1e6)
    if "ups-short" in lies:
        del lying[-1]
    if "ups-greedy" in lies:
        fields = msgspec.msgpack.decode(meta)
        meta = msgspec.msgpack.encode([bitmap_bytes((1 << len(exchange.peers)) - 1), *fields[1:]])
    return meta, bytes(lying)
