"""The tokenizer and the data of a run that is being created: what is packed here, and what peers will stream."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from blake3 import blake3

from node import artifacts
from node.errors import OperatorError
from node.manifest import Artifact, Data, Validation
from node.manifest_checks import DATASET_FORMATS
from node.run_cache import RunCache
from node.run_config import RunConfig
from node.trainer import documents, tokens
from node.trainer.tokens import TokensError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_STAGE_VERSION = 1
"""Raised when the same inputs should give other bytes."""
_TOKENIZER_DOCUMENTS = 20_000
"""Documents of a stream that a tokenizer is trained on."""

Report = Callable[[str], None]


class ResolvedTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    artifact: Artifact | None
    vocabulary: int | None
    """Tokens; None without a tokenizer."""
    end_token_id: int | None


class PackedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached of packed text."""

    validation: Artifact
    validation_sequences: int
    training: Artifact | None = None
    """None: peers stream the data."""
    sequences: int = 0


class ResolvedData(msgspec.Struct, frozen=True, kw_only=True):
    data: Data
    validation: Validation
    artifacts: dict[str, Artifact]


def resolve_tokenizer(
    config: RunConfig, cache: RunCache, report: Report, allow_functions: Sequence[str]
) -> ResolvedTokenizer:
    """Train, read or download the run's tokenizer. Raises `OperatorError`."""
    wanted = config.tokenizer
    if wanted.source == "none":
        if config.data.source != "function":
            raise OperatorError(
                f"{config.source}: tokenizer.source = 'none' needs data.source = 'function', whose documents are tokens"
            )
        return ResolvedTokenizer(artifact=None, vocabulary=None, end_token_id=None)
    if wanted.source == "train":

        def build() -> ResolvedTokenizer:
            report("training the tokenizer")
            text = _training_text(config, allow_functions)
            trained = tokens.train_tokenizer(text, vocabulary=wanted.vocabulary, end_token=wanted.end_token)
            with _as_operator_error(config):
                return _stored_tokenizer(trained, config, cache)

        inputs = {
            "version": _STAGE_VERSION,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "vocabulary": wanted.vocabulary,
            "end_token": wanted.end_token,
            "text": _text_inputs(config),
        }
        return build() if config.data.source == "function" else cache.stage(ResolvedTokenizer, inputs, build)
    if wanted.source == "file":
        assert wanted.file is not None
        path = config.directory / Path(wanted.file).expanduser()
        if not path.is_file():
            raise OperatorError(f"{config.source}: tokenizer.file = {wanted.file!r} does not exist: correct the path")
        with _as_operator_error(config):
            return _stored_tokenizer(tokens.load_tokenizer(path), config, cache)
    assert wanted.hub is not None
    report(f"fetching the tokenizer {wanted.hub}")
    with _as_operator_error(config):
        return _stored_tokenizer(_from_hub(config, wanted.hub), config, cache)


def resolve_data(
    config: RunConfig, tokenizer: ResolvedTokenizer, cache: RunCache, report: Report, allow_functions: Sequence[str]
) -> ResolvedData:
    """Pack the text, or describe the stream; validation is always packed here. Raises `OperatorError`."""

    def build() -> PackedTokens:
        report("tokenising the text")
        with _as_operator_error(config):
            if config.data.source in ("package", "files"):
                return _pack_files(config, tokenizer, cache)
            return _pack_validation(config, tokenizer, cache, allow_functions)

    inputs = {
        "version": _STAGE_VERSION,
        "tokenizers": importlib.metadata.version("tokenizers"),
        "tokenizer": tokenizer,
        "sequence_tokens": config.data.sequence_tokens,
        "validation": config.validation.model_dump(exclude={"every_rounds"}),
        "text": _text_inputs(config),
    }
    packed = build() if config.data.source == "function" else cache.stage(PackedTokens, inputs, build)
    named = {"validation": packed.validation}
    if packed.training is not None:
        named["tokens"] = packed.training
    return ResolvedData(
        data=manifest_data(config, tokenizer, packed),
        validation=Validation(
            artifact="validation",
            sequences=packed.validation_sequences,
            every_rounds=config.validation.every_rounds,
            share=0.0 if packed.training is not None or config.validation.split else config.validation.share,
        ),
        artifacts=named,
    )


