"""Work that all peers of one simulated swarm do alike is done once.

Every receiver of a broadcast parses the same bytes, judges the same roster from the same place in the chain, and comes
to the same next state. These are pure functions; each answer is kept under all that it depends on. (A base names the
whole chain state: `prev` is a hash over its sets and leases, and a lineage's name is one over its members.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from protocol import chain, nested, planning, validity, wire
from protocol.chain import ChainState
from protocol.messages import Commit, Roster, Signed
from protocol.names import Digest, Keyring, PeerId
from protocol.rules import Rules

ANSWERS_KEPT = 4096


@contextmanager
def shared_work() -> Iterator[None]:
    """For the schedules of one process. Collecting garbage waits until a schedule is over."""
    originals: list[tuple[Any, str, Any]] = []

    def share(module: Any, name: str, keep: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Everywhere where the code under test has it by this very name."""
        original = getattr(module, name)
        replacement = keep(original)
        for other in _modules():
            if other.__dict__.get(name) is original:
                originals.append((other, name, original))
                setattr(other, name, replacement)

    # Reading and signatures
    share(wire, "unseal", lru_cache(maxsize=ANSWERS_KEPT))
    share(wire, "beginning", lru_cache(maxsize=256))
    share(wire, "_covered", _kept_covered)
    share(nested, "make_signed", lru_cache(maxsize=ANSWERS_KEPT))
    share(wire, "decode", lru_cache(maxsize=ANSWERS_KEPT))
    # Rosters
    share(planning, "trees", lru_cache(maxsize=256))
    share(planning, "contributing_of", _kept_of_the_roster)
    share(validity, "check_roster", _kept_check)
    # Commits
    share(chain, "counted_tokens", _kept_tokens)
    share(chain, "_advance", _kept_advance)
    share(chain, "_encode", _kept_encode)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        for module, name, original in reversed(originals):
            setattr(module, name, original)


def _modules() -> list[Any]:
    """Of the code under test, and of the simulation around it."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(("protocol.", "sim_")) and module]


def _kept_covered(covered: Callable[[Any, bytes], bytes]) -> Callable[[Any, bytes], bytes]:
    """A message is what its body says."""
    kept: dict[tuple[type, bytes], bytes] = {}

    def shared(message: Any, body: bytes) -> bytes:
        key = (type(message), body)
        known = kept.get(key)
        if known is None:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            known = kept[key] = covered(message, body)
        return known

    return shared


def _kept_of_the_roster(answer: Callable[[Roster, Rules], Any]) -> Callable[[Roster, Rules], Any]:
    kept: dict[int, tuple[Roster, Rules, Any]] = {}

    def shared(roster: Roster, rules: Rules) -> Any:
        known = kept.get(id(roster))
        if known is None or known[0] is not roster or known[1] is not rules:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            known = kept[id(roster)] = (roster, rules, answer(roster, rules))
        return known[2]

    return shared


def _kept_tokens(counted_tokens: Callable[[Rules, Commit], dict[PeerId, int]]) -> Callable[..., dict[PeerId, int]]:
    kept: dict[tuple[object, ...], dict[PeerId, int]] = {}

    def shared(rules: Rules, commit: Commit) -> dict[PeerId, int]:
        key = (id(rules), commit.roster.body, _bodies(commit))
        known = kept.get(key)
        if known is None:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            known = kept[key] = counted_tokens(rules, commit)
        return known

    return shared


def _bodies(commit: Commit) -> tuple[bytes | None, ...]:
    return tuple(None if header is None else header.body for header in commit.headers)


def _kept_advance(advance: Callable[..., ChainState]) -> Callable[..., ChainState]:
    kept: dict[tuple[object, ...], ChainState] = {}

    def shared(state: ChainState, rules: Rules, commit: Commit) -> ChainState:
        attempt = commit.certificate.votes[0].message.attempt
        key = (id(rules), state.base, commit.roster.body, _bodies(commit), attempt)
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
