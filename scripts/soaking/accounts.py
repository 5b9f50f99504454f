"""What the account of a stopped node says, beside what its chain says (`node.daemon.contribution`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from node.cli import runs
from node.daemon.chain_log import HEADER_BYTES, MAGIC, ChainLog, FrameKind
from node.daemon.contribution import WorkLedger, counted_tokens
from node.daemon.identity import hold_identity
from node.daemon.store import Store
from node.daemon.work_book import enter, read_chain
from node.daemon.work_file import WorkFile
from node.home import Home
from node.manifest import rules_of
from node.status import WorkTotals
from protocol.chain import lineage_of
from protocol.messages import Reformed
from protocol.names import Digest, PeerId
from protocol.wire import decode_body, decode_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    peer: PeerId
    work: WorkTotals
    """Brought up to the end of the chain here."""
    chain: dict[PeerId, int]
    """Part-tokens that the chain here counts, by peer."""
    commits: dict[tuple[Digest, int], set[Digest]]
    """(lineage, round) → names of the commits that this home has, or had until it left a lineage."""
    reformed: set[Digest]
    """Lineages whose REFORM this home has, or had."""
    tip: tuple[Digest, int]
    """Lineage and round."""


def read_account(home: Home) -> Account | None:
    """None: it was never in a run. The node must be stopped. Raises `StoreError`, `OSError`."""
    run = runs.current(home)
    if run is None:
        return None
    rules = rules_of(run.manifest)
    directory = home.run_directory(run.run_id)
    with hold_identity(home) as identity:
        store = Store(directory, rules, identity)
        store.open()
        try:
            kept = WorkFile(directory / "work").load(rules.part_count)
            ledger = WorkLedger(kept, token_cap=3 * rules.lease_cap_units * rules.unit_tokens)
            enter(ledger, read_chain(store, identity.peer_id, kept.through))
            commits: dict[tuple[Digest, int], set[Digest]] = {}
            reformed: set[Digest] = set()
            frames = [(record.kind, record.body) for record in store.records()]
            tip = store.state.base
            _enter_records(frames, tip.prev, commits, reformed)
            for left in directory.glob("chain.log.left-*"):
                _enter_records(_frames_left(left, run.run_id), None, commits, reformed)
            chain: Counter[PeerId] = Counter()
            for kind, body in frames:
                if kind is FrameKind.COMMIT:
                    commit = decode_commit(body)
                    for ready in commit.roster.message.readys:
                        chain[ready.sender] += sum(counted_tokens(commit, ready.sender))
            return Account(
                peer=identity.peer_id,
                work=ledger.status().exact,
                chain=dict(chain),
                commits=commits,
                reformed=reformed,
                tip=(tip.lineage, tip.round),
            )
        finally:
            store.close()


def _enter_records(
    frames: list[tuple[FrameKind, bytes]],
    last: Digest | None,
    commits: dict[tuple[Digest, int], set[Digest]],
    reformed: set[Digest],
) -> None:
    """A commit's name stands in the base of the next one. `last`: that of the newest; None: it is not known."""
    bases = [decode_commit(body).roster.message.base for kind, body in frames if kind is FrameKind.COMMIT]
    names = [base.prev for base in bases[1:]] + ([last] if last is not None else [])
    for base, name in zip(bases, names, strict=False):
        commits.setdefault((base.lineage, base.round), set()).add(name)
    for kind, body in frames:
        if kind is FrameKind.REFORM:
            reformed.add(lineage_of(decode_body(Reformed, body)))


def _frames_left(path: Path, run: Digest) -> list[tuple[FrameKind, bytes]]:
    """What a node cut off its log when it left a lineage: frames without the log's header."""
    whole = path.with_name(f"{path.name}.read")
    whole.write_bytes(MAGIC + run + path.read_bytes())
    log = ChainLog(whole, run)
    try:
        return [(frame.kind, frame.payload) for frame in log.frames(HEADER_BYTES)]
    finally:
        log.close()
        whole.unlink()
