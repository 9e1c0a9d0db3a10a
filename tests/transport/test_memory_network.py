"""The simulated network: time, sizes, loss, partitions and deaths are what they claim, and a seed repeats a run."""

import asyncio
import time
from random import Random

import grpc
import pytest
from memory_network.network import DIAL_TIMEOUT_S, MemoryNetwork
from transport_peers import ADD, Exchange, Runs, drain, echo, failure_of, fragment, list_no_runs
from virtual_clock import in_virtual_time, run_virtual

from noloco_node.errors import NolocoError
from noloco_node.wire import peer_pb2
from noloco_node.wire.peer_pb2_grpc import ExchangeStub, RunsStub

STATUS = grpc.StatusCode


def now():
    return asyncio.get_running_loop().time()


async def hang(requests, context):
    await asyncio.Event().wait()
    yield


async def joined(network, *names, swap=echo):
    """Members that all answer `Swap` and `List`."""
    members = []
    for name in names:
        member = network.join(name)
        for servicer in (Exchange(swap), Runs(list_no_runs)):
            member.serve(lambda server, servicer=servicer: ADD[type(servicer)](servicer, server))
        await member.start()
        members.append(member)
    return members


def swap(source, target, requests, timeout=None):
    return ExchangeStub(source.channel(target.peer_id)).Swap(requests, timeout=timeout)


def ask(source, target, timeout=None):
    return RunsStub(source.channel(target.peer_id)).List(peer_pb2.RunsRequest(), timeout=timeout)


async def messages(*payloads, every_s=0.0):
    for payload in payloads:
        yield fragment(payload)
        await asyncio.sleep(every_s)


# ---- time ----


@in_virtual_time
async def test_a_thousand_simulated_seconds_pass_at_once():
    began = time.process_time()
    await asyncio.gather(*(asyncio.sleep(1000 * index) for index in range(10)))
    assert now() == pytest.approx(9000)
    assert time.process_time() - began < 1.0


@in_virtual_time
async def test_simulated_time_stands_still_while_there_is_work():
    for _ in range(1000):
        await asyncio.sleep(0)
    assert now() == 0.0


def test_work_in_a_thread_is_waited_for():
    assert run_virtual(asyncio.to_thread(lambda: 7)) == 7


@in_virtual_time
async def test_delay_goes_there_and_back():
    a, b = await joined(MemoryNetwork(Random(1), delay_s=0.25), "a", "b")
    await ask(a, b)
    assert now() == pytest.approx(0.5)


@in_virtual_time
async def test_bandwidth_is_the_links_and_sizes_are_the_messages():
    size = len(fragment(bytes(1000)).SerializeToString())
    network = MemoryNetwork(Random(1))
    a, b = await joined(network, "a", "b")
    network.link("a", "b").bandwidth_bytes_s = 100.0
    await asyncio.gather(*(drain(swap(a, b, messages(bytes(1000)))) for _ in range(2)))  # they share the link
    assert (one_way := now()) == pytest.approx(2 * size / 100)
    network.link("a", "b").bandwidth_bytes_s = float("inf")
    network.link("b", "a").bandwidth_bytes_s = 50.0
    await drain(swap(a, b, messages(bytes(1000))))
    assert now() - one_way == pytest.approx(size / 50)


@in_virtual_time
async def test_messages_of_one_instant_keep_their_order():
    a, b = await joined(MemoryNetwork(Random(1), delay_s=0.1), "a", "b")
    payloads = [bytes([index]) for index in range(100)]
    assert [reply.fragment.payload for reply in await drain(swap(a, b, messages(*payloads)))] == payloads


# ---- faults ----


@in_virtual_time
async def test_a_lost_message_leaves_a_stream_silent_until_its_deadline():
    network = MemoryNetwork(Random(1))
    a, b = await joined(network, "a", "b")
    call = swap(a, b, messages(b"first", b"second", b"third", every_s=1.0), timeout=20.0)
    replies = aiter(call)
    await anext(replies)
    network.link("a", "b").loss = 1.0
    await asyncio.sleep(1.5)
    network.link("a", "b").loss = 0.0  # the third message would pass, but it comes after the lost one
    assert await failure_of(anext(replies)) is STATUS.DEADLINE_EXCEEDED and now() == pytest.approx(20)


@in_virtual_time
async def test_loss_is_as_frequent_as_it_is_said_to_be():
    a, b = await joined(MemoryNetwork(Random(1), loss=0.1), "a", "b")
    calls = await asyncio.gather(*(ask(a, b, timeout=5.0) for _ in range(500)), return_exceptions=True)
    # A unary call is an opening, a request, an end of requests that may be lost unnoticed, a reply, and a status.
    assert sum(isinstance(call, Exception) for call in calls) / 500 == pytest.approx(1 - 0.9**4, abs=0.05)


