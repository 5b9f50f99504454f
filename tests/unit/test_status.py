"""The status server: what it answers, to whom, and that no client can stay in it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import trio

from node.daemon import http
from node.daemon.http import serve
from node.errors import OperatorError
from node.status import AuditStatus, ExportPoint, LastRound, MemberStatus, Peers, Status

STATUS = Status(
    peer_id="12D3KooWa",
    version="0.1.0",
    phase="training",
    reason="training: 3 of 50 steps",
    round=4,
    loss=2.5,
    tokens_total=1000,
    member_list=(MemberStatus(peer_id="12D3KooWb", alive=True),),
    last_round=LastRound(
        round=3,
        contributors=2,
        excluded={"12D3KooWc": "no READY"},
        seconds=3.0,
        bytes_sent=10,
        bytes_received=20,
        assemble_s=0.1,
        exchange_s=0.2,
        commit_s=0.3,
    ),
    audits=AuditStatus(right=7, wrong=1, skipped={"too late": 2}, seconds=1.5, bytes_received=640),
    caught={"12D3KooWc": "two VOTEs in one phase of an attempt"},
    problems={"a bad signature": 2},
)


class Source:
    def __init__(self) -> None:
        self.stopped = 0
        self.asked = 0
        self.has_state = True

    def status(self) -> Status:
        self.asked += 1
        return STATUS

    def stop(self) -> None:
        self.stopped += 1

    async def export_point(self) -> ExportPoint:
        if not self.has_state:
            raise OperatorError("this node has no state yet; wait for its first round")
        return ExportPoint(run_id="ab", round=4, state_hash="cd", snapshot="/home/x/snapshots/4-cd")


def run_server(
    path: Path, client: Callable[[Source, str], Awaitable[None]], http_address: str = "127.0.0.1:0"
) -> Source:
    source = Source()

    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:

                async def start(*, task_status: object = trio.TASK_STATUS_IGNORED) -> None:
                    await serve(source, path, http_address, task_status=task_status)  # type: ignore[arg-type]

                bound = await nursery.start(start)
                await client(source, bound)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert not path.exists(), "the control socket must not outlive the server"
    return source


def over_unix(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://atoll")


def over_tcp(bound: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{bound}")


def test_both_listeners_answer_and_only_the_unix_one_obeys(tmp_path: Path) -> None:
    path = tmp_path / "control"

    async def client(source: Source, bound: str) -> None:
        async with over_unix(path) as control, over_tcp(bound) as public:
            for one in (control, public):
                assert msgspec.json.decode((await one.get("/status")).content, type=Status) == STATUS
                peers = msgspec.json.decode((await one.get("/peers")).content, type=Peers)
                assert [peer.peer_id for peer in peers.peers] == ["12D3KooWb"]
                assert (await one.get("/health")).json() == {"phase": "training", "reason": "training: 3 of 50 steps"}
            for path_ in ("/stop", "/export"):
                assert (await public.post(path_)).status_code == 404
            assert source.stopped == 0
            assert (await control.get("/stop")).status_code == 405
            assert (await control.post("/export")).json()["snapshot"] == "/home/x/snapshots/4-cd"
            source.has_state = False
            refused = await control.post("/export")
            assert (refused.status_code, refused.json()["error"].startswith("this node has no state")) == (409, True)
            assert (await control.post("/stop")).status_code == 200
        assert source.stopped == 1
        assert source.asked == 1, "requests of one moment share a status"

    run_server(path, client)


def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    async def client(_: Source, bound: str) -> None:
        async with over_tcp(bound) as public:
            text = (await public.get("/metrics")).text
        assert "atoll_round 4.0" in text
        assert 'atoll_problems_total{reason="a bad signature"} 2.0' in text
        assert "atoll_last_round_contributors 2.0" in text
        assert "atoll_tokens_total 1000.0" in text
        for result, count in (("right", 7), ("wrong", 1), ("skipped", 2)):
            assert f'atoll_audits_total{{result="{result}"}} {count}.0' in text
        assert "atoll_audit_received_bytes_total 640.0" in text
        assert "atoll_caught_peers 1.0" in text

    run_server(tmp_path / "control", client)


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            await serve(Source(), tmp_path / "control", address)

        with pytest.raises(ExceptionGroup) as caught:
            trio.run(main)
        (error,) = caught.value.exceptions
        assert isinstance(error, OperatorError)
        assert str(error) == f"--http {address} is in use; choose another port, or `off`"


def test_off_means_no_tcp(tmp_path: Path) -> None:
    async def client(_: Source, bound: str) -> None:
        assert bound is None

    run_server(tmp_path / "control", client, http_address="off")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 4096,
        b"GET /status HTTP/1.1\r\nx: " + b"y" * 100_000,
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\n",
    ],
    ids=["zeros", "endless header", "tls", "http2"],
)
@pytest.mark.slow
def test_garbage_ends_its_own_connection(tmp_path: Path, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 0.5)

    async def client(_: Source, bound: str) -> None:
        host, port = bound.rsplit(":", 1)
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
                while await stream.receive_some(65536):
                    pass
        async with over_tcp(bound) as public:
            assert (await public.get("/health")).status_code == 200

    run_server(tmp_path / "control", client)


@pytest.mark.slow
def test_floods_and_clients_that_never_read_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 3.0)

    async def client(_: Source, bound: str) -> None:
        host, port = bound.rsplit(":", 1)
        opened_s = trio.current_time()
        streams = [await trio.open_tcp_stream(host, int(port)) for _ in range(3 * http.MAX_CONNECTIONS)]
        try:
            await never_read(streams[: http.MAX_CONNECTIONS // 2])
            ends = [await end_of(stream) for stream in reversed(streams)]
        finally:
            for stream in streams:
                await stream.aclose()
        # Beyond the cap they were closed at once. The others lived for CONNECTION_S, whatever they did, and not much
        # longer, or `run_server` gives up: none can have ended sooner after `opened_s`, however slow this machine is.
        at_once = sum(1 for end_s in ends if end_s - opened_s < http.CONNECTION_S)
        assert at_once == 2 * http.MAX_CONNECTIONS
        async with over_tcp(bound) as public:
            assert (await public.get("/health")).status_code == 200

    run_server(tmp_path / "control", client)


async def never_read(streams: list[trio.SocketStream]) -> None:
    """Ask for megabytes on each, so that the server's sends have to wait."""
    for stream in streams:
        with trio.move_on_after(0.05), contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n" * 90)


async def end_of(stream: trio.SocketStream) -> float:
    """When the other side closed it."""
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(1 << 20):
            pass
    return trio.current_time()
