"""The engine `hivemind`, what of it needs no hivemind: where that is looked for, what it is told, who reduces what."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from run_samples import VALID

from node.engine.hivemind.averager.job import Job, Weights
from node.engine.hivemind.environment import VERSION, check_engine, why_missing
from node.engine.hivemind.words import Begin
from node.engines import LIMITS
from node.errors import OperatorError
from node.manifest_checks import ENGINES, rounds_problems
from protocol.names import digest
from protocol.planning import deal, flat_plan

ELEMENTS, PART, PIECE = 11 * 1024 + 256, 2048, 1024


def interpreter(folder: Path, answer: str) -> str:
    """Says what an interpreter says that is asked for hivemind's version."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def job(*, me: int = 1, peers: int = 3) -> Job:
    """As it arrives over the socket."""
    parts = -(-ELEMENTS // PART)
    plan = flat_plan(peers, (1 << peers) - 1)
    owners = tuple(plan.shards[shard].root for shard in deal(digest(b"base"), parts, plan))
    said = Begin(
        roster="ab" * 32,
        names=tuple(f"peer{index}" for index in range(peers)),
        me=me,
        owners=owners,
        weights=((owners.count(me), tuple(100.0 * (index + 1) for index in range(peers))),),
        largest=(1.0,) * peers,
        sender_timeout_s=10.0,
        deadline_s=60.0,
    )
    message = json.loads(msgspec.json.encode(said))
    assert message.pop("op") == "begin"
    return Job.of(message)


def test_an_interpreter_with_the_right_version_will_do(tmp_path: Path) -> None:
    assert why_missing(interpreter(tmp_path, f"echo {VERSION}")) is None


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("exit 1", "does not hold hivemind: install version"),
        ("echo 1.2.0", "holds hivemind 1.2.0: install version"),
    ],
)
def test_an_interpreter_without_it_is_named_with_the_fix(tmp_path: Path, answer: str, sentence: str) -> None:
    python = interpreter(tmp_path, answer)
    why = why_missing(python)
    assert why is not None
    assert f"the environment of {python} {sentence}" in why
    assert "`pip install 'atoll[hivemind]'`" in why
    assert "ATOLL_HIVEMIND_PYTHON" in why


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    why = why_missing(str(tmp_path / "nothing"))
    assert why is not None
    assert "which ATOLL_HIVEMIND_PYTHON names, cannot be asked for it (" in why


def test_a_run_that_needs_what_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "exit 1")
    check_engine(VALID, python)
    needs_it = msgspec.structs.replace(VALID, rounds=msgspec.structs.replace(VALID.rounds, engine="hivemind"))
    with pytest.raises(
        OperatorError, match=r"averages by hivemind \(rounds.engine\), and the environment of .* does not"
    ):
        check_engine(needs_it, python)


def test_hivemind_has_no_codec_of_four_bits() -> None:
    rounds = msgspec.structs.replace(VALID.rounds, engine="hivemind")
    assert list(rounds_problems(rounds)) == []
    (sentence,) = rounds_problems(msgspec.structs.replace(rounds, codec="int4"))
    assert "rounds.codec = 'int4' is not possible with rounds.engine = 'hivemind'" in sentence


def test_every_engine_says_what_it_cannot_hold() -> None:
    assert set(LIMITS) == set(ENGINES)
    assert not LIMITS["atoll"]
    assert {"stated-order", "audit", "bound-bytes"} == set(LIMITS["hivemind"])


def test_pieces_cover_the_vector_once_and_each_part_has_one_owner() -> None:
    pieces = job().pieces(ELEMENTS, PART, PIECE)
    assert sorted(value for piece in pieces for value in range(piece.start, piece.stop)) == list(range(ELEMENTS))
    assert [job().owners[piece.part] for piece in pieces] == sorted(job().owners[piece.part] for piece in pieces)
    assert sum(piece.is_last for piece in pieces) == len(job().owners)
    assert sum(job().shares(pieces)) == ELEMENTS


def test_what_is_mine_comes_in_the_order_of_parts() -> None:
    mine = job().mine(job().pieces(ELEMENTS, PART, PIECE))
    assert [piece.start for piece in mine] == sorted(piece.start for piece in mine)
    assert {piece.part for piece in mine} == {part for part, owner in enumerate(job().owners) if owner == 1}


def test_weights_are_those_of_the_roster_whatever_a_sender_claims() -> None:
    weights = Weights(job())
    my_parts = [part for part, owner in enumerate(job().owners) if owner == 1]
    assert {weights.of(part, 2) for part in my_parts} == {300.0}
