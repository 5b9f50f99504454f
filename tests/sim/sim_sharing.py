"""Work that all peers of one simulated swarm do alike is done once.

Every receiver of a broadcast parses the same bytes, judges the same roster from the same place in the chain, and comes
to the same next state. These are pure functions; each answer is kept under all that it depends on. (A base names the
whole chain state: `prev` is a hash over its sets and leases, and a lineage's name is one over its members.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from protocol import chain, planning, stations, validity, wire
from protocol.chain import ChainState
from protocol.messages import Commit, Roster, Signed
from protocol.names import Digest, Keyring
from protocol.rules import Rules

ANSWERS_KEPT = 4096


@contextmanager
def shared_work() -> Iterator[None]:
    """For the schedules of one process. Collecting garbage waits until a schedule is over."""
    originals: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, replacement: Callable[..., Any]) -> None:
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, replacement)

    put(wire, "decode", lru_cache(maxsize=ANSWERS_KEPT)(wire.decode))
    put(planning, "trees", lru_cache(maxsize=256)(planning.trees))
    put(stations, "trees", planning.trees)
    put(planning, "deal", lru_cache(maxsize=256)(planning.deal))
    put(chain, "_advance", _kept_advance(chain._advance))
    put(chain, "_encode", _kept_encode(chain._encode))
    put(validity, "check_roster", _kept_check(validity.check_roster))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        for module, name, original in reversed(originals):
            setattr(module, name, original)


def _kept_advance(advance: Callable[..., ChainState]) -> Callable[..., ChainState]:
    kept: dict[tuple[object, ...], ChainState] = {}

    def shared(state: ChainState, rules: Rules, commit: Commit) -> ChainState:
        headers = tuple(None if header is None else header.body for header in commit.headers)
        attempt = commit.certificate.votes[0].message.attempt
        key = (id(rules), state.base, commit.roster.body, headers, attempt)
        known = kept.get(key)
        if known is None:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            known = kept[key] = advance(state, rules, commit)
        return known

    return shared


def _kept_encode(encode: Callable[[ChainState], bytes]) -> Callable[[ChainState], bytes]:
    kept: dict[int, tuple[ChainState, bytes]] = {}

    def shared(state: ChainState) -> bytes:
        known = kept.get(id(state))
        if known is None or known[0] is not state:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            known = kept[id(state)] = (state, encode(state))
        return known[1]

    return shared


def _kept_check(check: Callable[..., str | None]) -> Callable[..., str | None]:
    kept: dict[tuple[object, ...], str | None] = {}

    def shared(
        state: ChainState,
        rules: Rules,
        signed: Signed[Roster],
        keyring: Keyring,
        *,
        attempt: int | None = None,
        **own: Any,
    ) -> str | None:
        if own:
            # What one peer alone has seen is part of the question.
            return check(state, rules, signed, keyring, attempt=attempt, **own)
        key: tuple[Digest | object, ...] = (
            id(rules),
            state.base,
            signed.sender,
            signed.body,
            signed.signature,
            attempt,
        )
        if key not in kept:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            kept[key] = check(state, rules, signed, keyring, attempt=attempt)
        return kept[key]

    return shared
