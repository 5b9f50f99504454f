"""Catching up with the run: the chain from a peer, then the state that it certifies (protocol section 9).

The chain is verified record by record against the electors that follow from it; nothing a peer says is believed
without. State comes as a replay of the round log where the parts can still be had, else as a snapshot whose hash a
later commit certifies, fetched in verified chunks from several peers at once, and the replay from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import trio

from node.daemon import rpc
from node.daemon.chain_download import ChainDownload, Followed, StateUnavailable
from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.pace import Pace
from node.daemon.requests import apply_request, part_ref
from node.daemon.store import Store, StoreError
from node.daemon.tips import PeerTip, ask_tips
from node.errors import AtollError
from node.manifest import Manifest
from protocol.chain import ChainState
from protocol.messages import Commit
from protocol.names import Digest, Keyring, PeerId
from protocol.rules import Rules

PARTS_TIMEOUT_S = 60.0
SNAPSHOT_TIMEOUT_S = 3600.0
RETRY_S = 2.0
PACE_EVERY_S = 10.0
"""How often a long replay looks how far the run is."""
STUCK_S = 1.5 * SNAPSHOT_TIMEOUT_S
"""A winner that goes on and never gives its state away holds this node no longer than that without a nearer state."""
SNAPSHOT_COSTS_ROUNDS = 8
"""A snapshot is 8 bytes a parameter, a round's parts about one: nearer than this, replaying is cheaper."""

log = structlog.get_logger()


class WinnerGone(AtollError):
    """Nobody of the lineage that won is there any more, before its state was: go back to the one that was left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The outer state that the engine's memory holds."""

    round: int
    state_hash: Digest
    """Computed here; the run may have agreed on another."""


