"""Membership records: what each peer says of itself, signed, and how long that is believed (design section 3).

A record is msgpack of `MembershipRecord`; it travels as msgpack of `[record bytes, signature]`, never without its
signature, which covers the bytes as they were signed. A higher sequence number wins. No rule compares two machines'
clocks: how long a record is believed counts from its receipt here.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import trio

from node.daemon.addresses import MAX_ADDRESSES_PER_PEER, parse_strangers_addresses
from node.errors import StrangerError
from protocol.names import Digest, Keyring, PeerId

MAX_RECORD_BYTES = 4096
MAX_RECORDS = 2048
"""Members of the largest roster, and as many that are dead or new."""
MAX_LINKS = 48
LIFETIME_S = 60.0
MAX_LIFETIME_S = 3600.0
RECORDS_AT_ONCE = 5.0
RECORDS_PER_S = 1.0
"""Of one peer; what is beyond is a flood, and a later record makes up for what was dropped."""

LIVES_BEFORE_ALARM = 3
"""How often a node may find its own record under another incarnation before that is a second machine."""

_DOMAIN = b"atoll/membership-record/1\0"
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


class LinkSummary(msgspec.Struct, frozen=True, array_like=True):
    """One of a peer's links, as it measured it: two digits that hold still while only noise moves them."""

    round_trip_s: float
    """An answer that does not come counts as one that takes 5 s."""
    sent_bytes_s: float | None = None
    """The best that was seen, whatever else went over both lines at the same time: the link carries at least that."""
    received_bytes_s: float | None = None


def link_key(peer_id: PeerId) -> str:
    """The name of a peer in `MembershipRecord.links`: the end of its id, to keep records short."""
    return peer_id[-8:]


class MembershipRecord(msgspec.Struct, frozen=True, kw_only=True):
    peer_id: PeerId
    run: Digest
    sequence: int
    incarnation: bytes
    version: str
    addresses: tuple[str, ...] = ()
    """libp2p multiaddrs, best first."""
    data_addresses: tuple[str, ...] = ()
    """`host:port` of its engine's data listener, best first."""
    certificate_sha256: bytes = b""
    """Of the engine's TLS certificate; empty: no engine yet."""
    name: str = ""
    """For people."""
    round: int = 0
    state_hash: Digest = b""
    tokens_per_s: float = 0.0
    links: dict[str, LinkSummary] = {}
    """By `link_key` of the peer at the other end."""
    up_bytes_s: float | None = None
    """What this node's own line carries away, over all its links together; None: not measured yet."""
    down_bytes_s: float | None = None
    """What its line brings in, likewise."""
    reachable: bool | None = None
    """Whether peers can dial its control address; None: not known yet."""
    data_reachable: bool | None = None
    """Whether peers can dial its data address, likewise."""
    relays: bool = False
    """It joins pairs of which neither can dial the other."""
    seen_at: str = ""
    """The IP address from which its peers see it come; empty: not known yet."""
    lifetime_s: float = LIFETIME_S


URGENT_FIELDS = frozenset(
    {"run", "addresses", "data_addresses", "certificate_sha256", "reachable", "data_reachable", "relays", "seen_at"}
)
"""Without which this node is not found or not reached. Everything else may wait for its turn."""

OWN_FIELDS = frozenset(MembershipRecord.__struct_fields__) - {"peer_id", "sequence", "incarnation", "version"}

_record_decoder = msgspec.msgpack.Decoder(MembershipRecord)
_envelope_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])
_encoder = msgspec.msgpack.Encoder()


def sign_record(record: MembershipRecord, keyring: Keyring) -> bytes:
    """Raises `ValueError` when the record is too long to travel."""
    body = _encoder.encode(record)
    data = _encoder.encode((body, keyring.sign(_DOMAIN + body)))
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"a membership record of {len(data)} bytes is over the limit of {MAX_RECORD_BYTES}")
    return data


def parse_record(data: bytes) -> tuple[MembershipRecord, bytes, bytes]:
    """A record with its bytes and signature, well-formed but not verified. Raises `StrangerError`."""
    if len(data) > MAX_RECORD_BYTES:
        raise StrangerError(f"a membership record of {len(data)} bytes is over the limit of {MAX_RECORD_BYTES}")
    try:
        body, signature = _envelope_decoder.decode(data)
        record = _record_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrangerError(f"a membership record does not decode: {error}") from None
    _check(record)
    return record, body, signature


