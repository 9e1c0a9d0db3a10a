"""The promises of transport/base.py: one suite, run over memory and over libp2p."""

import asyncio

import grpc
import pytest
from transport_peers import (
    STEP_S,
    Exchange,
    OverLibp2p,
    OverMemory,
    Runs,
    State,
    drain,
    echo,
    failure_of,
    fragment,
    until,
)

from noloco_node.errors import PeerLost
from noloco_node.transport.base import peer_faults
from noloco_node.wire import peer_pb2
from noloco_node.wire.messages import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from noloco_node.wire.peer_pb2_grpc import ExchangeStub, RunsStub, StateStub


@pytest.fixture(params=[OverMemory, OverLibp2p])
async def net(request, tmp_path):
    net = request.param(tmp_path)
    yield net
    async with asyncio.timeout(STEP_S):
        await net.close()


def hanging():
    """A method that never answers, and the events of its begin and its end."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def hang(requests, context):
        began.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.set()

    return hang, began, ended


async def forever():
    while True:
        yield fragment()
        await asyncio.sleep(3600)


async def test_a_unary_call_and_a_server_stream(net):
    async def list_runs(request, context):
        return peer_pb2.RunsReply(runs=[peer_pb2.SignedManifest(author="me")])

    async def fetch(request, context):
        for index in range(request.protocol):
            yield peer_pb2.StateFrame(chunk=peer_pb2.StateChunk(data=bytes([index])))

    server, client = await net.start(Runs(list_runs), State(fetch)), await net.start()
    channel = client.channel(server.peer_id)
    reply = await RunsStub(channel).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    assert reply.runs[0].author == "me"
    frames = await drain(StateStub(channel).Fetch(peer_pb2.StateRequest(protocol=200), timeout=STEP_S))
    assert [frame.chunk.data[0] for frame in frames] == list(range(200))


async def test_both_directions_of_a_stream_run_at_once(net):
    """Neither side waits for the other's end: each sends its next message only when it has received the last one."""

    async def count_up(requests, context):
        yield fragment(index=0)
        async for request in requests:
            yield fragment(index=request.fragment.index + 1)

    server, client = await net.start(Exchange(count_up)), await net.start()
    heard = asyncio.Queue()

    async def answers():
        while (index := await heard.get()) < 50:
            yield fragment(index=index + 1)

    async with asyncio.timeout(STEP_S):
        async for frame in ExchangeStub(client.channel(server.peer_id)).Swap(answers(), timeout=STEP_S):
            heard.put_nowait(frame.fragment.index)
            last = frame.fragment.index
    assert last == 50


async def test_the_caller_is_proved_and_three_find_each_other(net):
    async def who(request, context):
        return peer_pb2.RunsReply(runs=[peer_pb2.SignedManifest(author=server.caller(context))])

    first, server, client = await net.start(), await net.start(Runs(who)), await net.start()
    for caller in (first, client):
        reply = await RunsStub(caller.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)
        assert reply.runs[0].author == caller.peer_id


