"""What nodes left on their disks, recomputed: each part of a commit against the contributions that its bitmap names.

The arithmetic is `tests/reference.py`, written from the protocol's text. The contributions are the encoded bytes that
each node kept in its home when the exchange began; the parts are those that a survivor applied.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from node.cli.runs import HomeRun
from node.daemon.chain_log import HEADER_BYTES, ChainLog, Frame, FrameKind
from node.home import Home
from node.manifest import rules_of
from protocol.chain import coordinator, genesis, next_state, reform_state
from protocol.codecs import codec
from protocol.messages import Commit, Reformed
from protocol.names import ZERO_DIGEST
from protocol.planning import contributing_of
from protocol.state_hash import chunk_hash
from protocol.weights import bits, tokens_of
from protocol.wire import decode_body, decode_commit, roster_id
from tests import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Of one commit, all exact."""

    round: int
    attempt: int
    """Of the certificate: how many attempts failed before."""
    parts: int
    """Not empty, and recomputed."""
    empty: int
    largest: float
    """Magnitude among all means."""
    bitmaps: tuple[tuple[str, ...], ...]
    """Per part: the peers that it counts; none: EMPTY."""


def commits(home: Home, run: HomeRun) -> dict[int, Commit]:
    """Those on this node's disk, by round."""
    found = (decode_commit(frame.payload) for frame in _frames(home, run) if frame.kind is FrameKind.COMMIT)
    return {commit.roster.message.base.round: commit for commit in found}


def leaders(home: Home, run: HomeRun) -> dict[int, str]:
    """Peer id of who leads the first attempt of each round, by the chain on this node's disk."""
    rules = rules_of(run.manifest)
    state = genesis(rules)
    found = {state.base.round: coordinator(state, 0)}
    for frame in _frames(home, run):
        if frame.kind is FrameKind.COMMIT:
            commit = decode_commit(frame.payload)
            # Which outer state a commit led to stands in the next one.
            state = next_state(replace(state, base=commit.roster.message.base), rules, commit, ZERO_DIGEST)
        elif frame.kind is FrameKind.REFORM:
            reformed = decode_body(Reformed, frame.payload)
            state = reform_state(replace(state, base=reformed.reform.base), rules, reformed)
        found[state.base.round] = coordinator(state, 0)
    return found


def _frames(home: Home, run: HomeRun) -> list[Frame]:
    """A copy is read: the log is its daemon's."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "chain.log"
        shutil.copyfile(home.run_directory(run.run_id) / "chain.log", copy)
        log = ChainLog(copy, run.run_id)
        try:
            return list(log.frames(HEADER_BYTES))
        finally:
            log.close()


def check_means(round_number: int, run: HomeRun, holder: Home, homes: Sequence[tuple[str, Home]]) -> Means:
    """Recompute every part of the commit that `holder` has. `homes`: (peer id, home) of everybody who may be in it.

    Raises AssertionError for a mean that is not the mean.
    """
    commit = commits(holder, run)[round_number]
    roster = commit.roster.message
    rules = rules_of(run.manifest)
    values = codec(rules.codec)
    slot_bytes = values.encoded_bytes(min(rules.part_elements, rules.elements))
    base = roster.base.digest().hex()
    leaf_files = {peer: home.path / "leaves" / f"{base}.data" for peer, home in homes}
    stored = (holder.engine_directory(run.run_id) / "parts" / f"{roster_id(commit.roster).hex()}.data").read_bytes()
    contributing = contributing_of(roster, rules)
    senders = [ready.sender for ready in roster.readys]
    counted: list[tuple[str, ...]] = []
    largest = 0.0
    for part, header in enumerate(commit.headers):
        if header is None:
            counted.append(())
            continue
        start, stop = rules.part_range(part)
        size, length = stop - start, values.encoded_bytes(stop - start)
        payload = stored[part * slot_bytes : part * slot_bytes + length]
        assert chunk_hash(payload) == header.message.hash, f"part {part} on disk is not the one that was committed"
        weights = _weights(roster, contributing, part, rules.weight_cap_ratio)
        acc, whole = np.zeros(size, np.float32), 0
        for index in bits(header.message.bitmap):
            leaf = leaf_files[senders[index]].read_bytes()[part * slot_bytes : part * slot_bytes + length]
            acc = acc + np.float32(weights[index]) * reference.decode(rules.codec, leaf, size)
            whole += weights[index]
        expected = reference.encode(rules.codec, acc / np.float32(whole))
        assert np.isfinite(acc).all(), f"part {part} of round {round_number} is not finite"
        assert payload == expected, f"part {part} of round {round_number} is not the mean of its bitmap"
        largest = max(largest, float(np.max(np.abs(reference.decode(rules.codec, payload, size)))))
        counted.append(tuple(senders[index] for index in bits(header.message.bitmap)))
    filled = sum(1 for header in commit.headers if header is not None)
    return Means(
        round=round_number,
        attempt=commit.certificate.votes[0].message.attempt,
        parts=filled,
        empty=len(commit.headers) - filled,
        largest=largest,
        bitmaps=tuple(counted),
    )


def _weights(roster: object, contributing: int, part: int, ratio: float) -> dict[int, int]:
    """Weights of the READYs with a slot, from the reference's reading of the text."""
    readys = roster.readys  # type: ignore[attr-defined]
    slots = [index for index in bits(contributing) if tokens_of(readys[index].message.tokens, part) > 0]
    tokens = [tokens_of(readys[index].message.tokens, part) for index in slots]
    return dict(zip(slots, reference.weights(tokens, ratio), strict=True))
