"""A node looks for others more often while nobody trains with it, and calls some cached peers that it has not seen."""

import asyncio
import gc
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_network.network import MemoryNetwork, MemoryTransport
from records import RUN, presence, record
from virtual_clock import in_virtual_time

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.errors import PeerLost, SwarmUnreachable
from noloco_node.peers import run_registry
from noloco_node.peers.cache import PeerCache
from noloco_node.peers.directory import REFUSED, SILENT, Directory, Found
from noloco_node.peers.membership import CACHED_ASKED, LOOK_ALONE_S, LOOK_S, Membership
from noloco_node.peers.record import TTL_S, accept


@dataclass(frozen=True)
class Cached:
    peer_id: str
    time: float = 5.0

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (Address("ip4", "192.0.2.1", 4001, self.peer_id),)


def cached(number: int) -> Cached:
    key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    return Cached(Identity(key, Path("nowhere")).peer_id)


class Transport:
    """One that needs no addresses."""

    p2p = None
    can_be_called = True

    def __init__(self, transport: MemoryTransport) -> None:
        self.peer_id, self.channel = transport.peer_id, transport.channel

    def introduce(self, peers: object) -> None:
        pass

    def place_of(self, peer: str) -> str:
        return peer


class Directory(Directory):
    """One that is there at once."""

    def __init__(self) -> None:
        self.stored, self.late = True, False
        self.found = Found({})

    async def start(self) -> None:
        pass

    async def peers(self) -> Found:
        return self.found

    async def publish(self, _presence: object) -> None:
        if self.late:
            raise TimeoutError

    async def rejoin(self, _p2p: object, *, stores: bool = True) -> None:
        self.stores = stores


@dataclass(frozen=True)
class Seen:
    state: str


def entered(tmp_path: Path) -> tuple[Membership, Directory]:
    us, directory = MemoryNetwork(random.Random(0)).join("us"), Directory()
    membership = Membership(Transport(us), PeerCache(tmp_path / "peers.json"), lambda: None)
    asyncio.run(membership.enter(directory))
    return membership, directory


def test_that_nobody_is_there_is_no_news_where_nobody_says_so(tmp_path: Path, identity: Identity) -> None:
    membership, directory = entered(tmp_path)
    assert not asyncio.run(membership.others())
    directory.found = Found({}, REFUSED)
    with pytest.raises(SwarmUnreachable, match=REFUSED):
        asyncio.run(membership.others())
    found = accept(identity.peer_id, record(identity, now=time.time()), RUN, time.time(), TTL_S)
    assert found
    directory.found = Found({identity.peer_id: found}, REFUSED)
    assert list(asyncio.run(membership.others())) == [found], "of those seen before it knows"


@pytest.mark.parametrize(
    ("why", "remedy"), [(REFUSED, "start another rendezvous"), (SILENT, "join again with an invitation of today")]
)
def test_a_node_whose_look_ups_are_not_answered_says_so(tmp_path: Path, why: str, remedy: str) -> None:
    membership, directory = entered(tmp_path)
    later = time.monotonic() + 2 * TTL_S
    assert not membership.health(later), "it has looked for nobody yet, as it still loads its model"
    directory.found = Found({}, why)
    for _ in range(2):
        asyncio.run(membership.look())
    assert not membership.health(time.monotonic()), "what was read before may still hold"
    (found,) = membership.health(later)
    assert why in found.text and "for 2 min" in found.text and remedy in found.remedy
    directory.found = Found({})
    asyncio.run(membership.look())
    assert not membership.health(later)


def test_a_node_whose_look_ups_fail_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: object) -> Found:
        raise TimeoutError

    membership, _ = entered(tmp_path)
    monkeypatch.setattr(Directory, "peers", fails)
    with pytest.raises(TimeoutError):
        asyncio.run(membership.look())
    assert SILENT in membership.health(time.monotonic() + 2 * TTL_S)[0].text


