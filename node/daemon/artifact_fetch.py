"""Artifacts of the manifest: fetched before anything else can begin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.manifest import Artifact

ARTIFACT_TIMEOUT_S = 3600.0
ARTIFACT_RETRY_S = 2.0

log = structlog.get_logger()


async def obtain_artifacts(
    artifacts: Mapping[str, Artifact],
    directory: Path,
    *,
    network: Network,
    engine: EngineClient,
    observations: Observations,
) -> None:
    """Everything the manifest names, by name, from whoever is connected, until it is in `directory`."""
    for name, artifact in artifacts.items():
        path = directory / artifact.hash
        while True:
            sources = tuple(network.peers)
            whole = path.exists() and path.stat().st_size == artifact.length
            size = f"{name} ({artifact.length / 1e6:.1f} MB)"
            observations.setting_up(
                "joining", f"checking {size}" if whole else f"fetching {size} from {len(sources)} peers"
            )
            try:
                await engine.fetch_artifact(
                    hash=bytes.fromhex(artifact.hash),
                    length=artifact.length,
                    sources=sources,
                    timeout_s=ARTIFACT_TIMEOUT_S,
                )
                if not whole:
                    log.info("artifact fetched", name=name, bytes=artifact.length)
                break
            except EngineFailed as error:
                observations.setting_up("joining", f"{name} cannot be had yet: {error}")
                await trio.sleep(ARTIFACT_RETRY_S)