async def test_the_place_of_a_caller_is_the_one_it_is_called_at(net):
    seen = []

    async def where(request, context):
        seen.append(server.place(context))
        return peer_pb2.RunsReply()

    server, client = await net.start(Runs(where)), await net.start()
    await RunsStub(client.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    assert seen == [server.place_of(client.peer_id)] == [client.place_of(server.peer_id)] == ["127.0.0.1"]


async def test_a_deadline_ends_the_call_on_both_sides(net):
    hang, began, ended = hanging()
    server, client = await net.start(Exchange(hang)), await net.start()
    stub = ExchangeStub(client.channel(server.peer_id))
    async with asyncio.timeout(STEP_S):
        while not began.is_set():  # again, where it was over on a busy machine before the call was there
            assert await failure_of(drain(stub.Swap(forever(), timeout=1.0))) is grpc.StatusCode.DEADLINE_EXCEEDED
        await ended.wait()


async def test_a_cancelled_call_is_cancelled_on_the_other_side_too(net):
    hang, began, ended = hanging()
    server, client = await net.start(Exchange(hang)), await net.start()
    call = ExchangeStub(client.channel(server.peer_id)).Swap(forever(), timeout=STEP_S)
    async with asyncio.timeout(STEP_S):
        await began.wait()
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drain(call)
        await ended.wait()
    assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED


async def test_a_task_that_is_cancelled_while_it_reads_cancels_its_call(net):
    hang, began, ended = hanging()
    server, client = await net.start(Exchange(hang)), await net.start()
    reading = asyncio.create_task(drain(ExchangeStub(client.channel(server.peer_id)).Swap(forever(), timeout=STEP_S)))
    async with asyncio.timeout(STEP_S):
        await began.wait()
        reading.cancel()
        await asyncio.wait([reading])
        await ended.wait()


async def test_a_peer_that_dies_in_mid_stream_is_unavailable(net):
    server, client = await net.start(Exchange(echo)), await net.start()
    stub = ExchangeStub(client.channel(server.peer_id))
    call = stub.Swap(forever(), timeout=STEP_S)
    replies = aiter(call)
    async with asyncio.timeout(STEP_S):
        await anext(replies)
    net.kill(server)
    assert await failure_of(anext(replies)) is grpc.StatusCode.UNAVAILABLE
    assert await failure_of(drain(stub.Swap(forever(), timeout=STEP_S))) is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_that_dies_in_mid_stream_cancels_its_handler(net):
    hang, began, ended = hanging()
    server, client = await net.start(Exchange(hang)), await net.start()
    call = ExchangeStub(client.channel(server.peer_id)).Swap(forever(), timeout=10 * STEP_S)
    async with asyncio.timeout(STEP_S):
        await began.wait()
        net.kill(client)
        await ended.wait()
    call.cancel()


async def test_an_unknown_peer_is_unavailable(net):
    _, client = await net.start(), await net.start()
    call = RunsStub(client.channel(net.new_id())).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE


async def test_a_request_of_1_mib_and_a_reply_of_4_pass_whole(net):
    async def four_times(requests, context):
        async for request in requests:
            yield fragment(4 * request.fragment.payload)

    server, client = await net.start(Exchange(four_times)), await net.start()
    payload = bytes(range(256)) * (1 << 12)

    async def one():
        yield fragment(payload)

    (reply,) = await drain(ExchangeStub(client.channel(server.peer_id)).Swap(one(), timeout=STEP_S))
    assert reply.fragment.payload == 4 * payload


async def test_a_message_over_the_limit_is_refused_in_both_directions(net):
    async def too_large(requests, context):
        async for _ in requests:
            yield fragment(bytes(MAX_MESSAGE_BYTES))

    async def one(payload):
        yield fragment(payload)

    server, client = await net.start(Exchange(too_large)), await net.start()
    stub = ExchangeStub(client.channel(server.peer_id))
    for payload in (b"", bytes(MAX_REQUEST_BYTES)):
        code = await failure_of(drain(stub.Swap(one(payload), timeout=STEP_S)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_fast_sender_waits_for_a_slow_receiver(net):
    read = asyncio.Event()

    async def slow(requests, context):
        await read.wait()
        async for request in requests:
            yield fragment(index=request.fragment.index)

    server, client = await net.start(Exchange(slow)), await net.start()
    sent = 0

    async def flood():
        nonlocal sent
        for index in range(100):
            sent += 1
            yield fragment(bytes(1 << 20), index)

    call = ExchangeStub(client.channel(server.peer_id)).Swap(flood(), timeout=3 * STEP_S)
    replies = asyncio.create_task(drain(call))
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.5)
    assert sent < 60  # of 100: what is on its way is bounded, whatever stands in between
    read.set()
    async with asyncio.timeout(3 * STEP_S):
        assert len(await replies) == 100


async def test_of_a_servicer_that_fails_only_a_code_is_sent(net, caplog):
    async def broken(request, context):
        raise ValueError("a secret")

    server, client = await net.start(Runs(broken)), await net.start()
    channel = client.channel(server.peer_id)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await RunsStub(channel).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failed.value.details()
    assert "a secret" in caplog.text  # the operator sees it
    announce = RunsStub(channel).Announce(peer_pb2.SignedManifest(), timeout=STEP_S)
    assert await failure_of(announce) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_peer_cannot_make_our_own_task_look_cancelled(net):
    async def cancelled(request, context):
        await context.abort(grpc.StatusCode.CANCELLED, "")

    server, client = await net.start(Runs(cancelled)), await net.start()
    stub = RunsStub(client.channel(server.peer_id))
    with pytest.raises(PeerLost, match="cancelled"), peer_faults():
        await stub.List(peer_pb2.RunsRequest(), timeout=STEP_S)
    with pytest.raises(PeerLost, match="unavailable"), peer_faults():
        await RunsStub(client.channel(net.new_id())).List(peer_pb2.RunsRequest(), timeout=STEP_S)

    async def ours():
        with peer_faults():
            await asyncio.Event().wait()

    task = asyncio.create_task(ours())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_ends_open_calls_on_both_sides(net):
    hang, began, ended = hanging()
    server, client = await net.start(Exchange(hang)), await net.start()
    call = ExchangeStub(client.channel(server.peer_id)).Swap(forever(), timeout=10 * STEP_S)
    async with asyncio.timeout(STEP_S):
        await began.wait()
        await server.close()
        await server.close()
        await ended.wait()
        await until(call.done)
    assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
