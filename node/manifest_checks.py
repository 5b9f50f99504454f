"""What must hold between the values of a manifest, beyond their types. Each check yields one sentence.

The same checks serve a creator's TOML and a stranger's manifest, so bounds here are also what keeps a stranger from
making a node allocate or wait without limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from node import __version__
from node.engines import ATOLL, HIVEMIND
from node.manifest import (
    FORMAT,
    UNBOUNDED_EPOCH_UNITS,
    Admission,
    Data,
    End,
    Inner,
    Layout,
    Limits,
    Manifest,
    Model,
    Outer,
    Rounds,
    Tensor,
)
from protocol.layout import ALIGNMENT, align

MAX_ELEMENTS = 1 << 38
MAX_PARTS = 1 << 14
"""A PROPOSAL or commit names a signed header of some 210 bytes, with a bit a READY, for each part, and travels in one
frame of 8 MiB (`protocol.ready_limits`)."""
MAX_ARTIFACTS = 64
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_TOKENS_BYTES = 1 << 36
MAX_HEADER_BYTES = 64 * 1024
"""Of a safetensors file with one or two tensors."""
MAX_DURATION_S = 86_400.0
MAX_SEQUENCE_TOKENS = 1 << 20
MAX_UNIT_SEQUENCES = 4096
MAX_PEERS = 10_000

CODECS = ("fp32", "fp16", "int8", "int4")
SUM_CODECS = ("sum16",)
ENGINES = (ATOLL, HIVEMIND)
SCHEDULES = ("cosine", "linear", "constant")
DATASET_FORMATS = ("json", "parquet", "csv", "text")

FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_CLASS = re.compile(r"^[A-Z]\w{0,99}$")
_PEER = re.compile(r"^[1-9A-HJ-NP-Za-km-z]{40,64}$")
_HUB_NAME = re.compile(r"^[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?$")
_ARTIFACT_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")

# Keys of a transformers config that make the library fetch or run something other than its own classes.
_FORBIDDEN_CONFIG = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "backbone",
        "custom_pipelines",
        "experts_implementation",
        "quantization_config",
        "trust_remote_code",
        "use_kernels",
        "use_pretrained_backbone",
    }
)
_LAYER_COUNTS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers"})


def problem(manifest: Manifest) -> str | None:
    """The first thing wrong with `manifest`, or None."""
    return next(_problems(manifest), None)


def limits_problems(limits: Limits) -> Iterator[str]:
    """Relations between the durations and counts of `limits`; also used on the TOML, before anything is built."""
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"limits.{name} = {value} is not a finite number"
        if name.endswith("_s") and value > MAX_DURATION_S:
            yield f"limits.{name} = {value:g} is over a day: set at most {MAX_DURATION_S:g} seconds"
        if name.endswith("_ratio") and value < 1:
            yield f"limits.{name} = {value:g} would shut out the median peer: set at least 1"
    pairs = (
        ("heartbeat_timeout_s", 2.0, "heartbeat_s"),
        ("fork_timeout_s", 1.0, "heartbeat_timeout_s"),
        ("ready_max_s", 1.0, "grace_s"),
        ("level_max_s", 1.0, "level_min_s"),
        ("attempt_timeout_max_s", 1.0, "attempt_timeout_s"),
    )
    for larger, ratio, smaller in pairs:
        least = ratio * getattr(limits, smaller)
        if getattr(limits, larger) < least:
            yield (
                f"limits.{larger} = {getattr(limits, larger):g} is too short beside "
                f"limits.{smaller} = {getattr(limits, smaller):g}: set at least {least:g} seconds"
            )
    if limits.heartbeat_s < 0.05:
        yield f"limits.heartbeat_s = {limits.heartbeat_s:g} would flood the peers: set at least 0.05 seconds"
    if limits.max_electors > 64:
        yield f"limits.max_electors = {limits.max_electors} is too many: set at most 64"
    if limits.keep_rounds <= limits.snapshot_every_rounds:
        yield (
            f"limits.keep_rounds = {limits.keep_rounds} would drop rounds that the last snapshot needs: set more than "
            f"limits.snapshot_every_rounds = {limits.snapshot_every_rounds}"
        )


def inner_problems(inner: Inner) -> Iterator[str]:
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(inner, name) < 1:
            yield f"inner.{name} = {getattr(inner, name):g} is not in [0, 1): set for example 0.9"
    if not 0 < inner.epsilon < 1:
        yield f"inner.epsilon = {inner.epsilon:g} is not between 0 and 1: set for example 1e-8"
    if not 0 <= inner.weight_decay <= 10:
        yield f"inner.weight_decay = {inner.weight_decay:g} is not in [0, 10]: set for example 0.1"
    if not 0 <= inner.final_lr_ratio <= 1:
        yield f"inner.final_lr_ratio = {inner.final_lr_ratio:g} is not in [0, 1]: set for example 0.1"
    if inner.schedule not in SCHEDULES:
        yield f"inner.schedule = {inner.schedule!r} is unknown: choose {_choices(SCHEDULES)}"
    if inner.schedule != "constant" and inner.total_steps <= inner.warmup_steps:
        yield (
            f"inner.total_steps = {inner.total_steps} leaves no room after inner.warmup_steps = {inner.warmup_steps}: "
            "raise it, or set inner.schedule = 'constant'"
        )
    if inner.micro_batch_sequences and inner.batch_sequences % inner.micro_batch_sequences:
        yield (
            f"inner.micro_batch_sequences = {inner.micro_batch_sequences} does not divide "
            f"inner.batch_sequences = {inner.batch_sequences}"
        )
    if inner.autocast not in ("bfloat16", "off"):
        yield f"inner.autocast = {inner.autocast!r} is unknown: choose 'bfloat16' or 'off'"


def outer_problems(outer: Outer) -> Iterator[str]:
    if not 0 <= outer.momentum < 1:
        yield f"outer.momentum = {outer.momentum:g} is not in [0, 1): set for example 0.9"
    counts = [count for count, _ in outer.lr]
    if not counts or counts[0] != 1 or counts != sorted(set(counts)) or len(counts) > 64:
        yield f"outer.lr has rows for {counts[:64]} contributors: begin at 1 and ascend, as in [[1, 0.4], [2, 0.6]]"
    if any(rate > 10 for _, rate in outer.lr):
        yield "outer.lr has a learning rate over 10: values between 0.1 and 1 are usual"


def rounds_problems(rounds: Rounds) -> Iterator[str]:
    least, most = rounds.step_bounds
    if least > rounds.steps:
        yield f"rounds.steps_least = {least} is above rounds.steps = {rounds.steps}: set at most that"
    if most < rounds.steps:
        yield f"rounds.steps_most = {most} is below rounds.steps = {rounds.steps}: set at least that"
    if rounds.part_elements % ALIGNMENT:
        nearest = max(1, round(rounds.part_elements / ALIGNMENT)) * ALIGNMENT
        yield f"rounds.part_elements = {rounds.part_elements} is not a multiple of 256: set for example {nearest}"
    if rounds.part_elements > 1 << 24:
        yield f"rounds.part_elements = {rounds.part_elements} is too large for one frame: set at most {1 << 24}"
    if rounds.codec not in CODECS:
        yield f"rounds.codec = {rounds.codec!r} is unknown: choose {_choices(CODECS)}"
    if rounds.sum_codec not in SUM_CODECS:
        yield f"rounds.sum_codec = {rounds.sum_codec!r} is unknown: choose {_choices(SUM_CODECS)}"
    if rounds.engine not in ENGINES:
        yield f"rounds.engine = {rounds.engine!r} is unknown: choose {_choices(ENGINES)}"
    if rounds.engine == HIVEMIND and rounds.codec == "int4":
        yield "rounds.codec = 'int4' is not possible with rounds.engine = 'hivemind': choose 'int8', 'fp16' or 'fp32'"
    if rounds.fragments != 1:
        yield f"rounds.fragments = {rounds.fragments} is not possible in Atoll {__version__}: set 1"
    if rounds.overlap != 0:
        yield f"rounds.overlap = {rounds.overlap} is not possible in Atoll {__version__}: set 0"


def admission_problems(admission: Admission) -> Iterator[str]:
    if admission.join not in ("open", "list"):
        yield f"admission.join = {admission.join!r} is unknown: choose 'open' or 'list'"
    if admission.quorum not in ("majority", "two_thirds"):
        yield f"admission.quorum = {admission.quorum!r} is unknown: choose 'majority' or 'two_thirds'"
    for name, peers in (("founders", admission.founders), ("peers", admission.peers)):
        if len(peers) > MAX_PEERS:
            yield f"admission.{name} has {len(peers)} peers: name at most {MAX_PEERS}"
        if len(set(peers)) != len(peers):
            yield f"admission.{name} names a peer twice: name each once"
        for peer in peers:
            if not _PEER.match(peer):
                yield f"admission.{name} has {peer[:80]!r}, which is not a peer id: `atoll id` prints one"
    if admission.join == "open" and admission.peers:
        yield "admission.peers is only for admission.join = 'list': set that, or remove the peers"


def _problems(manifest: Manifest) -> Iterator[str]:
    if manifest.format != FORMAT:
        yield f"the manifest has format {manifest.format} and this software reads {FORMAT}: install another version"
    if _minor(manifest.version) != _minor(__version__):
        yield (
            f"the run was made by Atoll {manifest.version[:40]} and this is {__version__}: "
            f"install atoll {_minor(manifest.version)[:40]}"
        )
    if not manifest.name or len(manifest.name) > 100 or not manifest.name.isprintable():
        yield f"the run's name {manifest.name[:100]!r} is not 1 to 100 printable characters: choose another"
    if not _PEER.match(manifest.creator):
        yield f"the creator {manifest.creator[:80]!r} is not a peer id: `atoll id` prints one"
    yield from layout_problems(manifest.layout)
    yield from _artifact_problems(manifest)
    yield from _model_problems(manifest.model, manifest.layout)
    yield from _data_problems(manifest)
    yield from inner_problems(manifest.inner)
    yield from outer_problems(manifest.outer)
    yield from rounds_problems(manifest.rounds)
    yield from admission_problems(manifest.admission)
    yield from limits_problems(manifest.limits)
    yield from lease_problems(manifest.data, manifest.inner, manifest.rounds, manifest.limits)
    yield from end_problems(manifest.end)
    parts = -(-manifest.layout.elements // manifest.rounds.part_elements)
    if parts > MAX_PARTS:
        yield f"the model has {parts} parts and the limit is {MAX_PARTS}: raise rounds.part_elements"


def end_problems(end: End) -> Iterator[str]:
    if end.rounds >= 1 << 40 or end.tokens >= 1 << 60:
        yield f"end.rounds = {end.rounds}, end.tokens = {end.tokens} is beyond any run: set 0 for no limit"


def lease_problems(data: Data, inner: Inner, rounds: Rounds, limits: Limits) -> Iterator[str]:
    needed = rounds.step_bounds[1] * inner.batch_sequences
    leased = limits.lease_units * data.unit_sequences
    if leased < needed:
        yield (
            f"limits.lease_units = {limits.lease_units} holds {leased} sequences and a round trains on {needed}: "
            f"set at least {-(-needed // data.unit_sequences)}"
        )


def layout_problems(layout: Layout) -> Iterator[str]:
    """Each segment's tensors tile it in order, aligned, without overlap."""
    if layout.elements > MAX_ELEMENTS:
        yield f"the layout has {layout.elements} elements and the limit is {MAX_ELEMENTS}"
    if layout.elements % ALIGNMENT or layout.buffer_elements % ALIGNMENT:
        yield f"the layout's {layout.elements} elements are not a multiple of {ALIGNMENT}"
    names = [tensor.name for tensor in (*layout.parameters, *layout.buffers)]
    if len(set(names)) != len(names):
        yield "the layout names a tensor twice"
    if any(not 0 < len(name) <= 500 for name in names):
        yield "the layout has a tensor whose name is empty or over 500 characters"
    split = layout.elements - layout.buffer_elements
    yield from _segment_problems(layout.parameters, 0, split)
    yield from _segment_problems(layout.buffers, split, layout.elements)


