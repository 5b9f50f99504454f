"""Nodes find each other: in any order, by any member's address, after deaths, across islands, from memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from network_nodes import RUN, free_port, meshed, nodes, run, until

from node.daemon.addresses import parse_peer_address
from node.daemon.identity import Identity, ensure_identity
from node.errors import OperatorError
from node.home import Home

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


def address(identity: Identity, port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"


def test_four_nodes_become_a_full_mesh_from_one_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            for _ in range(3):
                await some.start(first.address)
            await until(lambda: meshed(some.all))
            summaries = first.network.links.values()
            await until(lambda: all(link.round_trip_s is not None for link in summaries))
            assert all(0 < (link.round_trip_s or 0) < 2 for link in summaries)
            assert not any(node.network.reason() for node in some.all)

    run(main)


def test_a_chain_of_addresses_becomes_a_full_mesh(tmp_path: Path) -> None:
    """Each knows only the one before: the others are found through the DHT and the records."""

    async def main() -> None:
        async with nodes(tmp_path) as some:
            last = await some.start()
            for _ in range(4):
                last = await some.start(last.address)
            await until(lambda: meshed(some.all))

    run(main)


def test_providers_of_the_run_are_in_the_dht(tmp_path: Path) -> None:
    async def main() -> None:
        from node.daemon.run_dht import RunDHT
        from protocol.names import digest

        async with nodes(tmp_path) as some:
            first = await some.start()
            second = await some.start(first.address)
            third = await some.start(second.address)
            key = digest(b"atoll/dht/run", RUN)
            dht: RunDHT = third.network.discovery.dht
            expected = {first.network.peer_id, second.network.peer_id}
            found: set[str] = set()
            with trio.fail_after(15.0):
                while not expected <= found:
                    found = set(await dht.find(key))

    run(main)


def test_a_bootstrap_node_may_start_last(tmp_path: Path) -> None:
    async def main() -> None:
        identity, port = Identity.generate(), free_port()
        async with nodes(tmp_path) as some:
            early = [await some.start(address(identity, port)) for _ in range(2)]
            await until(lambda: all("Connection refused" in node.network.reason() for node in early))
            assert all(f"127.0.0.1/tcp/{port}" in node.network.reason() for node in early)
            await trio.sleep(3.0)
            await some.start(identity=identity, port=port)
            await until(lambda: meshed(some.all), within_s=30.0)

    run(main, within_s=45.0)


def test_a_later_member_is_enough_after_the_first_died(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            second = await some.start(first.address)
            third = await some.start(first.address)
            await until(lambda: meshed(some.all))
            await first.stop()
            fourth = await some.start(third.address)
            await until(lambda: meshed([second, third, fourth]))
            assert first.network.peer_id not in second.network.membership.records, "it said goodbye"

    run(main)


def test_islands_merge_when_one_node_knows_both(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            left = await some.start()
            await some.start(left.address)
            right = await some.start()
            await some.start(right.address)
            await until(lambda: meshed(some.all[:2]) and meshed(some.all[2:]))
            await some.start(left.address, right.address)
            await until(lambda: meshed(some.all), within_s=30.0)

    run(main, within_s=45.0)


def test_known_peers_are_remembered_across_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            port = free_port()
            first = await some.start(port=port)
            second = await some.start(first.address)
            await until(lambda: meshed([first, second]))
            await second.stop()
            rows = json.loads(second.home.peers_file.read_text())["peers"]
            assert [row["peer_id"] for row in rows] == [first.network.peer_id]
            assert rows[0]["addresses"] == [f"/ip4/127.0.0.1/tcp/{port}"]
            again = await some.start(identity=second.identity, home=second.home)
            await until(lambda: meshed([first, again]))

    run(main)


def test_whoever_is_met_is_on_disk_before_a_node_can_be_killed_for_long(tmp_path: Path) -> None:
    def written(home: Home) -> list[str]:
        if not home.peers_file.exists():
            return []
        return [row["peer_id"] for row in json.loads(home.peers_file.read_text())["peers"]]

    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            second = await some.start(first.address)
            await until(lambda: meshed([first, second]))
            await until(lambda: written(second.home) == [first.network.peer_id], within_s=5.0)
            await until(lambda: written(first.home) == [second.network.peer_id], within_s=5.0)

    run(main)


def test_a_damaged_file_of_peers_is_set_aside(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.peers_file.write_text('{"peers": [{"peer_id": "nonsense"}]}')

    async def main() -> None:
        async with nodes(tmp_path) as some:
            node = await some.start(home=home)
            assert (tmp_path / "peers.json.damaged").exists()
            await node.stop()

    run(main)


def test_a_restarted_peer_is_taken_back_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            second = await some.start(first.address)
            await until(lambda: meshed([first, second]))
            await second.stop()
            await until(lambda: not first.network.peers)
            again = await some.start(first.address, identity=second.identity)
            await until(lambda: meshed([first, again]), within_s=5.0)
            record = first.network.membership.records[again.network.peer_id]
            assert record.incarnation == again.network.membership.mine.incarnation

    run(main)


def test_a_node_with_only_an_address_learns_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            second = await some.start(first.address)

            async def manifest(peer: str, payload: bytes) -> bytes:
                return b"the manifest"

            second.network.serve("manifest", manifest)
            joiner = await some.start(second.address, run_id=None)
            assert await joiner.network.wait_for_peer(10.0)
            assert joiner.network.offered_run() == RUN
            answer = await joiner.network.request(second.network.peer_id, "manifest", b"", timeout_s=5.0)
            assert answer == b"the manifest"
            assert joiner.network.peer_id not in second.network.peers, "it is in no run yet"
            await joiner.network.set_run(RUN)
            await until(lambda: meshed(some.all))

    run(main)


def test_names_are_dialled(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            port = parse_peer_address(first.address).port
            await some.start(f"/dns4/localhost/tcp/{port}/p2p/{first.network.peer_id}")
            await until(lambda: meshed(some.all))

    run(main)


def test_a_busy_port_and_a_bad_address_are_one_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            port = free_port()
            await some.start(port=port)
            with pytest.raises(OperatorError, match=f"TCP port {port}"):
                await start_alone(tmp_path, port)
            with pytest.raises(OperatorError, match="names no peer"):
                await start_alone(tmp_path, 0, "/ip4/127.0.0.1/tcp/4001")

    run(main)


async def start_alone(folder: Path, port: int, *bootstrap: str) -> None:
    from node.daemon.network import open_network

    async with open_network(
        identity=Identity.generate(),
        home=Home(folder),
        listen=[f"/ip4/127.0.0.1/tcp/{port}"],
        bootstrap=bootstrap,
        run_id=RUN,
        version="0.1.0",
        incarnation=b"i",
    ):
        raise AssertionError("it should not have started")


NODE_PROCESS = """
import json, os, resource, sys, time
from pathlib import Path
import trio
from node.daemon.identity import hold_identity
from node.daemon.network import open_network
from node.home import Home

