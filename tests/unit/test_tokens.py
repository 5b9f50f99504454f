"""Text to tokens to packed sequences, and the file that they travel in."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from run_samples import text

from node.trainer import tokens
from node.trainer.tokens import Packer, TokensError

DOCUMENTS = [text(seed) for seed in range(12)]


def test_a_trained_tokenizer_is_reproducible_and_loses_nothing(tmp_path: Path) -> None:
    tokenizer = tokens.train_tokenizer(DOCUMENTS, vocabulary=300, end_token="<end>")
    again = tokens.train_tokenizer(DOCUMENTS, vocabulary=300, end_token="<end>")
    assert tokenizer.to_str() == again.to_str()
    assert tokenizer.get_vocab_size() == 300
    assert tokens.end_token_id(tokenizer, "<end>") == 0
    for sample in (DOCUMENTS[0], "Größe 中文 \N{PILE OF POO}\t\n"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    assert tokens.load_tokenizer(path).to_str() == tokenizer.to_str()
    with pytest.raises(TokensError, match=r"no token '</s>': set tokenizer\.end_token"):
        tokens.end_token_id(tokenizer, "</s>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokensError, match=r"tokenizer\.json is not a tokenizer"):
        tokens.load_tokenizer(path)


def test_documents_end_with_the_end_token_in_order() -> None:
    tokenizer = tokens.train_tokenizer(DOCUMENTS, vocabulary=300, end_token="<end>")
    many = [DOCUMENTS[index % 12] for index in range(150)]
    encoded = list(tokens.encode_documents(tokenizer, many, 0))
    assert [ids[-1] for ids in encoded] == [0] * 150
    assert [tokenizer.decode(ids[:-1]) for ids in encoded] == many
    assert list(tokens.encode_documents(tokenizer, [], 0)) == []


def test_packing_cuts_the_stream_of_tokens() -> None:
    packed = tokens.pack([[1, 2, 3], [4], [], [5, 6, 7, 8, 9]], sequence_tokens=4, vocabulary=10)
    assert packed.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert packed.dtype == np.uint16
    assert tokens.pack([[70_000]], sequence_tokens=1, vocabulary=1 << 17).dtype == np.uint32
    assert tokens.pack([], sequence_tokens=4, vocabulary=10).shape == (0, 4)
    with pytest.raises(TokensError, match="token 10 and the model's vocabulary has 10"):
        tokens.pack([[10]], sequence_tokens=1, vocabulary=10)
    with pytest.raises(TokensError, match="a text has the token -1"):
        tokens.pack([[3], [-1]], sequence_tokens=1, vocabulary=10)


def test_the_streaming_packer_packs_alike() -> None:
    rows = [list(range(start, start + length)) for start, length in ((0, 7), (10, 1), (20, 0), (30, 22), (60, 3))]
    packer, taken = Packer(5), []
    for row in rows:
        packer.add(row)
        while len(packer) >= 2:
            taken.append(packer.take(2))
    taken.append(packer.take(len(packer)))
    assert np.concatenate(taken).tolist() == tokens.pack(rows, sequence_tokens=5, vocabulary=100).tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_file_of_tokens_comes_back_mapped(tmp_path: Path, dtype: type) -> None:
    packed = np.arange(24, dtype=dtype).reshape(6, 4)
    path = tmp_path / "tokens"
    path.write_bytes(tokens.serialise(packed))
    mapped = tokens.open_tokens(path, sequence_tokens=4)
    assert isinstance(mapped, np.memmap)
    assert not mapped.flags.writeable
    assert mapped.dtype == dtype
    assert mapped.tolist() == packed.tolist()


def safetensors(header: object, body: bytes = bytes(16)) -> bytes:
    encoded = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(encoded)) + encoded + body


TOKENS = {"dtype": "U16", "shape": [2, 4], "data_offsets": [0, 16]}


def test_the_refused_files_would_be_good_without_their_fault(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(safetensors({"tokens": TOKENS}))
    assert tokens.open_tokens(path, sequence_tokens=4).shape == (2, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04cos\nsystem",
        struct.pack("<Q", 1 << 62) + bytes(100),
        safetensors(b"no json"),
        safetensors(b"[" * 50_000),
        safetensors({"theta": TOKENS}),
        safetensors({"tokens": {**TOKENS, "dtype": "F32"}}),
        safetensors({"tokens": {**TOKENS, "shape": [4, 2]}}),
        safetensors({"tokens": {**TOKENS, "shape": [2, 4, 1]}}),
        safetensors({"tokens": {**TOKENS, "shape": [-2, -4]}}),
        safetensors({"tokens": {**TOKENS, "shape": ["2", 4]}}),
        safetensors({"tokens": {**TOKENS, "shape": [0, 4], "data_offsets": [0, 0]}}, b""),
        safetensors({"tokens": {**TOKENS, "data_offsets": [0, 1 << 40]}}),
        safetensors({"tokens": {**TOKENS, "data_offsets": 3}}),
        safetensors({"tokens": {**TOKENS, "shape": [1 << 40, 4], "data_offsets": [0, 1 << 43]}}),
        safetensors({"tokens": TOKENS}, bytes(15)),
        safetensors({"tokens": TOKENS}, bytes(17)),
    ],
)
def test_a_strangers_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(data)
    with pytest.raises(TokensError):
        tokens.open_tokens(path, sequence_tokens=4)


def test_held_out_documents_depend_on_their_content_alone() -> None:
    texts = [text(seed, words=5) for seed in range(2000)]
    chosen = [one for one in texts if tokens.held_out(one, 0.1)]
    assert 140 < len(chosen) < 260
    assert all(tokens.held_out(one, 0.2) for one in chosen)
    assert tokens.held_out([1, 2, 3], 0.5) == tokens.held_out((1, 2, 3), 0.5)
    assert tokens.held_out("lone \udc80 surrogate", 1.0)
