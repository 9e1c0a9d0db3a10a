"""300 peers of one run in a real DHT of 8 nodes: found evenly, at a constant cost, among hostile records."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from noloco_node.base.addresses import ANY_LOCAL_PORT
from noloco_node.base.identity import Identity
from noloco_node.host import traffic
from noloco_node.peers import dht_messages, dht_storage, record
from noloco_node.peers.directory import Directory
from noloco_node.peers.record import Presence, key_of, signed_record
from noloco_node.peers.size_estimate import BUCKET
from noloco_node.transport.libp2p import Libp2pTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN = "a1" * 32
NODES = 8
LOOK_S, REFRESH_S = 5.0, 20.0
TTL_S = 600.0
"""Longer than the test takes, however busy the machine is."""
DRAWS = 1200
CHI_SQUARE = 383.0
"""Of 299 degrees of freedom: passed by 999 uniform samples of 1000."""


class Dht:
    """Real nodes with a p2pd each, and peers that share them: each signs its own records."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.transports: list[Libp2pTransport] = []
        self.nodes: list[Directory] = []
        self.peers: list[Directory] = []
        self.done: Counter[str] = Counter()

    def identity(self) -> Identity:
        return Identity.load_or_create(self.directory / f"{len(self.transports)}-{len(self.peers)}.key")

    async def node(self) -> None:
        bootstrap = self.transports[0].addresses() if self.transports else []
        transport = Libp2pTransport(self.identity(), ANY_LOCAL_PORT, bootstrap=bootstrap)
        await transport.start()
        self.transports.append(transport)
        self.nodes.append(Directory(transport.p2p, bootstrap, ttl_s=TTL_S))
        await self.nodes[-1].start()

    def peer(self) -> Directory:
        host = len(self.peers) % NODES
        identity = self.identity()
        peer = Directory(self.transports[host].p2p, [], identity, RUN, ttl_s=TTL_S)
        peer._node = _Counted(self.nodes[host]._node, self.done)
        self.peers.append(peer)
        return peer

    async def settle(self, count: int) -> None:
        """So many peers, as after some minutes: all have an estimate of their number and have published."""
        while len(self.peers) < count:
            self.peer()
        rng = Random(count)
        for peer in self.peers:
            peer._run.size._counts.clear()
            peer._run.size._counts.append(count * rng.uniform(0.8, 1.25))
        for first in range(0, count, NODES):  # one on each node at a time
            await asyncio.gather(*(peer.publish(standing()) for peer in self.peers[first : first + NODES]))

    async def minute(self, peers: int) -> Counter[str]:
        """The operations of one minute of some of the peers, for each of them."""
        chosen = self.peers[:peers]
        self.done.clear()
        for peer in chosen:
            for _ in range(round(60 / LOOK_S)):
                await peer.peers()
            for _ in range(round(60 / REFRESH_S)):
                await peer.publish(standing())
        return Counter({kind: round(count / len(chosen), 1) for kind, count in self.done.items()})

    async def close(self) -> None:
        for node, transport in zip(reversed(self.nodes), reversed(self.transports), strict=True):
            await node.close()
            await transport.close()


class _Counted:
    """A DHT node whose operations are counted."""

    def __init__(self, node: object, done: Counter[str]) -> None:
        self._node, self._done = node, done

    def __getattr__(self, name: str) -> object:
        if name in ("get", "store"):
            self._done[name] += 1
        return getattr(self._node, name)


def standing() -> Presence:
    return Presence("training", 3, 150, 2.5, 9e3, ())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dht")


@pytest.fixture
async def dht(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Dht]:
    # 37 peers share each p2pd, which stores and asks for them, and one makes an hour's look-ups in a minute
    monkeypatch.setattr(dht_messages, "_is_own", lambda _subkey, _peer: True)
    monkeypatch.setattr(traffic, "PLACE_BYTES_S", 10**9)
    for limit in ("PEER_A_MINUTE", "LOOK_UPS_A_MINUTE", "OTHERS_A_MINUTE"):
        monkeypatch.setattr(dht_storage, limit, 10**9)
    dht = Dht(directory)
    try:
        for _ in range(NODES):
            await dht.node()
        yield dht
    finally:
        async with asyncio.timeout(30):
            await dht.close()


async def hostile(dht: Dht) -> None:
    """What a hostile node of the DHT stores, in every bucket that is read."""
    evil, now = dht.identity(), time.time()
    others = [Identity.load_or_create(dht.directory / f"other{number}").peer_id for number in range(3)]
    forged = signed_record(evil, standing(), run_id=RUN, boot=bytes(16), now=now)
    far = signed_record(evil, standing(), run_id=RUN, boot=bytes(16), now=now + 1e6)
    for bucket in ("", *(f"{number:04b}" for number in range(16)), *(f"{number:03b}" for number in range(8))):
        key = key_of(RUN, bucket)
        for peer, value, expires in (
            (others[0], forged, now + 30),
            (others[1], bytes(record.MAX_RECORD_BYTES + 1), now + 30),
            (evil.peer_id, far, now + 1e9),
            (others[2], b"garbage", now + 1e9),
        ):
            await dht.nodes[-1]._node.store(key, value, expires, subkey=peer, exclude_self=True)


async def test_300_peers_are_found_evenly_at_a_constant_cost(dht: Dht, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {}
    for count in (8, 64, 300):
        await dht.settle(count)
        costs[count] = await dht.minute(4)
    await hostile(dht)

    reader, rng, drawn, seen = dht.peers[0], Random(1), Counter[str](), set[str]()
    members = {peer._identity.peer_id for peer in dht.peers if peer._identity}
    reader._run.known.clear()
    guesses = [peer._run.size.peers for peer in dht.peers]
    minute: deque[set[str]] = deque(maxlen=round(60 / LOOK_S))  # a real record is known until it expires
    for _ in range(DRAWS // 2):
        before = set[str]().union(*minute)
        reader._run.known = {peer: reader._run.known[peer] for peer in before}
        candidates = (await reader.peers()).peers
        minute.append(candidates.keys() - before)
        seen |= candidates.keys()
        if len(minute) == minute.maxlen:
            drawn.update(rng.choice(sorted(candidates)) for _ in range(2))
    total = drawn.total()
    expected = total / (len(members) - 1)
    chi = sum((drawn[peer] - expected) ** 2 / expected for peer in members if peer != reader._identity.peer_id)
    with capsys.disabled():
        print(f"\n  chi-square of {total} draws among {len(members) - 1} peers: {chi:.0f} (below {CHI_SQUARE:.0f})")  # noqa: T201
        print(f"  they estimate {min(guesses)} to {max(guesses)} of them, with buckets of about {BUCKET}")  # noqa: T201
        for count, cost in costs.items():
            print(f"  {count} peers: {cost['get']:g} look-ups and {cost['store']:g} stores a node and minute")  # noqa: T201
    assert seen <= members
    assert len(seen) == len(members) - 1
    assert chi < CHI_SQUARE
    for cost in costs.values():
        assert cost["get"] <= 60 / LOOK_S + 1
        assert cost["store"] <= 3 * 60 / REFRESH_S
