"""The manifest: the resolved, canonical, signed definition of a run (design section 4).

People write TOML (`node.run_config`); `atoll run create` resolves it to this, whose canonical bytes hash to the run id.
The daemon reads strangers' manifests, so this module imports neither PyTorch nor pydantic, and nothing is used before
`node.manifest_checks` has looked at every bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType

import protocol.layout
from node.errors import AtollError
from protocol.names import Digest, PeerId, digest
from protocol.rules import Quorum, Rules

FORMAT = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
UNBOUNDED_EPOCH_UNITS = 1 << 40
"""Units of an epoch whose data has no known length: leases then count work, they do not divide data."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
HexDigest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ManifestError(AtollError):
    """A manifest that cannot be a run: one sentence that names the key, the value and the fix."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Artifact(_Part, frozen=True, kw_only=True):
    hash: HexDigest
    length: NonNegativeInt
    """Bytes."""


class Model(_Part, frozen=True, kw_only=True):
    """Either a transformers architecture with its config, or a user's function."""

    architecture: str | None = None
    """A class of `transformers`, such as `LlamaForCausalLM`."""
    config: dict[str, object] = {}
    function: str | None = None
    """`module:function` returning a torch module; resolved only when the operator installed and allowed it."""


class Tensor(_Part, frozen=True, kw_only=True):
    """One tensor's place in the flat vector."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    offset: NonNegativeInt
    """Elements; a multiple of 256."""


class Layout(_Part, frozen=True, kw_only=True):
    """Design section 5: trained floating-point parameters first, then persistent float buffers."""

    elements: PositiveInt
    """Both segments, a multiple of 256."""
    buffer_elements: NonNegativeInt
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()


class Data(_Part, frozen=True, kw_only=True):
    kind: str
    """`tokens`: an artifact of packed tokens. `huggingface`: a dataset of the hub. `function`: the user's own."""
    sequence_tokens: PositiveInt
    unit_sequences: PositiveInt
    """Packed sequences of a unit, the granule of a lease."""
    units: NonNegativeInt
    """Units of an epoch; 0: a source without a known length ("local" assignment)."""
    artifact: str | None = None
    """Name in `artifacts` of the packed training tokens."""
    path: str | None = None
    """Dataset of the hub, or the format of `data_files`: `json`, `parquet`, `csv` or `text`."""
    name: str | None = None
    """Configuration of the dataset."""
    split: str | None = None
    text_field: str | None = None
    data_files: tuple[str, ...] = ()
    """Files of the dataset; without a hub dataset, relative to the folder that each operator names (`ATOLL_DATA`)."""
    function: str | None = None
    end_token_id: NonNegativeInt | None = None
    """Stands between two documents when a peer packs them itself."""

    @property
    def assignment(self) -> Literal["leased", "local"]:
        """`local`: each peer draws from its own shuffle; nobody promises that all the data is covered, or once only."""
        return "leased" if self.units else "local"


class Validation(_Part, frozen=True, kw_only=True):
    artifact: str | None = None
    """Packed validation tokens; None: the head of the `validation_split` of the dataset."""
    split: str | None = None
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of a dataset's documents, by hash, that no peer trains on because validation is made of them."""
    sequences: PositiveInt = 64
    every_rounds: PositiveInt = 1


class Inner(_Part, frozen=True, kw_only=True):
    """AdamW and its schedule; steps count over the run, so a joiner enters in the middle."""

    lr: PositiveFloat
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: PositiveFloat = 1.0
    schedule: str = "cosine"
    """`cosine`, `linear` (to zero after `stable`), `constant`."""
    warmup_steps: NonNegativeInt = 0
    total_steps: NonNegativeInt = 0
    """Where the schedule ends; 0 with `constant`."""
    final_lr_ratio: float = 0.1
    batch_sequences: PositiveInt = 8
    """Sequences of an inner step on one node."""
    micro_batch_sequences: NonNegativeInt = 0
    """0: the whole batch at once. Else gradient accumulation by this many."""
    rejoin_warmup_steps: NonNegativeInt = 50
    """Extra warm-up of a fresh inner optimizer (a joiner's)."""
    autocast: str = "bfloat16"
    """Type of the matrix products on a GPU, over fp32 parameters: `bfloat16` or `off`. A CPU computes in fp32."""


