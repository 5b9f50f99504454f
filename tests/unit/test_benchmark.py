"""`scripts/bench_round`: the link's limit, the plans' bytes, and a judge that takes no wrong mean for a right one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from node.errors import OperatorError
from protocol.codecs import codec
from protocol.sums import PartSum
from scripts.benchmark import accounts, command, lab, report
from scripts.benchmark.bounds import BOUNDS, Bound, bound_of
from scripts.benchmark.contestant import EXCHANGE, RoundFailed, at_once
from scripts.benchmark.lab import HostLine, Lab, Link, Site
from scripts.benchmark.plans import bytes_to_move, plan_of
from scripts.benchmark.record import CaseResult, Phase, Round, compared
from scripts.benchmark.vectors import SCALES, Inputs, Verdict, judge, scale_of

ELEMENTS = 3 * 65_536 + 256 + 17
"""Several blocks of scales, and a last block of the codec that is not full."""
HOSTS = 4


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    with closing(Inputs(HOSTS, ELEMENTS)) as made:
        yield made


def through_codec(inputs: Inputs, name: str, round_number: int) -> np.ndarray:
    """The mean as our engine makes it."""
    one = codec(name)
    total = PartSum(inputs.elements, codec("sum16"))
    for vector in inputs.vectors:
        total.add_leaf(1, one, one.encode(vector.values * np.float32(scale_of(round_number))))
    return one.decode(one.encode(total.mean(HOSTS)), inputs.elements)


# ---------------------------------------------------------------- the link's limit


def test_the_limit_of_the_issue() -> None:
    """25 M values in int8 over 200 Mbit/s, four hosts, 100 ms: 1.5 s of bytes and two round trips."""
    wide = lab.load("wide-200")
    traffic = bytes_to_move("atoll", "int8", "flat", wide, 25_000_000)
    assert wide.busiest_s(traffic) == pytest.approx(1.5 * (1 + 4 / 256) * 25e6 / 25e6, rel=1e-3)
    assert wide.limit_s(traffic) == pytest.approx(wide.busiest_s(traffic) + 0.2)


@pytest.mark.parametrize("engine", ["gloo", "hivemind"])
def test_a_ring_and_a_butterfly_move_as_many_bytes_through_each_line(engine: str) -> None:
    wide = lab.load("wide-200")
    moved = bytes_to_move(engine, "fp16", "", wide, 1_000_000)
    assert moved.sum(axis=0) == pytest.approx(np.full(HOSTS, 1.5 * 2e6))
    assert moved.sum(axis=1) == pytest.approx(np.full(HOSTS, 1.5 * 2e6))
    assert not moved.diagonal().any()


def test_a_flat_plan_takes_three_bytes_a_value_through_a_site() -> None:
    sites = lab.load("two-sites")
    moved = bytes_to_move("atoll", "int8", "flat", sites, 1_000_000)
    assert sites.busiest_s(moved) == pytest.approx(3 * (1 + 4 / 256) * 1e6 / 12.5e6, rel=1e-3)


def test_a_grouped_plan_takes_half_of_that() -> None:
    """Two sites of three: each tree has two leaves and a head below its root, whose partial sum and result cross."""
    sites = lab.load("two-sites")
    moved = bytes_to_move("atoll", "int8", "grouped", sites, 1_000_000)
    leaf, summed = (1 + 4 / 256) * 1e6, (2 + 1 / 256) * 1e6
    assert sites.busiest_s(moved) == pytest.approx((leaf + summed) / 2 / 12.5e6, rel=0.01)
    assert moved.sum() == pytest.approx(4 * leaf + summed + 5 * leaf, rel=1e-3)
    flat = sites.busiest_s(bytes_to_move("atoll", "int8", "flat", sites, 1_000_000))
    assert sites.busiest_s(moved) / flat < 0.505
    with pytest.raises(OperatorError, match="'wide-200' has no two sites"):
        plan_of("grouped", lab.load("wide-200"))


def test_a_weighted_plan_is_done_when_the_slow_uplink_has_sent_its_own() -> None:
    slow = lab.load("slow-uplink")
    moved = bytes_to_move("atoll", "int8", "weighted", slow, 1_000_000)
    assert slow.busiest_s(moved) == pytest.approx((1 + 4 / 256) * 1e6 / 2.5e6, rel=1e-3)
    assert plan_of("weighted", lab.load("wide-200")) == plan_of("flat", lab.load("wide-200"))


def test_the_slowest_line_is_the_limit() -> None:
    slow = lab.load("slow-uplink")
    moved = bytes_to_move("atoll", "int8", "flat", slow, 1_000_000)
    assert slow.busiest_s(moved) == pytest.approx(moved[0].sum() / 2.5e6)


def test_round_trips_are_of_the_farthest_pair() -> None:
    hosts = tuple(HostLine(name=name, site=site) for name, site in (("a", "A"), ("b", "A"), ("c", "")))
    made = Lab(hosts=hosts, sites=(Site(name="A", round_trip_ms=1),), round_trip_ms=50)
    assert made.longest_round_trip_s == 0.05
    links = (Link(between=("a", "b"), round_trip_ms=80),)
    assert msgspec.structs.replace(made, links=links).longest_round_trip_s == 0.08


@pytest.mark.parametrize("name", lab.shipped())
def test_shipped_labs_can_be_made(name: str) -> None:
    found = lab.load(name)
    assert found.name == name
    assert str(len(found.hosts)) in found.words


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hosts = 3", "describes no lab"),
        ('[[hosts]]\nname = "a"', "a lab of 1 hosts"),
        ('[[hosts]]\nname = "a"\n[[hosts]]\nname = "a"', "two hosts are called 'a'"),
        ('[[hosts]]\nname = "a"\nsite = "X"\n[[hosts]]\nname = "b"', "of site 'X'"),
        ('loss_percent = -1.0\n[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"', "not negative"),
        ('mtu_bytes = 10\n[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"', "MTU of 10"),
        ('[[hosts]]\nname = "a"\nspeed = 3\n[[hosts]]\nname = "b"', "unknown field"),
    ],
)
def test_mistakes_in_a_lab_are_sentences(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(text)
    with pytest.raises(OperatorError, match=why):
        lab.load(str(path))
    with pytest.raises(OperatorError, match="wide-200"):
        lab.load("none-such")
    with pytest.raises(OperatorError, match="no plan 'none-such'"):
        plan_of("none-such", lab.load("wide-200"))


# ---------------------------------------------------------------- the judge


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("round_number", range(2))
def test_a_right_mean_is_right(inputs: Inputs, name: str, round_number: int) -> None:
    bound = bound_of("atoll", name)
    assert bound is not None
    result = through_codec(inputs, name, round_number)
    verdict = judge([result] * HOSTS, inputs, round_number, bound)
    assert verdict.right, verdict.why
    assert verdict.same_bits
    assert 0 < verdict.worst <= 1
    assert verdict.rms_error < 0.02


def test_the_bound_of_int8_is_not_far_from_what_happens(inputs: Inputs) -> None:
    """A bound that nothing comes near would let wrong values pass."""
    verdict = judge([through_codec(inputs, "int8", 0)], inputs, 0, BOUNDS["atoll", "int8"])
    assert verdict.worst > 0.5


def test_partial_sums_are_within_their_bound(inputs: Inputs) -> None:
    """Two groups of two: one partial sum, then the rest."""
    one, sums = codec("int8"), codec("sum16")
    head, total = PartSum(ELEMENTS, sums), PartSum(ELEMENTS, sums)
    for place, vector in enumerate(inputs.vectors):
        (head if place < 2 else total).add_leaf(1, one, one.encode(vector.values[:]))
    total.add_partial(head.partial())
    result = one.decode(one.encode(total.mean(HOSTS)), ELEMENTS)
    bound = bound_of("atoll", "int8", 2)
    assert bound is not None
    assert judge([result], inputs, 0, bound).right
    assert not judge([wrong(result, "the last value")], inputs, 0, bound).right


def wrong(result: np.ndarray, how: str) -> np.ndarray:
    changed = result.copy()
    match how:
        case "a value not finite":
            changed[1000] = np.nan
        case "one block of another place":
            changed[:256], changed[256:512] = result[256:512], result[:256]
        case "a contribution missing":
            changed *= np.float32(4 / 3)
        case "the last value":
            changed[-1] += np.float32(0.01)
    return changed


@pytest.mark.parametrize(
    "how", ["a value not finite", "one block of another place", "a contribution missing", "the last value"]
)
def test_a_wrong_mean_on_one_host_is_found(inputs: Inputs, how: str) -> None:
    good = through_codec(inputs, "int8", 0)
    verdict = judge([good, good, wrong(good, how), good], inputs, 0, BOUNDS["atoll", "int8"])
    assert not verdict.right
    assert not verdict.same_bits
    assert verdict.why


def test_the_result_of_the_round_before_is_found(inputs: Inputs) -> None:
    assert all(before != after for before, after in zip(SCALES, SCALES[1:] + SCALES[:1], strict=True))
    for number in range(len(SCALES)):
        verdict = judge([through_codec(inputs, "int8", number)], inputs, number + 1, BOUNDS["atoll", "int8"])
        assert not verdict.right


def test_own_values_kept_are_no_mean_even_where_no_value_is_bound(inputs: Inputs) -> None:
    """What hivemind's 8-bit codec gave with NumPy 2.4: each keeps what it brought."""
    kept = [vector.values for vector in inputs.vectors]
    verdict = judge(kept, inputs, 0, BOUNDS["hivemind", "uniform8"])
    assert not verdict.right
    assert "root mean square" in verdict.why


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def test_fp16_of_the_other_engines_is_within_its_bounds(inputs: Inputs) -> None:
    brought = [vector.values[:] for vector in inputs.vectors]
    ring = brought[0].astype(np.float16)
    for values in brought[1:]:
        ring = ring + values.astype(np.float16)
    gloo = (ring / np.float16(HOSTS)).astype(np.float32)
    assert judge([gloo], inputs, 0, BOUNDS["gloo", "fp16"]).right
    mean = np.mean([halves(values) for values in brought], axis=0, dtype=np.float32)
    butterfly = [values + halves(mean - values) for values in brought]
    assert judge(butterfly, inputs, 0, BOUNDS["hivemind", "fp16"]).right
    for name, result in (("gloo", gloo), ("hivemind", butterfly[0])):
        assert not judge([result * np.float32(1.01)], inputs, 0, BOUNDS[name, "fp16"]).right


