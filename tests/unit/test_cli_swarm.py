"""How a local swarm is judged and shown; running one is in tests/swarm."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from node.cli import show
from node.cli.local_swarm import LocalSwarm, SwarmFailed
from node.cli.swarm import SwarmReport, collect_rounds, report_view, summarise, swarm_table
from node.status import (
    HistoryRound,
    LastRound,
    LostLineage,
    MemberStatus,
    ReachStatus,
    Status,
    TrainerStatus,
    WorkStatus,
)

ELEMENTS = 1000


def round_of(number: int, state: str, **changes: Any) -> HistoryRound:
    values: dict[str, Any] = {
        "round": number,
        "seconds": 2.0,
        "contributors": ("a", "b"),
        "state_hash": state,
        "loss": 5.0 - number,
        "validation_loss": 6.0 - number,
        "bytes_sent": 1100,
    }
    return HistoryRound(**(values | changes))


def status_of(rounds: int, state: str) -> Status:
    return Status(
        peer_id="12D3KooWa",
        version="0.1.0",
        run_id="ab" * 32,
        run_name="micro",
        phase="finished",
        reason="the run is over",
        round=rounds,
        final_round=3,
        state_hash=state,
        members=2,
        member_list=(MemberStatus(peer_id="12D3KooWb", name="garage", alive=True, round=2, round_trip_ms=1.25),),
        loss=2.0,
        parameters=ELEMENTS,
        addresses=("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWa",),
        history=tuple(round_of(number, f"s{number}") for number in range(rounds)),
        last_round=LastRound(
            round=2,
            contributors=2,
            seconds=2.0,
            bytes_sent=1,
            bytes_received=1,
            assemble_s=0.1,
            exchange_s=0.1,
            commit_s=0.1,
        ),
        trainer=TrainerStatus(attached=True, name="atoll trainer", device="cpu", step=3, budget_steps=30),
        problems={"a bad signature": 2},
        resident_bytes={"daemon": 100 << 20},
    )


@pytest.fixture
def swarm(tmp_path: Path) -> LocalSwarm:
    made = LocalSwarm(tmp_path, nodes=2, run="micro", rounds=3)
    layout = SimpleNamespace(elements=ELEMENTS)
    made.run = SimpleNamespace(run_id=bytes(32), manifest=SimpleNamespace(name="micro", layout=layout))  # type: ignore[assignment]
    for node in made.nodes:
        node.last = status_of(3, "s2")
        node.history = {number: round_of(number, f"s{number}") for number in range(3)}
    return made


def judge(swarm: LocalSwarm, problem: str | None = None) -> SwarmReport:
    return summarise(swarm, rounds=3, problem=problem, seconds=10.0, model=Path("/x/model"))


def test_equal_ends_are_a_success(swarm: LocalSwarm) -> None:
    report = judge(swarm)
    assert (report.ok, report.problem) == (True, None)
    assert (report.loss_start, report.loss_end) == (5.0, 3.0)
    assert (report.validation_loss_start, report.validation_loss_end) == (6.0, 4.0)
    assert report.bytes_per_parameter_round == pytest.approx(1.1)
    assert [one.contributors for one in report.rounds] == [2, 2, 2]


def test_different_states_are_a_failure(swarm: LocalSwarm) -> None:
    swarm.nodes[1].last = status_of(3, "other")
    report = judge(swarm)
    assert not report.ok
    assert report.problem == "the nodes ended on different states: {'node-0': 's2', 'node-1': 'other'}"


def test_a_round_that_split_is_a_failure_even_if_all_end_equal(swarm: LocalSwarm) -> None:
    swarm.nodes[1].history[1] = round_of(1, "other")
    assert judge(swarm).problem == "the nodes disagreed about rounds [1]"


def test_a_node_that_did_not_arrive_is_a_failure(swarm: LocalSwarm) -> None:
    swarm.nodes[1].last = status_of(2, "s1")
    assert judge(swarm).problem == "not all nodes reached round 3: {'node-0': 3, 'node-1': 2}"
    swarm.nodes[1].last = None
    assert not judge(swarm).ok


def test_a_problem_on_the_way_stays_a_failure(swarm: LocalSwarm) -> None:
    assert not judge(swarm, problem="node 1 ended with status 3").ok


def test_a_node_that_leaves_early_ends_the_wait(swarm: LocalSwarm) -> None:
    swarm.check()
    node = swarm.nodes[1]
    node.ended, node.last = 0, status_of(2, "s1")
    with pytest.raises(SwarmFailed, match=r"node 1 left in round 2 of 3; see .*daemon\.log"):
        swarm.check()
    node.was_ended = True
    swarm.check()
    node.was_ended, node.ended = False, 2
    (swarm.directory / "node-1.out").write_text("starting\nthe port is busy\n")
    with pytest.raises(SwarmFailed, match="node 1 ended with status 2: the port is busy; see"):
        swarm.wait(lambda: False, 1.0, "nothing")


def test_rounds_of_several_lives_are_put_together(swarm: LocalSwarm) -> None:
    swarm.nodes[0].history = {0: round_of(0, "s0", contributors=("a",), loss=None)}
    rounds = collect_rounds(swarm)
    assert [one.round for one in rounds] == [0, 1, 2]
    assert (rounds[0].contributors, rounds[0].loss, rounds[0].bytes_sent) == (2, 5.0, 2200)


def rendered(view: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_people_see(swarm: LocalSwarm) -> None:
    status = status_of(3, "0123456789abcdef")
    text = rendered(show.status_view(status))
    for words in ("finished", "the run is over", "3 of 3", "0123456789ab", "2 × a bad signature", "daemon 100.0 MiB"):
        assert words in text
    assert "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWa" in text
    assert "1.2 ms" in rendered(show.members_table(status.member_list, "12D3KooWa"))
    assert show.line(status).startswith("round 3/3 | finished | 2 members | loss 2.0000 | 0 tokens/s | the run is over")
    nothing = Status(peer_id="12D3KooWa", version="0.1.0", phase="joining", reason="asking 1 address")
    assert "asking 1 address" in rendered(show.status_view(nothing))
    assert "node-1" in rendered(swarm_table([status, None], swarm))
    assert "all 2 nodes ended on the same state" in rendered(report_view(judge(swarm)))
    assert "failed: it broke" in rendered(report_view(judge(swarm, problem="it broke")))


PEER = "12D3KooWSxPZtoku4kBoyVp2HYjKENqtr7n1PSqcVjCxseU6GLVU"
STATE = "0123456789ab" + "0" * 52
FACTS = ("run", "round", "members", "line", "loss", "tokens", "work here", "trainer", "memory", "disk", "peer id")


def test_what_can_be_done_for_a_node_that_nobody_can_dial_is_shown_and_what_it_costs_others() -> None:
    status = status_of(3, "s2")
    assert "reachable" not in rendered(show.status_view(status)), "nobody has tried yet"
    advice = "peers cannot dial this node: forward TCP ports 4001 and 4002 of the router at 203.0.113.7 to this machine"
    reach = ReachStatus(
        control=False, data=False, advice=advice, through={"12D3KooWb": "12D3KooWc"}, not_joined={PEER: "it is full"}
    )
    text = rendered(show.status_view(msgspec.structs.replace(status, reach=reach)))
    assert " ".join(advice.split()) in " ".join(text.split())
    assert f"lead to 1 peer; not to {PEER[-8:]}: it is full" in " ".join(text.split())
    reach = ReachStatus(control=True, data=True, relayed_pairs=2, relayed_bytes=3 << 30)
    text = rendered(show.status_view(msgspec.structs.replace(status, reach=reach)))
    assert "reachable     yes" in text
    assert "for 2 pairs now; 3.0 GiB so far" in text


def test_a_site_is_shown_by_name_where_the_plan_had_sites() -> None:
    status = status_of(3, "s2")
    assert "site" not in rendered(show.status_view(status))
    grouped = (*status.history[:-1], round_of(2, "s2", plan="grouped"))
    together = msgspec.structs.replace(status, history=grouped, group=("12D3KooWa", "12D3KooWb"))
    assert "2 alive   in one site with garage" in rendered(show.status_view(together))
    alone = msgspec.structs.replace(together, group=("12D3KooWa",))
    assert "in a site of its own" in rendered(show.status_view(alone))


def test_peers_are_shown_whole_on_a_terminal_of_80_columns() -> None:
    far = MemberStatus(
        peer_id=PEER,
        name="a name that is too long for it",
        alive=True,
        member=True,
        round=123_456,
        state_hash=STATE,
        tokens_per_s=123_456.0,
        round_trip_ms=5000.0,
        sent_bytes_s=123.4e6,
        received_bytes_s=999.9e6,
        rates_age_s=5940.0,
    )
    own = MemberStatus(peer_id=PEER, alive=True, member=True, sent_bytes_s=2e6, received_bytes_s=3.5e6, rates_age_s=7.0)
    gone = MemberStatus(peer_id=PEER[:-1] + "X", name="garage")
    lines = rendered(show.members_table([far, own, gone], ""), 80).splitlines()
    assert max(map(len, lines)) <= 80
    head, _, first, second, third = (line.split() for line in lines)
    assert head == ["peer", "name", "is", "state", "round", "tokens/s", "latency", "up", "down", "age"]
    assert first[-9:] == ["member", "012345", "123456", "123.5k", "5000.0", "ms", "123.4M", "999.9M", "99m"]
    assert second[-3:] == ["2.0M", "3.5M", "7s"]
    assert third == [f"…{PEER[-8:-1]}X", "garage", "gone", *["-"] * 7]
    assert (show.age(99.0), show.age(5999.0), show.age(7200.0), show.rate(None)) == ("99s", "100m", "2h", "-")


def in_phase(phase: str, **facts: Any) -> Status:
    return Status(peer_id=PEER, version="0.1.0", phase=phase, reason=f"{phase}: " + "some long reason " * 6, **facts)


AT_WORK: dict[str, Any] = {
    "run_id": "ab" * 32,
    "run_name": "micro",
    "round": 102,
    "final_round": 400,
    "state_hash": STATE,
    "members": 4,
    "up_bytes_s": 123.4e6,
    "down_bytes_s": 999.9e6,
    "line_age_s": 5940.0,
    "loss": 5.0,
    "validation_loss": 5.25,
    "tokens_total": 307_200_000,
    "parameters": 44_288,
    "history": tuple(
        round_of(
            number, STATE, seconds=123.4, loss=11.25, validation_loss=11.5, bytes_sent=1023 * 1024, excluded=("c", "d")
        )
        for number in range(103)
    ),
    "work": WorkStatus(
        produced_tokens=1_234_567,
        counted_tokens=1_200_000,
        carried_tokens=7_680,
        discarded_tokens=26_887,
        discarded={"another state was taken over": 20_000, "lost with the trainer": 6_887},
    ),
    "trainer": TrainerStatus(attached=True, name="atoll trainer", device="cpu", step=17, budget_steps=30),
    "resident_bytes": dict.fromkeys(("supervisor", "daemon", "engine", "trainer"), 999 << 20),
}


@pytest.mark.parametrize(
    "status",
    [
        in_phase("starting"),
        in_phase("catching-up", run_id="ab" * 32, run_name="micro"),
        *(in_phase(phase, **AT_WORK) for phase in ("training", "exchanging", "committing", "leaving")),
        in_phase(
            "training",
            lost_lineages=(
                LostLineage(lineage="c" * 64, followed="d" * 64, since_round=90, rounds=4, tokens=10_000, own_tokens=5),
            ),
            **AT_WORK,
        ),
        in_phase("finished", exported="/root/.atoll/exports/micro-400", **AT_WORK),
    ],
    ids=lambda status: status.phase,
)
def test_a_status_is_laid_out_alike_in_every_phase_on_a_terminal_of_80_columns(status: Status) -> None:
    lines = rendered(show.status_view(status, addresses=False), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines), "nothing is cut short"
    for fact in FACTS:
        (line,) = [line for line in lines if line.startswith(f"{fact} ") and line[:12].strip() == fact]
        assert line[12:14] == "  ", line
        assert line[14] != " ", line
    assert f"peer id       {PEER}" in [line.rstrip() for line in lines]
    shown = [line for line in lines if line.rstrip().endswith(STATE[:12]) and not line.startswith("round ")]
    assert len(shown) == (show.SHOWN_ROUNDS if status.history else 0)
