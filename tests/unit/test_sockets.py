from __future__ import annotations

import socket

import pytest

from node.sockets import MAX_RETRANSMISSION_GAP_S, keep_trying

TCP_RTO_MAX_MS = 44


def test_a_connection_does_not_wait_minutes_between_two_tries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as tcp:
        keep_trying(tcp)
        try:
            gap_ms = tcp.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            pytest.skip("this kernel has no TCP_RTO_MAX_MS (Linux 6.15 has)")
        assert gap_ms == MAX_RETRANSMISSION_GAP_S * 1000


def test_a_kernel_without_the_option_is_no_error() -> None:
    class Old:
        def setsockopt(self, level: int, option: int, value: int, /) -> None:
            raise OSError("Protocol not available")

    keep_trying(Old())
