"""Records of the chain: what a peer's bytes say, whether they follow a place, and where they lead to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from node.daemon.chain_log import FrameKind, StoreError
from node.errors import StrangerError
from protocol.chain import ChainState, next_state, reform_state
from protocol.commits import verify_commit, verify_reform
from protocol.messages import Commit, Reformed
from protocol.names import ZERO_DIGEST, Base, Digest, Keyring
from protocol.rules import Rules
from protocol.wire import WireError, decode_body, decode_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A commit or a reform of the chain."""

    kind: FrameKind
    round: int
    """The round that a commit decided; of a reform, the round that the new lineage starts with."""
    body: bytes
    """`encode_commit` of a commit, `encode_body` of a `Reformed`."""


@dataclass(frozen=True, slots=True)
class Follower:
    """The rules of one run, applied to records."""

    rules: Rules
    keyring: Keyring

    def verified(self, state: ChainState, record: bytes) -> tuple[FrameKind, Commit | Reformed]:
        """What a peer's record says, verified to follow `state`. Raises `StrangerError`, `InvalidCommit`."""
        kind, body = record[:1], record[1:]
        try:
            if kind == FrameKind.COMMIT.to_bytes(1, "little"):
                commit = decode_commit(body)
                verify_commit(vouched(state, commit.roster.message.base), self.rules, commit, self.keyring)
                return FrameKind.COMMIT, commit
            if kind == FrameKind.REFORM.to_bytes(1, "little"):
                reformed = decode_body(Reformed, body)
                verify_reform(vouched(state, reformed.reform.base), self.rules, reformed, self.keyring)
                return FrameKind.REFORM, reformed
        except WireError as error:
            raise StrangerError(f"a record of the chain does not decode: {error}") from error
        raise StrangerError(f"a record of the chain has kind {kind!r}, which is neither commit nor reform")

    def followed(self, state: ChainState, content: Commit | Reformed) -> ChainState:
        """The chain after a record, whose signers vouch for the state hash that it builds on."""
        if isinstance(content, Commit):
            return self.after_commit(vouched(state, content.roster.message.base), content)
        return reform_state(vouched(state, content.reform.base), self.rules, content)

    def after_commit(self, state: ChainState, commit: Commit) -> ChainState:
        """The state hash stays open unless the commit has no parts."""
        unchanged = commit.roster.message.plan is None
        return next_state(state, self.rules, commit, state.base.state_hash if unchanged else ZERO_DIGEST)


def with_hash(state: ChainState, state_hash: Digest) -> ChainState:
    return replace(state, base=replace(state.base, state_hash=state_hash))


def vouched(state: ChainState, base: Base) -> ChainState:
    """`state` with the state hash that a record names: its signers vouch for it, and mine may be open or corrupt.

    Before the first commit the manifest says it, and nobody else.
    """
    return state if state.base.prev == ZERO_DIGEST else with_hash(state, base.state_hash)


def misplaced(base: Base, here: Base) -> StoreError:
    return StoreError(
        f"a record of round {base.round} after {base.prev.hex()[:16]} does not follow the chain here, which is at "
        f"round {here.round} after {here.prev.hex()[:16]}; catch up first"
    )
