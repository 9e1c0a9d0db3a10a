"""Whether a node can be called is found out again and again, whatever happens to it meanwhile."""

import asyncio
import errno
import random
from collections.abc import Callable
from itertools import pairwise

import grpc.aio
import pytest
from memory_network.network import MemoryNetwork, started
from virtual_clock import in_virtual_time

from noloco_node.base import places
from noloco_node.base.addresses import Address
from noloco_node.transport import reachability, relay, self_view
from noloco_node.transport.reachability import AUTO, DIRECTLY, KEEP_S, MAPPED, OFF, OUTGOING, RELAYED, Reachability
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, add_MirrorServicer_to_server


async def always(*_: object) -> bool:
    return True


async def nothing(*_: object) -> None:
    pass


async def kept(found: Reachability, own: Callable[[], list[Address]], each: Callable[[], None], for_s: float) -> None:
    """It is asked again and again for so long, and `each` called."""
    keeping = asyncio.create_task(found.keep(lambda: None, own, each))
    await asyncio.sleep(for_s)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])


class OneHost(MirrorServicer):
    """Sees every caller at one host, where all ports are open; without a host, it cannot connect to any."""

    def __init__(self, host: str = "") -> None:
        self._host = host

    async def Look(self, request: pb.LookRequest, context: object) -> pb.LookReply:  # noqa: N802
        return pb.LookReply(host=self._host, open=request.ports if self._host else ())


