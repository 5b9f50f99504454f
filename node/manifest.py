"""The manifest: the resolved, canonical, signed definition of a run (design section 4).

People write TOML (`node.run_config`); `atoll run create` resolves it to this, whose canonical bytes hash to the run id.
The daemon reads strangers' manifests, so this module imports neither PyTorch nor pydantic and checks every bound.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

FORMAT = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
HexDigest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


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
    name: str | None = None
    split: str | None = None
    text_field: str | None = None
    function: str | None = None


class Validation(_Part, frozen=True, kw_only=True):
    artifact: str | None = None
    """Packed validation tokens; None: the head of the `validation_split` of the dataset."""
    split: str | None = None
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


class Outer(_Part, frozen=True, kw_only=True):
    momentum: float = 0.9
    lr: tuple[tuple[PositiveInt, PositiveFloat], ...] = ((1, 0.4), (2, 0.6), (8, 0.7))
    """(contributors at least, learning rate), ascending."""


class Rounds(_Part, frozen=True, kw_only=True):
    steps: PositiveInt = 50
    """H: inner steps of a round."""
    part_elements: PositiveInt = 65_536
    codec: str = "int8"
    sum_codec: str = "sum16"
    engine: str = "atoll"
    fragments: PositiveInt = 1
    overlap: NonNegativeInt = 0


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

    def run_id(self) -> bytes:
        return blake3(self.canonical()).digest()


class SignedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored and sent: canonical bytes and the creator's signature over them."""

    body: bytes
    signature: bytes