async def main():
    home = Home(Path(sys.argv[1]))
    with hold_identity(home) as identity:
        async with open_network(identity=identity, home=home, listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=sys.argv[2:],
                                run_id=b"r" * 32, version="0.1.0", incarnation=os.urandom(16)) as network:
            print(json.dumps(network.addresses), flush=True)
            await trio.sleep(60)

trio.run(main)
"""


def test_a_killed_process_is_noticed_and_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            first = await some.start()
            home = Home(tmp_path / "process")
            identity = ensure_identity(home)
            started = time.perf_counter()
            process = start_process(home, first.address)
            try:
                assert process.stdout is not None
                await trio.to_thread.run_sync(process.stdout.readline)
                listening_s = time.perf_counter() - started
                await until(lambda: identity.peer_id in first.network.peers)
                resident_mb = resident_bytes(process.pid) / 1e6
                process.send_signal(signal.SIGKILL)
                await until(lambda: identity.peer_id not in first.network.peers, within_s=3.0)
                process.wait(timeout=5)
                process.stdout.close()
                process = start_process(home, first.address)
                await until(lambda: identity.peer_id in first.network.peers)
                assert resident_mb < 160
                assert listening_s < 10.0  # about 1 s on an idle machine
            finally:
                process.kill()
                process.wait(timeout=5)
                assert process.stdout is not None
                process.stdout.close()

    run(main, within_s=60.0)


def start_process(home: Home, *bootstrap: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", NODE_PROCESS, str(home.path), *bootstrap], stdout=subprocess.PIPE)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