def test_who_was_seen_is_not_counted_for_longer_than_a_record_lives(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where look-ups fail, since the network daemon is down."""

    async def fails(_: object) -> Found:
        raise TimeoutError

    membership, directory = entered(tmp_path)
    now = time.time()
    found = accept(identity.peer_id, record(identity, now=now), RUN, now, TTL_S)
    assert found
    directory.found = Found({identity.peer_id: found})
    asyncio.run(membership.look())
    assert membership.living == [found]
    monkeypatch.setattr(Directory, "peers", fails)
    with pytest.raises(TimeoutError):
        asyncio.run(membership.look())
    assert list(membership.seen.values()) == [found], "they may still answer"
    monkeypatch.setattr(time, "time", lambda: now + TTL_S + 1)
    assert membership.living == []


def test_a_node_whose_record_nobody_stores_says_so(tmp_path: Path, identity: Identity) -> None:
    """As where its clock is minutes off, or that of the only rendezvous is."""
    membership, directory = entered(tmp_path)
    for stored, late, lines in ((False, False, 1), (False, True, 1), (True, False, 0), (True, True, 0)):
        directory.stored, directory.late = stored, late
        with suppress(TimeoutError):
            asyncio.run(membership.publish(presence(identity)))
        found = membership.health(time.monotonic() + 2 * TTL_S)
        assert len(found) == lines and all("nobody finds it" in each.text for each in found)


def test_who_can_no_longer_be_called_stores_nothing_when_its_network_daemon_is_replaced(tmp_path: Path) -> None:
    """As where it is found out late that no peer can call it."""
    membership, directory = entered(tmp_path)
    for can in (True, False):
        membership._transport.can_be_called = can
        asyncio.run(membership.rejoin())
        assert directory.stores == can


@pytest.mark.parametrize(
    ("own", "seen", "wait_s"),
    [
        ("training", [], LOOK_ALONE_S),
        ("joining", [], LOOK_ALONE_S),
        ("training", ["paused", "joining"], LOOK_ALONE_S),
        ("training", ["paused", "training"], LOOK_ALONE_S),
        ("training", ["paused", "partner"], LOOK_S),
        ("paused", ["paused"], LOOK_S),
        ("joining", ["paused"], LOOK_S),
        ("finished", ["finished"], LOOK_S),
    ],
)
def test_who_trains_looks_often_until_a_partner_trains(tmp_path: Path, own: str, seen: list[str], wait_s: float):
    transport = MemoryNetwork(random.Random(0)).join("us")
    us = Membership(Transport(transport), PeerCache(tmp_path / "peers.json"), lambda: None)
    us.seen = {state: Seen("training" if state == "partner" else state) for state in seen}
    assert us.look_again_s(own, {"partner", "gone"}) == wait_s


def test_who_is_refused_does_not_look_more_often(tmp_path: Path) -> None:
    membership, directory = entered(tmp_path)
    assert membership.look_again_s("training", ()) == LOOK_ALONE_S
    directory.found = Found({}, REFUSED)
    asyncio.run(membership.look())
    assert membership.look_again_s("training", ()) == LOOK_S


@in_virtual_time
async def test_cancelled_calls_to_cached_peers_leave_no_task_behind(tmp_path: Path) -> None:
    peers = [cached(number) for number in range(CACHED_ASKED)]
    cache = PeerCache(tmp_path / "peers.json")
    cache.keep(peers)
    network = MemoryNetwork(random.Random(0), delay_s=1.0)
    members = [network.join(name) for name in ("us", *(peer.peer_id for peer in peers))]
    for member in members:
        await member.start()
    us = Membership(Transport(members[0]), cache, lambda: None)
    before = asyncio.all_tasks()
    entering = asyncio.create_task(us.enter(Directory()))
    await asyncio.sleep(0.1)
    calling = len(asyncio.all_tasks() - before - {entering})
    entering.cancel()
    await asyncio.wait([entering])
    await asyncio.sleep(0.1)
    left = len(asyncio.all_tasks() - before)
    for member in members:
        await member.close()
    assert calling >= CACHED_ASKED
    assert left == 0


@in_virtual_time
async def test_a_call_to_a_cached_peer_that_fails_as_it_is_cancelled_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gRPC's do when a network daemon dies at that moment. asyncio logs what nobody asks such a task for."""
    cache, errors = PeerCache(tmp_path / "peers.json"), list[object]()
    cache.keep([cached(1)])

    async def fails(_channel: object) -> None:
        try:
            await asyncio.sleep(9.0)
        except asyncio.CancelledError:
            raise PeerLost("unavailable") from None

    monkeypatch.setattr(run_registry, "ask", fails)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    us = MemoryNetwork(random.Random(0)).join("us")
    entering = asyncio.create_task(Membership(Transport(us), cache, lambda: None).enter(Directory()))
    await asyncio.sleep(1.0)
    entering.cancel()
    await asyncio.wait([entering])
    assert entering.cancelled()
    gc.collect()
    assert errors == []
