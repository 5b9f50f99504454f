"""`scripts/demo`: with real nodes on the smallest preset; and its verdict on what did not hold."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from node.cli.swarm import SwarmReport, SwarmRound

PROGRAM = Path(__file__).parents[2] / "scripts" / "demo.py"
ROUNDS = 30
"""Rounds of two seconds: a returning node starts within five to fifteen of them, by the machine's load."""


@pytest.mark.swarm
@pytest.mark.slow
def test_the_demonstration_holds(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", str(PROGRAM), "--preset", "micro"),
            *("--rounds", str(ROUNDS), "--json", "--directory", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    swarm = report["swarm"]
    assert report["ok"]
    assert report["problems"] == []
    contributors = [one["contributors"] for one in swarm["rounds"]]
    assert len(contributors) == ROUNDS
    assert contributors[report["killed_in_round"]] == 3
    assert contributors[report["back_in_round"]] == 4
    assert 0 < report["down_s"] < report["back_after_s"]
    assert all(len(one["state_hashes"]) == 1 for one in swarm["rounds"])
    assert len(set(swarm["state_hashes"].values())) == 1
    assert swarm["rounds"][-1]["validation_loss"] is not None, "nodes stay until the final state is measured"
    assert report["text"].startswith("The people of the United States")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not (tmp_path / "node-0").exists(), "homes go unless --keep"
    lines = done.stderr
    for said in ("is killed in round", "starts again on its home", "is back", "round  0", "everything held"):
        assert said in lines


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    specification = importlib.util.spec_from_file_location("demo", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["demo"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def swarm_report(*, rounds: int, last_validation_loss: float | None) -> SwarmReport:
    one = SwarmRound(
        round=0, contributors=4, seconds=1.0, state_hashes=("aa",), loss=7.0, validation_loss=7.0, bytes_sent=1
    )
    seen = [msgspec.structs.replace(one, round=number) for number in range(rounds)]
    seen[-1] = msgspec.structs.replace(seen[-1], validation_loss=last_validation_loss)
    return SwarmReport(
        ok=True, problem=None, nodes=4, run_id="", run_name="micro", parameters=1, rounds=tuple(seen), final_rounds={},
        state_hashes={}, loss_start=7.0, loss_end=6.0, validation_loss_start=7.0, validation_loss_end=6.0,
        bytes_per_parameter_round=1.5, seconds=1.0, model="model", directory="here",
    )  # fmt: skip


def test_the_verdict_names_what_did_not_hold(demo: ModuleType) -> None:
    back = demo.Outage(back_round=6)
    held = swarm_report(rounds=10, last_validation_loss=6.0)
    assert demo.judge(held, back, 7.6, "words") == ()
    assert demo.judge(msgspec.structs.replace(held, problem="split"), back, 7.6, "words") == ("split",)

    def only(problems: tuple[str, ...]) -> str:
        assert len(problems) == 1
        return problems[0]

    assert "was not counted again" in only(demo.judge(held, demo.Outage(), 7.6, "words"))
    assert "only 9 rounds" in only(demo.judge(swarm_report(rounds=9, last_validation_loss=6.0), back, 7.6, "words"))
    assert "did not fall by 10%" in only(demo.judge(held, back, 6.5, "words"))
    assert "not known" in only(demo.judge(swarm_report(rounds=10, last_validation_loss=None), back, 7.6, "words"))
    assert "no text" in only(demo.judge(held, back, 7.6, None))
