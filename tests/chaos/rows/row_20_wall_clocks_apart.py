"""The wall clocks of three nodes stand an hour back, right, and an hour ahead.

Every clock that a process of a node can ask for the time of day lies (a small library, preloaded into all of them,
TLS included); durations are true. All are counted in every round, in the first attempt, and rounds take as long as
without.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.chaos.lab import PROGRAM, Lab, Node
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import ROUND_S, assert_agreed, atoll

SHIFTS_S = (-3600, 0, 3600)
ROUNDS = 5
SOURCE = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) { const char *text = getenv("CHAOS_CLOCK_SHIFT_S"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    int result = (int)syscall(SYS_gettimeofday, now, zone);
    if (result == 0) now->tv_sec += shift();
    return result;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
"""


def compiler() -> str | None:
    return shutil.which("cc")


def needs() -> str | None:
    return None if compiler() else "a C compiler (`cc`) makes the library that shifts the clock, and there is none"


def run(lab: Lab) -> Measured:
    library = build(lab.directory)
    with lab.apart("straight") as place:
        usual_s = place.usual_s(place.swarm(len(SHIFTS_S)))
    with lab.apart("shifted") as place:
        nodes = place.swarm(len(SHIFTS_S), programs=[shifted(library, shift_s) for shift_s in SHIFTS_S])
        for node, shift_s in zip(nodes, SHIFTS_S, strict=True):
            assert_lies(node, shift_s)
        began = place.reached(nodes)
        place.wait_counted(nodes, ROUNDS, f"all are counted in {ROUNDS} rounds", 2 * ROUND_S)
        for number in range(began, began + ROUNDS):
            assert place.means(number, nodes[0]).attempt == 0, f"round {number} took more than one attempt"
            missing = {node.peer_id for node in nodes} - set(nodes[0].rounds[number].contributors)
            assert not missing, f"round {number} did not count {missing}"
        assert_agreed(*nodes, at_least=ROUNDS)
        shifted_s = place.usual_s(nodes)
        problems = [problem for node in nodes for problem in node.status().problems]
        lab.say(f"rounds take {shifted_s:.1f} s with clocks two hours apart, {usual_s:.1f} s with one clock")
    return Measured(
        rounds_lost=0,
        work_lost_tokens=0,
        notes={
            "one clock: round_s": round(usual_s, 1),
            "two hours apart: round_s": round(shifted_s, 1),
            "problems": ", ".join(problems) or "none",
        },
    )


def build(directory: Path) -> Path:
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(SOURCE)
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def shifted(library: Path, shift_s: int) -> tuple[str, ...]:
    return ("env", f"LD_PRELOAD={library}", f"CHAOS_CLOCK_SHIFT_S={shift_s}", *PROGRAM)


def assert_lies(node: Node, shift_s: int) -> None:
    """By its own log: the supervisor writes the time of each start."""
    assert atoll("status", "--home", str(node.home.path)).returncode == 0
    ask = ["python3", "-c", "import time; print(int(time.time()))"]
    environment = dict(
        pair.split("=", 1)
        for pair in Path(f"/proc/{node.whole_node()['daemon'].pid}/environ").read_text().split("\0")
        if "=" in pair
    )
    told = int(subprocess.run(ask, env=environment, capture_output=True, text=True, check=True).stdout)
    now = int(subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout)
    assert abs(told - now - shift_s) < 60, f"the clock of {node.name} is {told - now} s off, not {shift_s}"


ROW = Row(
    number=20,
    fault="wall clocks ±1 h apart",
    must="no effect",
    checks=__doc__,
    run=run,
    needs=needs,
    within_s=200.0,
)
