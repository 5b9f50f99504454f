"""Messages, requests and introductions between real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from network_nodes import OTHER_RUN, RUN, Node, Nodes, meshed, nodes, run, until

from node.daemon import introductions, link, outbox
from node.daemon.addresses import parse_peer_address
from node.daemon.identity import Identity
from node.daemon.link import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES
from node.daemon.network import DuplicateIdentity, NetworkEvent, PeerConnected, PeerDisconnected, PeerRefused, Refused
from node.daemon.streams import MAX_FRAME_BYTES, RequestFailed
from node.errors import StrangerError

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


async def two(some: Nodes) -> tuple[Node, Node]:
    one = await some.start()
    other = await some.start(one.address)
    await until(lambda: meshed([one, other]))
    return one, other


def events(node: Node) -> list[NetworkEvent]:
    """Those that wait to be read."""
    found = []
    while True:
        try:
            found.append(node.network.changes.receive_nowait())
        except trio.WouldBlock:
            return found


# ---------------------------------------------------------------- datagrams


def test_a_message_reaches_one_or_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            third = await some.start(one.address)
            await until(lambda: meshed(some.all))
            one.network.send(None, b"to all")
            one.network.send(third.network.peer_id, b"to the third")
            assert await other.network.inbox.receive() == (one.network.peer_id, b"to all")
            assert await third.network.inbox.receive() == (one.network.peer_id, b"to all")
            assert await third.network.inbox.receive() == (one.network.peer_id, b"to the third")
            one.network.send(Identity.generate().peer_id, b"to nobody")
            large = bytes(3_000_000)
            other.network.send(one.network.peer_id, large)
            assert await one.network.inbox.receive() == (other.network.peer_id, large)

    run(main)


def test_the_newest_of_a_kind_replaces_the_one_that_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            for number in range(100):  # no task runs in between: all wait
                one.network.send(None, b"heartbeat %d" % number, replaces="heartbeat")
            one.network.send(None, b"vote")
            received = [(await other.network.inbox.receive())[1] for _ in range(2)]
            assert received == [b"heartbeat 99", b"vote"]
            assert not one.network.problems()

    run(main)


def test_a_slow_peer_blocks_nobody_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            count = outbox.MAX_QUEUED_DATAGRAMS + 50
            for number in range(count):
                one.network.send(None, number.to_bytes(4, "big"))
            first = await other.network.inbox.receive()
            assert int.from_bytes(first[1], "big") == 50, "the oldest give way"
            assert one.network.problems()["datagrams dropped for a slow peer"] == 50

    run(main)


def test_what_was_sent_is_written_before_a_node_goes(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            for number in range(100):
                one.network.send(None, number.to_bytes(4, "big") + bytes(30_000))
            assert await one.network.drain(10.0) == []
            await one.stop()
            received = [(await other.network.inbox.receive())[1][:4] for _ in range(100)]
            assert received == [number.to_bytes(4, "big") for number in range(100)]

    run(main)


def test_a_message_too_large_for_a_frame_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            one.network.send(None, bytes(MAX_FRAME_BYTES + 1))
            one.network.send(None, b"vote")
            assert (await other.network.inbox.receive())[1] == b"vote"
            assert one.network.problems()["datagrams too large to be sent"] == 1

    run(main)


def test_a_flooding_peer_displaces_only_its_own_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, loud = await two(some)
            quiet = await some.start(one.address)
            await until(lambda: meshed(some.all))
            quiet.network.send(one.network.peer_id, b"important")
            for _ in range(10):
                for _ in range(100):
                    loud.network.send(one.network.peer_id, b"noise")
                await trio.sleep(0.05)
            await until(lambda: "datagrams dropped because this node was too slow" in one.network.problems())
            two_received = [await one.network.inbox.receive() for _ in range(2)]
            assert (quiet.network.peer_id, b"important") in two_received

    run(main)


# ---------------------------------------------------------------- requests


def test_requests_are_answered_or_fail_with_a_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            peer = other.network.peer_id

            async def twice(who: str, payload: bytes) -> bytes:
                assert who == one.network.peer_id
                return payload * 2

            async def refuse(who: str, payload: bytes) -> bytes:
                raise StrangerError("round 7 is not here")

            async def broken(who: str, payload: bytes) -> bytes:
                raise ZeroDivisionError

            async def silent(who: str, payload: bytes) -> bytes:
                await trio.sleep_forever()
                return b""

            async def huge(who: str, payload: bytes) -> bytes:
                return bytes(MAX_ANSWER_BYTES + 1)

            for handler in (twice, refuse, broken, silent, huge):
                other.network.serve(handler.__name__, handler)
            assert await one.network.request(peer, "twice", b"ab", timeout_s=5.0) == b"abab"
            assert await one.network.request(peer, "twice", b"", timeout_s=5.0) == b""
            big = bytes(1_000_000)
            assert await one.network.request(peer, "twice", big, timeout_s=10.0) == big * 2
            for method, says in (
                ("refuse", "^round 7 is not here$"),
                ("broken", "its log says why"),
                ("unknown", "does not serve 'unknown'"),
                ("huge", "over the limit"),
            ):
                with pytest.raises(RequestFailed, match=says):
                    await one.network.request(peer, method, b"", timeout_s=5.0)
            with pytest.raises(RequestFailed, match=r"did not answer 'silent' within 0\.2 s"):
                await one.network.request(peer, "silent", b"", timeout_s=0.2)
            with pytest.raises(RequestFailed, match="over the limit"):
                await one.network.request(peer, "twice", bytes(MAX_REQUEST_BYTES + 1), timeout_s=5.0)
            stranger = Identity.generate().peer_id
            with pytest.raises(RequestFailed, match=f"{stranger} is not connected"):
                await one.network.request(stranger, "twice", b"", timeout_s=5.0)

    run(main)


def test_many_requests_at_once_wait_for_their_turn_and_do_not_delay_round_trips(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            at_once = most = 0

            async def slow(who: str, payload: bytes) -> bytes:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await trio.sleep(0.02)
                at_once -= 1
                return bytes(200_000)

            other.network.serve("slow", slow)
            answers: list[bytes] = []

            async def ask() -> None:
                answers.append(await one.network.request(other.network.peer_id, "slow", b"", timeout_s=20.0))

            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(ask)
            assert len(answers) == 30
            assert most == link.MAX_CONCURRENT_REQUESTS
            assert not other.network.problems()

    run(main)


def test_requests_in_flight_fail_when_the_peer_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            asked = trio.Event()

            async def silent(who: str, payload: bytes) -> bytes:
                asked.set()
                await trio.sleep_forever()
                return b""

            other.network.serve("silent", silent)
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(RequestFailed, match="is gone: it left"):
                        await one.network.request(other.network.peer_id, "silent", b"", timeout_s=20.0)

                nursery.start_soon(ask)
                await asked.wait()
                await other.stop()
            assert PeerDisconnected(peer=other.network.peer_id, why="it left: it was stopped") in events(one)

    run(main)


def test_who_is_in_no_run_may_ask_little_and_send_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            outsider = await some.start(one.address, run_id=None)
            assert await outsider.network.wait_for_peer(10.0)

            async def answer(who: str, payload: bytes) -> bytes:
                return b"yes"

            one.network.serve("ask", answer)
            failures: list[str] = []
            for _ in range(40):
                try:
                    await outsider.network.request(one.network.peer_id, "ask", b"", timeout_s=5.0)
                except RequestFailed as error:
                    failures.append(str(error))
            assert 0 < len(failures) <= 40 - link.STRANGER_REQUESTS_AT_ONCE
            assert set(failures) == {"too many requests from outside the run; ask again later"}
            await trio.sleep(0.5)
            with pytest.raises(RequestFailed, match="for peers of the run"):
                await outsider.network.request(one.network.peer_id, "membership", b"", timeout_s=5.0)
            outsider.network.links[one.network.peer_id].send(b"datagram")
            await until(lambda: "datagrams from outside the run" in one.network.problems())
            with pytest.raises(trio.WouldBlock):
                one.network.inbox.receive_nowait()

    run(main)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"version": "0.2.0"}, "version", "runs Atoll"),
        ({"run_id": OTHER_RUN}, "run", "of your own run"),
    ],
)
def test_another_version_or_run_is_refused_with_one_sentence_on_both_sides(
    tmp_path: Path, options: dict[str, object], code: str, says: str
) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            other = await some.start(one.address, **options)  # type: ignore[arg-type]
            await until(lambda: says in other.network.reason())
            await until(lambda: says in one.network.reason())
            assert one.network.reason() == other.network.reason()
            assert not one.network.links
            assert not other.network.links
            [told] = [event for event in events(one) if isinstance(event, PeerRefused)]
            assert (told.peer, told.code, told.by_this_node) == (other.network.peer_id, code, True)
            [heard] = [event for event in events(other) if isinstance(event, PeerRefused)]
            assert (heard.peer, heard.code, heard.by_this_node) == (one.network.peer_id, code, False)
            with pytest.raises(Refused, match=says):
                await other.network.connect(one.network.peer_id, [parse_peer_address(one.address)])

    run(main)


def test_a_patch_release_is_the_same_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            await some.start(one.address, version="0.1.7")
            await until(lambda: meshed(some.all))

    run(main)


def test_a_peer_that_chooses_another_run_later_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            joiner = await some.start(one.address, run_id=None)
            assert await joiner.network.wait_for_peer(10.0)
            await joiner.network.set_run(OTHER_RUN)
            await until(lambda: not one.network.links and not joiner.network.links)
            assert "of your own run" in joiner.network.reason()
            with pytest.raises(ValueError, match="already in run"):
                await joiner.network.set_run(RUN)

    run(main)


# ---------------------------------------------------------------- identity and simultaneous connections


def test_a_second_machine_with_the_same_key_is_refused_and_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            original = await some.start(one.address)
            await until(lambda: meshed([one, original]))
            copy = await some.start(one.address, identity=original.identity)
            await until(lambda: "already takes part as" in copy.network.reason())
            assert any(isinstance(event, DuplicateIdentity) for event in events(copy))
            await until(lambda: "was shown it by another" in original.network.reason())
            assert any(isinstance(event, DuplicateIdentity) for event in events(original))
            await trio.sleep(0.5)
            assert (
                one.network.links[original.network.peer_id].incarnation == original.network.membership.mine.incarnation
            )
            assert original.network.peers

    run(main)


def test_a_copy_that_dials_the_original_alarms_both(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            original = await some.start()
            copy = await some.start(identity=original.identity)
            with pytest.raises(Refused, match="Another machine uses the identity"):
                await copy.network.connect(original.network.peer_id, [parse_peer_address(original.address)])
            await until(lambda: "uses this node's identity" in original.network.reason())
            assert "uses this node's identity" in copy.network.reason()

    run(main)


def test_a_node_that_dials_itself_is_not_alarmed(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            one = await some.start()
            with pytest.raises(Refused, match="is this node itself"):
                await one.network.connect(one.network.peer_id, [parse_peer_address(one.address)])
            assert "No other peer yet" in one.network.reason()
            assert not events(one)

    run(main)


def test_two_that_dial_each_other_at_once_keep_the_same_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            for _ in range(5):
                one, other = await some.start(), await some.start()
                async with trio.open_nursery() as nursery:
                    for here, there in ((one, other), (other, one)):
                        addresses = [parse_peer_address(there.address)]
                        nursery.start_soon(here.network.connect, there.network.peer_id, addresses)
                await until(lambda pair=(one, other): meshed(pair))  # type: ignore[misc]
                await trio.sleep(introductions.RETIRED_S + 0.5 if _ == 0 else 0.1)
                mine, theirs = one.network.peers[other.network.peer_id], other.network.peers[one.network.peer_id]
                assert mine.dialled != theirs.dialled
                one.network.send(None, b"over the one that is left")
                assert (await other.network.inbox.receive())[1] == b"over the one that is left"
                connects = [event for event in events(one) if isinstance(event, PeerConnected)]
                assert connects, "it was told"

    run(main)


def test_a_peer_that_says_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 1.0)
    monkeypatch.setattr(link, "PING_INTERVAL_S", 0.2)
    monkeypatch.setattr(link, "LOST_AFTER_S", 0.3)

    async def main() -> None:
        async with nodes(tmp_path) as some:
            one, other = await two(some)
            kept = one.network.links[other.network.peer_id]
            await trio.sleep(1.5)
            assert not kept.closed.is_set(), "pongs are heard"
            theirs = other.network.links[one.network.peer_id]
            monkeypatch.setattr(theirs._outbox, "put_urgent", lambda frame: None)  # neither pings nor pongs any more
            await kept.closed.wait()
            assert kept.why_closed == "it said nothing for 1 s"
            assert kept.round_trips.lost_share > 0

    run(main)
