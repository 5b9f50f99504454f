"""What each member of a finished swarm trained on, read from its chain: units, steps and weights, round by round.

The chain says all of it. Genesis and the commits give each member's lease; its READY says how many tokens are in its
contribution; the trainer's own `LeaseCursor` turns both into batches. So a virtual worker repeats exactly the steps of
the member with its peer id, also where a round was cut short or a part was not counted.

P: parts of the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from node.cli import runs
from node.cli.runs import HomeRun
from node.daemon.chain_log import FrameKind
from node.daemon.contribution import run_lengths
from node.daemon.identity import ensure_identity
from node.daemon.store import Record, Store
from node.errors import OperatorError
from node.home import Home
from node.manifest import Manifest, rules_of
from node.trainer.lease_cursor import LeaseCursor, Stretch
from node.trainer.wire import Lease
from protocol.chain import ChainState, counted_bits, genesis, next_state
from protocol.messages import Commit
from protocol.names import PeerId
from protocol.planning import contributing_of
from protocol.rules import Rules
from protocol.weights import RosterWeights
from protocol.wire import decode_commit

Batch: TypeAlias = tuple[Stretch, ...]
"""Sequences of one inner step."""


class NotComparable(OperatorError):
    """The swarm's work cannot be repeated from its chain: one sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRound:
    """One member in one round."""

    peer: PeerId
    lease: tuple[Lease, ...]
    claimed: tuple[tuple[int, int], ...]
    """(parts, tokens) runs of its READY; empty: it contributed nothing."""
    weights: tuple[int, ...]
    """[P]; 0: no slot."""
    counted: tuple[bool, ...]
    """[P]: whether the part's mean holds its work."""
    batches: tuple[Batch, ...] = ()
    """Its inner steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    number: int
    outer_lr: float
    held: tuple[bool, ...]
    """[P]; False: the part stayed EMPTY and its state unchanged."""
    members: tuple[MemberRound, ...]
    """Ascending by peer id, which is the order of sums."""
    tokens_total: int
    """Counted by the run up to and with this round."""
    state_hash: str
    """Hex; of the state that it led to."""

    @property
    def contributors(self) -> int:
        return sum(any(one.counted) for one in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    manifest: Manifest
    rounds: tuple[Round, ...]
    guessed_rounds: tuple[int, ...]
    """Rounds in which a member's steps are not in the chain but inferred from a later READY."""

    @property
    def tokens(self) -> int:
        """Trained by all members."""
        data = self.manifest.data
        steps = (batch for one in self.rounds for member in one.members for batch in member.batches)
        return sum(sequences_of(batch) for batch in steps) * data.sequence_tokens


def sequences_of(batch: Iterable[Stretch]) -> int:
    return sum(stretch.stop - stretch.start for stretch in batch)


def read_work(home: Home) -> tuple[HomeRun, Work]:
    """The run of a home whose daemon has ended, and the work of all its members. Raises `NotComparable`."""
    run = runs.current(home)
    if run is None:
        raise NotComparable(f"the home {home.path} has no run: give a swarm's directory that was kept")
    rules = rules_of(run.manifest)
    store = Store(home.run_directory(run.run_id), rules, ensure_identity(home))
    store.open()
    try:
        hashes = {number: store.state_hash_at(number) or b"" for number in range(1, store.state.base.round + 1)}
        rounds = read_rounds(rules, store.records(), hashes)
    finally:
        store.close()
    return run, with_batches(run.manifest, rules, rounds)


def read_rounds(rules: Rules, records: Iterable[Record], hashes: dict[int, bytes]) -> list[Round]:
    """The chain's rounds without batches. `hashes`: state hash by the round that starts from it."""
    state = genesis(rules)
    rounds: list[Round] = []
    for record in records:
        if record.kind is not FrameKind.COMMIT:
            raise NotComparable(
                f"the run was reformed in round {record.round}: compare a swarm in which every node lived to the end"
            )
        commit = decode_commit(record.body)
        after = next_state(state, rules, commit, hashes[record.round + 1])
        rounds.append(_round(state, rules, commit, after))
        state = after
    return rounds