def _segment_problems(tensors: tuple[Tensor, ...], start: int, stop: int) -> Iterator[str]:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            yield f"the layout's tensor {tensor.name[:80]!r} is at {tensor.offset} and should be at {end}"
        if len(tensor.shape) > 16:
            yield f"the layout's tensor {tensor.name[:80]!r} has {len(tensor.shape)} dimensions and the limit is 16"
        if any(dimension > MAX_ELEMENTS for dimension in tensor.shape):
            yield f"the layout's tensor {tensor.name[:80]!r} has a dimension over {MAX_ELEMENTS}"
        end = align(tensor.offset + math.prod(tensor.shape[:16]))
        if end > stop:
            yield f"the layout's tensor {tensor.name[:80]!r} ends at {end}, beyond its segment's end at {stop}"
            return
    if end != stop:
        yield f"the layout's tensors end at {end} and their segment at {stop}"


def _artifact_problems(manifest: Manifest) -> Iterator[str]:
    artifacts = manifest.artifacts
    if len(artifacts) > MAX_ARTIFACTS:
        yield f"the manifest names {len(artifacts)} artifacts and the limit is {MAX_ARTIFACTS}"
    for name in artifacts:
        if not _ARTIFACT_NAME.match(name):
            yield f"the artifact name {name[:80]!r} is not lower-case letters, digits, dots and dashes"
    state_bytes = 4 * manifest.layout.elements
    bounds = [("initial_state", manifest.initial_state, state_bytes, state_bytes + MAX_HEADER_BYTES)]
    if manifest.tokenizer is not None:
        bounds.append(("tokenizer", manifest.tokenizer, 1, MAX_TOKENIZER_BYTES))
    if manifest.data.artifact is not None:
        bounds.append(("data.artifact", manifest.data.artifact, 1, MAX_TOKENS_BYTES))
    if manifest.validation.artifact is not None:
        bounds.append(("validation.artifact", manifest.validation.artifact, 1, MAX_TOKENS_BYTES))
    for key, name, least, most in bounds:
        artifact = artifacts.get(name)
        if artifact is None:
            yield f"{key} names the artifact {name[:80]!r}, which the manifest does not have"
        elif not least <= artifact.length <= most:
            yield f"the artifact {name[:80]!r} has {artifact.length} bytes and should have {least} to {most}"


