"""What the daemon and the engine say to each other (msgpack frames over a socket pair, `node.ipc`).

Requests carry an `id`; the engine answers each with one `Done` or one `Failed` of that id, in any order. Events come
unasked. Digests are 32 raw bytes, peer ids base58. The engine owns the folder `Open.directory` and nothing else:

    artifacts/HASH          content-addressed bytes of the manifest (tokenizer, S_0, small data); served to anyone
    parts/ROSTER.*          reduced parts of the last rounds (the round log's bodies), found by hash; served
    outbox/BASE.*           my encoded contributions of the last two freezes, for audits; served
    snapshots/ROUND-HASH/   immutable copies of the outer state (chunk hashes + data); served
    apply.journal           progress mark of the outer step, for restarts

The memfds arrive as descriptors with `Open`: theta, momentum, delta, in this order, each `elements` fp32
(momentum: `elements - buffer_elements`).

Bitmaps over a roster's READYs travel as little-endian bytes (`protocol.fields.bitmap_bytes`): msgpack's integers end at
64 bits, rosters do not.
"""

from __future__ import annotations

from typing import TypeAlias

from node.engine.api.answers import (
    Applied,
    Done,
    Encoded,
    Failed,
    Inventoried,
    Opened,
    PartsFetched,
    Probed,
    Recomputed,
    SpliceOpened,
    StateLoaded,
)
from node.engine.api.engine_events import (
    CallWanted,
    ExchangeEnded,
    HeaderWanted,
    LineMeasured,
    LinkMeasured,
    PartHeld,
    PayloadDropped,
    Rates,
    SpliceWanted,
    StorageFailed,
    StorageWorks,
    TokenWanted,
)
from node.engine.api.refs import PartRef, Snapshot
from node.engine.api.state_requests import (
    Apply,
    Encode,
    LoadInitial,
    LoadSnapshot,
    Open,
    ResumeState,
    SaveSnapshot,
    SetAside,
)
from node.engine.api.transfer_requests import (
    AcceptSplice,
    AcceptToken,
    Call,
    CallAnswered,
    DialToken,
    Exchange,
    FetchArtifact,
    FetchParts,
    FetchSnapshot,
    Inventory,
    KeepCommits,
    OpenSplice,
    Peer,
    Probe,
    Recompute,
    SetPeers,
    ShardPlan,
    SignedHeader,
    Splice,
    SpliceAnswered,
    StopExchange,
)

__all__ = [
    "AcceptSplice",
    "AcceptToken",
    "Answer",
    "Applied",
    "Apply",
    "Call",
    "CallAnswered",
    "CallWanted",
    "DialToken",
    "Done",
    "Encode",
    "Encoded",
    "Event",
    "Exchange",
    "ExchangeEnded",
    "Failed",
    "FetchArtifact",
    "FetchParts",
    "FetchSnapshot",
    "FromEngine",
    "HeaderWanted",
    "Inventoried",
    "Inventory",
    "KeepCommits",
    "LineMeasured",
    "LinkMeasured",
    "LoadInitial",
    "LoadSnapshot",
    "Open",
    "OpenSplice",
    "Opened",
    "PartHeld",
    "PartRef",
    "PartsFetched",
    "PayloadDropped",
    "Peer",
    "Probe",
    "Probed",
    "Rates",
    "Recompute",
    "Recomputed",
    "Request",
    "ResumeState",
    "SaveSnapshot",
    "SetAside",
    "SetPeers",
    "ShardPlan",
    "SignedHeader",
    "Snapshot",
    "Splice",
    "SpliceAnswered",
    "SpliceOpened",
    "SpliceWanted",
    "StateLoaded",
    "StopExchange",
    "StorageFailed",
    "StorageWorks",
    "TokenWanted",
]

Request: TypeAlias = (
    Open
    | LoadInitial
    | LoadSnapshot
    | ResumeState
    | SaveSnapshot
    | SetAside
    | Encode
    | Apply
    | SetPeers
    | AcceptToken
    | DialToken
    | Call
    | CallAnswered
    | OpenSplice
    | AcceptSplice
    | SpliceAnswered
    | Exchange
    | StopExchange
    | SignedHeader
    | FetchParts
    | Recompute
    | FetchArtifact
    | FetchSnapshot
    | Inventory
    | KeepCommits
    | Probe
)
Event: TypeAlias = (
    TokenWanted
    | CallWanted
    | SpliceWanted
    | HeaderWanted
    | PartHeld
    | PayloadDropped
    | ExchangeEnded
    | LinkMeasured
    | LineMeasured
    | StorageFailed
    | StorageWorks
)
Answer: TypeAlias = (
    Done
    | Failed
    | Opened
    | StateLoaded
    | Encoded
    | Applied
    | PartsFetched
    | Recomputed
    | Inventoried
    | Probed
    | SpliceOpened
)
FromEngine: TypeAlias = Answer | Event
