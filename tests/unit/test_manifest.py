"""The manifest as a stranger may send it: canonical, signed, and bounded in every value."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from run_samples import CREATOR, LAYOUT, OTHER, VALID, sign, verify

from node import __version__
from node.manifest import (
    MAX_MANIFEST_BYTES,
    UNBOUNDED_EPOCH_UNITS,
    Artifact,
    Data,
    Manifest,
    ManifestError,
    SignedManifest,
    decode,
    decode_signed,
    flat_layout,
    rules_of,
    signing_bytes,
    validate,
)
from protocol.rules import Quorum

HUB = Data(
    kind="huggingface",
    sequence_tokens=16,
    unit_sequences=4,
    units=0,
    path="owner/dataset",
    split="train",
    text_field="text",
    end_token_id=0,
)


def replaced(section: str, **values: object) -> Manifest:
    if section == "":
        return msgspec.structs.replace(VALID, **values)
    return msgspec.structs.replace(VALID, **{section: msgspec.structs.replace(getattr(VALID, section), **values)})


def test_decoding_gives_back_what_was_encoded() -> None:
    body = VALID.canonical()
    assert decode(body) == VALID
    assert decode(body).run_id() == VALID.run_id() == SignedManifest(body=body, signature=b"").run_id
    assert flat_layout(VALID.layout) == LAYOUT


def test_every_value_changes_the_run_id() -> None:
    changed = [replaced("limits", min_peers=2), replaced("", creator=OTHER), replaced("inner", lr=2e-3)]
    assert len({VALID.run_id(), *(manifest.run_id() for manifest in changed)}) == 4


def test_a_run_without_bounds_of_steps_is_written_as_before_there_were_any() -> None:
    assert b"steps_" not in VALID.canonical()
    assert VALID.rounds.step_bounds == (5, 5)
    bounded = msgspec.structs.replace(VALID, rounds=msgspec.structs.replace(VALID.rounds, steps_least=2, steps_most=9))
    assert decode(bounded.canonical()).rounds.step_bounds == (2, 9)


def test_bytes_that_are_not_canonical_are_refused() -> None:
    # The same run under a second id.
    spaced = json.dumps(json.loads(VALID.canonical())).encode()
    with pytest.raises(ManifestError, match="not canonical"):
        decode(spaced)
    backwards = replaced("", artifacts=dict(sorted(VALID.artifacts.items(), reverse=True)))
    unordered = msgspec.json.encode(backwards)
    assert unordered != backwards.canonical() == VALID.canonical()
    with pytest.raises(ManifestError, match="not canonical"):
        decode(unordered)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff", b"[" * 100_000, b'{"format":' + b"9" * 5000 + b"}", b" " * (MAX_MANIFEST_BYTES + 1)],
    ids=["empty", "no keys", "no text", "deep", "long number", "long"],
)
def test_other_bytes_are_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(data)
    assert "\n" not in str(caught.value)


def test_unknown_keys_are_refused() -> None:
    values = json.loads(VALID.canonical())
    values["inner"]["learning_rate"] = 1
    with pytest.raises(ManifestError, match="learning_rate"):
        decode(msgspec.json.encode(values))


def test_the_creators_signature() -> None:
    body = VALID.canonical()
    signed = SignedManifest(body=body, signature=sign(signing_bytes(body)))
    assert decode_signed(signed.encode(), verify) == (signed, VALID)
    forged = SignedManifest(body=body, signature=sign(body))
    with pytest.raises(ManifestError, match=f"not that of its creator {CREATOR}"):
        decode_signed(forged.encode(), verify)
    other = replaced("", creator=OTHER).canonical()
    with pytest.raises(ManifestError, match="signature"):
        decode_signed(SignedManifest(body=other, signature=sign(signing_bytes(other))).encode(), verify)
    for data in (b"", b"\x80", signed.encode()[:-1], signed.encode() + b"\0", bytes(MAX_MANIFEST_BYTES + 2000)):
        with pytest.raises(ManifestError):
            decode_signed(data, verify)


LAYOUT_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"elements": LAYOUT.elements + 1}, "not a multiple of 256"),
    ({"elements": LAYOUT.elements + 256}, "the layout's tensors end at"),
    ({"elements": 1 << 39}, "the limit is"),
    ({"buffer_elements": LAYOUT.elements + 256}, "beyond its segment's end"),
    ({"buffers": ()}, "the layout's tensors end at"),
    ({"parameters": VALID.layout.parameters[::-1]}, "and should be at 0"),
    ({"parameters": VALID.layout.parameters * 2}, "names a tensor twice"),
    (
        {"parameters": (msgspec.structs.replace(VALID.layout.parameters[0], shape=(1 << 200, 0)),)},
        "has a dimension over",
    ),
    ({"parameters": (msgspec.structs.replace(VALID.layout.parameters[0], shape=(1,) * 17),)}, "has 17 dimensions"),
    ({"parameters": (msgspec.structs.replace(VALID.layout.parameters[0], name=""),)}, "name is empty"),
]
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("", {"format": 2}, "has format 2"),
    ("", {"version": "0.0.9"}, f"was made by Atoll 0.0.9 and this is {__version__}: install atoll 0.0"),
    ("", {"name": "a\nb"}, "printable"),
    ("", {"creator": "somebody"}, "'somebody' is not a peer id"),
    ("", {"initial_state": "missing"}, "'missing', which the manifest does not have"),
    ("", {"artifacts": {**VALID.artifacts, "../x": VALID.artifacts["tokens"]}}, "'../x' is not lower-case"),
    ("", {"artifacts": {**VALID.artifacts, "tokenizer": Artifact(hash="11" * 32, length=1 << 30)}}, "should have 1 to"),
    ("", {"artifacts": {**VALID.artifacts, "initial-state": Artifact(hash="11" * 32, length=9)}}, "has 9 bytes"),
    ("", {"artifacts": {f"a{n}": VALID.artifacts["tokens"] for n in range(65)}}, "names 65 artifacts"),
    ("model", {"architecture": None}, "either model.architecture or model.function"),
    ("model", {"function": "a:b"}, "either model.architecture or model.function"),
    ("model", {"architecture": "os.system"}, "is not a class name"),
    ("model", {"architecture": None, "function": "a b:c"}, "'module:function'"),
    ("model", {"config": {"auto_map": {"AutoModel": "x.y"}}}, "model.config.auto_map may not be set"),
    ("model", {"config": {"_attn_implementation": "who/kernel"}}, "_attn_implementation may not be set"),
    ("model", {"config": {"text_config": {"attn_implementation": "who/kernel"}}}, "text_config.attn_implementation"),
    ("model", {"config": {"num_hidden_layers": 1 << 40}}, "more than the layout's 2 tensors"),
    ("data", {"kind": "pickle"}, "data.kind = 'pickle' is unknown"),
    ("data", {"artifact": None}, "needs data.artifact"),
    ("data", {"units": 0}, "do not fill one unit"),
    ("data", {"units": 1 << 50}, "data.units"),
    ("data", {"sequence_tokens": 1 << 30}, "data.sequence_tokens"),
    ("data", {"unit_sequences": 1 << 30}, "data.unit_sequences"),
    ("validation", {"sequences": 1 << 40}, "validation.sequences"),
    ("inner", {"beta1": 1.0}, "inner.beta1 = 1 is not in"),
    ("inner", {"schedule": "step"}, "inner.schedule = 'step' is unknown: choose 'cosine', 'linear', 'constant'"),
    ("inner", {"total_steps": 0}, "leaves no room"),
    ("inner", {"micro_batch_sequences": 3}, "does not divide"),
    ("inner", {"autocast": "int8"}, "inner.autocast"),
    ("outer", {"momentum": -0.5}, "outer.momentum"),
    ("outer", {"lr": ((2, 0.4),)}, "begin at 1"),
    ("outer", {"lr": ((1, 0.4), (8, 0.5), (2, 0.6))}, "begin at 1 and ascend"),
    ("outer", {"lr": ()}, "begin at 1"),
    ("outer", {"lr": ((1, 1e9),)}, "over 10"),
    ("rounds", {"part_elements": 500}, "rounds.part_elements = 500 is not a multiple of 256: set for example 512"),
    ("rounds", {"steps_least": 6}, "rounds.steps_least = 6 is above rounds.steps = 5"),
    ("rounds", {"steps_most": 4}, "rounds.steps_most = 4 is below rounds.steps = 5"),
    ("rounds", {"steps_most": 10**6}, "a round trains on"),
    ("rounds", {"codec": "zip"}, "rounds.codec = 'zip' is unknown"),
    ("rounds", {"sum_codec": "zip"}, "rounds.sum_codec = 'zip' is unknown"),
    ("rounds", {"engine": "magic"}, "rounds.engine = 'magic' is unknown"),
    ("rounds", {"fragments": 2}, "rounds.fragments = 2 is not possible"),
    ("rounds", {"overlap": 1}, "rounds.overlap = 1 is not possible"),
    ("admission", {"join": "closed"}, "admission.join = 'closed' is unknown"),
    ("admission", {"quorum": "one"}, "admission.quorum = 'one' is unknown"),
    ("admission", {"founders": (CREATOR, CREATOR)}, "names a peer twice"),
    ("admission", {"founders": ("x",)}, "'x', which is not a peer id"),
    ("admission", {"peers": (OTHER,)}, "only for admission.join = 'list'"),
    ("end", {"rounds": 1 << 50}, "beyond any run"),
    ("limits", {"heartbeat_timeout_s": 1.0}, "too short beside limits.heartbeat_s = 1: set at least 2 seconds"),
    ("limits", {"fork_timeout_s": 5.0}, "limits.fork_timeout_s = 5 is too short beside"),
    ("limits", {"attempt_timeout_max_s": 5.0}, "limits.attempt_timeout_max_s = 5 is too short"),
    ("limits", {"level_min_s": 400.0}, "limits.level_max_s = 300 is too short"),
    ("limits", {"ready_max_s": 1e9}, "is over a day"),
    ("limits", {"heartbeat_s": 0.001}, "would flood"),
    ("limits", {"weight_cap_ratio": 0.5}, "would shut out"),
    ("limits", {"max_electors": 65}, "set at most 64"),
    ("limits", {"keep_rounds": 5}, "would drop rounds"),
    ("limits", {"lease_units": 4}, "holds 16 sequences and a round trains on 20: set at least 5"),
    *(("layout", values, sentence) for values, sentence in LAYOUT_CHANGES),
]


@pytest.mark.parametrize(("section", "values", "sentence"), CHANGES)
def test_each_bound_is_one_sentence(section: str, values: dict[str, Any], sentence: str) -> None:
    manifest = replaced(section, **values)
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    with pytest.raises(ManifestError):
        decode(manifest.canonical())


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, None),
        ({"path": "json", "data_files": ("a/*.jsonl",)}, None),
        ({"path": "json"}, "give a hub dataset, or 'json'"),
        ({"path": "/etc/passwd"}, "is not the name of a dataset"),
        ({"path": "../private"}, "is not the name of a dataset"),
        ({"path": "json", "data_files": ("/etc/*",)}, "name files relative to the dataset"),
        ({"path": "json", "data_files": ("a/../../b",)}, "name files relative to the dataset"),
        ({"path": "json", "data_files": ("https://example.org/x",)}, "name files relative to the dataset"),
        ({"path": "json", "data_files": ("~/x",)}, "name files relative to the dataset"),
        ({"units": 7}, "data.units = 7 is not known"),
        ({"end_token_id": None}, "needs data.end_token_id"),
        ({"kind": "function"}, "data.function = None"),
    ],
)
def test_data_that_peers_fetch_themselves(values: dict[str, Any], sentence: str | None) -> None:
    manifest = replaced("", data=msgspec.structs.replace(HUB, **values))
    if sentence is None:
        assert decode(manifest.canonical()) == manifest
    else:
        with pytest.raises(ManifestError) as caught:
            validate(manifest)
        assert sentence in str(caught.value)


def test_rules() -> None:
    rules = rules_of(VALID)
    assert rules.run == VALID.run_id()
    assert rules.founders == (CREATOR,)
    assert rules.allowed_peers is None
    assert rules.quorum is Quorum.TWO_THIRDS
    assert rules.initial_state_hash == b"\xab" * 32
    assert (rules.elements, rules.buffer_elements) == (LAYOUT.elements, LAYOUT.buffer_elements)
    assert rules.part_count == -(-LAYOUT.elements // 512)
    assert (rules.epoch_units, rules.unit_tokens, rules.lease_cap_units) == (10, 64, 16)
    assert (rules.final_round, rules.final_tokens) == (20, None)
    for name in VALID.limits.__struct_fields__:
        if hasattr(rules, name):
            assert getattr(rules, name) == getattr(VALID.limits, name), name
    closed = replaced("admission", join="list", peers=(OTHER,), quorum="majority")
    assert rules_of(closed).allowed_peers == tuple(sorted((CREATOR, OTHER)))
    assert rules_of(replaced("", data=HUB)).epoch_units == UNBOUNDED_EPOCH_UNITS
    assert (VALID.data.assignment, HUB.assignment) == ("leased", "local")
    assert rules_of(replaced("end", rounds=0)).final_round is None


@pytest.mark.slow
def test_random_changes_are_refused_or_valid_but_never_anything_else() -> None:
    """Whatever a stranger puts where, the answer is a manifest or a `ManifestError`."""
    draw = random.Random(7)
    original, accepted = json.loads(VALID.canonical()), 0
    sentences: list[str] = []
    odd = [
        None,
        True,
        -1,
        0,
        1 << 63,
        1 << 64,
        10**40,
        0.5,
        -1e308,
        1e308,
        "",
        "x" * 5000,
        "\ud7ff",
        [],
        {},
        [[]],
        [1, "a"],
    ]
    for _ in range(3000):
        values = json.loads(json.dumps(original))
        for _ in range(draw.choice((1, 1, 2, 4))):
            _put(values, draw, copy.deepcopy(draw.choice(odd)))
        try:
            manifest = decode(msgspec.json.encode(values))
        except ManifestError as error:
            sentences.append(str(error))
        else:
            accepted += 1
            rules_of(manifest)
            flat_layout(manifest.layout).digest()
    assert 0 < accepted < 1500
    assert not any("\n" in sentence for sentence in sentences)


def _put(values: dict[str, Any], draw: random.Random, value: object) -> None:
    inside: Any = values
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(inside[key], dict | list) or draw.random() < 0.2:
            inside[key] = value
            return
        inside = inside[key]


@pytest.mark.slow
def test_reading_a_manifest_is_light() -> None:
    program = (
        "import sys, node.manifest, node.manifest_checks;"
        "print([name for name in ('torch', 'pydantic', 'transformers', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