def _model_problems(model: Model, layout: Layout) -> Iterator[str]:
    if (model.architecture is None) == (model.function is None):
        yield "the model needs either model.architecture or model.function, not both"
    if model.architecture is not None and not _CLASS.match(model.architecture):
        yield f"model.architecture = {model.architecture[:80]!r} is not a class name such as 'LlamaForCausalLM'"
    if model.function is not None and not FUNCTION.match(model.function):
        yield f"model.function = {model.function[:80]!r} is not of the form 'module:function'"
    if model.architecture is not None:
        key = forbidden_config_key(model.config)
        if key is not None:
            yield f"model.config.{key[:80]} may not be set by a run: remove it"
    for key in _LAYER_COUNTS & model.config.keys():
        count = model.config[key]
        # Building the model on no device at all would still loop over its layers.
        if isinstance(count, int) and count > len(layout.parameters):
            yield f"model.config.{key} = {count} is more than the layout's {len(layout.parameters)} tensors"


def forbidden_config_key(config: Mapping[str, object]) -> str | None:
    """A key of a model's config, dotted, that would make transformers fetch or run other code than its own."""
    for key, value in config.items():
        if key.startswith("_") or key in _FORBIDDEN_CONFIG:
            return key
        nested = forbidden_config_key(value) if isinstance(value, dict) else None
        if nested is not None:
            return f"{key}.{nested}"
    return None


