"""Text → tokens → packed sequences, and the file they travel in.

Shapes: `S` sequences, `T` tokens of a sequence. A file of packed tokens is safetensors with one tensor `tokens`
[S, T], uint16 where the vocabulary allows and uint32 otherwise: readable by anyone, memory-mapped, never unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from node.errors import AtollError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_HEADER_LIMIT_BYTES = 64 * 1024
_LENGTH = struct.Struct("<Q")
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
_BATCH_DOCUMENTS = 64
_HASH_BUCKETS = 1 << 32


class TokensError(AtollError):
    """Text, a tokenizer, or a file of tokens that cannot be used: one sentence."""


def train_tokenizer(documents: Iterable[str], *, vocabulary: int, end_token: str) -> Tokenizer:
    """Byte-level BPE: every text can be encoded and decoded exactly. The same text gives the same bytes.

    `end_token` has id 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises `TokensError`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise TokensError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error


def end_token_id(tokenizer: Tokenizer, end_token: str) -> int:
    """Raises `TokensError` when the tokenizer has no such token."""
    found: int | None = tokenizer.token_to_id(end_token)
    if found is None:
        raise TokensError(
            f"the tokenizer has no token {end_token!r}: set tokenizer.end_token to the one it ends texts with"
        )
    return found


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str], end: int) -> Iterator[list[int]]:
    """Token ids of each document, `end` appended. Batches, so that the library uses all cores."""
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH_DOCUMENTS:
            yield from _encode(tokenizer, batch, end)
            batch = []
    yield from _encode(tokenizer, batch, end)


def pack(documents: Iterable[Sequence[int]], *, sequence_tokens: int, vocabulary: int) -> TokenArray:
    """Documents one after another, cut into sequences [S, T]; the rest that fills none is left out.

    Raises `TokensError` for a token outside the vocabulary.
    """
    dtype = _DTYPES["U16" if vocabulary <= 1 << 16 else "U32"]
    pieces = [np.empty(0, dtype)]
    for document in documents:
        piece = np.asarray(document, dtype=np.int64)
        check_range(piece, vocabulary)
        pieces.append(piece.astype(dtype))
    flat = np.concatenate(pieces)
    sequences = len(flat) // sequence_tokens
    return flat[: sequences * sequence_tokens].reshape(sequences, sequence_tokens)


class Packer:
    """The same packing, one document at a time, for a stream: `add` documents, `take` sequences."""

    def __init__(self, sequence_tokens: int) -> None:
        self._sequence_tokens = sequence_tokens
        self._rest = np.empty(0, np.int64)
        self._ready: list[npt.NDArray[np.int64]] = []

    def add(self, document: Sequence[int]) -> None:
        flat = np.concatenate([self._rest, np.asarray(document, dtype=np.int64)])
        whole = len(flat) // self._sequence_tokens * self._sequence_tokens
        self._ready.extend(flat[:whole].reshape(-1, self._sequence_tokens))
        self._rest = flat[whole:].copy()

    def __len__(self) -> int:
        """Sequences that are ready."""
        return len(self._ready)

    def take(self, sequences: int) -> npt.NDArray[np.int64]:
        """The oldest ready sequences, int64 [`sequences`, T]."""
        taken, self._ready = self._ready[:sequences], self._ready[sequences:]
        assert len(taken) == sequences, "ask len() first"
        return np.stack(taken) if taken else np.empty((0, self._sequence_tokens), np.int64)


def held_out(document: str | Sequence[int], share: float) -> bool:
    """Whether a document belongs to validation: by the hash of its text (or tokens), so that every peer, reading the
    dataset in any order, leaves out the same ones."""
    if isinstance(document, str):
        data = document.encode("utf-8", "surrogatepass")
    else:
        data = np.asarray(document, dtype="<i8").tobytes()
    bucket = int.from_bytes(blake3(data).digest()[:4], "little")
    return bucket < share * _HASH_BUCKETS


def check_range(tokens: npt.NDArray[Any], vocabulary: int | None) -> None:
    """Raises `TokensError`: an embedding with a token outside its table fails far from the cause."""
    if vocabulary is None or not tokens.size:
        return
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocabulary:
            raise TokensError(f"a text has the token {token} and the model's vocabulary has {vocabulary}")


def serialise(tokens: TokenArray) -> bytes:
    """The file of packed tokens [S, T]."""
    from safetensors.numpy import save

    return save({"tokens": np.ascontiguousarray(tokens)})


def open_tokens(path: Path, *, sequence_tokens: int) -> TokenArray:
    """Map the file's tokens [S, `sequence_tokens`], read-only. Raises `TokensError` for anything but such a file.

    Parsed here: safetensors' own reader copies the slice of a memory map through Python bytes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
        if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size):
            raise TokensError(f"{path} is not a safetensors file of packed tokens")
        header = file.read(length)
    try:
        entry = json.loads(header)["tokens"]
        dtype = _DTYPES[entry["dtype"]]
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokensError(f"{path} has no tensor `tokens` of type U16 or U32") from error
    rows = shape[0] if len(shape) == 2 and isinstance(shape[0], int) else 0
    offset = _LENGTH.size + length
    if shape != (rows, sequence_tokens) or rows < 1 or start != 0 or stop != rows * sequence_tokens * dtype.itemsize:
        raise TokensError(f"{path} has tokens of shape {list(shape)} and the run's sequences have {sequence_tokens}")
    if offset + stop != size:
        raise TokensError(f"{path} has {size} bytes and its header says {offset + stop}")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(rows, sequence_tokens))


def _encode(tokenizer: Tokenizer, batch: list[str], end: int) -> Iterator[list[int]]:
    if batch:
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield [*encoding.ids, end]