def _round(state: ChainState, rules: Rules, commit: Commit, after: ChainState) -> Round:
    roster = commit.roster.message
    weights = RosterWeights(
        [ready.message.tokens for ready in roster.readys], contributing_of(roster, rules), rules.weight_cap_ratio
    )
    bits = {ready.sender: bit for bit, ready in enumerate(roster.readys)}
    bitmaps = [header.message.bitmap if header is not None else 0 for header in commit.headers]
    bitmaps = bitmaps or [0] * rules.part_count
    members = []
    for peer, entry in state.members:
        bit = bits.get(peer)
        members.append(
            MemberRound(
                peer=peer,
                lease=tuple(Lease(epoch=held.epoch, start=held.start, stop=held.stop) for held in entry.lease),
                claimed=roster.readys[bit].message.tokens if bit is not None else (),
                weights=tuple(weights.at(part)[bit] if bit is not None else 0 for part in range(rules.part_count)),
                counted=tuple(bit is not None and bool(bitmap >> bit & 1) for bitmap in bitmaps),
            )
        )
    return Round(
        number=state.base.round,
        outer_lr=rules.outer_lr_for(max(1, counted_bits(commit.headers).bit_count())),
        held=tuple(bitmap != 0 for bitmap in bitmaps),
        members=tuple(members),
        tokens_total=after.tokens_total,
        state_hash=after.base.state_hash.hex(),
    )


# ---------------------------------------------------------------- from tokens to batches


def with_batches(manifest: Manifest, rules: Rules, rounds: Sequence[Round]) -> Work:
    """`rounds` with every member's steps. Raises `NotComparable` for work that the chain contradicts."""
    peers = sorted({member.peer for one in rounds for member in one.members})
    batches: dict[tuple[int, PeerId], tuple[Batch, ...]] = {}
    guessed: set[int] = set()
    for peer in peers:
        mine = [(one.number, member) for one in rounds for member in one.members if member.peer == peer]
        tokens, unsaid = trained_tokens(manifest, rules, mine)
        guessed |= unsaid
        cursor = LeaseCursor(manifest.data.unit_sequences)
        for number, member in mine:
            cursor.begin(member.lease)
            batches[number, peer] = _steps(manifest, cursor, number, peer, tokens[number])
            if member.claimed and any(member.counted):
                cursor.counted()
    return Work(
        manifest=manifest,
        rounds=tuple(
            replace(
                one,
                members=tuple(replace(member, batches=batches[one.number, member.peer]) for member in one.members),
            )
            for one in rounds
        ),
        guessed_rounds=tuple(sorted(guessed)),
    )


def trained_tokens(
    manifest: Manifest, rules: Rules, mine: Sequence[tuple[int, MemberRound]]
) -> tuple[dict[int, int], set[int]]:
    """Tokens that one member trained on in each round, and the rounds for which that is inferred.

    A READY claims what is in the local model and in no commit yet, so that new tokens are the claim less what was
    carried. Work of a round without a claim (its READY came too late) shows up in the next claim; what is in there
    beyond a full budget is put into the rounds just before.
    """
    budget = manifest.rounds.steps * manifest.inner.batch_sequences * manifest.data.sequence_tokens
    token_cap = 3 * rules.lease_cap_units * rules.unit_tokens
    carried = [0] * rules.part_count
    tokens: dict[int, int] = {}
    silent: list[int] = []
    guessed: set[int] = set()
    for number, member in mine:
        if not member.claimed:
            tokens[number] = 0
            silent.append(number)
            continue
        new = member.claimed[0][1] - carried[0]
        if new < 0 or run_lengths([min(before + new, token_cap) for before in carried]) != member.claimed:
            raise NotComparable(
                f"round {number}: {member.peer} claims {member.claimed} tokens, which do not follow from "
                f"{carried[0]} carried ones: work was discarded there; compare a swarm whose trainers all lived"
            )
        guessed.update(silent)
        left = new
        for place in [number, *reversed(silent)]:
            tokens[place] = min(left, budget)
            left -= tokens[place]
        if left:
            raise NotComparable(f"round {number}: {member.peer} claims {left} tokens more than its budgets allow")
        silent.clear()
        carried = [0 if done else before + new for done, before in zip(member.counted, carried, strict=True)]
    return tokens, guessed


def _steps(manifest: Manifest, cursor: LeaseCursor, number: int, peer: PeerId, tokens: int) -> tuple[Batch, ...]:
    """Inner steps over `tokens` tokens of the lease, as `node.trainer.batches` makes them."""
    left, rest = divmod(tokens, manifest.data.sequence_tokens)
    steps: list[Batch] = []
    while left > 0:
        batch = cursor.take(min(manifest.inner.batch_sequences, left))
        if not batch:
            raise NotComparable(f"round {number}: {peer} trained beyond its lease: the chain does not say on what")
        cursor.trained()
        steps.append(tuple(batch))
        left -= sequences_of(batch)
    if rest:
        raise NotComparable(f"round {number}: {peer} trained on {tokens} tokens, not on whole sequences of the run")
    return tuple(steps)


def home_of(swarm_directory: Path, index: int = 0) -> Home:
    """A node's home in the directory of `atoll swarm --keep`."""
    return Home(swarm_directory.absolute() / f"node-{index}")