@pytest.mark.parametrize(
    ("own", "verdict"), [(["192.0.2.1"], DIRECTLY), (["192.0.2.1", "192.0.2.9"], DIRECTLY), (["10.0.0.2"], MAPPED)]
)
@in_virtual_time
async def test_a_node_seen_at_any_address_of_its_machine_is_reached_directly(
    own: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p2pd finds one of them, that of the default route."""
    monkeypatch.setattr(reachability, "is_of_this_machine", lambda host: host in own)
    network = MemoryNetwork(random.Random(0))
    us, helper = network.join("us"), network.join("helper")
    helper.serve(lambda server: add_MirrorServicer_to_server(OneHost("192.0.2.1"), server))
    found = Reachability("us", OFF, {"helper": []}, {"helper"}, list, us.channel, str, always)
    async with started(us, helper):
        await found.survey(lambda: None, [Address("ip4", own[-1], 4001)])
    assert found.verdict == verdict
    assert str(found.addresses([])[0]) == "/ip4/192.0.2.1/tcp/4001/p2p/us"


async def test_a_node_that_has_ipv6_alone_and_listens_for_ipv4_is_called_over_its_relay_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gave everybody its loopback address first, so that it seemed to be at the place of all such nodes."""
    monkeypatch.setattr(relay, "reserve", always)
    door = Address("ip6", "2001:db9::5", 4001, "helper")
    found = Reachability("us", AUTO, {"helper": [door]}, {"helper"}, list, str, str, always)
    here = Address("ip4", "127.0.0.1", 4002, "us")
    assert found.addresses([here]) == [here]
    await found.reserve(None)
    (way,) = found.addresses([here])
    assert (way.relay, way.host) == ("helper", door.host) and places.claimed("us", [way]) == places.RELAYED


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ({"chosen": "9.9.9.9"}, MAPPED),
        ({"stranger": "9.9.9.9"}, OUTGOING),
        ({"stranger": "9.9.9.9", "another": "9.9.9.9"}, MAPPED),
        ({"stranger": "9.9.9.9", "another": "9.9.9.8"}, OUTGOING),
        ({"stranger": "9.9.9.9", "of its place": "9.9.9.9"}, OUTGOING),
        ({"stranger": "9.9.9.9", "over a relay": "9.9.9.9"}, OUTGOING),
        ({"stranger": "10.0.0.2"}, OUTGOING),
    ],
)
async def test_at_the_word_of_one_that_nobody_chose_no_relay_is_given_up(
    says: dict[str, str], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All peers seen earlier may have been asked: then a lie would leave a node behind a router that nobody calls."""

    async def look(peer: str, ports: list[int]) -> self_view.SelfView:
        return self_view.SelfView(says[peer], tuple(ports))

    monkeypatch.setattr(reachability.self_view, "skew", nothing)
    monkeypatch.setattr(reachability.self_view, "look", look)
    at = {"of its place": "stranger", "over a relay": places.RELAYED}
    found = Reachability(
        "us", OFF, dict.fromkeys(says, ()), {"chosen"}, list, lambda peer: peer, lambda peer: at.get(peer, peer), always
    )
    await found.survey(lambda: None, [Address("ip4", "10.0.0.2", 4001)])
    assert found.verdict == verdict
    assert [address.host for address in found.addresses([])] == (["9.9.9.9"] if verdict == MAPPED else [])


@pytest.mark.parametrize("verdict", [MAPPED, RELAYED])
@in_virtual_time
async def test_a_laptop_in_another_network_is_soon_known_there(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd does not know for half a minute that its connections of the old network are dead."""
    moves_s, dead_s = 400.0, 40.0
    reserved, clock = list[float](), asyncio.get_running_loop().time

    async def reserve(*_: object) -> bool:
        reserved.append(clock())
        return True

    async def look(_channel: object, ports: list[int]) -> self_view.SelfView | None:
        if moves_s <= clock() < moves_s + dead_s:
            return None
        host = "8.8.4.4" if clock() < moves_s else "9.9.9.9"
        return self_view.SelfView(host, tuple(ports) if verdict == MAPPED else ())

    monkeypatch.setattr(reachability.self_view, "skew", nothing)
    monkeypatch.setattr(reachability.self_view, "look", look)
    monkeypatch.setattr(reachability.relay, "reserve", reserve)
    relay = Address("ip4", "8.8.8.8", 4001, "helper")
    found = Reachability("us", AUTO, {"helper": [relay]}, {"helper"}, list, str, str, always)
    own = lambda: [Address("ip4", "10.0.0.2" if clock() < moves_s else "10.1.0.2", 4001)]  # noqa: E731
    await kept(found, own, lambda: None, moves_s + dead_s + KEEP_S + 5)
    assert found.verdict == verdict
    if verdict == MAPPED:
        assert [address.host for address in found.addresses([])] == ["9.9.9.9"]
    else:
        assert max(after - before for before, after in pairwise(reserved)) < KEEP_S + 5, "also where nobody answers"


@pytest.mark.parametrize(("closed", "verdict"), [(1, MAPPED), (2, OUTGOING)])
@in_virtual_time
async def test_one_probe_that_comes_too_late_takes_no_address_back(
    closed: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a swap fills a slow link: the node would end all its connections, to listen for QUIC."""
    verdicts = list[str | None]()

    async def look(_channel: object, ports: list[int]) -> self_view.SelfView:
        return self_view.SelfView("9.9.9.9", () if 3 <= len(verdicts) < 3 + closed else tuple(ports))

    monkeypatch.setattr(reachability.self_view, "skew", nothing)
    monkeypatch.setattr(reachability.self_view, "look", look)
    monkeypatch.setattr(reachability.relay, "reserve", always)
    monkeypatch.setattr(reachability, "_SURVEY_EVERY", 1)
    found = Reachability("us", AUTO, {"helper": []}, {"helper"}, list, str, str, always)
    own = lambda: [Address("ip4", "10.0.0.2", 4001)]  # noqa: E731
    await kept(found, own, lambda: verdicts.append(found.verdict), (3 + closed) * (KEEP_S + 1))
    assert verdicts[:4] == [MAPPED] * 4 and verdicts[2 + closed] == verdict


@in_virtual_time
async def test_a_node_without_bootstrap_peers_compares_clocks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    async def skew(*_: object) -> None:
        asked.append(_)

    monkeypatch.setattr(reachability.self_view, "skew", skew)
    found = Reachability("us", AUTO, {}, set(), list, str, str, always)
    own = lambda: [Address("ip4", "10.0.0.2", 4001)]  # noqa: E731
    await kept(found, own, lambda: None, 3600.0)
    assert len(asked) == pytest.approx(3600 / (10 * KEEP_S), abs=2)


async def test_a_host_without_an_address_that_others_know_asks_for_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with IPv6 alone, where p2pd listens for IPv4."""

    async def look(*_: object) -> self_view.SelfView:
        return self_view.SelfView("2001:db8::1", ())

    monkeypatch.setattr(reachability.self_view, "skew", nothing)
    monkeypatch.setattr(reachability.self_view, "look", look)
    found = Reachability("us", OFF, {"helper": []}, {"helper"}, list, lambda peer: peer, str, always)
    await found.survey(lambda: None, [Address("ip4", "127.0.0.1", 4001)])
    assert found.verdict == OUTGOING


async def test_one_peer_of_each_place_is_asked_for_its_clock_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def skew(peers: list[str], *_: object) -> None:
        asked.extend(peers)

    monkeypatch.setattr(reachability.self_view, "skew", skew)
    monkeypatch.setattr(reachability.self_view, "look", nothing)
    crowd = [f"crowd {number}" for number in range(9)]
    others = lambda: [*crowd, "peer", "helper"]  # noqa: E731
    found = Reachability("us", OFF, {"helper": []}, {"helper"}, others, str, lambda peer: peer.split()[0], always)
    await found.survey(lambda: None, [])
    assert asked == ["helper", "crowd 0", "peer"]


@in_virtual_time
async def test_a_machine_out_of_descriptors_looks_again_when_it_has_some() -> None:
    network = MemoryNetwork(random.Random(0))
    us, helper = network.join("us"), network.join("helper")
    helper.serve(lambda server: add_MirrorServicer_to_server(OneHost(), server))
    calls = iter(range(1_000))

    def channel(peer: str) -> grpc.aio.Channel:
        if next(calls) == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return us.channel(peer)

    found = Reachability("us", OFF, {"helper": []}, {"helper"}, list, channel, str, always)
    found.verdict = RELAYED
    async with started(us, helper):
        await kept(found, lambda: [Address("ip4", "10.0.0.2", 4001)], lambda: None, 15 * KEEP_S)
    assert found.verdict == OUTGOING
