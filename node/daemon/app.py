"""The daemon of one node: network, status server, supervisor's link, and one run session. Effects only.

`run_node` owns everything; when it returns or raises, nothing of it is left.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog
import trio

import node
from node.daemon import http, rpc
from node.daemon.addresses import parse_peer_address
from node.daemon.identity import Identity, hold_identity
from node.daemon.network import DuplicateIdentity, Network, PeerConnected, PeerDisconnected, PeerRefused, open_network
from node.daemon.observations import Observations
from node.daemon.session import RunSession
from node.daemon.status_view import StatusView
from node.daemon.store import load_manifest, save_manifest
from node.daemon.streams import RequestFailed
from node.daemon.supervisor_client import SupervisorClient
from node.daemon.trainer_host import TrainerHost
from node.engine.hivemind.environment import check_engine
from node.errors import OperatorError
from node.manifest import Manifest, ManifestError, SignedManifest, decode_signed
from node.memory import check_memory_for
from node.settings import DaemonSettings

FIRST_PEER_S = 30.0
"""How long a node that has only an address looks for its run before it gives up."""
LEAVING_S = 6.0
"""From SIGTERM to the end: an exchange under way may finish, and LEAVE spread (design section 11: 10 s in all)."""

log = structlog.get_logger()


async def run_node(settings: DaemonSettings) -> None:
    """Returns when the run is over or the operator stops the node. Raises `OperatorError` and `Fallen`."""
    home = settings.home_directory
    observations = Observations()
    supervisor = SupervisorClient.from_environment()
    incarnation = secrets.token_bytes(16)
    with hold_identity(home) as identity:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            async with open_network(
                identity=identity,
                home=home,
                listen=settings.listen,
                announce=settings.announce,
                announce_data=settings.announce_data,
                bootstrap=settings.join,
                run_id=settings.run_digest,
                version=node.__version__,
                incarnation=incarnation,
                name=settings.name or "",
                relay_bytes_s=settings.max_relay_bytes_s,
            ) as network:
                host = TrainerHost(home)
                view = StatusView(
                    settings=settings,
                    identity=identity,
                    network=network,
                    host=host,
                    supervisor=supervisor,
                    observations=observations,
                )
                nursery.start_soon(_log_network, network, observations)
                await nursery.start(host.run)  # type: ignore[arg-type]
                bound = await nursery.start(
                    partial(http.serve, view, home.control_socket, settings.http, last_status=home.last_status_file)
                )
                view.http = bound
                await supervisor.ready(network.addresses, bound)
                nursery.start_soon(view.keep_fresh)
                await _live(settings, identity, network, supervisor, host, observations, view, incarnation)
                observations.setting_up("finished", "this node has ended its part in the run")
            nursery.cancel_scope.cancel()


async def _live(
    settings: DaemonSettings,
    identity: Identity,
    network: Network,
    supervisor: SupervisorClient,
    host: TrainerHost,
    observations: Observations,
    view: StatusView,
    incarnation: bytes,
) -> None:
    async with _leaving_on_signals(view) as stopped, trio.open_nursery() as nursery:
        nursery.start_soon(_end_when, stopped, view, nursery.cancel_scope)
        signed, manifest = await _obtain_manifest(settings, identity, network, observations)
        check_memory_for(manifest)
        await trio.to_thread.run_sync(check_engine, manifest, settings.hivemind_python)
        if network.run_id is None:
            await network.set_run(signed.run_id)
        network.serve(rpc.MANIFEST, partial(_answer_manifest, signed))
        session = RunSession(
            settings=settings,
            identity=identity,
            network=network,
            supervisor=supervisor,
            host=host,
            signed=signed,
            manifest=manifest,
            observations=observations,
            incarnation=incarnation,
        )
        view.session = session
        await session.run()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _leaving_on_signals(view: StatusView) -> AsyncIterator[trio.Event]:
    """The event is set by SIGTERM, SIGINT or a stop request."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for _ in signals:
                    view.stop_requested.set()

            nursery.start_soon(watch)
            yield view.stop_requested
            nursery.cancel_scope.cancel()


async def _end_when(stopped: trio.Event, view: StatusView, scope: trio.CancelScope) -> None:
    """Leave in order: finish what is being exchanged, tell the others, keep the state, end."""
    await stopped.wait()
    log.info("leaving the run")
    with trio.move_on_after(LEAVING_S):
        if view.session is not None:
            await view.session.leave()
    scope.cancel()


async def _log_network(network: Network, observations: Observations) -> None:
    async for event in network.changes:
        match event:
            case PeerConnected():
                log.info("peer connected", peer=event.peer)
            case PeerDisconnected():
                log.info("peer gone", peer=event.peer, why=event.why)
            case PeerRefused():
                log.warning("peer refused", peer=event.peer, by_this_node=event.by_this_node, why=event.reason)
            case DuplicateIdentity():
                log.error("this node's identity is used twice", why=event.reason)
                observations.count(["identity used twice"])


async def _answer_manifest(signed: SignedManifest, peer: str, payload: bytes) -> bytes:
    return signed.encode()


async def _obtain_manifest(
    settings: DaemonSettings, identity: Identity, network: Network, observations: Observations
) -> tuple[SignedManifest, Manifest]:
    """From the home, or from the peers that the operator named. Raises `OperatorError` after `FIRST_PEER_S`."""
    home = settings.home_directory
    run = settings.run_digest
    if run is not None:
        signed = await trio.to_thread.run_sync(load_manifest, home.manifest_file(run))
        if signed is not None:
            return decode_signed(signed.encode(), identity.verify)
    earlier = bytes.fromhex(settings.resume_run_id) if settings.resume_run_id else None
    observations.setting_up("joining", f"asking {len(settings.join)} addresses for the run's manifest")
    # Others that find this node meanwhile (of its run of last time, or strangers) do not choose what it joins.
    named = {parse_peer_address(text).peer_id for text in settings.join}
    refusals: dict[str, str] = {}
    deadline = trio.current_time() + FIRST_PEER_S
    while trio.current_time() < deadline:
        for peer in [one for one in network.peers if run is not None or one in named]:
            try:
                data = await network.request(peer, rpc.MANIFEST, b"", timeout_s=10.0)
                signed, manifest = decode_signed(data, identity.verify)
                if run is not None and signed.run_id != run:
                    raise ManifestError(f"it is of run {signed.run_id.hex()[:16]}, not {run.hex()[:16]}")
            except (RequestFailed, ManifestError) as error:
                refusals[peer] = str(error)
                continue
            await trio.to_thread.run_sync(save_manifest, home.manifest_file(signed.run_id), signed)
            home.current_run_file.write_text(signed.run_id.hex() + "\n")
            log.info("joined the run", name=manifest.name, run=signed.run_id.hex()[:16])
            return signed, manifest
        observations.setting_up("joining", network.reason())
        with trio.move_on_after(1.0):
            await network.links_changed().wait()
    if earlier is not None and (signed := await trio.to_thread.run_sync(load_manifest, home.manifest_file(earlier))):
        log.warning("nobody answers at the given addresses: going on with this home's run", run=earlier.hex()[:16])
        return decode_signed(signed.encode(), identity.verify)
    why = "; ".join(f"{peer}: {reason}" for peer, reason in refusals.items()) or network.reason().partition(";")[0]
    raise OperatorError(
        f"no run was found within {FIRST_PEER_S:.0f} s at {', '.join(settings.join)} ({why}); check that a member runs "
        "there and can be reached from here, and ask it for its address by `atoll id`"
    )
