"""Pieces of the supervisor that need no processes: output, locks, memory."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from node import memory
from node.errors import OperatorError
from node.home import Home
from node.memory import available_memory, disk_shortage, human, memory_shortage, total_memory
from node.supervisor import lock, segments
from node.supervisor.child import Child
from node.supervisor.output import MAX_LINE_BYTES, BoundedLog, PipeReader, Terminal
from node.supervisor.segments import NotEnoughMemory, allocate


def test_the_log_never_outgrows_two_files(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    log = BoundedLog(path, max_bytes=1000)
    for number in range(200):
        log.line(f"line {number:03d} of the story".encode())
    log.close()
    assert path.stat().st_size <= 1000
    assert path.with_name("daemon.log.1").stat().st_size <= 1000
    assert path.read_text().splitlines()[-1] == "line 199 of the story"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_log_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for word in (b"one", b"two"):
        log = BoundedLog(tmp_path / "daemon.log")
        log.line(word)
        log.close()
    assert (tmp_path / "daemon.log").read_bytes() == b"one\ntwo\n"


def test_a_log_that_cannot_be_written_hinders_nobody(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "missing" / "daemon.log")
    log.line(b"lost")
    log.close()


def test_lines_are_cut_and_the_last_words_are_kept() -> None:
    lines: list[bytes] = []
    reading, writing = os.pipe()
    reader = PipeReader(reading, lines.append)
    assert not reader.read(), "nothing is there, and nothing blocks"
    os.write(writing, b"one\r\ntwo\nthr")
    assert reader.read()
    assert lines == [b"one", b"two"]
    os.write(writing, b"ee\n" + b"x" * (MAX_LINE_BYTES + 5) + b"\nlast words")
    os.close(writing)
    reader.finish()
    assert reader.ended
    assert [len(line) for line in lines[2:]] == [5, MAX_LINE_BYTES, 10]
    assert lines[-1] == b"last words"
    os.close(reading)


def test_a_full_pipe_loses_lines_instead_of_time() -> None:
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    terminal = Terminal(writing)
    for _ in range(2 * capacity // 1000):
        terminal.line(b"x" * 999)
    assert terminal.lost > 0
    os.close(reading)
    terminal.line(b"the reader is gone")
    os.close(writing)


def test_one_process_a_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert lock.holder(home) is None
    held = lock.acquire(home)
    assert lock.holder(home) == os.getpid()
    with pytest.raises(
        OperatorError, match=rf"a daemon \(process {os.getpid()}\) already runs on the home {home.path}"
    ):
        lock.acquire(home)
    os.close(held)
    assert lock.holder(home) is None
    os.close(lock.acquire(home))


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match=r"cannot be written \(Not a directory\); choose another by --home"):
        lock.acquire(Home(tmp_path / "file" / "home"))


def test_sockets_live_where_nobody_else_can_put_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = Home(tmp_path / "home")
    lock.prepare_socket_directory(home)
    assert home.socket_directory.stat().st_mode & 0o777 == 0o700
    home.control_socket.touch()
    home.attach_socket.touch()
    lock.remove_live_files(Home(tmp_path / "home"))
    assert not home.socket_directory.exists()
    lock.prepare_socket_directory(home)
    home.socket_directory.parent.chmod(0o777)
    with pytest.raises(OperatorError, match="is not yours alone; remove it, or set XDG_RUNTIME_DIR"):
        lock.prepare_socket_directory(home)


def test_segments_are_zero_sealed_and_read_only_for_the_trainer() -> None:
    vectors = allocate(8192, 4096, 8192)
    try:
        sizes = [os.fstat(descriptor).st_size for descriptor in vectors.descriptors]
        assert sizes == [8192, 4096, 8192, 8192]
        assert os.fstat(vectors.theta).st_blocks * 512 >= 8192, "the memory is taken, not promised"
        os.pwrite(vectors.theta, b"theta", 0)
        assert os.pread(vectors.theta_read, 6, 0) == b"theta\x00"
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(vectors.theta, size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(vectors.theta_read, b"x", 0)
    finally:
        vectors.close()


def test_what_does_not_fit_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: segments.ENGINE_BYTES + 4095)
    with pytest.raises(NotEnoughMemory, match=r"does not fit: 250\.0 MiB of memory needed, 250\.0 MiB available; free"):
        allocate(4096, 0, 0)
    monkeypatch.setattr(memory, "available_memory", lambda: segments.ENGINE_BYTES + 4096)
    allocate(4096, 0, 0).close()


def test_a_cgroup_counts_more_than_the_machine(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    (root / "a" / "memory.max").write_text("1000\n")
    (root / "a" / "memory.current").write_text("700\n")
    (root / "a" / "memory.stat").write_text("anon 100\ninactive_file 300\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "self").write_text("0::/a/b\n")
    assert memory._cgroup_limits(root, tmp_path / "self") == [(1000, 400)]
    old = root / "memory" / "c"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("50\n")
    (old / "memory.usage_in_bytes").write_text("20\n")
    (old / "memory.stat").write_text("total_inactive_file 30\n")
    (tmp_path / "self").write_text("4:memory:/c\n0::/\n")
    assert memory._cgroup_limits(root, tmp_path / "self") == [(50, 0)]
    assert memory._cgroup_limits(root, tmp_path / "missing") == []


def test_shortages_read_like_help(tmp_path: Path) -> None:
    assert memory_shortage(0) is None
    assert 0 < available_memory() <= total_memory()
    shortage = disk_shortage(tmp_path / "not" / "yet", 1 << 60)
    assert shortage is not None
    assert str(shortage).startswith(f"1073741824.0 GiB of disk at {tmp_path / 'not' / 'yet'} needed, ")
    assert [human(size) for size in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


@pytest.mark.slow
def test_a_signal_does_not_take_the_exit_status_of_a_child_that_has_just_ended() -> None:
    child = Child(name="trainer", command=("false",))
    child.start(0.0, link_type=None)
    assert child.process is not None
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    child.signal(signal.SIGTERM)
    assert child.exited()
    assert child.reap() == 1


def test_a_live_daemon_is_found_from_a_shell_with_another_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/of-the-service")
    there = home.control_socket
    lock.write_daemon_file(home, {"control_socket": str(there)})
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert home.control_socket != there
    assert home.live_socket("control_socket") == there
    assert home.live_socket("attach_socket") == home.attach_socket, "an older daemon does not say"
    home.daemon_file.unlink()
    assert home.live_socket("control_socket") == home.control_socket


def test_the_first_death_costs_no_wait_and_a_loop_of_deaths_ever_more() -> None:
    child = Child(name="trainer", command=("false",))
    delays = []
    for life in range(7):
        child.started_s = 10.0 * life
        delays.append(child.schedule_restart(child.started_s + 1.0))
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert child.crashes == 7
    assert child.is_looping(70.0)
    child.started_s = 100.0
    assert child.schedule_restart(200.0) == 0.0, "a life of half a minute makes up for it"
    assert not child.is_looping(200.0)