class Outer(_Part, frozen=True, kw_only=True):
    momentum: float = 0.9
    lr: tuple[tuple[PositiveInt, PositiveFloat], ...] = ((1, 0.4), (2, 0.6), (8, 0.7))
    """(contributors at least, learning rate), ascending."""


class Rounds(_Part, frozen=True, kw_only=True):
    steps: PositiveInt = 50
    """H: inner steps of a round, of a peer of the usual speed."""
    steps_least: PositiveInt | UnsetType = UNSET
    """Of the slowest peers; absent: `steps`."""
    steps_most: PositiveInt | UnsetType = UNSET
    """Of the fastest peers; absent: `steps`."""
    part_elements: PositiveInt = 65_536
    codec: str = "int8"
    sum_codec: str = "sum16"
    engine: str = "atoll"
    fragments: PositiveInt = 1
    overlap: NonNegativeInt = 0

    @property
    def step_bounds(self) -> tuple[int, int]:
        """(least, most) of any peer's budget."""
        least, most = self.steps_least, self.steps_most
        return self.steps if least is UNSET else least, self.steps if most is UNSET else most


class Admission(_Part, frozen=True, kw_only=True):
    join: str = "open"
    """`open`: anyone may join. `list`: only `peers` (the creator extends it by signature)."""
    peers: tuple[str, ...] = ()
    founders: tuple[str, ...] = ()
    quorum: str = "two_thirds"
    """`majority` or `two_thirds`."""


class End(_Part, frozen=True, kw_only=True):
    rounds: NonNegativeInt = 0
    """0: no limit."""
    tokens: NonNegativeInt = 0


class Limits(_Part, frozen=True, kw_only=True):
    """Seconds unless named otherwise. See `protocol.rules.Rules` for the meaning of each."""

    min_peers: PositiveInt = 1
    max_electors: PositiveInt = 64
    lease_units: PositiveInt = 16
    weight_cap_ratio: PositiveFloat = 3.0
    norm_limit_ratio: PositiveFloat = 5.0
    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 6.0
    grace_s: PositiveFloat = 2.0
    ready_max_s: PositiveFloat = 600.0
    assembly_max_s: PositiveFloat = 60.0
    level_max_s: PositiveFloat = 300.0
    level_min_s: PositiveFloat = 2.0
    progress_s: PositiveFloat = 5.0
    slack_s: PositiveFloat = 1.0
    attempt_timeout_s: PositiveFloat = 10.0
    attempt_timeout_max_s: PositiveFloat = 120.0
    resend_s: PositiveFloat = 2.0
    fork_timeout_s: PositiveFloat = 20.0
    reform_collect_s: PositiveFloat = 10.0
    snapshot_every_rounds: PositiveInt = 5
    keep_snapshots: PositiveInt = 2
    keep_rounds: PositiveInt = 20


