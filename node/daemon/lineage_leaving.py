"""Leaving a lineage that lost: its state is kept, then given up for good or gone back to (protocol section 10)."""

from __future__ import annotations

from pathlib import Path

import structlog
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.observations import Observations
from node.daemon.store import Store, StoreError
from protocol.names import Base, PeerId

GIVE_UP_RETRY_S = 2.0
RESUME_RETRY_S = 5.0

log = structlog.get_logger()


async def keep_state(
    store: Store, engine: EngineClient, base: Base, snapshot: Path, observations: Observations
) -> None:
    """The outer state at the tip of a lineage that may be left: without it the way back needs others' bytes."""
    observations.setting_up("catching-up", f"keeping the state of round {base.round} before it is left")
    try:
        await engine.save_snapshot(round=base.round)
        await trio.to_thread.run_sync(store.left_files.keep_state, snapshot)
    except (EngineFailed, OSError) as error:
        log.warning("the state of the lineage that is left cannot be kept", round=base.round, why=str(error))


async def resume_left(store: Store, snapshots: Path, observations: Observations) -> None:
    """Back to the lineage that was left; its state, given to the engine's folder, is loaded like any other."""
    while True:
        try:
            await trio.to_thread.run_sync(store.resume_left, snapshots)
            observations.count(["lineage resumed"])
            return
        except (OSError, StoreError) as error:
            observations.setting_up("catching-up", f"the lineage that was left cannot be resumed: {error}")
            log.error("the lineage that was left cannot be resumed", why=str(error))
        await trio.sleep(RESUME_RETRY_S)


async def give_up_left(store: Store, me: PeerId, observations: Observations) -> None:
    """This node is a member of the lineage that it followed: what went with its own is said once."""
    while True:
        try:
            lost = await trio.to_thread.run_sync(store.give_up_left, me)
            break
        except OSError as error:
            log.warning("the lineage that was left cannot be given up yet", why=str(error))
        await trio.sleep(GIVE_UP_RETRY_S)
    if lost is not None:
        observations.lost_lineages.append(lost)
        observations.count(["lineage lost"])
        log.error(
            "this node's own lineage is given up: what it counted since the branching is discarded",
            lineage=lost.lineage[:16],
            followed=lost.followed[:16],
            since_round=lost.since_round,
            rounds=lost.rounds,
            own_tokens=lost.own_tokens,
            tokens=lost.tokens,
        )
