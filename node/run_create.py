"""TOML → manifest and artifacts: resolve, tokenise, initialise, sign (design section 4).

Runs in a process of its own: it may import PyTorch. Whatever takes long is cached by what it was made from, so that
creating the same run again takes as long as reading it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from node import __version__, artifacts, run_config
from node.errors import OperatorError
from node.manifest import (
    FORMAT,
    Admission,
    Artifact,
    Data,
    End,
    Inner,
    Layout,
    Limits,
    Manifest,
    ManifestError,
    Model,
    Outer,
    Rounds,
    SignedManifest,
    decode,
    signing_bytes,
)
from node.manifest_checks import (
    admission_problems,
    end_problems,
    inner_problems,
    lease_problems,
    limits_problems,
    outer_problems,
    rounds_problems,
)
from node.run_cache import RunCache
from node.run_config import RunConfig
from node.run_data import ResolvedTokenizer, resolve_data, resolve_tokenizer

_STATE_VERSION = 1
"""Raised when the same inputs should give another S_0."""


class InitialState(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached of S_0."""

    state: Artifact
    state_hash: str
    layout: Layout
    model_config: dict[str, object]
    parameters: int


def create(
    config: RunConfig,
    *,
    identity_sign: Callable[[bytes], bytes],
    creator: str,
    founders: Sequence[str] = (),
    artifacts_directory: Path,
    cache: Path,
    overrides: Mapping[str, object] | None = None,
    allow_functions: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> SignedManifest:
    """Resolve `config`, put its artifacts into `artifacts_directory`, and sign the manifest as `creator`.

    `overrides` are dotted keys of the TOML (`{"end.rounds": 10}`); `founders` replaces `admission.founders`. `report`
    is told, in a few words, what takes long. Raises `OperatorError`.
    """
    changes = dict(overrides or {})
    if founders:
        changes["admission.founders"] = list(founders)
    config = run_config.override(config, changes)
    store = RunCache(cache)
    rounds = Rounds(**config.rounds.model_dump(exclude_none=True))
    inner, limits = _inner(config), _limits(config, rounds)
    outer = Outer(momentum=config.outer.momentum, lr=tuple(config.outer.lr))
    admission = _admission(config)
    end = End(**config.end.model_dump())
    _refuse_early(config, inner, outer, rounds, admission, end, limits)

    tokenizer = resolve_tokenizer(config, store, report, allow_functions)
    data = resolve_data(config, tokenizer, store, report, allow_functions)
    state = _initial_state(config, tokenizer, store, report, allow_functions)
    named = {"initial-state": state.state, **data.artifacts}
    if tokenizer.artifact is not None:
        named["tokenizer"] = tokenizer.artifact
    manifest = Manifest(
        format=FORMAT,
        name=config.name,
        version=__version__,
        creator=creator,
        model=Model(architecture=config.model.architecture, config=state.model_config, function=config.model.function),
        layout=state.layout,
        tokenizer=None if tokenizer.artifact is None else "tokenizer",
        data=data.data,
        validation=data.validation,
        inner=inner,
        outer=outer,
        rounds=rounds,
        admission=admission,
        end=end,
        limits=limits,
        initial_state="initial-state",
        initial_state_hash=state.state_hash,
        artifacts=named,
    )
    body = manifest.canonical()
    try:
        decode(body)  # exactly what every peer will do with it
    except ManifestError as error:
        raise OperatorError(f"{config.source}: {error}") from error
    for artifact in named.values():
        artifacts.place(artifact, store.artifacts, artifacts_directory)
    return SignedManifest(body=body, signature=identity_sign(signing_bytes(body)))


def _inner(config: RunConfig) -> Inner:
    inner = Inner(**config.inner.model_dump())
    if inner.schedule == "constant" or inner.total_steps:
        return inner
    total = config.end.rounds * config.rounds.steps
    # A run shortened by an override keeps a schedule: half of it at most is warm-up.
    return msgspec.structs.replace(inner, total_steps=total, warmup_steps=min(inner.warmup_steps, total // 2))


def _limits(config: RunConfig, rounds: Rounds) -> Limits:
    values = config.limits.model_dump()
    if values["lease_units"] == 0:
        needed = rounds.step_bounds[1] * config.inner.batch_sequences
        values["lease_units"] = -(-2 * needed // config.data.unit_sequences)
    return Limits(**values)


def _admission(config: RunConfig) -> Admission:
    admission = config.admission
    return Admission(
        join=admission.join,
        peers=tuple(admission.peers),
        founders=tuple(admission.founders),
        quorum=admission.quorum,
    )


def _refuse_early(
    config: RunConfig, inner: Inner, outer: Outer, rounds: Rounds, admission: Admission, end: End, limits: Limits
) -> None:
    """What would be refused at the end is refused before minutes are spent."""
    sizes = Data(
        kind="tokens",
        sequence_tokens=config.data.sequence_tokens,
        unit_sequences=config.data.unit_sequences,
        units=1,
    )
    checks = (
        inner_problems(inner),
        outer_problems(outer),
        rounds_problems(rounds),
        admission_problems(admission),
        end_problems(end),
        limits_problems(limits),
        lease_problems(sizes, inner, rounds, limits),
    )
    for check in checks:
        for sentence in check:
            raise OperatorError(f"{config.source}: {sentence}")


def _initial_state(
    config: RunConfig,
    tokenizer: ResolvedTokenizer,
    cache: RunCache,
    report: Callable[[str], None],
    allow_functions: Sequence[str],
) -> InitialState:
    values = _model_values(config, tokenizer)
    inputs = {
        "version": _STATE_VERSION,
        "architecture": config.model.architecture,
        "function": config.model.function,
        "config": values,
        "seed": config.model.seed,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }

    def build() -> InitialState:
        from node.run_state import build_initial_state  # PyTorch: only when it has to be made

        report("initialising the model")
        return build_initial_state(config, values, cache.artifacts, allow_functions)

    if config.model.function is not None:
        return build()  # what the function does is not known from its name
    return cache.stage(InitialState, inputs, build)


def _model_values(config: RunConfig, tokenizer: ResolvedTokenizer) -> dict[str, object]:
    """The model's keyword arguments; the tokenizer says what the TOML leaves open."""
    values = dict(config.model.config)
    if config.model.architecture is None or tokenizer.vocabulary is None:
        return values
    values.setdefault("vocab_size", tokenizer.vocabulary)
    values.setdefault("bos_token_id", tokenizer.end_token_id)
    values.setdefault("eos_token_id", tokenizer.end_token_id)
    size = values["vocab_size"]
    if not isinstance(size, int) or size < tokenizer.vocabulary:
        raise OperatorError(
            f"{config.source}: model.config.vocab_size = {size!r} is less than the tokenizer's {tokenizer.vocabulary} "
            "tokens: raise it, or leave it out"
        )
    return values
