"""`scripts/compare`: what members trained on is read from the chain, and repeated with the swarm's own arithmetic."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from chain_samples import make_rules, next_hash, peers, plain_commit
from rich.console import Console
from run_samples import VALID

from node.daemon.chain_log import FrameKind
from node.daemon.store import Record
from node.manifest import Data, Inner, Rounds, rules_of
from node.trainer.lease_cursor import Stretch
from node.trainer.wire import Lease
from protocol.chain import genesis, next_state
from protocol.wire import encode_commit
from scripts.comparison import report
from scripts.comparison.command import parsed
from scripts.comparison.report import CODED, DILOCO, NARROW, SWARM, WIDE, Comparison, Series
from scripts.comparison.training import CodedOuter, PaperOuter, take_over
from scripts.comparison.work import (
    MemberRound,
    NotComparable,
    Round,
    read_rounds,
    sequences_of,
    trained_tokens,
    with_batches,
)
from tests import reference

T, UNIT, BATCH, STEPS = 16, 4, 3, 5
"""Tokens of a sequence, sequences of a unit and of a batch, steps of a round."""
BUDGET = T * BATCH * STEPS


MANIFEST = msgspec.structs.replace(
    VALID,
    layout=msgspec.structs.replace(VALID.layout, buffer_elements=0),
    data=Data(kind="tokens", sequence_tokens=T, unit_sequences=UNIT, units=100, artifact="tokens"),
    inner=Inner(lr=1e-3, total_steps=100, batch_sequences=BATCH),
    rounds=Rounds(steps=STEPS, part_elements=512),
)
RULES = rules_of(MANIFEST)
PARTS = RULES.part_count
ALL, NONE = (True,) * PARTS, (False,) * PARTS


def a_member(
    tokens: int | None, counted: tuple[bool, ...] = ALL, *, peer: str = "a", lease: tuple[Lease, ...] = ()
) -> MemberRound:
    """`tokens`: what its READY claims for every part; None: no contribution."""
    claimed = () if tokens is None else ((PARTS, tokens),)
    weights = (tokens or 0,) * PARTS
    return MemberRound(peer=peer, lease=lease, claimed=claimed, weights=weights, counted=counted)


def a_round(number: int, *members: MemberRound, held: tuple[bool, ...] = ALL, outer_lr: float = 0.6) -> Round:
    return Round(number=number, outer_lr=outer_lr, held=held, members=members, tokens_total=0, state_hash="00")


# ---------------------------------------------------------------- what the chain says


def test_rounds_are_read_from_the_chain() -> None:
    founders = peers(3)
    rules = make_rules(founders)
    state, records, hashes = genesis(rules), [], {}
    leases = []
    for number in range(3):
        commit = plain_commit(state, rules)
        hashes[number + 1] = next_hash(state)
        records.append(Record(kind=FrameKind.COMMIT, round=number, body=encode_commit(commit)))
        leases.append({peer: entry.lease for peer, entry in state.members})
        state = next_state(state, rules, commit, hashes[number + 1])
    rounds = read_rounds(rules, records, hashes)
    assert [one.number for one in rounds] == [0, 1, 2]
    assert rounds[-1].tokens_total == state.tokens_total > 0
    assert rounds[-1].state_hash == state.base.state_hash.hex()
    for one in rounds:
        assert one.outer_lr == rules.outer_lr_for(3)
        assert one.held == (True,) * rules.part_count
        assert one.contributors == 3
        assert [member.peer for member in one.members] == sorted(founders)
        for member in one.members:
            assert member.weights == (400,) * rules.part_count
            held = leases[one.number][member.peer]
            assert member.lease == tuple(Lease(epoch=item.epoch, start=item.start, stop=item.stop) for item in held)


def test_a_reformed_run_is_refused() -> None:
    with pytest.raises(NotComparable, match="reformed in round 2"):
        read_rounds(RULES, [Record(kind=FrameKind.REFORM, round=2, body=b"")], {})


def test_new_tokens_are_the_claim_less_what_was_carried() -> None:
    half = (True,) * (PARTS // 2) + (False,) * (PARTS - PARTS // 2)
    partly = MemberRound(
        peer="a",
        lease=(),
        claimed=((PARTS // 2, 100), (PARTS - PARTS // 2, 180)),
        weights=(1,) * PARTS,
        counted=ALL,
    )
    mine = [(0, a_member(80, half)), (1, partly), (2, a_member(60, NONE)), (3, a_member(160))]
    assert trained_tokens(MANIFEST, RULES, mine) == ({0: 80, 1: 100, 2: 60, 3: 100}, set())


def test_work_that_came_too_late_is_found_in_the_next_claim() -> None:
    mine = [(0, a_member(None, NONE)), (1, a_member(BUDGET + 2 * T)), (2, a_member(None, NONE)), (3, a_member(BUDGET))]
    assert trained_tokens(MANIFEST, RULES, mine) == ({0: 2 * T, 1: BUDGET, 2: 0, 3: BUDGET}, {0, 2})


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ([(100, NONE), (60, ALL)], "work was discarded there"),
        ([(BUDGET + 1, ALL)], "1 tokens more than its budgets allow"),
        ([(T + 1, ALL)], "not on whole sequences"),
    ],
)
def test_claims_that_cannot_be_repeated_are_refused(claims: list[tuple[int, tuple[bool, ...]]], why: str) -> None:
    lease = (Lease(epoch=0, start=0, stop=50),)
    rounds = [
        a_round(number, a_member(tokens, counted, lease=lease)) for number, (tokens, counted) in enumerate(claims)
    ]
    with pytest.raises(NotComparable, match=why):
        with_batches(MANIFEST, RULES, rounds)


def test_batches_follow_the_lease_from_round_to_round() -> None:
    """A unit in the middle is finished in the next round; the last batch of a lease, or of a cut round, is smaller."""
    rounds = [
        a_round(0, a_member(BUDGET - T, lease=(Lease(epoch=0, start=0, stop=5),))),
        a_round(1, a_member(6 * T, lease=(Lease(epoch=0, start=3, stop=5), Lease(epoch=0, start=9, stop=10)))),
    ]
    work = with_batches(MANIFEST, RULES, rounds)
    first, second = (one.members[0].batches for one in work.rounds)
    assert [sequences_of(batch) for batch in first] == [3, 3, 3, 3, 2]
    assert first[1] == (
        Stretch(epoch=0, unit=0, start=3, stop=4),
        Stretch(epoch=0, unit=1, start=0, stop=2),
    )
    assert [sequences_of(batch) for batch in second] == [3, 3]
    assert second[0] == (Stretch(epoch=0, unit=3, start=2, stop=4), Stretch(epoch=0, unit=4, start=0, stop=1))
    assert work.tokens == BUDGET - T + 6 * T
    assert work.guessed_rounds == ()
    with pytest.raises(NotComparable, match="beyond its lease"):
        with_batches(MANIFEST, RULES, [a_round(0, a_member(BUDGET, lease=(Lease(epoch=0, start=0, stop=2),)))])


# ---------------------------------------------------------------- the outer step


def outer_rounds() -> list[tuple[Round, dict[str, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(3)
    last_empty = (*ALL[:-1], False)
    rounds = []
    for number, held in enumerate((ALL, last_empty, ALL)):
        members = (a_member(100, held, peer="a"), a_member(300, held, peer="b"))
        deltas = {peer: torch.randn(RULES.elements, generator=draw) for peer in "ab"}
        rounds.append((a_round(number, *members, held=held, outer_lr=0.6 - number / 10), deltas))
    return rounds


def expected_state(codec: str) -> np.ndarray:
    """By the reference that was written from the design alone."""
    theta = np.ones(RULES.elements, np.float32)
    momentum = np.zeros(RULES.elements, np.float32)
    for one, deltas in outer_rounds():
        after, moved = reference.flat_round(
            theta,
            momentum,
            [delta.numpy() for delta in deltas.values()],
            [[100] * PARTS, [300] * PARTS],
            codec=codec,
            part_elements=RULES.part_elements,
            lr=one.outer_lr,
            factor=RULES.momentum,
        )
        for part, held in enumerate(one.held):
            here = slice(*RULES.part_range(part))
            if held:
                theta[here], momentum[here] = after[here], moved[here]
    return theta


def test_the_paper_s_outer_optimizer_agrees_with_the_design_s() -> None:
    outer = PaperOuter(MANIFEST, torch.ones(RULES.elements))
    for one, deltas in outer_rounds():
        outer.step(one, deltas)
    np.testing.assert_allclose(outer.theta_n.numpy(), expected_state("fp32"), rtol=0, atol=2e-5)


def test_the_coded_outer_step_is_the_swarm_s_bit_for_bit() -> None:
    outer = CodedOuter(MANIFEST, torch.ones(RULES.elements))
    for one, deltas in outer_rounds():
        outer.step(one, deltas)
    assert outer.theta_n.numpy().tobytes() == expected_state("int8").tobytes()


def test_counted_work_leaves_the_local_model_and_the_rest_stays() -> None:
    before, after = torch.zeros(RULES.elements), torch.full((RULES.elements,), 2.0)
    local = torch.full((RULES.elements,), 5.0)
    take_over(local, before, after, a_member(100, (True, *NONE[1:])), RULES.part_elements)
    assert local[: RULES.part_elements].eq(2.0).all()
    assert local[RULES.part_elements :].eq(7.0).all()


# ---------------------------------------------------------------- the report


def a_comparison(swarm: float = 4.0, **more: object) -> Comparison:
    finals = {SWARM: swarm, DILOCO: 4.0, CODED: swarm, WIDE: 3.9, NARROW: 3.5}
    values: dict[str, object] = {
        "date": "2030-01-01 00:00 UTC",
        "machine": "2 cores",
        "command": "scripts/compare",
        "run_name": "sample",
        "run_id": "ab" * 32,
        "parameters": 1_000_000,
        "nodes": 4,
        "rounds": 2,
        "steps_per_round": 50,
        "seed": 1,
        "tokens": 2000,
        "contributors": (3, 4),
        "guessed_rounds": (),
        "series": tuple(
            Series(
                name=name,
                tokens=(0, 1000, 2000),
                losses=(6.0, 5.0, final),
                inner_steps=100,
                batch_sequences=8,
                seconds=1.0,
            )
            for name, final in finals.items()
        ),
        "difference_percent": report.percent(swarm, 4.0),
        "codec_difference_percent": 0.0,
        "identical_states": True,
        "gap_to_adamw_percent": report.percent(swarm, 3.9),
        "gap_to_narrow_adamw_percent": report.percent(swarm, 3.5),
    }
    return Comparison(**{**values, **more})  # type: ignore[arg-type]


def shown(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=100)
    report.show(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_half_a_percent_decides() -> None:
    good, high, low = a_comparison(4.0199), a_comparison(4.0201), a_comparison(3.9799)
    assert (good.ok, high.ok, low.ok) == (True, False, False)
    assert "+0.497 %, within 0.5 %" in shown(good)
    assert "BEYOND" in shown(high)


def test_the_report_says_what_was_not_as_planned() -> None:
    text = shown(a_comparison(identical_states=False, different_rounds=(3, 4), guessed_rounds=(1,), seed=None))
    assert "not the same bits after rounds 3, 4" in text
    assert "contributors by round: (3, 4)" in text
    assert "rounds (1,) are inferred" in text
    assert "seed" not in text
    assert "seed 1" in shown(a_comparison())


@pytest.mark.slow
def test_what_is_written(tmp_path: Path) -> None:
    comparison = a_comparison()
    report.write(comparison, tmp_path / "out")
    read = msgspec.json.decode((tmp_path / "out" / "compare.json").read_bytes(), type=Comparison)
    assert read == comparison
    picture = (tmp_path / "out" / "compare.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 100_000


def test_options() -> None:
    options = parsed([])
    assert (options.preset, options.nodes, options.steps, options.seed) == ("tiny", 4, 50, 1)
    assert options.threads >= 1
    quick = parsed(["--quick"])
    assert (quick.preset, quick.codec, quick.threads) == ("micro", True, 1)
    assert parsed(["--swarm", "somewhere"]).seed is None
    with pytest.raises(SystemExit):
        parsed(["--rounds", "0"])
