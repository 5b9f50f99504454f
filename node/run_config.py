"""What people write to define a run: the TOML, a doc for each key, its bounds in its type (design section 4).

`load` reads a preset or a file; `node.run_create` resolves the result to a manifest. Every mistake becomes one sentence
that names the file, the key, the value and the fix.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from node.errors import OperatorError
from node.run_config_errors import sentence

PRESETS = ("tiny", "micro", "gpu-150m")
MAX_TOML_BYTES = 1024 * 1024

Text = Annotated[str, Field(min_length=1, max_length=500)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
# Not strict: TOML has lists only.
OuterRow = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, le=10)]], Field(strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(_Section):
    """The model: a language model of transformers with its config, or a user's function."""

    architecture: str | None = Field(default=None, pattern=r"^[A-Z]\w{0,99}$")
    """A causal language model class of transformers, such as `LlamaForCausalLM`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its config class (or of the function). The vocabulary defaults to the tokenizer's."""
    function: FunctionName | None = None
    """`module:function` returning a torch module; each operator must install and allow it."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the initial parameters, which are drawn once, here, and shipped."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if (self.architecture is None) == (self.function is None):
            raise ValueError("set either architecture or function")
        return self


class TokenizerConfig(_Section):
    """Where the tokenizer comes from; it travels with the run as an artifact whatever the source."""

    source: Literal["train", "file", "hub", "none"] = "train"
    """`train`: byte-level BPE on the run's text. `file`: a tokenizer.json. `hub`: a model's tokenizer. `none`."""
    vocabulary: int = Field(default=2048, ge=260, le=1 << 20)
    """Tokens of a trained tokenizer: the 256 bytes, the end token, and merges."""
    file: Text | None = None
    """Path of a tokenizer.json, relative to the TOML."""
    hub: Text | None = None
    """Name of a model on the Hugging Face hub, such as `openai-community/gpt2`."""
    end_token: Text = "<|endoftext|>"
    """Token between two documents."""

    @model_validator(mode="after")
    def _source_has_its_key(self) -> TokenizerConfig:
        if self.source in ("file", "hub") and getattr(self, self.source) is None:
            raise ValueError(f"source = {self.source!r} needs the key {self.source!r}")
        return self


class DataConfig(_Section):
    """The text. Small text is packed once and travels with the run; a large dataset is streamed by each peer."""

    source: Literal["package", "files", "huggingface", "function"]
    """`package`: files of an installed Python package. `files`: local files. Both become one artifact.
    `huggingface`: each peer streams the dataset. `function`: each peer calls the function."""
    package: Text | None = None
    """Name of the package."""
    files: list[Text] = Field(default_factory=list)
    """Glob patterns, relative to the package or to the TOML: `.txt` (a document a file), `.jsonl`, `.parquet`."""
    max_documents: int = Field(default=0, ge=0)
    """Use only this many documents, spread evenly over all; 0: all."""
    path: Text | None = None
    """Dataset of the hub, or `json`, `parquet`, `csv` or `text` for `data_files`."""
    name: Text | None = None
    """Configuration of the dataset."""
    split: Text = "train"
    """Split of a Hugging Face dataset to train on."""
    data_files: list[Text] = Field(default_factory=list)
    """Files of the dataset. Without a hub dataset they lie in a folder that each peer names in `ATOLL_DATA`."""
    text_field: Text = "text"
    """Column that holds the text."""
    function: FunctionName | None = None
    """`module:function` that yields documents; each operator must install and allow it."""
    sequence_tokens: int = Field(ge=2, le=1 << 20)
    """Tokens of a packed sequence."""
    unit_sequences: int = Field(default=64, ge=1, le=4096)
    """Packed sequences of a unit, the granule in which data is leased to peers."""

    @model_validator(mode="after")
    def _source_has_its_keys(self) -> DataConfig:
        needed = {
            "package": ("package", "files"),
            "files": ("files",),
            "huggingface": ("path",),
            "function": ("function",),
        }[self.source]
        for key in needed:
            if not getattr(self, key):
                raise ValueError(f"source = {self.source!r} needs the key {key!r}")
        return self


class ValidationConfig(_Section):
    """Fixed sequences, of documents that nobody trains on, measured by every peer alike."""

    sequences: int = Field(default=64, ge=1, le=65_536)
    """Packed sequences, at most; fewer when the held-out documents fill fewer."""
    every_rounds: int = Field(default=1, ge=1)
    """Rounds between two measurements."""
    share: float = Field(default=0.04, gt=0, le=0.5)
    """Share of the documents that is held out when the data has no split of its own."""
    split: Text | None = None
    """Split of a Hugging Face dataset to take them from."""
    max_scan_documents: int = Field(default=200_000, ge=1)
    """Documents of a stream that are looked at, at most, to find the held-out ones when the run is created."""


class InnerConfig(_Section):
    """AdamW and its schedule. Steps count over the run, so a joiner enters in the middle."""

    lr: float = Field(gt=0, le=10)
    """Peak learning rate of a peer's own optimizer."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    epsilon: float = Field(default=1e-8, gt=0, lt=1)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """AdamW's decoupled weight decay, scaled by the learning rate."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Inner steps of the run over which the learning rate rises from zero."""
    total_steps: int = Field(default=0, ge=0)
    """Where the schedule ends; 0: at end.rounds × rounds.steps, and then warm-up takes at most half of it."""
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of `lr`."""
    batch_sequences: int = Field(default=8, ge=1)
    """Sequences of an inner step on one node."""
    micro_batch_sequences: int = Field(default=0, ge=0)
    """Sequences that go through the model at once; 0: the whole batch."""
    rejoin_warmup_steps: int = Field(default=50, ge=0)
    """Warm-up of a fresh inner optimizer, such as a joiner's."""
    autocast: Literal["bfloat16", "off"] = "bfloat16"
    """Type of the matrix products on a GPU; parameters stay fp32, and a CPU computes in fp32."""


