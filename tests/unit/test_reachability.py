"""What peers say of whether they can dial this node, and what follows from it; how a dial-back is kept from misuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.daemon import rpc
from node.daemon.addresses import Address
from node.daemon.dial_back import ALLOWED_AT_ONCE, DialBackAnswer, DialBackRequest, DialBacks
from node.daemon.dial_words import AGAIN_S, NOTHING_SAID_S, RENEWED_S, Words, closed_ports
from node.daemon.host import DialError
from node.daemon.identity import Identity
from node.daemon.membership import Membership
from node.daemon.own_addresses import OwnAddresses
from node.daemon.reachability import Reachability
from node.errors import AtollError


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# ------------------------------------------------------------ what peers say


def words(*said: tuple[str, bool, str | None]) -> Words:
    """(peer, local, why not), in order."""
    made = Words()
    for number, (peer, local, why) in enumerate(said):
        made.say(peer, float(number), local=local, why=why)
    return made


def test_nobody_has_said_anything() -> None:
    assert Words().verdict is None
    assert words(("a", False, None)).verdict is None


def test_one_failed_dial_may_be_that_peers_trouble() -> None:
    assert words(("a", False, "no answer")).verdict is None
    assert words(("a", False, "no answer"), ("b", False, "no answer")).verdict is False
    assert words(("a", False, "no answer"), ("a", False, "no answer")).verdict is False
    assert words(("a", False, "no answer"), ("a", False, "")).verdict is True


def test_the_majority_is_believed_and_of_equals_those_who_got_through() -> None:
    assert words(("a", False, ""), ("b", False, "no"), ("c", False, "no")).verdict is False
    assert words(("a", False, ""), ("b", False, "no")).verdict is True
    assert words(("a", False, ""), ("b", False, ""), ("c", False, "no")).verdict is True


def test_a_neighbour_on_the_same_network_says_little_of_the_world() -> None:
    assert words(("lan", True, "")).verdict is True
    assert words(("lan", True, ""), ("a", False, "no"), ("b", False, "no")).verdict is False
    assert words(("lan", True, "no"), ("lan", True, "no"), ("a", False, "")).verdict is True


def test_when_a_peer_is_asked_again() -> None:
    made = words(("a", False, ""), ("b", False, "no"))
    assert not made.due("a", AGAIN_S + 1)
    assert made.due("a", RENEWED_S + 1)
    assert made.due("b", AGAIN_S + 1)
    assert made.due("c", 0.0)


def test_who_cannot_tell_takes_nothing_back() -> None:
    made = words(("a", False, ""), ("a", False, None))
    assert made.verdict is True
    made = words(("a", False, None))
    assert not made.due("a", AGAIN_S)
    assert made.due("a", NOTHING_SAID_S)


def test_the_word_of_who_is_gone_fades() -> None:
    made = words(("gone", False, ""))
    for minute in (10, 11):
        made.say("here", 60.0 * minute + 1, local=False, why="no answer")
    assert made.verdict is False


def test_the_words_of_strangers_are_bounded() -> None:
    made = Words()
    for number in range(1000):
        made.say(str(number), 0.0, local=False, why="")
    assert len(made.by_peer) <= 64


LISTEN = Address("ip4", "0.0.0.0", 4001)


def test_the_sentence_names_the_ports_the_router_and_the_flags() -> None:
    behind: dict[str, Any] = {"seen_at": "203.0.113.7", "own": {"192.168.1.5"}, "listening": LISTEN}
    ports: dict[str, Any] = {"control_port": 4001, "data_port": 4002}
    says = closed_ports(**behind, **ports, closed=[4001, 4002], announced=False)
    assert "forward TCP ports 4001 and 4002 of the router at 203.0.113.7 to this machine" in says
    assert "--listen /ip4/0.0.0.0/tcp/4001 --data-port 4002 --announce /ip4/203.0.113.7/tcp/4001" in says
    says = closed_ports(**behind, **ports, closed=[4002], announced=True)
    assert "forward TCP port 4002 of the router" in says
    assert "--announce" not in says
    says = closed_ports(**{**behind, "own": {"203.0.113.7"}}, **ports, closed=[4001], announced=False)
    assert "open TCP port 4001 in this machine's firewall" in says
    assert "--announce" not in says


# ------------------------------------------------------------ dial-back

PEER = "12D3KooWAsker"


def dial_backs(dialled: list[Address], failures: dict[int, str] | None = None) -> DialBacks:
    async def dial(address: Address) -> None:
        await trio.sleep(0.1)
        dialled.append(address)
        if why := (failures or {}).get(address.port):
            raise DialError({address: why})

    link: Any = SimpleNamespace(remote_host="203.0.113.7", is_spliced=False)
    return DialBacks(peers=lambda: {PEER: link}, dial_control=dial)


def request(*control: int, data: tuple[int, ...] = ()) -> bytes:
    return rpc.encode(DialBackRequest(control_ports=control, data_ports=data, certificate_sha256=bytes(32)))


def test_only_the_address_that_the_asker_comes_from_is_dialled() -> None:
    async def main() -> None:
        dialled: list[Address] = []
        answer = await dial_backs(dialled, {4003: "Connection refused"}).answer(PEER, request(4001, 4003))
        said = rpc.decode(answer, DialBackAnswer)
        assert sorted(str(one) for one in dialled) == [
            f"/ip4/203.0.113.7/tcp/{port}/p2p/{PEER}" for port in (4001, 4003)
        ]
        assert said.host == "203.0.113.7"
        assert said.control == {4001: "", 4003: "203.0.113.7:4003: Connection refused"}

    in_virtual_time(main)


def test_a_data_port_that_nobody_answers_at_is_said_so() -> None:
    async def main() -> None:
        link: Any = SimpleNamespace(remote_host="127.0.0.1", is_spliced=False)

        async def reached(_: Address) -> None:
            await trio.lowlevel.checkpoint()

        made = DialBacks(peers=lambda: {PEER: link}, dial_control=reached)
        said = rpc.decode(await made.answer(PEER, request(4001, data=(1,))), DialBackAnswer)
        assert said.control == {4001: ""}
        assert "127.0.0.1:1" in said.data[1]

    trio.run(main)


@pytest.mark.parametrize(
    ("peer", "payload", "says"),
    [
        ("12D3KooWStranger", request(4001), "for peers of the run that are connected directly"),
        (PEER, request(1, 2, 3), "at most 2 ports"),
        (PEER, request(0), "a port that is none"),
        (PEER, request(70_000), "a port that is none"),
        (PEER, b"\xc1", "does not decode"),
    ],
)
def test_what_is_no_dial_back(peer: str, payload: bytes, says: str) -> None:
    async def main() -> None:
        dialled: list[Address] = []
        with pytest.raises(AtollError, match=says):
            await dial_backs(dialled).answer(peer, payload)
        assert not dialled

    in_virtual_time(main)


def test_one_address_is_dialled_back_only_so_often() -> None:
    async def main() -> None:
        dialled: list[Address] = []
        made = dial_backs(dialled)

        async def ask_on_and_on() -> None:
            for _ in range(1000):
                await made.answer(PEER, request(4001))

        with pytest.raises(AtollError, match=r"too many dial-backs to 203\.0\.113\.7"):
            await ask_on_and_on()
        assert len(dialled) <= ALLOWED_AT_ONCE + 1
        await trio.sleep(10)
        await made.answer(PEER, request(4001))

    in_virtual_time(main)


def test_only_so_many_dials_go_on_at_once() -> None:
    async def main() -> None:
        refused = []

        async def never(_: Address) -> None:
            await trio.sleep_forever()

        link: Any = SimpleNamespace(remote_host="203.0.113.7", is_spliced=False)
        made = DialBacks(peers=lambda: {PEER: link}, dial_control=never)

        async def ask() -> None:
            try:
                await made.answer(PEER, request(4001))
            except AtollError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(ask)
        assert len(refused) == 4
        assert "under way here" in refused[0]

    in_virtual_time(main)


# ------------------------------------------------------------ asking


class Network:
    """What `Reachability` asks of it, with peers that answer as `answers` says."""

    relay_bytes_s = 1e6

    def __init__(self, answers: dict[str, DialBackAnswer]) -> None:
        identity = Identity.generate()
        self.peer_id = identity.peer_id
        self.membership = Membership(peer_id=identity.peer_id, keyring=identity, version="0.1.0", incarnation=b"i")
        self.membership.publish(run=bytes(32), certificate_sha256=bytes(32), data_addresses=("192.0.2.5:4002",))
        self.splicing: Any = SimpleNamespace(through={}, failures={})
        self.own_addresses = OwnAddresses(announce=(), announce_data=())
        self.own_addresses.control = self.own_addresses.listening = [LISTEN]
        self.answers = answers
        self.peers: dict[str, Any] = {
            peer: SimpleNamespace(peer_id=peer, remote_host=f"203.0.113.{number}", is_spliced=False, dialled=True)
            for number, peer in enumerate(answers)
        }
        self.found: list[str] = []
        self.asked = 0

    def links_changed(self) -> trio.Event:
        return trio.Event()

    def found_address(self, host: str) -> None:
        self.found.append(host)

    async def request(self, peer: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        return rpc.encode(self.answers[peer])

    async def ask(self) -> Reachability:
        """For three rounds of questions."""
        reachability = Reachability(self)
        with trio.move_on_after(3.5 * AGAIN_S):
            await reachability.run()
        return reachability


def answer(why: str, *, data: str | None = None, host: str = "198.51.100.9") -> DialBackAnswer:
    return DialBackAnswer(host=host, control={4001: why}, data={4002: why if data is None else data})


def test_who_is_reachable_is_asked_about_once_and_volunteers() -> None:
    async def main() -> None:
        network = Network({"a": answer(""), "b": answer(""), "c": answer(""), "d": answer("")})
        reachability = await network.ask()
        mine = network.membership.mine
        assert (mine.reachable, mine.data_reachable, mine.relays) == (True, True, True)
        assert mine.seen_at == "198.51.100.9"
        assert not reachability.advice()
        assert network.asked == 3
        assert "198.51.100.9" in network.found

    in_virtual_time(main)


def test_who_is_not_reachable_is_told_what_to_do() -> None:
    async def main() -> None:
        network = Network({"a": answer("no answer", data=""), "b": answer("no answer", data="")})
        reachability = await network.ask()
        mine = network.membership.mine
        assert (mine.reachable, mine.data_reachable) == (False, True)
        assert "forward TCP port 4001 of the router at 198.51.100.9" in reachability.advice()
        assert reachability.status().advice == reachability.advice()
        assert not network.found

    in_virtual_time(main)


def test_what_a_liar_says_spoils_no_record() -> None:
    """Its record would be malformed, or send others to somebody else's door."""

    async def main() -> None:
        network = Network({
            "honest": answer(""),
            "other": answer(""),
            "liar": answer("", host="not an address"),
        })  # fmt: skip
        await network.ask()
        assert network.membership.mine.seen_at == "198.51.100.9"
        network = Network({"a": answer(""), "b": answer(""), "liar": answer("", host="192.0.2.66")})
        await network.ask()
        assert set(network.found) == {"198.51.100.9"}
        network = Network({"liar": answer("", host="192.0.2.66"), "slow": DialBackAnswer(host="", control={}, data={})})
        await network.ask()
        assert not network.found

    in_virtual_time(main)


def test_until_somebody_dials_hellos_say_where_this_node_comes_from() -> None:
    network = Network({})
    reachability = Reachability(network)

    def hello(peer: str, remote_host: str, host: str) -> None:
        link: Any = SimpleNamespace(peer_id=peer, remote_host=remote_host, is_spliced=not remote_host)
        reachability.was_seen(link, host)

    hello("neighbour", "127.0.0.1", "127.0.0.1")
    assert reachability.seen_at == "127.0.0.1"
    hello("liar", "203.0.113.8", "not an address")
    hello("spliced", "", "203.0.113.9")
    assert reachability.seen_at == "127.0.0.1"
    hello("far", "203.0.113.8", "198.51.100.9")
    assert reachability.seen_at == "198.51.100.9"
    for number in range(1000):
        hello(str(number), "203.0.113.8", "198.51.100.9")
    assert len(reachability._seen) <= 64
