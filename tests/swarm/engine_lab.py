"""Real engine processes on loopback, with the test in the place of their daemons and supervisors."""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from node.daemon.engine_client import EngineClient, EngineFailed
from node.engine import api
from node.engine.hivemind import environment as hivemind
from node.peer_id import peer_id_of
from node.supervisor import link as supervisor_link
from protocol.fields import bitmap_bytes
from protocol.messages import PartHeader
from protocol.names import digest
from protocol.plan import Plan
from protocol.planning import flat_plan
from protocol.wire import encode_body, signing_bytes

UNTIL_S = 60.0 * float(os.environ.get("ATOLL_TEST_PATIENCE", "1"))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    elements: int = 5 * 1024 + 512
    buffer_elements: int = 768
    part_elements: int = 1024
    codec: str = "int8"
    threads: int = 2
    engine: str = "atoll"

    @property
    def part_count(self) -> int:
        return -(-self.elements // self.part_elements)


def certificate() -> tuple[bytes, bytes, bytes]:
    """A self-signed certificate: PEM, key PEM, SHA-256 of its DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    der = made.public_bytes(serialization.Encoding.DER)
    return made.public_bytes(pem), key_pem, hashlib.sha256(der).digest()


@dataclass(eq=False, kw_only=True)
class LabEngine:
    """One engine process, its memory, and the daemon's part played by `Lab`."""

    lab: Lab
    directory: Path
    key: Ed25519PrivateKey
    memory: tuple[int, int, int]
    theta: np.ndarray
    momentum: np.ndarray
    delta: np.ndarray
    certificate: tuple[bytes, bytes, bytes]
    peer_id: str
    dialable: bool = True
    process: subprocess.Popen[bytes] | None = None
    supervisor: socket.socket | None = None
    client: EngineClient | None = None
    port: int = 0
    seen_port: int = 0
    """Where the others dial it, if not at `port`: a `Proxy`."""
    held: dict[tuple[bytes, int], api.PartRef] = field(default_factory=dict)
    ended: dict[bytes, api.ExchangeEnded] = field(default_factory=dict)
    links: list[api.LinkMeasured] = field(default_factory=list)
    lines: list[api.LineMeasured] = field(default_factory=list)
    storage: list[api.StorageFailed | None] = field(default_factory=list)
    """`StorageFailed` events; None: `StorageWorks`."""
    changed: trio.Event = field(default_factory=trio.Event)
    refuse_headers: bool = False
    sizes: Sizes | None = None
    """If its vector is cut in another way than the others'."""

    @property
    def ask(self) -> EngineClient:
        assert self.client is not None
        return self.client

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start the process, as the supervisor does."""
        self._spawn()
        await self.connect()

    def _spawn(self) -> None:
        self.supervisor, theirs = socket.socketpair()
        environment = os.environ | {
            supervisor_link.SUPERVISOR_VARIABLE: str(theirs.fileno()),
            "MALLOC_ARENA_MAX": "2",
        }
        command = (sys.executable, "-P", "-m", "node.engine")
        self.process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))
        theirs.close()

    async def connect(self) -> None:
        """A new daemon for the engine that runs."""
        assert self.supervisor is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        supervisor_link.send(self.supervisor, {"op": "daemon"}, (theirs.fileno(),))
        theirs.close()
        self.client = EngineClient(ours)
        self.lab.nursery.start_soon(self.client.run)
        self.lab.nursery.start_soon(self._play_daemon, self.client)
        sizes = self.sizes or self.lab.sizes
        opened = await self.client.open(
            api.Open(
                id=0,
                directory=str(self.directory),
                peer_id=self.peer_id,
                certificate_pem=self.certificate[0],
                key_pem=self.certificate[1],
                listen_host="127.0.0.1",
                listen_port=0,
                elements=sizes.elements,
                buffer_elements=sizes.buffer_elements,
                part_elements=sizes.part_elements,
                codec=sizes.codec,
                sum_codec="sum16",
                momentum=0.9,
                keep_rounds=self.lab.keep_rounds,
                keep_snapshots=2,
                disk_limit_bytes=self.lab.disk_limit_bytes,
                threads=sizes.threads,
                engine=sizes.engine,
                averager_python=os.environ.get(hivemind.VARIABLE, ""),
                relay_bytes_s=self.lab.relay_bytes_s,
            ),
            fds=self.memory,
        )
        self.port = opened.port

    async def _play_daemon(self, client: EngineClient) -> None:
        async for event in client.events:
            match event:
                case api.TokenWanted():
                    self.lab.nursery.start_soon(self._give_token, client, event.peer_id)
                case api.CallWanted():
                    self.lab.nursery.start_soon(self._have_call, client, event.peer_id)
                case api.SpliceWanted():
                    self.lab.nursery.start_soon(self._have_splice, client, event.peer_id)
                case api.HeaderWanted():
                    header = None if self.refuse_headers else self.sign(event)
                    self.lab.nursery.start_soon(self._give_header, client, event, header)
                case api.PartHeld():
                    self.held[event.header.roster_id, event.header.part] = event.header
                case api.ExchangeEnded():
                    self.ended[event.roster_id] = event
                case api.StorageFailed():
                    self.storage.append(event)
                case api.StorageWorks():
                    self.storage.append(None)
                case api.LinkMeasured():
                    self.links.append(event)
                case api.LineMeasured():
                    self.lines.append(event)
            self.changed.set()
            self.changed = trio.Event()

    async def _give_token(self, client: EngineClient, peer_id: str) -> None:
        """What two daemons do over their control stream."""
        token: bytes | None = secrets.token_bytes(32)
        try:
            await self.lab.by_id[peer_id].ask.accept_token(peer_id=self.peer_id, token=token or b"", expires_s=20)
        except (KeyError, trio.BrokenResourceError):
            token = None
        try:
            await client.dial_token(peer_id=peer_id, token=token)
        except trio.BrokenResourceError:
            return

    async def _have_call(self, client: EngineClient, peer_id: str) -> None:
        """Likewise."""
        token = secrets.token_bytes(32)
        self.lab.calls.append((self.peer_id, peer_id))
        try:
            await client.accept_token(peer_id=peer_id, token=token, expires_s=20)
            await self.lab.by_id[peer_id].ask.call(peer_id=self.peer_id, token=token, host="127.0.0.1")
            await client.call_answered(peer_id=peer_id, failure="")
        except trio.BrokenResourceError:
            return

    async def _have_splice(self, client: EngineClient, peer_id: str) -> None:
        """What three daemons do."""
        failure = "there is no volunteer"
        for volunteer in self.lab.volunteers:
            try:
                opened = await volunteer.ask.open_splice(first=self.peer_id, second=peer_id, lanes=2)
                addresses = (f"127.0.0.1:{volunteer.seen_port or volunteer.port}",)
                mine, theirs = (api.Splice(addresses=addresses, ticket=one, lanes=2) for one in opened.tickets)
                await self.lab.by_id[peer_id].ask.accept_splice(peer_id=self.peer_id, splice=theirs)
            except (EngineFailed, trio.BrokenResourceError) as error:
                failure = str(error)
                continue
            await client.splice_answered(peer_id=peer_id, splice=mine)
            return
        await client.splice_answered(peer_id=peer_id, splice=None, failure=failure)

    async def _give_header(self, client: EngineClient, wanted: api.HeaderWanted, header: api.PartRef | None) -> None:
        try:
            await client.signed_header(roster_id=wanted.roster_id, part=wanted.part, header=header)
        except trio.BrokenResourceError:
            return

    def sign(self, wanted: api.HeaderWanted) -> api.PartRef:
        header = PartHeader(
            roster_id=wanted.roster_id,
            part=wanted.part,
            bitmap=wanted.bitmap,
            hash=wanted.hash,
            length=wanted.length,
        )
        body = encode_body(header)
        return api.PartRef(
            roster_id=wanted.roster_id,
            part=wanted.part,
            bitmap_bytes=wanted.bitmap_bytes,
            hash=wanted.hash,
            length=wanted.length,
            root=self.peer_id,
            body=body,
            signature=self.key.sign(signing_bytes(PartHeader, body)),
        )

    async def until(self, what: str, condition: object) -> None:
        assert callable(condition)
        with trio.move_on_after(UNTIL_S) as waiting:
            while not condition():
                await self.changed.wait()
        assert not waiting.cancelled_caught, f"{self.peer_id} did not reach: {what}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self._hang_up()

    async def stop(self) -> None:
        """As the supervisor ends: the engine must follow by itself."""
        self._hang_up()
        if self.process is not None:
            try:
                await trio.to_thread.run_sync(self.process.wait, 10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
                raise
        for fd in self.memory:
            os.close(fd)

    def _hang_up(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.supervisor is not None:
            self.supervisor.close()

    def resident(self) -> tuple[int, int]:
        """Bytes of its own and of shared memory."""
        values = {"RssAnon": 0, "RssShmem": 0, "RssFile": 0}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
        return values["RssAnon"] + values["RssFile"], values["RssShmem"]


@dataclass(eq=False, kw_only=True)
class Lab:
    nursery: trio.Nursery
    directory: Path
    sizes: Sizes
    keep_rounds: int = 20
    disk_limit_bytes: int = 0
    engines: list[LabEngine] = field(default_factory=list)
    relay_bytes_s: float = 0.0
    """What each engine passes on for others."""
    volunteers: list[LabEngine] = field(default_factory=list)
    """Who is asked to join pairs, in this order."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Who asked whom to dial it."""
    by_id: dict[str, LabEngine] = field(default_factory=dict)

    async def add(self, *, dialable: bool = True) -> LabEngine:
        engine = self.prepare(dialable=dialable)
        await engine.start()
        await self.introduce()
        return engine

    def prepare(self, *, dialable: bool = True) -> LabEngine:
        """Its place and its memory; no process yet."""
        number = len(self.by_id)
        sizes = self.sizes
        lengths = (sizes.elements, sizes.elements - sizes.buffer_elements, sizes.elements)
        memory, vectors = [], []
        for length in lengths:
            fd = os.memfd_create("lab", os.MFD_CLOEXEC)
            os.ftruncate(fd, 4 * length)
            memory.append(fd)
            vectors.append(np.memmap(f"/proc/self/fd/{fd}", np.float32, "r+", shape=(length,)))
        key = Ed25519PrivateKey.from_private_bytes(bytes([number + 1] * 32))
        engine = LabEngine(
            lab=self,
            directory=self.directory / f"engine{number}",
            key=key,
            memory=(memory[0], memory[1], memory[2]),
            theta=vectors[0],
            momentum=vectors[1],
            delta=vectors[2],
            certificate=certificate(),
            peer_id=peer_id_of(key.public_key().public_bytes_raw()),
            dialable=dialable,
        )
        self.by_id[engine.peer_id] = engine
        self.engines.append(engine)
        return engine

    async def introduce(self) -> None:
        """Every engine learns where the others are."""
        for engine in self.engines:
            peers = tuple(
                api.Peer(
                    peer_id=other.peer_id,
                    addresses=(f"127.0.0.1:{other.seen_port or other.port}",)
                    if other.dialable or other.seen_port
                    else (),
                    certificate_sha256=other.certificate[2],
                    dialable=other.dialable,
                    dials=engine.dialable,
                )
                for other in self.engines
            )
            await engine.ask.set_peers(peers)

    async def load_initial(self, theta: np.ndarray) -> bytes:
        """Give all engines the same S_0; returns its hash."""
        from safetensors.numpy import save

        data = save({"theta": theta.astype(np.float32)})
        from blake3 import blake3

        artifact = blake3(data).digest()
        found = set()
        for engine in self.engines:
            path = engine.directory / "artifacts" / artifact.hex()
            path.write_bytes(data)
            found.add((await engine.ask.load_initial(hash=artifact)).state_hash)
        assert len(found) == 1
        return found.pop()


@dataclass(kw_only=True)
class Round:
    """One exchange over some engines, in ascending order of peer id."""

    lab: Lab
    number: int
    engines: list[LabEngine]
    tokens: list[tuple[tuple[int, int], ...]]
    plan: Plan
    duration_s: float = 20.0
    progress_s: float = 5.0
    attempt: int = 0

    @property
    def base(self) -> bytes:
        return digest(b"lab base", self.number.to_bytes(4, "big"))

    @property
    def roster_id(self) -> bytes:
        return digest(b"lab roster", self.base, bytes([self.attempt]))

    def requests(self, encoded: Sequence[api.Encoded]) -> list[api.Exchange]:
        contributing = sum(1 << index for index, runs in enumerate(self.tokens) if any(tokens for _, tokens in runs))
        levels = max(max(_heights(shard.parents)) for shard in self.plan.shards)
        return [
            api.Exchange(
                id=0,
                roster_id=self.roster_id,
                base=self.base,
                my_index=index,
                peers=tuple(one.peer_id for one in self.engines),
                contributing_bytes=bitmap_bytes(contributing),
                tokens=tuple(self.tokens),
                shards=tuple(api.ShardPlan(share=shard.share, parents=shard.parents) for shard in self.plan.shards),
                durations_s=(self.duration_s,) * (levels + 1),
                progress_s=self.progress_s,
                slack_s=1.0,
                parts_roots=tuple(one.parts_root for one in encoded),
                largest=tuple(one.largest for one in encoded),
            )
            for index in range(len(self.engines))
        ]

    async def encode(self) -> list[api.Encoded]:
        return [await engine.ask.encode(base=self.base) for engine in self.engines]

    async def start(self) -> None:
        for engine, request in zip(self.engines, self.requests(await self.encode()), strict=True):
            await engine.ask.exchange(request)

    async def finish(self, engines: Sequence[LabEngine] | None = None) -> tuple[api.PartRef | None, ...]:
        """Wait for the end at `engines`; returns the parts that some of them hold. Who lacks one fetches it."""
        engines = list(engines or self.engines)
        for engine in engines:
            await engine.until("the exchange's end", lambda engine=engine: self.roster_id in engine.ended)
        found: dict[int, api.PartRef] = {}
        for engine in engines:
            for ref in engine.held.values():
                if ref.roster_id == self.roster_id:
                    assert found.setdefault(ref.part, ref) == ref
        for engine in engines:
            await self.complete(engine, tuple(found.values()), engines)
        return tuple(found.get(part) for part in range(self.lab.sizes.part_count))

    async def complete(self, engine: LabEngine, refs: tuple[api.PartRef, ...], engines: Sequence[LabEngine]) -> None:
        lacking = tuple(ref for ref in refs if (self.roster_id, ref.part) not in engine.held)
        if lacking:
            sources = tuple(one.peer_id for one in engines if one is not engine)
            answer = await engine.ask.fetch_parts(headers=lacking, sources=sources, timeout_s=20)
            assert not answer.missing
            await engine.until(
                "fetched parts", lambda: {(self.roster_id, ref.part) for ref in lacking} <= set(engine.held)
            )

    async def apply(
        self, refs: tuple[api.PartRef | None, ...], engines: Sequence[LabEngine] | None = None, *, lr: float = 0.6
    ) -> list[api.Applied]:
        answers = []
        for engine in engines or self.engines:
            await engine.ask.stop_exchange(roster_id=self.roster_id)
            answers.append(await engine.ask.apply(self.apply_request(engine, refs, lr=lr)))
            hashes = tuple(ref.hash for ref in refs if ref is not None)
            await engine.ask.keep_commits(round=self.number, hashes=hashes)
        return answers

    def apply_request(self, engine: LabEngine, refs: tuple[api.PartRef | None, ...], *, lr: float = 0.6) -> api.Apply:
        index = self.engines.index(engine)
        return api.Apply(
            id=0,
            base=self.base,
            new_round=self.number + 1,
            headers=refs,
            outer_lr=lr,
            my_index=index,
            contributed=any(tokens for _, tokens in self.tokens[index]),
        )


SMALL_BUFFER_BYTES = 32 * 1024
CHUNK_BYTES = 8 * 1024
"""Less than a frame: what a real line brings does not stop where frames do."""


class Proxy:
    """Forwards TCP to an engine, and can break every connection at once while both ends live.

    `lane_bytes_s`: how fast each connection goes, either way, with small buffers on the way; None: as it can.
    """

    def __init__(self, lane_bytes_s: float | None = None) -> None:
        self.port = 0
        self._lane_bytes_s = lane_bytes_s
        self.target_port = 0
        self.forwarded_bytes = 0
        self.connections = 0
        self._streams: list[trio.SocketStream] = []
        self._moved = trio.Event()

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._shrink(listeners[0].socket)
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._forward, listeners, task_status=task_status)

    async def until(self, forwarded_bytes: int) -> None:
        with trio.fail_after(30):
            while self.forwarded_bytes < forwarded_bytes:
                await self._moved.wait()

    async def cut(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await trio.aclose_forcefully(stream)

    async def _forward(self, near: trio.SocketStream) -> None:
        self.connections += 1
        far_socket = trio.socket.socket()
        self._shrink(far_socket)
        await far_socket.connect(("127.0.0.1", self.target_port))
        far = trio.SocketStream(far_socket)
        self._streams += [near, far]
        async with near, far, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, near, far)
            nursery.start_soon(self._pump, far, near)

    def saw(self, data: bytes) -> None:
        """Called with all that passes."""

    def _shrink(self, one: trio.socket.SocketType) -> None:
        """Before it is connected; what is accepted has the listener's buffers."""
        if self._lane_bytes_s is not None:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                one.setsockopt(socket.SOL_SOCKET, option, SMALL_BUFFER_BYTES)

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        try:
            while data := await source.receive_some(None if self._lane_bytes_s is None else CHUNK_BYTES):
                if self._lane_bytes_s is not None:
                    await trio.sleep(len(data) / self._lane_bytes_s)
                self.saw(data)
                await sink.send_all(data)
                self.forwarded_bytes += len(data)
                self._moved.set()
                self._moved = trio.Event()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await trio.aclose_forcefully(source)
        await trio.aclose_forcefully(sink)


