"""Who this node is: one ed25519 key per home, and the certificate of its data channel (design section 3 and 8).

The key file holds py-libp2p's own serialisation (a protobuf `PrivateKey`), so its tools can read it. This module
needs no libp2p: `atoll id` and `atoll init` stay fast.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.errors import OperatorError, StrangerError
from node.home import Home
from node.peer_id import peer_id_of, public_key_of
from node.peer_id import verify as verify_signature
from protocol.names import PeerId

_PRIVATE_KEY_PREFIX = bytes.fromhex("08011220")
"""Protobuf of `PrivateKey {type: Ed25519, data: 32 bytes}`: what follows is the seed."""

_SEED_BYTES = 32


REMEMBERED_BYTES = 256
"""Longer messages are verified anew: what is remembered must stay small. Of most kinds a signature covers less."""
REMEMBERED = 4096

_remembered = lru_cache(maxsize=REMEMBERED)(verify_signature)


def is_peer_id(text: str) -> bool:
    """Whether `text` is the base58 id of an ed25519 key, the only kind that Atoll's peers have."""
    try:
        public_key_of(text)
    except StrangerError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key. Implements `protocol.names.Keyring`."""

    seed: bytes = field(repr=False)
    """The 32 secret bytes."""
    peer_id: PeerId
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        key = Ed25519PrivateKey.from_private_bytes(seed)
        return cls(seed, peer_id_of(key.public_key().public_bytes_raw()), key)

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_seed(secrets.token_bytes(_SEED_BYTES))

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """64 bytes. The caller separates domains: nothing is prepended here."""
        return self._key.sign(message)

    def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is `signer`'s over `message`; False for an id that holds no ed25519 key.

        A READY comes by itself and again in the ROSTER: a thousand of them cost 0.13 s only once.
        """
        verify = _remembered if len(message) <= REMEMBERED_BYTES else verify_signature
        return verify(signer, message, signature)

    def serialize(self) -> bytes:
        return _PRIVATE_KEY_PREFIX + self.seed

    @classmethod
    def deserialize(cls, data: bytes) -> Identity:
        """Raises `ValueError` unless `data` is one ed25519 private key."""
        if len(data) != len(_PRIVATE_KEY_PREFIX) + _SEED_BYTES or not data.startswith(_PRIVATE_KEY_PREFIX):
            raise ValueError("it does not hold one ed25519 private key")
        return cls.from_seed(data[len(_PRIVATE_KEY_PREFIX) :])


def load_identity(home: Home) -> Identity | None:
    """The identity of `home`; None when it has none yet. Raises `OperatorError` when the file cannot be trusted."""
    path = home.identity_file
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(4096)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperatorError(f"The identity {path} cannot be read ({error.strerror}); make it readable.") from error
    if mode & 0o077:
        raise OperatorError(f"The identity {path} can be read by others (mode {mode:o}); run `chmod 600 {path}`.")
    try:
        return Identity.deserialize(data)
    except ValueError as error:
        raise OperatorError(
            f"The identity {path} is damaged: {error}; restore it from a backup, or move it away to get a new one."
        ) from error


def ensure_identity(home: Home) -> Identity:
    """The identity of `home`, created when there is none.

    Two processes that start at once end with the same key: the file appears complete, by a hard link, or not at all.
    """
    if identity := load_identity(home):
        return identity
    path = home.identity_file
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # a umask cannot widen the mode, but it may narrow it below what we can read
            os.write(fd, Identity.generate().serialize())
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise OperatorError(
            f"The identity {path} cannot be written ({error.strerror}); choose a writable folder with --home."
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    identity = load_identity(home)
    assert identity is not None
    return identity


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def hold_identity(home: Home) -> Iterator[Identity]:
    """The identity of `home`, locked against a second daemon for as long as the context is open.

    The lock lies on an open file that children do not inherit, so it ends exactly when this process does.
    Raises `OperatorError` naming the home and the process that holds it.
    """
    path = home.identity_lock
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OperatorError(
            f"The lock {path} cannot be opened ({error.strerror}); choose a writable folder with --home."
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise OperatorError(
                f"The home {home.path} is in use by process {holder}; "
                f"stop it with `atoll stop --home {home.path}`, or give this one another --home."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        yield ensure_identity(home)
    finally:
        os.close(fd)


class DataCertificate(NamedTuple):
    """The self-signed TLS certificate of one process start; peers pin its fingerprint, so its dates mean nothing."""

    certificate_pem: bytes
    key_pem: bytes
    sha256: bytes
    """Of the DER form: what stands in the membership record."""


def create_data_certificate(owner: PeerId) -> DataCertificate:
    """A fresh P-256 key and certificate for the engine's data channel (design section 8)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, owner)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Wide dates: a wrong wall clock must not end a connection, and the fingerprint is what binds.
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return DataCertificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.fingerprint(hashes.SHA256()),
    )