class Manifest(_Part, frozen=True, kw_only=True):
    format: int
    name: str
    version: str
    """Version of the software that made it; `major.minor` must match ours."""
    creator: str
    """Peer id; its signature stands beside the manifest."""
    model: Model
    layout: Layout
    tokenizer: str | None
    """Name in `artifacts`; None: a model without a tokenizer."""
    data: Data
    validation: Validation
    inner: Inner
    outer: Outer
    rounds: Rounds
    admission: Admission
    end: End
    limits: Limits
    initial_state: str
    """Name in `artifacts` of S_0."""
    initial_state_hash: HexDigest
    """`h_0`, of S_0 with zero momentum."""
    artifacts: dict[str, Artifact]

    def canonical(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")

    def run_id(self) -> Digest:
        return blake3(self.canonical()).digest()


class SignedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored and sent: canonical bytes and the creator's signature over `signing_bytes` of them."""

    body: bytes
    signature: bytes

    @property
    def run_id(self) -> Digest:
        return blake3(self.body).digest()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def signing_bytes(body: bytes) -> bytes:
    """What the creator signs: bound to this type of message, as every signature here."""
    return digest(b"atoll/manifest", body)


def validate(manifest: Manifest) -> None:
    """Raise `ManifestError` for the first thing that keeps `manifest` from being a run of this software."""
    from node.manifest_checks import problem  # not at the top: it is written in terms of this module's structs

    sentence = problem(manifest)
    if sentence is not None:
        raise ManifestError(sentence)


def decode(body: bytes) -> Manifest:
    """The manifest of canonical bytes, from anyone. Raises `ManifestError`."""
    if len(body) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {len(body)} bytes is over the limit of {MAX_MANIFEST_BYTES} bytes")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestError(f"the manifest does not decode: {error}") from error
    if manifest.canonical() != body:
        # Two encodings of one run would have two run ids.
        raise ManifestError("the manifest's bytes are not canonical: make it again with `atoll run create`")
    validate(manifest)
    return manifest


def decode_signed(data: bytes, verify: Callable[[PeerId, bytes, bytes], bool]) -> tuple[SignedManifest, Manifest]:
    """A stored or received `SignedManifest`. `verify(signer, message, signature)` as in `protocol.names.Keyring`.

    Raises `ManifestError`.
    """
    if len(data) > MAX_MANIFEST_BYTES + 1024:
        raise ManifestError(f"a signed manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_BYTES} bytes")
    try:
        signed = msgspec.msgpack.decode(data, type=SignedManifest)
    except msgspec.DecodeError as error:
        raise ManifestError(f"the signed manifest does not decode: {error}") from error
    manifest = decode(signed.body)
    if not verify(manifest.creator, signing_bytes(signed.body), signed.signature):
        raise ManifestError(f"the manifest's signature is not that of its creator {manifest.creator}: do not use it")
    return signed, manifest


def rules_of(manifest: Manifest) -> Rules:
    """The constants that the protocol's state machines share. `manifest` is valid."""
    admission, limits = manifest.admission, manifest.limits
    allowed = None
    if admission.join == "list":
        allowed = tuple(sorted({*admission.peers, *admission.founders, manifest.creator}))
    return Rules(
        run=manifest.run_id(),
        founders=admission.founders or (manifest.creator,),
        initial_state_hash=bytes.fromhex(manifest.initial_state_hash),
        allowed_peers=allowed,
        quorum=Quorum(admission.quorum),
        min_peers=limits.min_peers,
        max_electors=limits.max_electors,
        elements=manifest.layout.elements,
        buffer_elements=manifest.layout.buffer_elements,
        part_elements=manifest.rounds.part_elements,
        fragments=manifest.rounds.fragments,
        overlap=manifest.rounds.overlap,
        codec=manifest.rounds.codec,
        sum_codec=manifest.rounds.sum_codec,
        momentum=manifest.outer.momentum,
        outer_lr=manifest.outer.lr,
        epoch_units=manifest.data.units or UNBOUNDED_EPOCH_UNITS,
        lease_cap_units=limits.lease_units,
        unit_tokens=manifest.data.unit_sequences * manifest.data.sequence_tokens,
        weight_cap_ratio=limits.weight_cap_ratio,
        norm_limit_ratio=limits.norm_limit_ratio,
        heartbeat_s=limits.heartbeat_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        grace_s=limits.grace_s,
        ready_max_s=limits.ready_max_s,
        assembly_max_s=limits.assembly_max_s,
        level_max_s=limits.level_max_s,
        level_min_s=limits.level_min_s,
        progress_s=limits.progress_s,
        slack_s=limits.slack_s,
        attempt_timeout_s=limits.attempt_timeout_s,
        attempt_timeout_max_s=limits.attempt_timeout_max_s,
        resend_s=limits.resend_s,
        fork_timeout_s=limits.fork_timeout_s,
        reform_collect_s=limits.reform_collect_s,
        final_round=manifest.end.rounds or None,
        final_tokens=manifest.end.tokens or None,
    )


def flat_layout(layout: Layout) -> protocol.layout.Layout:
    """The places of all tensors as `protocol` knows them; its `digest()` is what a trainer shows when it attaches."""
    return protocol.layout.Layout(
        parameters=tuple(_entry(tensor) for tensor in layout.parameters),
        buffers=tuple(_entry(tensor) for tensor in layout.buffers),
        elements=layout.elements,
        buffer_elements=layout.buffer_elements,
    )


def stored_layout(layout: protocol.layout.Layout) -> Layout:
    """The inverse of `flat_layout`."""
    return Layout(
        elements=layout.elements,
        buffer_elements=layout.buffer_elements,
        parameters=tuple(_tensor(entry) for entry in layout.parameters),
        buffers=tuple(_tensor(entry) for entry in layout.buffers),
    )


def _entry(tensor: Tensor) -> protocol.layout.Entry:
    return protocol.layout.Entry(name=tensor.name, shape=tensor.shape, offset=tensor.offset)


def _tensor(entry: protocol.layout.Entry) -> Tensor:
    return Tensor(name=entry.name, shape=entry.shape, offset=entry.offset)