def _check(record: MembershipRecord) -> None:
    parse_strangers_addresses(record.addresses, record.peer_id)
    if len(record.data_addresses) > MAX_ADDRESSES_PER_PEER:
        raise StrangerError(f"more than {MAX_ADDRESSES_PER_PEER} data addresses in a membership record")
    for address in record.data_addresses:
        match = _HOST_PORT.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise StrangerError(f"{address[:60]!r} in a membership record is not host:port")
    if record.seen_at and not _is_ip(record.seen_at):
        raise StrangerError(f"{record.seen_at[:60]!r} in a membership record is not an IP address")
    if record.sequence < 0 or record.round < 0:
        raise StrangerError("a negative number in a membership record")
    if len(record.certificate_sha256) not in (0, 32) or len(record.state_hash) not in (0, 32):
        raise StrangerError("a hash of the wrong length in a membership record")
    if not 0 < record.lifetime_s <= MAX_LIFETIME_S:
        raise StrangerError(f"a membership record that wants to live for {record.lifetime_s} s")
    numbers = [record.tokens_per_s, record.up_bytes_s or 0.0, record.down_bytes_s or 0.0]
    for link in record.links.values():
        numbers += [link.round_trip_s, link.sent_bytes_s or 0.0, link.received_bytes_s or 0.0]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise StrangerError("a number that is negative or not finite in a membership record")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Verdict(enum.Enum):
    """What became of a record from the network."""

    NEWS = enum.auto()
    KNOWN = enum.auto()
    OUTDATED = enum.auto()
    """Its owner began a new life below the number of an earlier one: tell it what is known here."""


class _Held(msgspec.Struct):
    record: MembershipRecord
    data: bytes
    received_at_s: float
    allowance: float
    """Records that its owner may still send at once."""
    left: bool = False
    """Its owner said goodbye in this incarnation, which never comes back."""