class OuterConfig(_Section):
    """Nesterov momentum on the mean of what the peers learned in a round."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""
    lr: list[OuterRow] = Field(default=[(1, 0.4), (2, 0.6), (8, 0.7)])
    """Rows of (contributors at least, learning rate), ascending from 1."""


class RoundsConfig(_Section):
    steps: int = Field(default=50, ge=1, le=100_000)
    """H: inner steps of a round, of a peer of the usual speed."""
    steps_least: int | None = Field(default=None, ge=1, le=100_000)
    """Least steps of a peer's own budget, which follows its training speed so that all are done together. By default
    all make `steps`, and the faster wait for the slower."""
    steps_most: int | None = Field(default=None, ge=1, le=100_000)
    """Most steps of a peer's own budget."""
    part_elements: int = Field(default=65_536, ge=256, le=1 << 24, multiple_of=256)
    """Elements of a part, the granule that peers average and vote on."""
    codec: Literal["fp32", "fp16", "int8", "int4"] = "int8"
    """How contributions and results travel."""
    sum_codec: Literal["sum16"] = "sum16"
    """How partial sums travel."""
    engine: Literal["atoll", "hivemind"] = "atoll"
    """What moves and computes the averages. `hivemind` runs its averager between the peers (each needs the extra
    `hivemind`): all agree on the same bytes, but no mean can be recomputed by others, nor is it the stated sum to the
    bit; `int8` then is hivemind's 8-bit quantisation, which is coarser, and `int4` is not possible."""
    fragments: Literal[1] = 1
    """Parts of the vector that take turns; only 1 so far."""
    overlap: Literal[0] = 0
    """Inner steps that go on while a round's average is made; only 0 so far."""


class AdmissionConfig(_Section):
    join: Literal["open", "list"] = "open"
    """`open`: anyone may join. `list`: only `peers`, the founders and the creator."""
    peers: list[Text] = Field(default_factory=list)
    """Peer ids that may join when `join` is `list`."""
    founders: list[Text] = Field(default_factory=list)
    """Peer ids that count before the first round; empty: the creator."""
    quorum: Literal["majority", "two_thirds"] = "two_thirds"
    """`majority` among friends, `two_thirds` where anyone may join."""


class EndConfig(_Section):
    rounds: int = Field(default=0, ge=0, lt=1 << 40)
    """Rounds of the run; 0: no limit."""
    tokens: int = Field(default=0, ge=0, lt=1 << 60)
    """Tokens of the run; 0: no limit."""