def flat_round(lab: Lab, number: int, *, tokens: Sequence[int] | None = None, **settings: object) -> Round:
    engines = sorted(lab.engines, key=lambda engine: engine.peer_id)
    counts = list(tokens or [1000 + 100 * index for index in range(len(engines))])
    contributing = sum(1 << index for index, count in enumerate(counts) if count)
    return Round(
        lab=lab,
        number=number,
        engines=engines,
        tokens=[((lab.sizes.part_count, count),) if count else () for count in counts],
        plan=flat_plan(len(engines), contributing),
        **settings,  # type: ignore[arg-type]
    )


def _heights(parents: Sequence[int]) -> list[int]:
    heights = [0] * len(parents)
    for _ in parents:
        for index, parent in enumerate(parents):
            if parent >= 0:
                heights[parent] = max(heights[parent], heights[index] + 1)
    return heights


@asynccontextmanager
async def lab(directory: Path, count: int, sizes: Sizes | None = None, **settings: float) -> AsyncIterator[Lab]:
    """`count` engines that know each other; all processes end with the block."""
    async with trio.open_nursery() as nursery:
        made = Lab(nursery=nursery, directory=directory, sizes=sizes or Sizes(), **settings)
        try:
            async with trio.open_nursery() as starting:
                for _ in range(count):
                    starting.start_soon(made.prepare().start)
            await made.introduce()
            yield made
        finally:
            with trio.CancelScope(shield=True):
                for engine in made.by_id.values():
                    await engine.stop()
            nursery.cancel_scope.cancel()
