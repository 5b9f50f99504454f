"""This node's `status`, assembled from what its parts know (`node.status` has the schema)."""

from __future__ import annotations

import msgspec
import trio

import node
from node.daemon.engine_client import EngineFailed
from node.daemon.identity import Identity
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.round_trips import RoundTrips
from node.daemon.session import RunSession
from node.daemon.supervisor_client import SupervisorClient
from node.daemon.trainer_host import TrainerHost
from node.engines import LIMITS
from node.errors import OperatorError
from node.settings import DaemonSettings
from node.status import ExportPoint, MemberStatus, ReachStatus, Status, TrainerStatus
from protocol.chain import member

PROCESSES_EVERY_S = 2.0
EXPORT_S = 120.0


class StatusView:
    """Implements `node.daemon.http.StatusSource`."""

    def __init__(
        self,
        *,
        settings: DaemonSettings,
        identity: Identity,
        network: Network,
        host: TrainerHost,
        supervisor: SupervisorClient,
        observations: Observations,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._network = network
        self._host = host
        self._supervisor = supervisor
        self._observations = observations
        self._resident_bytes: dict[str, int] = {}
        self._crashes: dict[str, int] = {}
        self.session: RunSession | None = None
        self.http: str | None = None
        self.stop_requested = trio.Event()

    async def keep_fresh(self) -> None:
        """Resident memory of the four processes, as the supervisor sees them."""
        while True:
            processes = await self._supervisor.processes()
            self._resident_bytes, self._crashes = processes.resident_bytes, processes.crashes
            await trio.sleep(PROCESSES_EVERY_S)

    def stop(self) -> None:
        self.stop_requested.set()

    async def export_point(self) -> ExportPoint:
        session = self.session
        if session is None or session.engine is None or session.machine is None:
            raise OperatorError("this node holds no state yet; wait until `atoll status` shows a round")
        with trio.move_on_after(EXPORT_S):
            try:
                path, base = await session.save_snapshot()
            except (EngineFailed, trio.BrokenResourceError) as error:
                raise OperatorError(f"the engine could not save a snapshot ({error}); try again in a moment") from error
            return ExportPoint(
                run_id=session.rules.run.hex(), round=base.round, state_hash=base.state_hash.hex(), snapshot=path
            )
        raise OperatorError(f"the engine did not save a snapshot within {EXPORT_S:.0f} s; try again after the round")

    def status(self) -> Status:
        seen = self._observations
        session = self.session
        machine = session.machine if session is not None else None
        phase, reason = seen.phase, seen.starting or ""
        if machine is not None and seen.starting is None:
            phase, reason = machine.phase, machine.reason
            if phase == "training" and session is not None and not self._host.attached:
                reason = session.trainer_exit or "no trainer is attached: it is starting, or attach one"
                if machine.meeting.says is not None:
                    reason = f"{reason}; {machine.meeting.says}"
        if seen.storage is not None:
            reason = f"{seen.storage}; {reason}" if reason else seen.storage
        trouble = self._network.reason()
        # With peers it is an alarm; without, a node that trains alone is told only what it waits for.
        if trouble and trouble not in reason and (self._network.peers or phase != "training"):
            reason = f"{reason}; {trouble[:1].lower()}{trouble[1:].rstrip('.')}"
        if self.stop_requested.is_set():
            phase, reason = "leaving", "the operator asked this node to stop"
        state = session.state if session is not None else None
        base = state.base if state is not None else None
        left = session.store.left if session is not None else None
        progress = self._host.progress
        line = self._network.link_table.line
        engine = session.manifest.rounds.engine if session is not None else None
        return Status(
            peer_id=self._identity.peer_id,
            name=self._settings.name,
            version=node.__version__,
            addresses=tuple(self._network.addresses),
            run_id=session.rules.run.hex() if session is not None else self._settings.run_id,
            run_name=session.manifest.name if session is not None else None,
            phase=phase,
            reason=reason or "nothing: the round goes on",
            round=base.round if base is not None else 0,
            final_round=session.rules.final_round if session is not None else None,
            state_hash=base.state_hash.hex() if base is not None else None,
            lineage=base.lineage.hex() if base is not None else None,
            left_lineage=left.tip.lineage.hex() if left is not None else None,
            lost_lineages=tuple(seen.lost_lineages),
            members=self._members_alive(),
            member_list=self._member_list(),
            group=machine.group if machine is not None else tuple(peer for peer, _ in state.members) if state else (),
            electors=state.electors if state is not None else (),
            attempt=machine.round.attempt if machine is not None else 0,
            coordinator=machine.round.leader() if machine is not None else None,
            tokens_total=state.tokens_total if state is not None else 0,
            tokens_per_s=seen.tokens_per_s if self._host.attached else 0.0,
            up_bytes_s=line.sent_bytes_s,
            down_bytes_s=line.received_bytes_s,
            line_age_s=line.age_s,
            loss=seen.loss,
            validation_loss=seen.validation_loss,
            last_round=seen.last_round,
            history=tuple(seen.history),
            trainer=TrainerStatus(
                attached=self._host.attached,
                name=self._host.name,
                device=self._settings.device,
                step=progress.steps if progress is not None else 0,
                budget_steps=session.budget_steps if session is not None else 0,
            ),
            work=seen.work,
            reach=self._reach(),
            parameters=session.rules.elements if session is not None else 0,
            disk_bytes=seen.disk_bytes,
            storage_able=seen.storage is None,
            engine=engine,
            engine_limits=LIMITS[engine] if engine is not None else {},
            resident_bytes=self._resident_bytes,
            audits=seen.audits,
            caught=dict.fromkeys(state.banned, "by the run's evidence") | seen.caught if state is not None else {},
            crash_loops=self._crashes,
            problems={**seen.problems, **self._network.problems(), **self._dropped_by_engine()},
            http=self.http,
            uptime_s=trio.current_time() - seen.started_s,
        )

    def _reach(self) -> ReachStatus:
        inventory = self.session.inventory if self.session is not None else None
        reach = self._network.reachability.status()
        if inventory is None:
            return reach
        return msgspec.structs.replace(
            reach, relayed_pairs=inventory.relayed_pairs, relayed_bytes=inventory.relayed_bytes
        )

    def _dropped_by_engine(self) -> dict[str, int]:
        """What strangers and peers sent to the data port and was refused there."""
        inventory = self.session.inventory if self.session is not None else None
        return {f"data channel: {why}": count for why, count in inventory.dropped.items()} if inventory else {}

    def _members_alive(self) -> int:
        machine = self.session.machine if self.session is not None else None
        if machine is None:
            return 0
        return sum(1 for peer, _ in machine.state.members if peer in machine.live)

    def _member_list(self) -> tuple[MemberStatus, ...]:
        machine = self.session.machine if self.session is not None else None
        live = machine.live if machine is not None else frozenset()
        records = self._network.membership.records
        known = {self._identity.peer_id, *records, *self._network.peers}
        if machine is not None:
            known |= {peer for peer, _ in machine.state.members}
        rows = []
        for peer in sorted(known):
            record = records.get(peer)
            link = self._network.peers.get(peer)
            own = peer == self._identity.peer_id
            trips = link.round_trips if link is not None else RoundTrips()
            rates = self._network.link_table.line if own else self._network.link_table.rates_of(peer)
            rows.append(
                MemberStatus(
                    peer_id=peer,
                    name=(record.name or None) if record is not None else None,
                    addresses=record.addresses if record is not None else (),
                    connected=link is not None,
                    alive=peer in live or own,
                    member=machine is not None and member(machine.state, peer) is not None,
                    round=record.round if record is not None else None,
                    state_hash=record.state_hash.hex() if record is not None and record.state_hash else None,
                    tokens_per_s=record.tokens_per_s if record is not None else None,
                    round_trip_ms=None if trips.smoothed_s is None else trips.smoothed_s * 1000,
                    round_trip_age_s=None if trips.answered_at_s is None else trio.current_time() - trips.answered_at_s,
                    lost_answers=trips.lost_share if link is not None else None,
                    sent_bytes_s=rates.sent_bytes_s,
                    received_bytes_s=rates.received_bytes_s,
                    rates_age_s=rates.age_s,
                    up_bytes_s=record.up_bytes_s if record is not None else None,
                    down_bytes_s=record.down_bytes_s if record is not None else None,
                    version=record.version if record is not None else None,
                )
            )
        return tuple(rows)
