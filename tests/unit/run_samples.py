"""A run that is created in about a second from text made here, for the tests of what a run is."""

from __future__ import annotations

import os
import random
from pathlib import Path

# Before `datasets` is imported: nothing in these tests may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"

from node import __version__, run_config, run_create
from node.manifest import (
    Admission,
    Artifact,
    Data,
    End,
    Inner,
    Limits,
    Manifest,
    Model,
    Outer,
    Rounds,
    SignedManifest,
    Validation,
    decode,
    stored_layout,
)
from node.run_config import RunConfig
from protocol.layout import build_layout

CREATOR = "12D3KooWGjMCSkT8cRhGvRVGWBBMcnHkqQBqzoBnGVTMNgUHSeDh"
OTHER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"

_WORDS = (
    "the a of and to in nation people law peace war year state house power public great union right duty hand land "
    "sea trade treasury army navy debt tax road river harbour school labour farm mill ship court justice liberty"
)

RUN = """
name = "sample"

[model]
architecture = "LlamaForCausalLM"
seed = 1

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64
tie_word_embeddings = true

[tokenizer]
source = "train"
vocabulary = 300

[data]
source = "files"
files = ["corpus/*.txt"]
sequence_tokens = 16
unit_sequences = 4

[validation]
sequences = 8
share = 0.1

[inner]
lr = 1e-3
warmup_steps = 2
batch_sequences = 4

[rounds]
steps = 5
part_elements = 512

[end]
rounds = 4
"""


LAYOUT = build_layout([("embedding", (300, 16)), ("head.weight", (7, 5))], [("norm.mean", (16,))])
VALID = Manifest(
    format=1,
    name="sample",
    version=__version__,
    creator=CREATOR,
    model=Model(
        architecture="LlamaForCausalLM", config={"hidden_size": 16, "num_hidden_layers": 2, "rope": {"theta": 1}}
    ),
    layout=stored_layout(LAYOUT),
    tokenizer="tokenizer",
    data=Data(kind="tokens", sequence_tokens=16, unit_sequences=4, units=10, artifact="tokens"),
    validation=Validation(artifact="validation", sequences=4),
    inner=Inner(lr=1e-3, total_steps=100, batch_sequences=4),
    outer=Outer(),
    rounds=Rounds(steps=5, part_elements=512),
    admission=Admission(),
    end=End(rounds=20),
    limits=Limits(),
    initial_state="initial-state",
    initial_state_hash="ab" * 32,
    artifacts={
        "initial-state": Artifact(hash="00" * 32, length=4 * LAYOUT.elements + 80),
        "tokenizer": Artifact(hash="11" * 32, length=1000),
        "tokens": Artifact(hash="22" * 32, length=1360),
        "validation": Artifact(hash="33" * 32, length=200),
    },
)


def text(seed: int, words: int = 120) -> str:
    """Prose of a kind, the same for the same seed."""
    draw, vocabulary = random.Random(seed), _WORDS.split()
    return " ".join(draw.choice(vocabulary) for _ in range(words)) + ".\n"


def write_run(folder: Path, *, documents: int = 30, definition: str = RUN) -> Path:
    """A TOML and the text it names, in `folder`."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        (corpus / f"{index:03}.txt").write_text(text(index), encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(definition, encoding="utf-8")
    return path


def sign(message: bytes) -> bytes:
    return b"signed:" + message


def verify(signer: str, message: bytes, signature: bytes) -> bool:
    return signer == CREATOR and signature == sign(message)


class Created:
    """A created run with its folders."""

    def __init__(self, folder: Path, config: RunConfig, **arguments: object) -> None:
        self.artifacts = folder / "artifacts"
        self.cache = folder / "cache"
        self.told: list[str] = []
        self.signed: SignedManifest = run_create.create(
            config,
            identity_sign=sign,
            creator=CREATOR,
            artifacts_directory=self.artifacts,
            cache=self.cache,
            report=self.told.append,
            **arguments,  # type: ignore[arg-type]
        )
        self.manifest: Manifest = decode(self.signed.body)


def created(folder: Path, **arguments: object) -> Created:
    return Created(folder, run_config.load(write_run(folder)), **arguments)