def _data_problems(manifest: Manifest) -> Iterator[str]:
    data = manifest.data
    if data.sequence_tokens > MAX_SEQUENCE_TOKENS or data.sequence_tokens < 2:
        yield f"data.sequence_tokens = {data.sequence_tokens} is not in [2, {MAX_SEQUENCE_TOKENS}]"
    if data.unit_sequences > MAX_UNIT_SEQUENCES:
        yield f"data.unit_sequences = {data.unit_sequences} is over {MAX_UNIT_SEQUENCES}"
    if data.units >= UNBOUNDED_EPOCH_UNITS:
        yield f"data.units = {data.units} is not below {UNBOUNDED_EPOCH_UNITS}"
    if manifest.validation.sequences * data.sequence_tokens > 1 << 28:
        yield f"validation.sequences = {manifest.validation.sequences} is too many: lower it"
    if data.kind == "tokens":
        if data.artifact is None:
            yield "data.kind = 'tokens' needs data.artifact"
        if data.units == 0:
            yield "data.units = 0: the tokens do not fill one unit, so give more text or lower data.unit_sequences"
    elif data.kind == "huggingface":
        yield from _dataset_problems(data)
    elif data.kind == "function":
        if data.function is None or not FUNCTION.match(data.function):
            yield f"data.function = {data.function!r} is not of the form 'module:function'"
    else:
        yield f"data.kind = {data.kind[:80]!r} is unknown: choose 'tokens', 'huggingface' or 'function'"
    if data.kind != "tokens":
        if data.units:
            yield f"data.units = {data.units} is not known for data.kind = {data.kind!r}: set 0"
        if manifest.validation.artifact is None and manifest.validation.split is None:
            yield "validation needs an artifact or a split"


def _dataset_problems(data: Data) -> Iterator[str]:
    if data.path is None or not _HUB_NAME.match(data.path):
        yield f"data.path = {data.path!r} is not the name of a dataset such as 'owner/name'"
        return
    if data.end_token_id is None or not data.text_field or not data.split:
        yield "data.kind = 'huggingface' needs data.end_token_id, data.text_field and data.split"
    for pattern in data.data_files:
        # The files are the operator's: a stranger's manifest must not choose where on the disk they lie.
        if ":" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            yield f"data.data_files has {pattern[:80]!r}: name files relative to the dataset, without '..' or a scheme"
    if (data.path in DATASET_FORMATS) != ("/" not in data.path and bool(data.data_files)):
        yield f"data.path = {data.path!r}: give a hub dataset, or {_choices(DATASET_FORMATS)} with data.data_files"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _choices(values: tuple[str, ...]) -> str:
    return ", ".join(repr(value) for value in values)