class CatchUp:
    """Brings the store's chain and the engine's state to the tip that the connected peers hold."""

    def __init__(
        self,
        *,
        rules: Rules,
        manifest: Manifest,
        keyring: Keyring,
        network: Network,
        engine: EngineClient,
        store: Store,
        observations: Observations,
    ) -> None:
        self._rules = rules
        self._manifest = manifest
        self._keyring = keyring
        self._network = network
        self._engine = engine
        self._store = store
        self._observations = observations
        self._held: HeldState | None = None
        """What the engine holds; None: no state that is of use."""
        self._chain = ChainDownload(network=network, store=store, observations=observations, say=self._say)
        self._pace = Pace()
        self._no_help: set[PeerId] = set()
        """Peers whose chain did not bring this node any further, whatever they say of it."""

    async def run(self, held: HeldState | None, lineage: Digest | None = None) -> ChainState:
        """`held`: the state that the engine holds, None if it holds none. Returns the tip's state.

        `lineage`: the one that won (`protocol.lineages`): if this node's chain is not part of it, what is behind the
        branching is left. Without it a chain only grows. Retries while something is missing; `status` says what.
        Raises `WinnerGone` when a lineage was left and nobody who has the other's state has been there for `T_fork`, or
        no nearer state came for `STUCK_S`.
        """
        self._no_help.clear()
        self._pace.begin()
        self._held = held
        there_s = nearer_s = trio.current_time()
        nearest = self._held
        while True:
            tips = await ask_tips(self._network, lineage)
            self._measure(tips)
            name, now_s = self._store.state.base.lineage, trio.current_time()
            # Other losers follow the same chain, and lack what is missing here.
            if self._store.left is None or any(tip.tip.lineage == name and not tip.tip.catching_up for tip in tips):
                there_s = now_s
            if self._store.left is None or self._held != nearest:
                nearest, nearer_s = self._held, now_s
            if now_s > there_s + self._rules.fork_timeout_s:
                raise WinnerGone(f"nobody who has the state of lineage {name.hex()[:8]} is connected any more")
            if now_s > nearer_s + max(STUCK_S, self._rules.fork_timeout_s):
                raise WinnerGone(f"nobody of lineage {name.hex()[:8]} has given its state for {now_s - nearer_s:.0f} s")
            before = self._store.state.base, self._held
            try:
                for tip in self._worth_following(tips, lineage):
                    won = tip.tip.lineage == lineage != self._store.state.base.lineage
                    followed = await self._chain.extend(tip, may_leave=won)
                    if followed is Followed.ANOTHER_LINEAGE:
                        self._held = None
                    if followed is not Followed.NOTHING:
                        break
                    self._no_help.add(tip.peer)
                await self._bring_state(tips)
            except (StateUnavailable, EngineFailed) as error:
                self._say(str(error))
                await trio.sleep(RETRY_S)
                continue
            base = self._store.state.base
            if (base, self._held) == before:
                return self._store.state  # at once: all that was said of the run is as fresh as it was
            again = await ask_tips(self._network, lineage)
            self._measure(again)
            if not any(tip.tip.round > base.round + 1 for tip in self._worth_following(again, lineage)):
                return self._store.state

    def _worth_following(self, tips: Sequence[PeerTip], lineage: Digest | None) -> list[PeerTip]:
        """Best first: of the lineage that won; else of whichever more of them are on, and the furthest.

        The lineage that won is followed from however far behind: what was trained here alone since is lost with mine.
        Where none has won, a chain that goes on from mine is mine to follow, whatever its lineage: nodes that died and
        come back together would otherwise find each other on the lineage that those who lived had to leave, and their
        number would undo all that was trained without them. Who cannot help is asked once.
        """
        base = self._store.state.base
        if any(tip.tip.lineage == lineage for tip in tips):
            tips = [tip for tip in tips if tip.tip.lineage == lineage]
        won = lineage is not None and lineage != base.lineage
        ahead = [
            tip
            for tip in tips
            if tip.peer not in self._no_help
            and (
                tip.tip.round > base.round
                or (tip.tip.round == base.round and tip.tip.lineage != base.lineage)
                or (won and tip.tip.lineage == lineage)
            )
        ]
        followers = Counter(tip.tip.lineage for tip in ahead)
        return sorted(ahead, key=lambda tip: (-followers[tip.tip.lineage], -tip.tip.round))

    def _say(self, what: str) -> None:
        """What is done now, and why it may never end."""
        slow = self._pace.too_slow
        self._observations.setting_up("catching-up", f"{what}; {slow}" if slow else what)

    def _measure(self, tips: Sequence[PeerTip]) -> None:
        """How far this node and the run are, and whether it comes nearer."""
        mine = self._held.round if self._held is not None else 0
        lineage = self._store.state.base.lineage
        tip = max((tip.tip.round for tip in tips if tip.tip.lineage == lineage), default=mine)
        self._pace.saw(mine, max(tip, mine))
        if (news := self._pace.news()) is not None:
            log.warning("this node is slower than the run", why=news)
            self._observations.count(["slower than the run's rounds"])

    # ------------------------------------------------------------ state

    async def _bring_state(self, tips: Sequence[PeerTip]) -> None:
        """Raises `StateUnavailable` with one sentence when no connected peer has what is missing, or `EngineFailed`."""
        target = self._store.state.base.round
        sources = tuple(tip.peer for tip in tips)
        await self._trust_what_is_held()
        if self._held is None:
            self._held = await self._load_local()
        offer = await self._best_snapshot(target, tips)
        nearer = offer.round - self._held.round if offer is not None and self._held is not None else 0
        if offer is not None and (self._held is None or nearer > (1 if self._pace.too_slow else SNAPSHOT_COSTS_ROUNDS)):
            await self._load_from_peers(offer, tips)
        if self._held is None:
            self._held = await self._load_initial()
        try:
            await self._replay(target, sources)
        except StateUnavailable:
            if offer is None or (self._held is not None and offer.round <= self._held.round):
                raise
            await self._load_from_peers(offer, tips)
            await self._replay(target, sources)

    async def _trust_what_is_held(self) -> None:
        """What the engine holds is of use unless the run has meanwhile agreed on another state of that round."""
        held = self._held
        agreed = self._store.state_hash_at(held.round) if held is not None else None
        if held is not None and agreed not in (None, held.state_hash):
            assert agreed is not None
            await self.set_aside(
                held,
                f"the run agreed on {agreed.hex()[:16]} for round {held.round}, not on {held.state_hash.hex()[:16]}",
            )

    async def set_aside(self, held: HeldState, why: str) -> None:
        """The state here is corrupt: keep what is on disk of it apart, and use it no more. Raises `EngineFailed`."""
        log.critical("this node's outer state is corrupt: it is set aside and fetched anew", why=why)
        self._observations.count(["corrupt state set aside"])
        self._say(f"the outer state here was corrupt and is set aside: {why}")
        self._held = None
        await self._engine.set_aside(round=held.round, state_hash=held.state_hash, reason=why)

    async def _load_local(self) -> HeldState | None:
        """The newest snapshot on this disk that lies on the chain."""
        inventory = await self._engine.inventory()
        for snapshot in sorted(inventory.snapshots, key=lambda snapshot: -snapshot.round):
            if self._store.state_hash_at(snapshot.round) != snapshot.state_hash:
                continue
            try:
                await self._engine.load_snapshot(round=snapshot.round, state_hash=snapshot.state_hash)
            except EngineFailed as error:
                log.warning("a snapshot on this disk cannot be used", round=snapshot.round, why=str(error))
                self._observations.count(["snapshot set aside"])
                continue
            return HeldState(round=snapshot.round, state_hash=snapshot.state_hash)
        return None

    async def _load_initial(self) -> HeldState:
        artifact = self._manifest.artifacts[self._manifest.initial_state]
        loaded = await self._engine.load_initial(hash=bytes.fromhex(artifact.hash))
        if loaded.state_hash.hex() != self._manifest.initial_state_hash:
            raise StateUnavailable(
                f"the initial state hashes to {loaded.state_hash.hex()[:16]}, the manifest says "
                f"{self._manifest.initial_state_hash[:16]}: its creator must make the run anew"
            )
        return HeldState(round=0, state_hash=loaded.state_hash)

    async def _best_snapshot(self, target: int, tips: Sequence[PeerTip]) -> rpc.SnapshotOffer | None:
        """The newest that is offered, certified by a later commit (s ≤ tip - 1), and newer than what is here.

        One that was begun goes on, while it is not much older.
        """
        offers = [
            offer
            for tip in tips
            for offer in tip.tip.snapshots
            if offer.round < target
            and (self._held is None or offer.round > self._held.round)
            and self._store.state_hash_at(offer.round) == offer.state_hash
        ]
        newest = max(offers, key=lambda offer: offer.round, default=None)
        if newest is None:
            return None
        # What an interrupted download left on this disk need not come again.
        begun = {(one.round, one.state_hash) for one in (await self._engine.inventory()).partial}
        for offer in sorted(offers, key=lambda offer: -offer.round):
            if (offer.round, offer.state_hash) in begun and newest.round - offer.round <= SNAPSHOT_COSTS_ROUNDS:
                return offer
        return newest

    async def _load_from_peers(self, offer: rpc.SnapshotOffer, tips: Sequence[PeerTip]) -> None:
        sources = tuple(tip.peer for tip in tips if offer in tip.tip.snapshots)
        self._say(f"downloading the state of round {offer.round} from {len(sources)} peers")
        try:
            await self._engine.fetch_snapshot(
                round=offer.round, state_hash=offer.state_hash, sources=sources, timeout_s=SNAPSHOT_TIMEOUT_S
            )
            self._held = None
            await self._engine.load_snapshot(round=offer.round, state_hash=offer.state_hash)
            self._held = HeldState(round=offer.round, state_hash=offer.state_hash)
            self._pace.restart()
        except EngineFailed as error:
            raise StateUnavailable(f"the state of round {offer.round} cannot be had: {error}") from error
        log.info("state downloaded", round=offer.round, sources=len(sources))

    async def _replay(self, target: int, sources: tuple[PeerId, ...]) -> None:
        """Apply the commits from what is held to round `target - 1`, fetching their parts."""
        assert self._held is not None
        first = self._held.round
        for number in range(first, target):
            try:
                commit = await trio.to_thread.run_sync(self._store.commit_at, number)
            except StoreError as error:
                raise StateUnavailable(str(error)) from error
            if self._pace.due(PACE_EVERY_S):
                self._measure(await ask_tips(self._network, None))
                if self._pace.too_slow and self._held.round > first:
                    return  # to see whether a snapshot is nearer by now
            self._say(f"replaying round {number} of {target}")
            await self._fetch_parts(commit, number, sources)
            try:
                applied = await self._engine.apply(apply_request(commit, self._rules, my_index=None, contributed=False))
            except EngineFailed as error:
                raise StateUnavailable(f"round {number} cannot be replayed: {error}") from error
            held = self._held = HeldState(round=number + 1, state_hash=applied.state_hash)
            try:
                await trio.to_thread.run_sync(self._store.verify_state, number + 1, applied.state_hash)
            except StoreError as error:
                await self.set_aside(held, str(error))
                raise StateUnavailable(str(error)) from error

    async def _fetch_parts(self, commit: Commit, number: int, sources: tuple[PeerId, ...]) -> None:
        headers = tuple(part_ref(header) for header in commit.headers if header is not None)
        if not headers:
            return
        try:
            answer = await self._engine.fetch_parts(headers=headers, sources=sources, timeout_s=PARTS_TIMEOUT_S)
        except EngineFailed as error:
            raise StateUnavailable(f"the parts of round {number} cannot be had: {error}") from error
        if answer.missing:
            raise StateUnavailable(
                f"{len(answer.missing)} parts of round {number} are with none of the {len(sources)} connected peers"
            )
        hashes = tuple(header.hash for header in headers)
        await self._engine.keep_commits(round=number, hashes=hashes)