def test_a_bound_never_lets_nan_pass() -> None:
    bound = Bound(name="nothing", of=lambda inputs, mean: np.full(len(mean), np.inf), rms_limit=np.inf)
    with closing(Inputs(2, 100)) as made:
        assert not judge([np.full(100, np.nan, np.float32)], made, 0, bound).right


# ---------------------------------------------------------------- accounts


def test_cpu_time_and_memory_of_a_process_are_the_kernels_own() -> None:
    before, mine = accounts.cpu_ns(os.getpid()), time.process_time_ns()
    while time.process_time_ns() - mine < 50_000_000:
        pass
    assert accounts.cpu_ns(os.getpid()) - before >= 50_000_000
    assert accounts.system_ns(os.getpid()) <= accounts.cpu_ns(os.getpid()) + 2 * accounts.TICK_NS
    accounts.forget_peaks([os.getpid()])
    before = accounts.peak_bytes(os.getpid())
    bytearray(b"x" * (64 << 20)).clear()
    assert accounts.peak_bytes(os.getpid()) - before > 32 << 20


def test_a_process_that_is_gone_costs_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pid = child.pid
        child.wait(60)
    assert accounts.family(pid) == []
    assert accounts.cpu_ns(pid) == accounts.system_ns(pid) == accounts.peak_bytes(pid) == 0
    accounts.forget_peaks([pid])


