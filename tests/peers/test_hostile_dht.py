"""A node of the DHT that sends what no node of ours would, over real p2pds: who is sent it goes on as before."""

import asyncio
import math
import time
from types import SimpleNamespace

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from patience import PATIENCE
from records import OTHER_RUN, RUN, presence, record
from transport_peers import STEP_S, until_it

from noloco_node.base.addresses import ANY_LOCAL_PORT
from noloco_node.base.identity import Identity
from noloco_node.peers import dht_messages
from noloco_node.peers.directory import Directory
from noloco_node.transport.libp2p import Libp2pTransport

STALL_S = 1.0 * PATIENCE
"""How long this process may compute without a look at the event loop. A peer id of 120 kB once took 74 s."""


def nested(levels):
    data = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(0x40, data))
    return data


def bucket(most, records):
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([most, time.time() + 59, records])))


class Swarm:
    """A rendezvous, two members of a run, and a stranger that its p2pd lets call and be called."""

    def __init__(self, folder):
        self.folder = folder
        self.open = []

    async def start(self):
        self.rendezvous, self.address = await self.node("rendezvous", member=False)
        (self.one, _), (self.other, _) = [await self.node(name) for name in ("one", "other")]
        self.evil = Libp2pTransport(
            Identity.load_or_create(self.folder / "evil"), ANY_LOCAL_PORT, bootstrap=[self.address]
        )
        await self.evil.start()

    async def node(self, name, *, member=True):
        identity = Identity.load_or_create(self.folder / name)
        bootstrap = [self.address] if self.open else []
        transport = Libp2pTransport(identity, ANY_LOCAL_PORT, bootstrap=bootstrap)
        await transport.start()
        who = (identity, RUN) if member else (None, "")
        node = Directory(transport.p2p, bootstrap, *who, place_of=transport.place_seen)
        await node.start()
        self.open.append((node, transport))
        return node, transport.addresses()[0]

    async def close(self):
        for node, transport in reversed(self.open):
            await node.close()
            await transport.close()
        await self.evil.close()

    async def call(self, name, request, answer):
        from hivemind.p2p import PeerID

        victim = PeerID.from_base58(self.address.peer)
        return await self.evil.p2p.call_protobuf_handler(victim, f"DHTProtocol.{name}", request, answer)

    async def enter(self, answers):
        """Become a node of the DHT that answers look-ups so."""
        from hivemind.proto import dht_pb2

        own = dht_pb2.NodeInfo(node_id=dht_messages.node_id(self.evil.p2p.peer_id.to_bytes()))

        async def ping(request, context):
            return dht_pb2.PingResponse(peer=own)

        async def find(request, context):
            self.asked = True
            found = answers()
            if isinstance(found, bytes):  # made once: it takes seconds
                return SimpleNamespace(SerializeToString=lambda: found)
            return dht_pb2.FindResponse(results=[found for _ in request.keys], peer=own)

        await self.evil.p2p.add_protobuf_handler("DHTProtocol.rpc_ping", ping, dht_pb2.PingRequest)
        await self.evil.p2p.add_protobuf_handler("DHTProtocol.rpc_find", find, dht_pb2.FindRequest)
        await self.call("rpc_ping", dht_pb2.PingRequest(peer=own), dht_pb2.PingResponse)

    async def publish(self, *, round):
        for node in (self.one, self.other):
            await node.publish(presence(node._identity, round=round))


@pytest.fixture
async def swarm(tmp_path):
    swarm = Swarm(tmp_path)
    await swarm.start()
    yield swarm
    async with asyncio.timeout(STEP_S):
        await swarm.close()


async def longest_stall():
    """Of the event loop, until it is cancelled: which returns it. In time of the processor, as the machine may stand
    still, too."""
    longest = 0.0
    try:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.02)
            longest = max(longest, time.process_time() - before)
    except asyncio.CancelledError:
        return longest


def answers(kind, identity):
    from hivemind.proto import dht_pb2
    from hivemind.utils.serializer import MSGPackSerializer

    run_id = OTHER_RUN if kind == "records of another run" else RUN
    mine = MSGPackSerializer.dumps(record(identity, run_id=run_id, now=time.time()))
    found = {"type": dht_pb2.FOUND_DICTIONARY, "expiration_time": time.time() + 59}
    match kind:
        case "nested":
            return dht_pb2.FindResult(**found, value=nested(1500))
        case "a long peer id":
            raw = bytes(120_000)
            ids = {"nearest_node_ids": [dht_messages.node_id(raw)], "nearest_peer_ids": [raw]}
            return dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, **ids)
        case "many parts":
            return dht_pb2.FindResponse(results=[dht_pb2.FindResult()]).SerializeToString() * 2_000_000
        case "a size that is none":
            return dht_pb2.FindResult(**found, value=bucket("x", [[identity.peer_id, mine, time.time() + 59]]))
        case "many records":
            return dht_pb2.FindResult(**found, value=bucket(math.inf, [[n, b"", 1.0] for n in range(200_000)]))
        case "records of another run":
            many = [[identity.peer_id, mine, time.time() + 59]] * dht_messages.MAX_IN_BUCKET
            return dht_pb2.FindResult(**found, value=bucket(math.inf, many))


