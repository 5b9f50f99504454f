"""Real nodes tell each other whether they can be dialled."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trio
from network_nodes import RUN, Node, nodes, run, until

from node.daemon.addresses import parse_peer_address
from node.daemon.identity import create_data_certificate
from node.daemon.network import Network, RequestFailed
from node.engine import api, tls
from node.engine.handshake import OnlyProbed, TokenBook, accept
from node.engine.splice import Splicer

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


class DataListener:
    """In the place of an engine: it welcomes as one does, and counts."""

    def __init__(self, peer_id: str) -> None:
        certificate = create_data_certificate(peer_id)
        self.sha256 = certificate.sha256
        self.probed = 0
        self._context: ssl.SSLContext = tls.server_context(certificate.certificate_pem, certificate.key_pem)

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._welcome, listeners)

    async def _welcome(self, tcp: trio.SocketStream) -> None:
        with pytest.raises(OnlyProbed):
            await accept(tcp, self._context, TokenBook())
        self.probed += 1
        await trio.aclose_forcefully(tcp)


class Volunteer:
    """In the place of a volunteer's engine: its data port, and what its daemon asks of it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.splicer = Splicer(1e9)
        self._nursery = nursery

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._welcome, listeners)

    async def _welcome(self, tcp: trio.SocketStream) -> None:
        await self.splicer.carry(await self.splicer.welcome(tcp))

    async def open_splice(self, *, first: str, second: str, lanes: int) -> api.SpliceOpened:
        return api.SpliceOpened(id=0, tickets=self.splicer.open(first, second, lanes))


async def volunteer_on(node: Node, nursery: trio.Nursery) -> Volunteer:
    made = Volunteer(nursery)
    port = await nursery.start(made.run)
    node.network.splicing.engine = made  # type: ignore[assignment]
    node.network.membership.publish(reachable=True, relays=True, data_addresses=(f"127.0.0.1:{port}",))
    return made


async def answered(asking: Network, asked: Network) -> None:
    """Both sides may have a volunteer join them at once; the one connection then gives way to the other."""
    while True:
        try:
            assert await asking.request(asked.peer_id, "echo", b"through", timeout_s=10) == b"through"
        except RequestFailed:
            await until(lambda: asked.peer_id in asking.peers)
        else:
            return


def test_two_that_nobody_can_dial_are_connected_through_a_volunteer_and_then_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, trio.open_nursery() as nursery:
            streets = [await some.start()]
            streets.append(await some.start(streets[0].address))
            volunteers = {node.network.peer_id: await volunteer_on(node, nursery) for node in streets}
            homes = []
            for _ in range(2):
                home = await some.start(run_id=None, announce=["/ip4/127.0.0.1/tcp/1"])  # nobody listens there
                home.network.membership.publish(reachable=False)
                await home.network.set_run(RUN)
                for street in streets:
                    address = parse_peer_address(street.address)
                    await home.network.connect(street.network.peer_id, [address])
                homes.append(home)
            left, right = (home.network for home in homes)

            async def echo(peer: str, payload: bytes) -> bytes:
                return payload

            right.serve("echo", echo)
            await until(lambda: right.peer_id in left.peers and left.peer_id in right.peers, within_s=30)
            await answered(left, right)
            assert left.peers[right.peer_id].is_spliced
            first = left.reachability.status().through[right.peer_id]
            assert set(right.reachability.status().through) == {left.peer_id}
            assert volunteers[first].splicer.relayed_bytes > 0

            (dying,) = (node for node in streets if node.network.peer_id == first)
            dying.network.splicing.engine = None
            await dying.stop()
            left.peers[right.peer_id].close("its volunteer is gone")
            await until(lambda: left.splicing.through[right.peer_id] != first, within_s=30)
            await until(lambda: right.peer_id in left.peers and left.peer_id in right.peers, within_s=30)
            await answered(left, right)
            assert not left.reachability.status().not_joined
            nursery.cancel_scope.cancel()

    run(main, within_s=120.0)


def test_a_node_learns_which_of_its_ports_peers_can_dial(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, trio.open_nursery() as nursery:
            first = await some.start()
            second = await some.start(first.address)
            listener = DataListener(first.network.peer_id)
            port = await nursery.start(listener.run)
            first.network.publish_engine(port, listener.sha256)
            second.network.publish_engine(1, listener.sha256)  # nobody listens there
            mine = [node.network.membership for node in (first, second)]
            await until(lambda: mine[0].mine.data_reachable is True, within_s=60)
            await until(lambda: mine[1].mine.data_reachable is False, within_s=60)
            assert [one.mine.reachable for one in mine] == [True, True]
            assert [one.mine.seen_at for one in mine] == ["127.0.0.1", "127.0.0.1"]
            assert listener.probed >= 1
            # The others know, too.
            peer = second.network.peer_id
            await until(lambda: mine[0].records[peer].data_reachable is False)
            assert first.network.reachability.status().advice == ""
            assert "open TCP port 1 in this machine's firewall" in second.network.reachability.status().advice
            reachability = first.network.reachability
            assert reachability.data_dialable(mine[0].records[peer]), "on one machine, a local address is worth a try"
            assert not any(node.network.problems() for node in some.all), "a look is no trouble"
            nursery.cancel_scope.cancel()

    run(main, within_s=120.0)