# ---------------------------------------------------------------- what is said of it


def a_result(engine: str, seconds: tuple[float, ...], *, name: str = "lab", failure: str = "") -> CaseResult:
    made = msgspec.structs.replace(lab.even_lab(2, 200.0), name=name)
    verdict = Verdict(right=True, worst=0.5, rms_error=0.01, same_bits=True)
    return CaseResult(
        lab=made,
        elements=1000,
        engine=engine,
        codec="fp16",
        plan="flat",
        limit_s=0.5,
        busiest_bytes_s=0.3,
        rounds=tuple(
            Round(
                number=number,
                phases={EXCHANGE: Phase(seconds=one, cpu_ns=20_000)},
                sent_bytes=(100, 200),
                received_bytes=(200, 100),
                delivered_bytes=((0, 100), (200, 0)),
                peak_bytes=((10, 30), (20,)),
                verdict=verdict,
            )
            for number, one in enumerate(seconds)
        ),
        failure=failure,
        date="2026-12-01",
        machine="a machine",
        command="scripts/bench_round",
    )


def test_figures_are_medians_and_ratios() -> None:
    ours, theirs, broken = compared(
        [a_result("atoll", (3.0, 1.0, 1.1)), a_result("gloo", (4.4,)), a_result("hivemind", (), failure="gone")]
    )
    assert ours.exchange_s == 1.1
    assert ours.ratio == pytest.approx(2.2)
    assert ours.cpu_ns(EXCHANGE) == 10
    assert ours.peak_bytes == 30
    assert ours.others == {"gloo fp16": 4.0}
    assert theirs.others == {"atoll fp16": 0.25}
    assert not broken.measured


