"""Our own engine: one real engine process on each host; this process plays their supervisors and daemons.

A round's bytes take the way that they take in a swarm: frozen into the outbox, sent over TLS, checked, summed, signed,
written to disk, synced. What daemons say to each other (tokens, rosters) passes here without the lab's delay.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.identity import DataCertificate, Identity, create_data_certificate
from node.engine import api
from node.supervisor import link as supervisor_link
from node.supervisor.roles import default_commands, small_process
from protocol.codecs import Float32Array, codec
from protocol.fields import bitmap_bytes
from protocol.messages import PartHeader
from protocol.names import digest, encode_integer
from protocol.plan import Plan
from protocol.planning import level_count
from protocol.state_hash import chunk_hash
from protocol.wire import encode_body, signing_bytes
from scripts.benchmark.contestant import ENCODE, EXCHANGE, LOAD, OUTER, WARM_UP_S, Case, RoundFailed, at_once
from scripts.benchmark.plans import SUM_CODEC, plan_of
from scripts.benchmark.vectors import Shared, scale_of
from scripts.wanlab.wan import Host

TOKENS = 1000
"""Of every contribution: all weigh alike."""
MOMENTUM, OUTER_LR = 0.9, 0.7
KEEP_ROUNDS = 2
TOKEN_S = 20.0
END_S = 10.0
ENDED = (EngineFailed, trio.BrokenResourceError)
"""An engine that ends: whoever waits for the phase says so."""


@dataclass(eq=False, kw_only=True)
class Station:
    """One host's engine, its memory, and what its daemon knows."""

    case: Case
    host: Host
    others: dict[str, Station]
    """All stations, by peer id."""
    identity: Identity
    certificate: DataCertificate
    directory: Path
    threads: int
    theta: Shared
    momentum: Shared
    delta: Shared
    process: subprocess.Popen[bytes]
    supervisor: socket.socket
    client: EngineClient
    port: int = 0
    held: dict[int, api.PartRef] = field(default_factory=dict)
    """Parts of the round under way."""
    roster_id: bytes = b""
    complete: trio.Event = field(default_factory=trio.Event)
    """Every part is held, or the engine has ended."""
    complete_s: float = 0.0
    gone: bool = False
    encoded: api.Encoded | None = None
    measured: list[api.LinkMeasured | api.LineMeasured] = field(default_factory=list)
    """What it says of its links and its line."""

    @classmethod
    def start(cls, case: Case, host: Host, others: dict[str, Station], threads: int) -> Station:
        """Its process, as a supervisor starts it."""
        identity = Identity.from_seed(digest(b"bench", encode_integer(host.index)))
        supervisor, theirs = socket.socketpair()
        number = str(theirs.fileno())
        environment = os.environ | small_process() | {supervisor_link.SUPERVISOR_VARIABLE: number}
        with (case.directory / f"atoll-{host.index}.log").open("wb") as words:
            process = subprocess.Popen(
                [*host.prefix, *default_commands().engine],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdout=words,
                stderr=words,
            )
        theirs.close()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        supervisor_link.send(supervisor, {"op": "daemon"}, (theirs.fileno(),))
        theirs.close()
        return cls(
            case=case,
            host=host,
            others=others,
            identity=identity,
            certificate=create_data_certificate(identity.peer_id),
            directory=case.directory / f"atoll-{host.index}",
            threads=threads,
            theta=Shared(case.elements),
            momentum=Shared(case.elements),
            delta=Shared(case.elements),
            process=process,
            supervisor=supervisor,
            client=EngineClient(ours),
        )

    async def open(self) -> None:
        opened = await self.client.open(
            api.Open(
                id=0,
                directory=str(self.directory),
                peer_id=self.identity.peer_id,
                certificate_pem=self.certificate.certificate_pem,
                key_pem=self.certificate.key_pem,
                listen_host=self.host.address,
                listen_port=0,
                elements=self.case.elements,
                buffer_elements=0,
                part_elements=self.case.part_elements,
                codec=self.case.codec,
                sum_codec=SUM_CODEC,
                momentum=MOMENTUM,
                keep_rounds=KEEP_ROUNDS,
                keep_snapshots=1,
                disk_limit_bytes=0,
                threads=self.threads,
            ),
            fds=(self.theta.fd, self.momentum.fd, self.delta.fd),
        )
        self.port = opened.port

    @property
    def as_peer(self) -> api.Peer:
        return api.Peer(
            peer_id=self.identity.peer_id,
            addresses=(f"{self.host.address}:{self.port}",),
            certificate_sha256=self.certificate.sha256,
        )

    @property
    def part_count(self) -> int:
        return -(-self.case.elements // self.case.part_elements)

    # ---------------------------------------------------------------- the daemon's part

    async def listen(self) -> None:
        """Until the engine ends, which nobody waits for in vain."""
        await self.client.run()
        self.gone = True
        self.complete.set()

    async def play_daemon(self, nursery: trio.Nursery) -> None:
        async for event in self.client.events:
            match event:
                case api.TokenWanted():
                    nursery.start_soon(self._give_token, event.peer_id)
                case api.HeaderWanted():
                    nursery.start_soon(self._sign, event)
                case api.PartHeld() if event.header.roster_id == self.roster_id:
                    self.held[event.header.part] = event.header
                    if len(self.held) == self.part_count:
                        self.complete_s = trio.current_time()
                        self.complete.set()
                case api.LinkMeasured() | api.LineMeasured():
                    self.measured.append(event)
                case _:
                    pass

    async def _give_token(self, peer_id: str) -> None:
        token = secrets.token_bytes(32)
        other = self.others[peer_id]
        with contextlib.suppress(*ENDED):
            await other.client.accept_token(peer_id=self.identity.peer_id, token=token, expires_s=TOKEN_S)
            await self.client.dial_token(peer_id=peer_id, token=token)

    async def _sign(self, wanted: api.HeaderWanted) -> None:
        message = PartHeader(
            roster_id=wanted.roster_id,
            part=wanted.part,
            bitmap=wanted.bitmap,
            hash=wanted.hash,
            length=wanted.length,
        )
        body = encode_body(message)
        header = api.PartRef(
            roster_id=wanted.roster_id,
            part=wanted.part,
            bitmap_bytes=wanted.bitmap_bytes,
            hash=wanted.hash,
            length=wanted.length,
            root=self.identity.peer_id,
            body=body,
            signature=self.identity.sign(signing_bytes(PartHeader, body)),
        )
        with contextlib.suppress(*ENDED):
            await self.client.signed_header(roster_id=wanted.roster_id, part=wanted.part, header=header)

    # ---------------------------------------------------------------- what came of it

    def payloads(self) -> list[bytes]:
        """The round's parts, read from the engine's own disk and compared with their signed hashes.

        Raises `RoundFailed`.
        """
        slot_bytes = codec(self.case.codec).encoded_bytes(min(self.case.part_elements, self.case.elements))
        found = []
        with (self.directory / "parts" / f"{self.roster_id.hex()}.data").open("rb") as file:
            for part in range(self.part_count):
                ref = self.held[part]
                file.seek(part * slot_bytes)
                data = file.read(ref.length)
                if chunk_hash(data) != ref.hash:
                    raise RoundFailed(f"host {self.host.index} holds part {part} with other bytes than its hash says")
                found.append(data)
        return found

    async def end(self) -> None:
        self.client.close()
        self.supervisor.close()
        try:
            await trio.to_thread.run_sync(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)
        for memory in (self.theta, self.momentum, self.delta):
            memory.close()


@dataclass(eq=False, kw_only=True)
class AtollEngines:
    """A `Contestant`."""

    case: Case
    plan: Plan
    stations: Sequence[Station]
    """In order of their hosts."""
    rounds: int = 0
    """Begun."""
    _round_number: int = 0

    phases = (LOAD, ENCODE, EXCHANGE, OUTER)

    def pids(self) -> list[int]:
        return [station.process.pid for station in self.stations]

    @property
    def _base(self) -> bytes:
        return digest(b"bench base", encode_integer(self.rounds))

    async def perform(self, phase: str, round_number: int) -> float:
        steps: dict[str, Callable[[Station], Awaitable[None]]] = {
            LOAD: self._load,
            ENCODE: self._encode,
            EXCHANGE: self._exchange,
            OUTER: self._step,
        }
        if phase == LOAD:
            self.rounds += 1
            self._round_number = round_number

        async def at(station: Station) -> None:
            try:
                await steps[phase](station)
            except ENDED as error:
                raise RoundFailed(f"host {station.host.index} failed in the phase {phase!r}: {error}") from error

        began_s = trio.current_time()
        try:
            with trio.fail_after(self.case.patience_s):
                await at_once(*(partial(at, station) for station in self.stations))
        except trio.TooSlowError:
            lacking = [f"host {one.host.index} {one.part_count - len(one.held)}" for one in self.stations]
            patience_s = self.case.patience_s
            raise RoundFailed(
                f"the phase {phase!r} did not end within {patience_s:.0f} s; parts lacking: {', '.join(lacking)}"
            ) from None
        if phase == EXCHANGE:
            return max(station.complete_s for station in self.stations) - began_s
        return trio.current_time() - began_s

    # ---------------------------------------------------------------- phases, on one host

    async def _load(self, station: Station) -> None:
        given = self.case.inputs.vectors[station.host.index].values
        scale = np.float32(scale_of(self._round_number))
        await trio.to_thread.run_sync(lambda: np.multiply(given, scale, out=station.delta.values))

    async def _encode(self, station: Station) -> None:
        station.encoded = await station.client.encode(base=self._base)

    async def _exchange(self, station: Station) -> None:
        station.held, station.complete = {}, trio.Event()
        station.roster_id = digest(b"bench roster", self._base)
        await station.client.exchange(self._request(station))
        await station.complete.wait()
        if station.gone:
            log = self.case.directory / f"atoll-{station.host.index}.log"
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise RoundFailed(f"the engine on host {station.host.index} ended in the exchange: {last}")

    async def _step(self, station: Station) -> None:
        await station.client.stop_exchange(roster_id=station.roster_id)
        headers = tuple(station.held[part] for part in range(station.part_count))
        await station.client.apply(
            api.Apply(
                id=0,
                base=self._base,
                new_round=self.rounds,
                headers=headers,
                outer_lr=OUTER_LR,
                my_index=self._ordered.index(station),
                contributed=True,
            )
        )
        await station.client.keep_commits(round=self.rounds, hashes=tuple(header.hash for header in headers))

    @property
    def _ordered(self) -> list[Station]:
        """As a roster orders them: by peer id."""
        return sorted(self.stations, key=lambda station: station.identity.peer_id)

    def _request(self, station: Station) -> api.Exchange:
        ordered = self._ordered
        encoded = [one.encoded for one in ordered if one.encoded is not None]
        everybody = (1 << len(ordered)) - 1
        # The plan's indices are hosts, the roster's are places in the order of peer ids.
        place = {one.host.index: index for index, one in enumerate(ordered)}
        shards = tuple(
            api.ShardPlan(
                share=shard.share,
                parents=tuple(
                    place[parent] if parent >= 0 else -1
                    for parent in (shard.parents[one.host.index] for one in ordered)
                ),
            )
            for shard in self.plan.shards
        )
        return api.Exchange(
            id=0,
            roster_id=station.roster_id,
            base=self._base,
            my_index=ordered.index(station),
            peers=tuple(one.identity.peer_id for one in ordered),
            contributing_bytes=bitmap_bytes(everybody),
            tokens=(((station.part_count, TOKENS),),) * len(ordered),
            shards=shards,
            durations_s=tuple(self.case.patience_s + level for level in range(level_count(self.plan, everybody) + 1)),
            progress_s=self.case.patience_s,
            slack_s=1.0,
            parts_roots=tuple(one.parts_root for one in encoded),
            largest=tuple(one.largest for one in encoded),
        )

    def results(self) -> Sequence[Float32Array]:
        """Decoded once where all hold the same bytes, which each host's disk is read for."""
        first = self.stations[0].payloads()
        values = self._decoded(first)
        return [
            values if station.payloads() == first else self._decoded(station.payloads()) for station in self.stations
        ]

    def _decoded(self, payloads: Sequence[bytes]) -> Float32Array:
        out = np.empty(self.case.elements, np.float32)
        for part, data in enumerate(payloads):
            start = part * self.case.part_elements
            codec(self.case.codec).decode_into(data, out[start : start + self.case.part_elements])
        return out


@asynccontextmanager
async def opened_atoll(case: Case, nursery: trio.Nursery) -> AsyncIterator[AtollEngines]:
    """Engines on all hosts that know each other; `nursery` runs what listens to them. Raises `RoundFailed`."""
    by_id: dict[str, Station] = {}
    stations: list[Station] = []
    threads = max(1, (os.cpu_count() or 1) // len(case.hosts))
    try:
        for host in case.hosts:
            station = Station.start(case, host, by_id, threads)
            stations.append(station)
            by_id[station.identity.peer_id] = station
            nursery.start_soon(station.listen)
            nursery.start_soon(station.play_daemon, nursery)
        try:
            with trio.fail_after(WARM_UP_S):
                for station in stations:
                    await station.open()
                for station in stations:
                    await station.client.set_peers(tuple(one.as_peer for one in stations))
        except (trio.TooSlowError, *ENDED) as error:
            raise RoundFailed(f"the engines cannot start: {error or 'no answer'}; see {case.directory}") from error
        yield AtollEngines(case=case, plan=plan_of(case.plan, case.lab), stations=stations)
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as endings:
                for station in stations:
                    endings.start_soon(station.end)