@in_virtual_time
async def test_a_partition_is_silent_and_heals():
    network = MemoryNetwork(Random(1))
    a, b, c, d = await joined(network, "a", "b", "c", "d")
    network.partition([{"a", "b"}])
    await ask(a, b)
    await ask(c, d)
    failures = await asyncio.gather(failure_of(ask(a, c)), failure_of(ask(c, a)), failure_of(ask(a, d, timeout=2.0)))
    after = now()
    network.heal()
    await ask(a, c)
    assert failures == [STATUS.UNAVAILABLE, STATUS.UNAVAILABLE, STATUS.DEADLINE_EXCEEDED]
    assert after == pytest.approx(DIAL_TIMEOUT_S)


@in_virtual_time
async def test_a_peer_that_vanishes_is_gone_for_all_and_may_come_back():
    network = MemoryNetwork(Random(1), delay_s=0.5)
    a, b, c = await joined(network, "a", "b", "c", swap=hang)
    outgoing, incoming = swap(b, a, messages()), swap(c, b, messages())
    bystander = swap(a, c, messages(), timeout=20.0)
    await asyncio.sleep(5)
    network.vanish("b")
    codes = [await incoming.code(), await outgoing.code(), await failure_of(ask(a, b))]
    seen_after = now() - 5
    (again,) = await joined(network, "b")
    await ask(a, again)
    assert codes == [STATUS.UNAVAILABLE] * 3
    assert seen_after == pytest.approx(0.5 + 1.0)  # the break is seen, then a call is refused
    assert await bystander.code() is STATUS.DEADLINE_EXCEEDED


@in_virtual_time
async def test_an_id_is_taken_while_its_member_is_there():
    network = MemoryNetwork(Random(1))
    (a,) = await joined(network, "a")
    with pytest.raises(NolocoError, match="close"):
        await joined(network, "a")
    await a.close()
    await joined(network, "a")


@in_virtual_time
async def test_nothing_is_left_of_calls_that_ended():
    network = MemoryNetwork(Random(1), delay_s=0.01, loss=0.05)
    a, b = await joined(network, "a", "b")
    calls = [drain(swap(a, b, messages(b"x", b"y"), timeout=5.0)) for _ in range(50)]
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(10)
    assert (len(asyncio.all_tasks()), len(network._calls), len(a._answers), len(b._answers)) == (1, 0, 0, 0)


def test_a_stuck_simulation_says_so(monkeypatch):
    monkeypatch.setattr("virtual_clock._STALL_S", 0.05)
    with pytest.raises(RuntimeError, match="stuck"):
        run_virtual(asyncio.Event().wait())


# ---- many nodes ----


def history(seed, nodes=64, rounds=20):
    """Everybody swaps with random others over a bad network; what happened to whom, and when."""

    async def life(me, members, rng, log):
        for _ in range(rounds):
            partner = rng.choice([other for other in members if other is not me])
            try:
                replies = await drain(swap(me, partner, messages(*[bytes(100)] * 8), timeout=5.0))
                log.append((round(now(), 9), me.peer_id, partner.peer_id, len(replies)))
            except grpc.aio.AioRpcError as error:
                log.append((round(now(), 9), me.peer_id, partner.peer_id, error.code().name))
            await asyncio.sleep(rng.random())

    async def main():
        rng, log = Random(seed), []
        network = MemoryNetwork(Random(rng.random()), delay_s=0.03, bandwidth_bytes_s=1e5, loss=0.001)
        members = await joined(network, *(f"n{index}" for index in range(nodes)))
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(life(member, members, Random(rng.random()), log))
            group.create_task(trouble(network))
        return log

    async def trouble(network):
        await asyncio.sleep(5)
        network.partition([{f"n{index}" for index in range(nodes // 2)}])
        await asyncio.sleep(2)
        network.heal()
        network.vanish("n3")

    return run_virtual(main())


def test_a_seed_repeats_a_run_to_the_last_event():
    first = history(seed=1, nodes=16)
    assert first == history(seed=1, nodes=16)
    assert first != history(seed=2, nodes=16)
    assert {entry[3] for entry in first} >= {8, "DEADLINE_EXCEEDED", "UNAVAILABLE"}


def test_it_is_fast_enough_for_64_nodes():
    began = time.process_time()
    assert len(history(seed=3)) == 64 * 20
    assert time.process_time() - began < 5.0  # 1280 swaps of 16 messages; 0.4 s on an idle machine
