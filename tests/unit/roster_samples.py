"""Small rosters for tests: ten parts, a few READYs, durations as a coordinator would give them."""

from __future__ import annotations

import dataclasses

from protocol.messages import Ready, Roster, Signed
from protocol.names import Base, digest
from protocol.plan import Plan
from protocol.planning import contributing_of, deal, level_durations
from protocol.rules import Rules

BASE = Base(run=digest(b"run"), lineage=digest(b"lineage"), round=3, prev=digest(b"prev"), state_hash=digest(b"state"))
PARTS = 10


def rules(**changes: object) -> Rules:
    values: dict = {
        "run": BASE.run,
        "founders": (),
        "initial_state_hash": BASE.state_hash,
        "elements": 9 * 1024 + 512,
        "part_elements": 1024,
        "epoch_units": 100,
        "lease_cap_units": 4,
        "unit_tokens": 100,
    }
    return Rules(**(values | changes))


def ready(tokens: int = 100, **changes: object) -> Ready:
    values: dict = {"base": BASE, "tokens": ((PARTS, tokens),), "norm": 1.0, "largest": 0.1}
    return Ready(**(values | changes))


def roster(readys: list[Ready], plan: Plan | None, *, durations_s: tuple[float, ...] | None = None, **fields) -> Roster:
    signed = tuple(
        Signed(sender=f"peer{index:03}", message=message, body=b"", signature=b"")
        for index, message in enumerate(readys)
    )
    made = Roster(base=BASE, attempt=0, readys=signed, plan=plan, durations_s=durations_s or (), **fields)
    if plan is not None and durations_s is None:
        contributing = contributing_of(made, rules())
        dealt = deal(BASE.digest(), PARTS, plan)
        durations_s = level_durations(plan, contributing, dealt, rules())
        made = dataclasses.replace(made, durations_s=durations_s)
    return made