@pytest.mark.parametrize(
    "kind", ["nested", "a long peer id", "many parts", "a size that is none", "many records", "records of another run"]
)
async def test_a_hostile_answer_ends_no_look_up(swarm, kind):
    identity = Identity.load_or_create(swarm.folder / "evil")
    answer = answers(kind, identity)  # made once: signing takes time, too
    await swarm.enter(lambda: answer)
    watching = asyncio.create_task(longest_stall())
    swarm.asked = False
    for round in (1, 2):
        await swarm.publish(round=round)
        members = {node._identity.peer_id for node in (swarm.one, swarm.other)}

        async def all_seen(round=round, members=members):
            seen = [(await node.peers()).peers for node in (swarm.one, swarm.other)]
            rounds = [{peer: at.round for peer, at in each.items() if peer in members} for each in seen]
            return all(round in each.values() for each in rounds)

        await until_it(all_seen)
    assert swarm.asked
    watching.cancel()
    assert await watching < STALL_S
    for node in (swarm.rendezvous, swarm.one, swarm.other):
        storage = node._node.protocol.storage
        kept = {signer for _, signer in storage._held}
        assert kept <= members, "what a look-up found is not stored"


async def test_a_hostile_store_is_refused_and_costs_nothing(swarm):
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
    from hivemind.proto import dht_pb2
    from hivemind.utils.serializer import MSGPackSerializer

    fake = Identity(Ed25519PrivateKey.generate(), swarm.folder / "nowhere")
    signed = MSGPackSerializer.dumps(record(fake, now=time.time()))
    watching = asyncio.create_task(longest_stall())
    for tag, value in (
        (b"", nested(1500)),
        (b"", bucket(math.inf, [[number, b"", 1.0] for number in range(200_000)])),
        (nested(1500), b"x"),
        (b"\xc0", b"a value without a signer"),
        (dht_messages.packed_text(fake.peer_id), signed),
    ):
        store = dht_pb2.StoreRequest(
            keys=[bytes(20)], subkeys=[tag], values=[value], expiration_time=[time.time() + 30], in_cache=[False]
        )
        with pytest.raises(P2PHandlerError):
            await swarm.call("rpc_store", store, dht_pb2.StoreResponse)
    watching.cancel()
    assert await watching < STALL_S
    assert not swarm.rendezvous._node.protocol.storage._held


async def test_one_peer_is_one_node_of_the_dht_whatever_it_says(swarm):
    from hivemind.proto import dht_pb2

    table = swarm.rendezvous._node.protocol.routing_table
    before = len(table.uid_to_peer_id)
    for number in range(100):
        named = dht_pb2.NodeInfo(node_id=number.to_bytes(20, "big"))
        await swarm.call("rpc_ping", dht_pb2.PingRequest(peer=named), dht_pb2.PingResponse)
    await swarm.enter(dht_pb2.FindResult)

    async def is_known():
        return swarm.evil.p2p.peer_id in table

    await until_it(is_known)
    assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) == before + 1


async def test_nobody_is_called_back_while_a_ping_is_answered(swarm):
    """By who asks for that and does not answer, twelve identities held all places of the DHT's calls."""
    from hivemind.proto import dht_pb2

    called = asyncio.Event()

    async def ping(request, context):
        called.set()
        await asyncio.sleep(STEP_S)

    await swarm.evil.p2p.add_protobuf_handler("DHTProtocol.rpc_ping", ping, dht_pb2.PingRequest)
    own = dht_pb2.NodeInfo(node_id=dht_messages.node_id(swarm.evil.p2p.peer_id.to_bytes()))
    for _ in range(20):
        reply = await swarm.call("rpc_ping", dht_pb2.PingRequest(peer=own, validate=True), dht_pb2.PingResponse)
        assert reply.available, "hivemind's own nodes warn of it otherwise"
    assert not called.is_set()


async def test_calls_that_end_early_leave_nothing_behind(swarm):
    """hivemind forgets a call only where its handler comes to its end: not one that the caller gave up."""
    from hivemind.proto import dht_pb2

    under_way = swarm.open[0][1].p2p._client.control._handler_tasks
    made = 0
    while made < 300:
        calls = [
            asyncio.create_task(swarm.call("rpc_ping", dht_pb2.PingRequest(), dht_pb2.PingResponse)) for _ in range(30)
        ]
        await asyncio.sleep(0.002)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        made += len(calls)

    async def nothing():
        return not under_way

    await until_it(nothing)


async def test_neighbours_that_are_nobody_do_not_displace_those_that_are_there() -> None:
    """Ids near any key cost a second of arithmetic."""
    table = {"met": 1, "also met": 2}
    directory = object.__new__(Directory)
    directory._told_by = {}

    async def find(*_: object) -> dict[str, tuple[None, dict[str, str]]]:
        return {"key": (None, {**{f"nobody {n}": "x" for n in range(6)}, "met": "m", "also met": "a"})}

    found = await directory._noting(find, table)(None, ["key"])
    assert [*found["key"][1]] == ["nobody 0", "nobody 1", "met", "also met"]
