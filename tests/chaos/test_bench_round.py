"""`scripts/bench_round --short`: real engines of ours and gloo over a lab of two hosts, every value checked."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio

from node.engine import api
from scripts.benchmark import lab
from scripts.benchmark.atoll import opened_atoll
from scripts.benchmark.contestant import DECODE, ENCODE, EXCHANGE, LOAD, OUTER, Case, RoundFailed
from scripts.benchmark.record import Run
from scripts.benchmark.vectors import Inputs
from scripts.wanlab.wan import Wan, unavailable

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "a lab can be made"),
]

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0


def bench(tmp_path: Path, *words: str, status: int = 0) -> tuple[Run, str]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmark", "--short", "--output", str(tmp_path / "out"), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return msgspec.json.decode((tmp_path / "out" / "bench.json").read_bytes(), type=Run), done.stdout


def test_engines_average_and_are_measured(tmp_path: Path) -> None:
    """Slow: about 15 s, for three engines that start and warm up."""
    run, said = bench(tmp_path, "--engines", "atoll,gloo", "--codecs", "int8,fp16", "--directory", str(tmp_path))
    assert [one.title for one in run.results] == ["atoll int8", "atoll fp16", "gloo fp16"]
    for one in run.results:
        assert one.measured, one.failure
        assert len(one.rounds) == 2
        for seen in one.rounds:
            assert set(seen.phases) == {LOAD, ENCODE, EXCHANGE, OUTER if one.engine == "atoll" else DECODE}
            assert seen.verdict.right
            assert seen.verdict.same_bits
            # Payload, and a little for headers, TLS and acknowledgements; retransmissions are possible, not the rule.
            payload = one.busiest_bytes_s * 400e6 / 8
            for moved in (*seen.sent_bytes, *seen.received_bytes):
                assert payload < moved < 1.5 * payload
            assert seen.exchange.seconds > one.busiest_bytes_s
            assert seen.exchange.cpu_ns > 0
            assert all(peak > 4 * one.elements for host in seen.peak_bytes for peak in host)
        assert one.title in said
    assert "× as fast as gloo fp16" in said
    assert (tmp_path / "out" / "bench.png").exists()
    assert not list(tmp_path.glob("atoll-bench-*")), "what engines wrote is removed"


def test_an_engine_that_cannot_run_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_HIVEMIND_PYTHON", str(tmp_path / "nowhere"))
    run, said = bench(tmp_path, "--engines", "hivemind", "--codecs", "fp16")
    assert run.results[0].failure.startswith("not available: ")
    assert "--setup-hivemind" in said


def test_an_engine_that_is_killed_ends_the_case_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of an engine's phase is not waited for; the others and the lab are taken down."""
    with Wan(2, mtu_bytes=9000) as wan, closing(Inputs(2, 4_000_000)) as inputs:
        made = lab.load("short")
        made.lay(wan)
        wan.rate(*wan.hosts, up_bytes_s=1e5, down_bytes_s=1e5)
        case = Case(
            engine="atoll",
            codec="int8",
            plan="flat",
            lab=made,
            hosts=wan.hosts,
            inputs=inputs,
            part_elements=65_536,
            patience_s=LIMIT_S,
            directory=tmp_path,
        )

        async def main() -> None:
            with trio.fail_after(LIMIT_S / 4):
                async with trio.open_nursery() as nursery:
                    async with opened_atoll(case, nursery) as engines:
                        victim = engines.stations[1]
                        begin = victim.client.exchange

                        async def begin_and_die(request: api.Exchange) -> api.Done:
                            # The round's bytes take 40 s at this rate: it is killed in the middle of them.
                            answer = await begin(request)
                            victim.process.kill()
                            return answer

                        monkeypatch.setattr(victim.client, "exchange", begin_and_die)
                        await engines.perform(LOAD, 0)
                        await engines.perform(ENCODE, 0)
                        with pytest.raises(RoundFailed, match="host 1"):
                            await engines.perform(EXCHANGE, 0)
                        victim.process.wait(20)
                    nursery.cancel_scope.cancel()
            assert all(station.process.returncode is not None for station in engines.stations)

        trio.run(main)
