"""Real nodes tell each other whether they can be dialled."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trio
from network_nodes import nodes, run, until

from node.daemon.identity import create_data_certificate
from node.engine import tls
from node.engine.handshake import OnlyProbed, TokenBook, accept

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