def manifest_data(config: RunConfig, tokenizer: ResolvedTokenizer, packed: PackedTokens | None = None) -> Data:
    """What peers are told about the data."""
    data = config.data
    if data.source in ("package", "files"):
        sequences = 0 if packed is None else packed.sequences
        return Data(
            kind="tokens",
            sequence_tokens=data.sequence_tokens,
            unit_sequences=data.unit_sequences,
            units=sequences // data.unit_sequences,
            artifact="tokens",
        )
    streamed = data.source == "huggingface"
    return Data(
        kind="huggingface" if streamed else "function",
        sequence_tokens=data.sequence_tokens,
        unit_sequences=data.unit_sequences,
        units=0,
        path=data.path if streamed else None,
        name=data.name if streamed else None,
        split=data.split if streamed else None,
        text_field=data.text_field if streamed else None,
        data_files=tuple(data.data_files) if streamed else (),
        function=data.function,
        end_token_id=tokenizer.end_token_id,
    )


def split_documents(texts: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Training and validation documents: the share with the smallest hashes, at least one, is held out.

    Equal documents stay on one side. Raises `TokensError` when nothing would be left on one of them.
    """
    ranks = [blake3(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    count = max(1, round(share * len(texts)))
    threshold = sorted(ranks)[count - 1] if texts else b""
    training = [text for text, rank in zip(texts, ranks, strict=True) if rank > threshold]
    validation = [text for text, rank in zip(texts, ranks, strict=True) if rank <= threshold]
    if not training or not validation:
        raise TokensError(
            f"the data has {len(texts)} documents, too few to hold some out for validation: give at least two "
            "different ones"
        )
    return training, validation


def spread(sequences: tokens.TokenArray, count: int) -> tokens.TokenArray:
    """At most `count` of the sequences, evenly over all."""
    if len(sequences) <= count:
        return sequences
    return sequences[(np.arange(count) * len(sequences)) // count]


def _pack_files(config: RunConfig, tokenizer: ResolvedTokenizer, cache: RunCache) -> PackedTokens:
    codec, vocabulary, end = _codec(tokenizer, cache)
    training, validation = split_documents(_file_documents(config), config.validation.share)
    width = config.data.sequence_tokens

    def packed(texts: Iterable[str]) -> tokens.TokenArray:
        encoded = tokens.encode_documents(codec, texts, end)
        return tokens.pack(encoded, sequence_tokens=width, vocabulary=vocabulary)

    sequences, held = packed(training), spread(packed(validation), config.validation.sequences)
    if len(sequences) < config.data.unit_sequences:
        raise TokensError(
            f"the data fills {len(sequences)} sequences of {width} tokens, less than one unit of "
            f"{config.data.unit_sequences}: give more text or lower data.unit_sequences"
        )
    return PackedTokens(
        training=artifacts.store(tokens.serialise(sequences), cache.artifacts),
        sequences=len(sequences),
        validation=_stored_validation(held, width, cache),
        validation_sequences=len(held),
    )


def _pack_validation(
    config: RunConfig, tokenizer: ResolvedTokenizer, cache: RunCache, allow_functions: Sequence[str]
) -> PackedTokens:
    """The first held-out documents of a stream, or the head of the split that is made for it."""
    width, wanted = config.data.sequence_tokens, config.validation.sequences
    packer = tokens.Packer(width)
    for document in _encoded_validation(config, tokenizer, cache, allow_functions):
        packer.add(document)
        if len(packer) >= wanted:
            break
    held = packer.take(min(len(packer), wanted))
    vocabulary = tokenizer.vocabulary if tokenizer.vocabulary is not None else int(held.max(initial=0)) + 1
    packed = tokens.pack(held, sequence_tokens=width, vocabulary=vocabulary)
    return PackedTokens(validation=_stored_validation(packed, width, cache), validation_sequences=len(packed))


def _encoded_validation(
    config: RunConfig, tokenizer: ResolvedTokenizer, cache: RunCache, allow_functions: Sequence[str]
) -> Iterator[Sequence[int]]:
    split = config.validation.split
    stream = _stream(config, tokenizer, split, allow_functions)
    scanned = islice(stream, config.validation.max_scan_documents)
    chosen = (document for document in scanned if split or tokens.held_out(document, config.validation.share))
    if tokenizer.artifact is None:
        for document in chosen:
            if isinstance(document, str):
                raise TokensError("the function yields text and the run has no tokenizer: set tokenizer.source")
            yield document
        return
    codec, _, end = _codec(tokenizer, cache)
    for document in chosen:
        # One at a time: the caller stops as soon as it has enough.
        yield from tokens.encode_documents(codec, [document], end) if isinstance(document, str) else [document]


def _stream(
    config: RunConfig, tokenizer: ResolvedTokenizer, split: str | None, allow_functions: Sequence[str]
) -> Iterator[documents.Document]:
    data = manifest_data(config, tokenizer)
    if data.kind == "function":
        return documents.function_documents(data, allow_functions, seed=0)
    data = msgspec.structs.replace(data, split=split or data.split)
    return documents.texts(documents.dataset(data, documents.data_directory()), config.data.text_field)


def _training_text(config: RunConfig, allow_functions: Sequence[str]) -> list[str]:
    """What a tokenizer is trained on: nothing that validation measures."""
    with _as_operator_error(config):
        if config.data.source in ("package", "files"):
            return split_documents(_file_documents(config), config.validation.share)[0]
        nothing = ResolvedTokenizer(artifact=None, vocabulary=None, end_token_id=None)
        stream = islice(_stream(config, nothing, None, allow_functions), _TOKENIZER_DOCUMENTS)
        return [text for text in stream if isinstance(text, str) and not tokens.held_out(text, config.validation.share)]


def _files(config: RunConfig) -> list[Path]:
    with _as_operator_error(config):
        if config.data.source == "package":
            assert config.data.package is not None
            return documents.package_files(config.data.package, config.data.files)
        return documents.local_files(config.directory, config.data.files)


def _file_documents(config: RunConfig) -> list[str]:
    texts = list(documents.read_files(_files(config), config.data.text_field))
    most = config.data.max_documents
    if most and len(texts) > most:
        texts = [texts[index * len(texts) // most] for index in range(most)]
    return texts


def _text_inputs(config: RunConfig) -> dict[str, object]:
    """What the text of the run depends on, for the cache."""
    data = config.data
    inputs: dict[str, object] = data.model_dump(include={"source", "max_documents", "text_field"})
    inputs["share"] = config.validation.share
    if data.source in ("package", "files"):
        inputs["files"] = documents.fingerprint(_files(config))
    elif data.source == "huggingface":
        inputs |= data.model_dump(include={"path", "name", "split", "data_files"})
        if data.path in DATASET_FORMATS:
            found = documents.local_files(documents.data_directory(), data.data_files)
            inputs["files"] = documents.fingerprint(found)
    return inputs


def _codec(tokenizer: ResolvedTokenizer, cache: RunCache) -> tuple[Tokenizer, int, int]:
    assert tokenizer.artifact is not None
    assert tokenizer.vocabulary is not None
    assert tokenizer.end_token_id is not None
    path = artifacts.verified(tokenizer.artifact, cache.artifacts)
    return tokens.load_tokenizer(path), tokenizer.vocabulary, tokenizer.end_token_id


def _stored_tokenizer(tokenizer: Tokenizer, config: RunConfig, cache: RunCache) -> ResolvedTokenizer:
    # A file may ask to cut or fill up what it encodes; documents are packed whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokens.end_token_id(tokenizer, config.tokenizer.end_token)
    artifact = artifacts.store(tokenizer.to_str(pretty=False).encode(), cache.artifacts)
    return ResolvedTokenizer(artifact=artifact, vocabulary=tokenizer.get_vocab_size(), end_token_id=end)


def _stored_validation(held: tokens.TokenArray, width: int, cache: RunCache) -> Artifact:
    if not len(held):
        raise TokensError(
            f"the documents held out for validation do not fill one sequence of {width} tokens: raise validation.share"
        )
    return artifacts.store(tokens.serialise(held), cache.artifacts)


def _from_hub(config: RunConfig, name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:
        raise OperatorError(
            f"{config.source}: tokenizer.hub = {name!r} cannot be fetched: check the name and this machine's "
            "connection, or give a tokenizer.json as tokenizer.file"
        ) from error


@contextmanager
def _as_operator_error(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except (TokensError, documents.DataError) as error:
        raise OperatorError(f"{config.source}: {error}") from error
