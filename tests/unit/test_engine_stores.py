"""What the engine keeps on disk: torn files, forgetting, identical bytes, pins."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from node.engine.api import Open, PartRef
from node.engine.apply_journal import ApplyJournal, Mark, Phase
from node.engine.artifacts import ArtifactStore
from node.engine.geometry import Geometry
from node.engine.outbox import Contribution, Outbox
from node.engine.parts import PartStore
from node.engine.snapshots import MAX_CORRUPT, MAX_PINS, SnapshotError, SnapshotStore, split_hashes
from protocol.codecs import codec
from protocol.commitment import Commitment
from protocol.names import digest
from protocol.state_hash import state_hash

GEOMETRY = Geometry(
    elements=2560, buffer_elements=256, part_elements=1024, codec=codec("fp32"), sum_codec=codec("sum16"), momentum=0.9
)


def part_ref(roster: int, part: int, payload: bytes) -> PartRef:
    return PartRef(
        roster_id=digest(b"roster", bytes([roster])),
        part=part,
        bitmap_bytes=b"\1",
        hash=blake3(payload).digest(),
        length=len(payload),
        root="root",
        body=b"body",
        signature=b"signature",
    )


def store(tmp_path: Path) -> PartStore:
    return PartStore(tmp_path / "parts", 4096)


def put(parts: PartStore, roster: int, part: int, payload: bytes) -> PartRef:
    ref = part_ref(roster, part, payload)
    parts.write(ref, payload)
    parts.sync([ref])
    return ref


def test_parts_are_found_by_hash_also_after_a_restart(tmp_path: Path) -> None:
    parts = store(tmp_path)
    refs = [put(parts, 1, part, bytes([part]) * 4096) for part in range(3)]
    parts.close()
    parts = store(tmp_path)
    for part, ref in enumerate(refs):
        assert parts.find(ref.hash) == ref
        assert parts.read(ref.hash) == bytes([part]) * 4096
    assert parts.read(bytes(32)) is None
    parts.close()


def test_what_was_not_synced_is_not_held_after_a_restart(tmp_path: Path) -> None:
    parts = store(tmp_path)
    ref = part_ref(1, 0, b"x" * 100)
    parts.write(ref, b"x" * 100)
    assert parts.read(ref.hash) == b"x" * 100
    parts.close()
    parts = store(tmp_path)
    assert parts.find(ref.hash) is None
    parts.close()


def test_a_torn_index_keeps_what_stands_before_the_tear(tmp_path: Path) -> None:
    parts = store(tmp_path)
    refs = [put(parts, 1, part, bytes([part]) * 50) for part in range(3)]
    parts.close()
    (index,) = (tmp_path / "parts").glob("*.index")
    os.truncate(index, index.stat().st_size - 5)
    parts = store(tmp_path)
    assert [parts.find(ref.hash) is not None for ref in refs] == [True, True, False]
    again = put(parts, 1, 2, bytes([2]) * 50)
    parts.close()
    parts = store(tmp_path)
    assert parts.find(again.hash) == again
    parts.close()


def test_identical_parts_of_one_roster_and_of_two(tmp_path: Path) -> None:
    parts = store(tmp_path)
    payload = bytes(64)
    for roster, part in ((1, 0), (1, 1), (2, 7)):
        put(parts, roster, part, payload)
    assert parts.read(blake3(payload).digest()) == payload
    parts.close()


def test_old_rounds_and_rosters_without_a_commit_go(tmp_path: Path) -> None:
    parts = store(tmp_path)
    refs = []
    for number in range(6):
        put(parts, 100 + number, 0, b"aborted" + bytes([number]))
        refs.append(put(parts, number, 0, bytes([number]) * 10))
        parts.keep(number, [refs[-1].hash], keep_rounds=3)
    assert parts.complete_rounds() == (3, 4, 5)
    assert [parts.find(ref.hash) is not None for ref in refs] == [False, False, False, True, True, True]
    # Those of the newest attempts stay until the next commit: voters may still ask for them.
    assert len(list((tmp_path / "parts").glob("*.data"))) <= 3 + 2
    assert parts.drop_oldest_round()
    assert parts.complete_rounds() == (4, 5)
    parts.close()


def test_a_round_whose_parts_are_not_all_here_is_not_complete(tmp_path: Path) -> None:
    parts = store(tmp_path)
    here, absent = put(parts, 1, 0, b"here"), part_ref(1, 1, b"absent")
    parts.keep(1, [here.hash, absent.hash], keep_rounds=3)
    assert parts.complete_rounds() == ()
    put(parts, 1, 1, b"absent")
    assert parts.complete_rounds() == (1,)
    parts.close()


def test_a_contribution_counts_once_it_is_whole(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox", GEOMETRY)
    base = bytes(32)
    writer = outbox.write(base)
    payloads = [bytes([part]) * GEOMETRY.part_bytes(part) for part in range(3)]
    hashes = tuple(blake3(payload).digest() for payload in payloads)
    for part, payload in enumerate(payloads):
        writer.put(part, payload)
    assert outbox.find(base) is None
    frozen = Contribution(hashes=hashes, parts_root=Commitment(hashes).root, norm=1.0, largest=0.5)
    writer.finish(frozen)
    reader = outbox.read(base)
    assert reader is not None
    assert reader.read(2) == bytes([2]) * GEOMETRY.part_bytes(2)
    other = bytes([1]) * 32
    outbox.write(other).finish(Contribution(hashes=hashes, parts_root=bytes([1]) * 32, norm=1.0, largest=0.5))
    assert outbox.find(base) is not None, "until the next commit, others may audit it"
    assert outbox.leaf(frozen.parts_root, 1) == payloads[1] + Commitment(hashes).proof(1)
    assert outbox.leaf(frozen.parts_root, 3) is None
    assert outbox.leaf(bytes(32), 1) is None
    # Two files of one clock tick are in no order.
    os.utime(tmp_path / "outbox" / f"{base.hex()}.meta", (1, 1))
    outbox.write(bytes([2]) * 32).finish(frozen)
    assert outbox.find(base) is None
    assert outbox.find(other) is not None
    assert reader.read(0) == bytes(GEOMETRY.part_bytes(0)), "an exchange that runs keeps its bytes"
    reader.close()


def test_a_contribution_that_went_bad_on_disk_is_not_given_back(tmp_path: Path) -> None:
    """Sent or summed, it would look as if this node had lied about what its READY binds."""
    outbox = Outbox(tmp_path / "outbox", GEOMETRY)
    writer = outbox.write(bytes(32))
    payloads = [bytes([part]) * GEOMETRY.part_bytes(part) for part in range(3)]
    hashes = tuple(blake3(payload).digest() for payload in payloads)
    for part, payload in enumerate(payloads):
        writer.put(part, payload)
    writer.finish(Contribution(hashes=hashes, parts_root=Commitment(hashes).root, norm=1.0, largest=0.5))
    path = tmp_path / "outbox" / f"{bytes(32).hex()}.data"
    data = bytearray(path.read_bytes())
    data[GEOMETRY.slot_bytes + 7] ^= 1
    path.write_bytes(data)
    reader = outbox.read(bytes(32))
    assert reader is not None
    assert reader.read(0) == payloads[0]
    for read in (reader.read, reader.read_cached):
        with pytest.raises(OSError, match="went bad"):
            read(1)
    reader.close()
    path.unlink()
    assert outbox.find(bytes(32)) is None


def test_a_damaged_part_counts_as_not_here(tmp_path: Path) -> None:
    parts = store(tmp_path)
    refs = [put(parts, 1, part, bytes([part]) * 4096) for part in range(2)]
    parts.keep(1, [ref.hash for ref in refs], 20)
    assert parts.complete_rounds() == (1,)
    parts.forget(refs[0].hash)
    assert parts.find(refs[0].hash) is None
    assert parts.complete_rounds() == ()
    put(parts, 1, 0, bytes([0]) * 4096)
    assert parts.complete_rounds() == (1,)


def test_a_damaged_artifact_becomes_a_download_that_goes_on(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    data = np.random.default_rng(1).bytes(3_000_000)
    name = blake3(data).digest()
    artifacts.path(name).write_bytes(data)
    chunks = artifacts.chunk_list(name)
    assert chunks is not None
    assert artifacts.is_whole(name)
    spoilt = bytearray(data)
    spoilt[1_500_000] ^= 1
    again = ArtifactStore(tmp_path / "artifacts")
    artifacts.path(name).write_bytes(spoilt)
    assert not again.is_whole(name)
    assert not again.has(name)
    assert again.begin_download(name, len(data), split_hashes(chunks)) == {1}
    again.put_chunk(name, 1, data[1 << 20 : 2 << 20])
    assert again.finish_download(name)
    assert again.is_whole(name)


def vectors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(2560).astype(np.float32), rng.standard_normal(2304).astype(np.float32)


def nothing() -> None:
    return None


def test_a_snapshot_of_corrupt_memory_is_refused(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "snapshots", GEOMETRY)
    theta, momentum = vectors(1)
    with pytest.raises(SnapshotError, match="it is corrupt"):
        snapshots.save(1, theta, momentum, expected=bytes(32), check=nothing)
    assert snapshots.complete() == []
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_snapshot_in_download_outlives_pruning_within_bounds(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "snapshots", GEOMETRY)
    hashes = []
    for number in range(5):
        theta, momentum = vectors(number)
        hashes.append(state_hash(theta, momentum))
        snapshots.save(number, theta, momentum, expected=hashes[-1], check=nothing)
    for number in range(4):
        assert snapshots.read_chunk(number, hashes[number], 0) is not None
    snapshots.prune(1)
    assert [one.round for one in snapshots.complete()] == [*range(MAX_PINS), 4]


def memory() -> tuple[int, int]:
    fds = os.memfd_create("theta"), os.memfd_create("momentum")
    for fd in fds:
        os.ftruncate(fd, 4096)
    return fds


def test_a_journal_belongs_to_its_memory(tmp_path: Path) -> None:
    fds, others = memory(), memory()
    path = tmp_path / "apply.journal"
    journal = ApplyJournal(path, GEOMETRY, 2, fds)
    mark = Mark(phase=Phase.RUNNING, base=bytes([7]) * 32, new_round=3, parts=bytes([8]) * 32)
    journal.begin(mark)
    journal.progress[1] = 512
    journal.slots[1].arm(1024, np.ones(100, np.float32), np.ones(60, np.float32))
    again = ApplyJournal(path, GEOMETRY, 2, fds)
    assert again.mark == mark
    assert list(again.progress) == [0, 512, 0]
    assert [slot.armed for slot in again.slots] == [None, (1024, 100, 60)]
    again.complete(bytes([9]) * 32)
    assert ApplyJournal(path, GEOMETRY, 2, fds).mark.state_hash == bytes([9]) * 32
    # After a reboot, or with memory allocated anew, it says nothing.
    assert ApplyJournal(path, GEOMETRY, 2, others).mark.phase is Phase.IDLE
    for fd in (*fds, *others):
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"elements": 0}, "no vector"), ({"buffer_elements": 4096}, "no vector"), ({"codec": "int3"}, "int3")],
)
def test_sizes_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "id": 1,
        "directory": "",
        "peer_id": "",
        "certificate_pem": b"",
        "key_pem": b"",
        "listen_host": "",
        "listen_port": 0,
        "elements": 2560,
        "buffer_elements": 0,
        "part_elements": 1024,
        "codec": "int8",
        "sum_codec": "sum16",
        "momentum": 0.9,
        "keep_rounds": 1,
        "keep_snapshots": 1,
        "disk_limit_bytes": 0,
        "threads": 1,
    }
    with pytest.raises(ValueError, match=message):
        Geometry.of(Open(**(fields | change)))  # type: ignore[arg-type]


def test_what_is_found_corrupt_is_kept_apart_with_a_reason_a_few_at_a_time(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "snapshots", GEOMETRY)
    saved = []
    for number in range(MAX_CORRUPT + 2):
        theta, momentum = vectors(number)
        saved.append(snapshots.save(number, theta, momentum, expected=state_hash(theta, momentum), check=nothing))
    snapshots.set_aside(0, bytes(32), "there is none of that name")
    for number in range(MAX_CORRUPT + 1):
        snapshots.set_aside(number, saved[number], f"electors hold another state of round {number}")
    assert [one.round for one in snapshots.complete()] == [MAX_CORRUPT + 1]
    aside = tmp_path / "snapshots" / "corrupt"
    kept = {path.name: (path / "why").read_text() for path in aside.iterdir()}
    assert kept == {
        f"{number}-{saved[number].hex()}": f"electors hold another state of round {number}\n"
        for number in range(1, MAX_CORRUPT + 1)
    }
    assert snapshots.read_chunk(1, saved[1], 0) is None, "nothing serves it"
    assert snapshots.drop_oldest(), "room is made of these first"
    assert len(list(aside.iterdir())) == MAX_CORRUPT - 1
