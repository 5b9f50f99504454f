"""Identity: one key per home, held by one process, that libp2p itself understands."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

import node.daemon.identity as identity_module
from node.daemon.identity import (
    Identity,
    create_data_certificate,
    ensure_identity,
    hold_identity,
    is_peer_id,
    load_identity,
)
from node.errors import OperatorError
from node.home import Home
from node.peer_id import verify


def test_an_identity_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    assert load_identity(home) is None
    first = ensure_identity(home)
    assert ensure_identity(home) == first
    assert home.identity_file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.path.iterdir()] == ["identity.key"], "no draft is left behind"


def test_threads_that_create_at_once_agree(tmp_path: Path) -> None:
    home = Home(tmp_path)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_identity(home).peer_id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_libp2p_reads_the_key_and_derives_the_same_peer_id(tmp_path: Path) -> None:
    from libp2p.identity_utils import load_identity as libp2p_load
    from libp2p.peer.id import ID

    identity = ensure_identity(Home(tmp_path))
    pair = libp2p_load(tmp_path / "identity.key")
    assert str(ID.from_pubkey(pair.public_key)) == identity.peer_id
    assert pair.public_key.verify(b"message", identity.sign(b"message"))


def test_signatures_bind_signer_and_message() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"message")
    assert other.verify(one.peer_id, b"message", signature)
    assert not other.verify(one.peer_id, b"Message", signature)
    assert not other.verify(other.peer_id, b"message", signature)
    assert not other.verify(one.peer_id, b"message", signature[:-1])
    assert not other.verify("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", b"message", signature)
    assert not other.verify("0OIl", b"message", signature)


def test_what_was_verified_is_remembered_as_long_as_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = Identity.generate(), []

    def counted(signer: str, message: bytes, signature: bytes) -> bool:
        calls.append(message)
        return verify(signer, message, signature)

    monkeypatch.setattr(identity_module, "verify_signature", counted)
    monkeypatch.setattr(identity_module, "_remembered", lru_cache(maxsize=8)(counted))
    short, long = b"a" * identity_module.REMEMBERED_BYTES, b"b" * (identity_module.REMEMBERED_BYTES + 1)
    for message in (short, long):
        signature = one.sign(message)
        for _ in range(3):
            assert one.verify(one.peer_id, message, signature)
        assert not one.verify(one.peer_id, message, one.sign(b"something else"))
    assert calls.count(short) == 2
    assert calls.count(long) == 4


@pytest.mark.parametrize("text", ["", "x", "1" * 5000, "12D3KooW", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"])
def test_what_is_no_ed25519_peer_id(text: str) -> None:
    assert not is_peer_id(text)


def test_verification_is_fast_enough_for_rounds() -> None:
    one = Identity.generate()
    signature = one.sign(b"x" * 500)
    one.verify(one.peer_id, b"x" * 500, signature)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        assert one.verify(one.peer_id, b"x" * 500, signature)
        times.append(time.perf_counter() - start)
    assert min(times) < 400e-6, f"one verification took {min(times) * 1e6:.0f} µs"


def test_the_secret_is_not_in_the_repr() -> None:
    identity = Identity.generate()
    assert identity.seed.hex() not in repr(identity)
    assert repr(identity.seed) not in repr(identity)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ensure_identity(Home(tmp_path))
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(OperatorError, match=r"mode 644.*chmod 600"):
        load_identity(Home(tmp_path))


@pytest.mark.parametrize("cut", [0, 10, 35])
def test_a_damaged_key_is_named_and_not_replaced(tmp_path: Path, cut: int) -> None:
    home = Home(tmp_path)
    ensure_identity(home)
    data = home.identity_file.read_bytes()
    home.identity_file.write_bytes(data[:cut])
    with pytest.raises(OperatorError, match="damaged"):
        ensure_identity(home)
    assert home.identity_file.read_bytes() == data[:cut]


def test_a_second_holder_is_refused_by_home_and_process(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with hold_identity(home), pytest.raises(OperatorError) as refusal, hold_identity(home):
        pass
    assert str(home.path) in str(refusal.value)
    assert str(os.getpid()) in str(refusal.value)
    with hold_identity(home):
        pass


@pytest.mark.slow
@pytest.mark.swarm
def test_the_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "from node.daemon.identity import hold_identity\n"
        "from node.home import Home\n"
        "held = hold_identity(Home(Path(sys.argv[1])))\n"
        "held.__enter__()\n"
        "child = subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL, close_fds=False)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(OperatorError, match=f"process {holder.pid}"), hold_identity(Home(tmp_path)):
            pass
        holder.kill()
        holder.wait(timeout=10)
        os.kill(child, 0)  # the child lives on
        with hold_identity(Home(tmp_path)):
            pass
    finally:
        os.kill(child, 9)
        holder.stdin.close()
        holder.stdout.close()


def test_the_data_certificate_is_fresh_and_its_fingerprint_is_of_its_der_form() -> None:
    peer_id = Identity.generate().peer_id
    one, other = create_data_certificate(peer_id), create_data_certificate(peer_id)
    assert one.sha256 != other.sha256
    certificate = x509.load_pem_x509_certificate(one.certificate_pem)
    assert certificate.fingerprint(hashes.SHA256()) == one.sha256
    assert len(one.sha256) == 32
    assert b"PRIVATE KEY" in one.key_pem