def test_a_wrong_round_is_in_no_figure() -> None:
    """hivemind gives some: a reducer is given up, and what it has not sent is left as it was."""
    one = a_result("hivemind", (2.0, 2.2, 0.1), failure="1 of 4 rounds gave no mean")
    wrong = msgspec.structs.replace(
        one.rounds[2], verdict=msgspec.structs.replace(one.rounds[2].verdict, right=False, worst=800.0)
    )
    one = msgspec.structs.replace(one, rounds=(*one.rounds[:2], wrong))
    assert one.measured
    assert one.exchange_s == pytest.approx(2.1)
    assert one.worst == 0.5
    assert report.remarks(one).startswith("1 of 4 rounds")
    nothing = msgspec.structs.replace(one, rounds=(wrong,))
    assert not nothing.measured
    assert report.remarks(nothing) == one.failure


def test_json_and_plot_are_written(tmp_path: Path) -> None:
    results = compared([a_result("atoll", (1.0, 1.1)), a_result("hivemind", (), failure="not available: no")])
    run = command.Run(date="2026-12-01", machine="a machine", command="scripts/bench_round", results=results)
    report.write(run, tmp_path)
    assert msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=command.Run) == run
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_the_section_replaces_itself_and_nothing_else() -> None:
    first = report.with_section("# Results\n\nBy hand.\n", report.section([]))
    again = report.with_section(first + "\nMore by hand.\n", report.section([a_result("atoll", (1.0,))]))
    assert again.startswith("# Results\n\nBy hand.\n")
    assert again.endswith("\nMore by hand.\n")
    assert again.count("## Rounds at the speed of the link") == 1
    assert "| atoll fp16 | 1.00 |" in again


def test_the_document_is_made_of_the_record() -> None:
    text = report.DOCUMENT.read_text()
    assert report.with_section(text, report.section(report.recorded())) == text, "run `scripts/bench_round --record`"


def test_options() -> None:
    short = command.parsed(["--short", "--repetitions", "3"])
    assert (short.lab, short.sizes, short.repetitions) == (["short"], [200_000], 3)
    changed = command.changed(lab.load("wide-200"), command.parsed(["--rate", "1000", "--loss", "0.1"]))
    assert changed.name == "wide-200, 1000 Mbit/s, 0.1 % loss"
    assert {host.up_mbit_s for host in changed.hosts} == {1000.0}


@pytest.mark.parametrize(
    "words", [["--engines", "none"], ["--codecs", "none"], ["--sizes", "x"], ["--part-elements", "300"]]
)
def test_mistakes_on_the_command_line_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parsed(words)
    assert ended.value.code == 2


def test_what_fails_on_one_host_ends_it_on_all() -> None:
    import trio

    async def fail() -> None:
        raise RoundFailed("host 1 is gone")

    async def main() -> None:
        with trio.fail_after(10), pytest.raises(RoundFailed, match="host 1 is gone"):
            await at_once(trio.sleep_forever, fail)

    trio.run(main)