class LimitsConfig(_Section):
    """Seconds where the name ends in `_s`, measured on each peer's own clock."""

    min_peers: int = Field(default=1, ge=1, le=10_000)
    """A round needs this many contributors; with fewer the run waits."""
    max_electors: int = Field(default=64, ge=1, le=64)
    """Members that vote, at most."""
    lease_units: int = Field(default=0, ge=0, le=1 << 20)
    """Units that a member may ask for at a time, at least one round's; 0: what two rounds of average length need."""
    weight_cap_ratio: float = Field(default=3.0, ge=1)
    """A contribution weighs at most this many times the median one."""
    norm_limit_ratio: float = Field(default=5.0, ge=1)
    """A contribution whose norm is this many times the median's is left out."""
    heartbeat_s: float = Field(default=1.0, ge=0.05, le=3600)
    """Time between two signs of life."""
    heartbeat_timeout_s: Seconds = 6.0
    """Silence after which a peer counts as gone; at least twice the heartbeat."""
    grace_s: Seconds = 2.0
    """What every peer gets to become ready after the first one is."""
    ready_max_s: Seconds = 600.0
    """The most that a peer may take to become ready after the first one is."""
    assembly_max_s: Seconds = 60.0
    """The most that a coordinator waits for live members after a quorum is ready."""
    level_max_s: Seconds = 300.0
    """The most that a roster may give a level of its trees."""
    level_min_s: Seconds = 2.0
    """The least that a roster gives a level of its trees."""
    progress_s: Seconds = 5.0
    """A transfer that moves nothing for this long is given up."""
    slack_s: Seconds = 1.0
    """Added to each deadline of an exchange."""
    attempt_timeout_s: Seconds = 10.0
    """Length of an attempt's timer beside the roster's own durations; doubles with each attempt."""
    attempt_timeout_max_s: Seconds = 120.0
    """What the doubling stops at."""
    resend_s: Seconds = 2.0
    """Time between two repetitions of votes that may have been lost."""
    fork_timeout_s: Seconds = 20.0
    """How long a quorum must be silent before the others re-form without it; more than the heartbeat timeout."""
    reform_collect_s: Seconds = 10.0
    """How long a REFORM collects those who are willing."""
    snapshot_every_rounds: int = Field(default=5, ge=1)
    """Rounds between two snapshots, which joiners start from."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Snapshots that each peer keeps on its disk."""
    keep_rounds: int = Field(default=20, ge=2)
    """Rounds whose results are kept for peers that catch up; more than `snapshot_every_rounds`."""


class RunConfig(_Section):
    """A whole run, as its creator writes it."""

    name: str = Field(min_length=1, max_length=100)
    """What people call the run."""
    model: ModelConfig
    """What is trained."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    data: DataConfig
    """What it is trained on."""
    validation: ValidationConfig = ValidationConfig()
    """How progress is measured."""
    inner: InnerConfig
    """How each peer trains."""
    outer: OuterConfig = OuterConfig()
    """How a round's average becomes the next state."""
    rounds: RoundsConfig = RoundsConfig()
    """How often and how the peers agree."""
    admission: AdmissionConfig = AdmissionConfig()
    """Who takes part and who decides."""
    end: EndConfig = EndConfig()
    """When the run is over."""
    limits: LimitsConfig = LimitsConfig()
    """Durations and bounds that all peers share."""

    _source: str = PrivateAttr("the run's definition")
    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def source(self) -> str:
        """What messages call the definition: a file, or a preset's name."""
        return self._source

    @property
    def directory(self) -> Path:
        """Relative paths of the definition start here."""
        return self._directory


def load(path_or_preset: str | Path, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """The run that a preset's name or a TOML file defines, with `overrides` as in `override`.

    Raises `OperatorError`.
    """
    name = str(path_or_preset)
    if name in PRESETS:
        text = (resources.files("node") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
        source, directory = f"the preset {name!r}", Path.cwd()
    else:
        path = Path(path_or_preset).expanduser()
        text, source, directory = _read(path), str(path), path.absolute().parent
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OperatorError(f"{source} is not valid TOML: {_lower_first(str(error))}") from error
    return from_values(_merged(values, overrides or {}), source=source, directory=directory)


def override(config: RunConfig, overrides: Mapping[str, object]) -> RunConfig:
    """`config` with dotted keys replaced, as in `{"limits.min_peers": 2}`. Raises `OperatorError`."""
    if not overrides:
        return config
    values = _merged(config.model_dump(exclude_unset=True), overrides)
    return from_values(values, source=config.source, directory=config.directory)


def parse_override(text: str) -> tuple[str, object]:
    """`limits.min_peers=2` as a key and a TOML value; a bare word is a string. Raises `OperatorError`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise OperatorError(f"the override {text!r} is not of the form KEY=VALUE, such as limits.min_peers=2")
    try:
        parsed: object = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return key.strip(), parsed


def from_values(values: Mapping[str, object], *, source: str, directory: Path) -> RunConfig:
    """The run that a parsed TOML document defines. Raises `OperatorError`."""
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise OperatorError(f"{source}: {sentence(RunConfig, error)}") from error
    config._source = source
    config._directory = directory
    return config


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TOML_BYTES:
            raise OperatorError(f"{path} has {path.stat().st_size} bytes, too many for a run's definition in TOML")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        presets = ", ".join(PRESETS)
        raise OperatorError(f"{path} does not exist: give a TOML file or one of the presets {presets}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path} is not UTF-8 text: give a run's definition in TOML") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror or error}") from error


def _merged(values: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    result: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        inside: dict[str, Any] = result
        for section in sections:
            # A copy on the way down: the values may be another config's.
            nested = inside.get(section)
            inside[section] = dict(nested) if isinstance(nested, dict) else {}
            inside = inside[section]
        inside[key] = value
    return result


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
