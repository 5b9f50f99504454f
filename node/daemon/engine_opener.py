"""Opening an engine for a run: what it is told, and what becomes known of it to others."""

from __future__ import annotations

from pathlib import Path

import structlog
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.identity import Identity, create_data_certificate
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.supervisor_client import EngineHandle
from node.engine import api
from node.errors import OperatorError
from node.manifest import Manifest
from node.settings import DaemonSettings
from protocol.rules import Rules

ENGINE_RETRY_S = 5.0

log = structlog.get_logger()


class EngineOpener:
    """For one run, one engine after another."""

    def __init__(
        self,
        *,
        settings: DaemonSettings,
        identity: Identity,
        manifest: Manifest,
        rules: Rules,
        directory: Path,
        network: Network,
        observations: Observations,
    ) -> None:
        """`directory`: the engine's own."""
        self._settings = settings
        self._identity = identity
        self._manifest = manifest
        self._rules = rules
        self._directory = directory
        self._network = network
        self._observations = observations
        self._was_open = False

    async def open(self, engine: EngineClient, handle: EngineHandle) -> None:
        """Raises `OperatorError` when the run's first engine cannot be opened."""
        certificate = create_data_certificate(self._identity.peer_id)
        rounds, limits = self._manifest.rounds, self._manifest.limits
        request = api.Open(
            id=0,
            directory=str(self._directory),
            peer_id=self._identity.peer_id,
            certificate_pem=certificate.certificate_pem,
            key_pem=certificate.key_pem,
            listen_host=self._network.data_host,
            listen_port=self._settings.data_port,
            elements=self._rules.elements,
            buffer_elements=self._rules.buffer_elements,
            part_elements=self._rules.part_elements,
            codec=rounds.codec,
            sum_codec=rounds.sum_codec,
            momentum=self._rules.momentum,
            keep_rounds=limits.keep_rounds,
            keep_snapshots=limits.keep_snapshots,
            disk_limit_bytes=self._settings.max_disk_bytes,
            threads=self._settings.threads,
            relay_bytes_s=self._settings.max_relay_bytes_s,
            engine=rounds.engine,
            averager_python=self._settings.hivemind_python,
        )
        opened = await self._opened(engine, request, (handle.theta_fd, handle.momentum_fd, handle.delta_fd))
        self._network.publish_engine(opened.port, certificate.sha256)
        log.info("engine ready", data_port=opened.port)

    async def _opened(self, engine: EngineClient, request: api.Open, fds: tuple[int, int, int]) -> api.Opened:
        """What hinders the first start is the operator's to mend; later (a full disk, say) it is waited for."""
        while True:
            try:
                opened = await engine.open(request, fds=fds)
            except EngineFailed as error:
                if not self._was_open:
                    raise OperatorError(str(error)) from error
                self._observations.setting_up("starting", f"the engine cannot start yet: {error}")
                log.error("the engine cannot start yet", why=str(error))
                await trio.sleep(ENGINE_RETRY_S)
                continue
            self._was_open = True
            return opened