class Membership:
    """The table of the run's records, this node's included, and the making of its own."""

    def __init__(
        self,
        *,
        peer_id: PeerId,
        keyring: Keyring,
        version: str,
        incarnation: bytes,
        name: str = "",
        on_duplicate: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._keyring = keyring
        self._mine = MembershipRecord(
            peer_id=peer_id,
            run=b"",
            # Milliseconds, so that a new life starts above the last one without a file; only this node compares it.
            sequence=time.time_ns() // 1_000_000,
            incarnation=incarnation,
            version=version,
            name=name,
        )
        self._own_data = b""
        self._held: dict[PeerId, _Held] = {}
        self._former: dict[PeerId, _Held] = {}
        self._records: dict[PeerId, MembershipRecord] = {}
        self._lives_seen = 0
        self._on_duplicate = on_duplicate
        self._changed = trio.Event()
        self.unpublished = trio.Event()
        """Set when this node's record differs from what was last sent."""
        self.urgent = trio.Event()
        """Set when it differs in what others need at once."""

    @property
    def records(self) -> Mapping[PeerId, MembershipRecord]:
        """Of the run's peers that are believed now, and this node's own."""
        return MappingProxyType(self._records)

    @property
    def mine(self) -> MembershipRecord:
        return self._mine

    async def changes(self) -> AsyncGenerator[None]:
        """Yields at once, then after every change (several quick ones count as one)."""
        while True:
            changed = self._changed
            yield None
            await changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------ this node's own record

    def publish(self, **fields: Any) -> None:
        """Change fields of this node's record; the network sends it soon. Raises `TypeError` for an unknown field."""
        if unknown := fields.keys() - OWN_FIELDS:
            raise TypeError(f"a membership record has no settable field {', '.join(sorted(unknown))}")
        before, updated = self._mine, msgspec.structs.replace(self._mine, **fields)
        if updated != before:
            self._mine = updated
            if updated.run:
                self._records[updated.peer_id] = updated
            self._own_data = b""
            self._change()
            self.unpublished.set()
            if any(getattr(updated, field) != getattr(before, field) for field in URGENT_FIELDS):
                self.urgent.set()

    def renew(self) -> bytes:
        """This node's record, newly numbered and signed, to be sent to all."""
        self.unpublished, self.urgent = trio.Event(), trio.Event()
        return self._sign()

    def newest(self) -> bytes:
        """This node's record as it stands, signed, for one peer; the others are still to get it."""
        return self._own_data or self._sign()

    def _sign(self) -> bytes:
        self._mine = msgspec.structs.replace(self._mine, sequence=self._mine.sequence + 1)
        if self._mine.run:
            self._records[self._mine.peer_id] = self._mine
        self._own_data = sign_record(self._mine, self._keyring)
        return self._own_data

    # ------------------------------------------------------------ others' records

    def accept(self, data: bytes) -> Verdict:
        """Take a record from the network. Raises `StrangerError` for a malformed or forged one."""
        record, body, signature = parse_record(data)
        if record.run != self._mine.run or not record.run:
            return Verdict.KNOWN  # whoever sends it is about to be told that this is another run
        if record.peer_id == self._mine.peer_id:
            self._meet_myself(record, body, signature)
            return Verdict.KNOWN
        now = trio.current_time()
        allowance = RECORDS_AT_ONCE - 1.0
        held = self._held.get(record.peer_id) or self._former.get(record.peer_id)
        if held is not None:
            if held.left and held.record.incarnation == record.incarnation:
                return Verdict.KNOWN  # somebody has passed it on later than the goodbye came
            if held.record.sequence >= record.sequence:
                new_life = record.incarnation != held.record.incarnation
                return Verdict.OUTDATED if new_life and held.record.sequence > record.sequence else Verdict.KNOWN
            refill = (now - held.received_at_s) * RECORDS_PER_S
            allowance = min(RECORDS_AT_ONCE, held.allowance + refill) - 1.0
            if allowance < 0.0:
                return Verdict.KNOWN
        elif len(self._held) >= MAX_RECORDS:
            return Verdict.KNOWN
        self._verify(record, body, signature)
        self._former.pop(record.peer_id, None)
        self._held[record.peer_id] = _Held(record, data, now, allowance)
        self._records[record.peer_id] = record
        self._change()
        return Verdict.NEWS

    def data_of(self, peer_id: PeerId) -> bytes | None:
        """The newest record of a peer as it travels, even one that is not believed any more."""
        held = self._held.get(peer_id) or self._former.get(peer_id)
        return held.data if held is not None else None

    def _verify(self, record: MembershipRecord, body: bytes, signature: bytes) -> None:
        if not self._keyring.verify(record.peer_id, _DOMAIN + body, signature):
            raise StrangerError(f"a membership record with a wrong signature in the name of {record.peer_id}")

    def _meet_myself(self, record: MembershipRecord, body: bytes, signature: bytes) -> None:
        """My own record, of an earlier life: outnumber it. Again and again: a second machine has my key."""
        if record.incarnation == self._mine.incarnation or record.sequence <= self._mine.sequence:
            return
        self._verify(record, body, signature)
        self._lives_seen += 1
        self._mine = msgspec.structs.replace(self._mine, sequence=record.sequence)
        self._own_data = b""
        self.unpublished.set()
        self.urgent.set()
        if self._lives_seen >= LIVES_BEFORE_ALARM:
            self._on_duplicate(f"its record names the addresses {', '.join(record.addresses) or 'unknown'}")

    def forget(self, peer_id: PeerId) -> None:
        """A peer said that it leaves."""
        if peer_id in self._held:
            self._held[peer_id].left = True
            self._drop(peer_id)
            self._change()

    def expire(self) -> list[MembershipRecord]:
        """Drop what is believed no longer; what was dropped."""
        now = trio.current_time()
        gone = [held.record for held in self._held.values() if held.received_at_s + held.record.lifetime_s <= now]
        for record in gone:
            self._drop(record.peer_id)
        if gone:
            self._change()
        return gone

    def _drop(self, peer_id: PeerId) -> None:
        # Kept aside, or a joiner that still has the record would bring it back to life, everywhere, again and again.
        self._former[peer_id] = self._held.pop(peer_id)
        del self._records[peer_id]
        while len(self._former) > MAX_RECORDS:
            del self._former[next(iter(self._former))]

    def table(self) -> tuple[bytes, ...]:
        """Every record with its signature, this node's included, for a joiner."""
        own = (self.newest(),) if self._mine.run else ()
        return own + tuple(held.data for held in self._held.values())
