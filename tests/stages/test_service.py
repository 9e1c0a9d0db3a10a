"""Micro-batches between nodes over the in-memory network: carried, retried, lost, and what a hostile peer may send."""

import asyncio
import queue
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
from memory_network.network import MemoryNetwork
from moved_clock import MovedClock
from patience import PATIENCE
from stage_pairs import TinyPart
from transport_peers import until

from noloco_node.core.codecs.activations import CastActivations
from noloco_node.errors import PeerLost
from noloco_node.run.schema import Manifest, StagesSpec
from noloco_node.stages import held as held_module
from noloco_node.stages import next_stage
from noloco_node.stages import service as service_module
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Lost, LostMicroBatch, Sent
from noloco_node.stages.next_stage import StageTerms
from noloco_node.stages.part import Position
from noloco_node.stages.passes import StageTask
from noloco_node.stages.service import StageService
from noloco_node.stages.shown import LEAST_JUDGED
from noloco_node.version import PROTOCOL
from noloco_node.wire import stage_messages as wire
from noloco_node.wire.stage_pb2_grpc import StageServicer, StageStub, add_StageServicer_to_server

RUN = Manifest(name="staged", stages=StagesSpec(count=2, activations="fp32"))
RUN_ID = bytes.fromhex(RUN.run_id)
PART = TinyPart()


class Node:
    def __init__(self, network: MemoryNetwork, name: str, stage: int) -> None:
        self.name, self.transport = name, network.join(name)
        self.blamed: list[tuple[str, str]] = []
        self.service = StageService(
            self.transport, random.Random(1), lambda peer, reason: self.blamed.append((peer, reason))
        )
        self.transport.serve(lambda server: add_StageServicer_to_server(self.service, server))
        at = Position(stage, 2)
        task = StageTask(PART, PART, at, self.service._next, self.service.letters)
        self.service._task = self.service._next.task = task
        self.service.begin(StageTerms(RUN_ID, "fp32"))

    def sends(self, within_s: float = 60.0, *, evaluates: bool = False, tries: bool = False) -> Sent:
        what, until = (torch.ones(2, *PART.activations), PART.some_targets(2)), time.monotonic() + within_s
        micro = Sent(7, *what, evaluates, until, tries=tries)
        self.service._next.send(micro)
        return micro

    async def asked(self, within_s: float = 30.0) -> Asked:
        """What comes is a micro-batch."""
        letter = await self.letter(within_s)
        assert isinstance(letter, Asked)
        return letter

    async def answered(self) -> Answer:
        """What comes is an answer to the micro-batch that was sent."""
        letter = await self.letter()
        assert isinstance(letter, Answered)
        return letter.answer

    async def letter(self, within_s: float = 30.0) -> Letter:
        async with asyncio.timeout(within_s * PATIENCE):
            while True:
                try:
                    return self.service.letters.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(0.005)


def answer(asked: Asked) -> None:
    asked.answer.set_result(Answer(1.0, torch.zeros(asked.activations.shape)))


@asynccontextmanager
async def measuring(says: Mapping[Node, float]) -> AsyncIterator[None]:
    """Meanwhile each of these nodes says this of all held-out data."""

    async def measure(node: Node, loss: float) -> None:
        while True:
            asked = await node.asked(60)
            assert asked.evaluates
            asked.answer.set_result(Answer(loss, None))

    tasks = [asyncio.create_task(measure(node, loss)) for node, loss in says.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def a_machine_that_stands_still_is_no_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_stage, "LEAST_PATIENCE_S", 60.0)


class Trio:
    """A first stage, and two nodes of the second one."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.first, self.one, self.two = (
            Node(network, name, stage) for name, stage in (("first", 0), ("one", 1), ("two", 1))
        )

    async def start(self, *candidates: str) -> None:
        for node in (self.first, self.one, self.two):
            await node.transport.start()
        self.first.service.candidates(candidates or ("one", "two"))

    async def close(self) -> None:
        for node in (self.first, self.one, self.two):
            await node.service.close()
            await node.transport.close()


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    there = Trio(MemoryNetwork(random.Random(1)))
    yield there
    await there.close()


async def test_a_micro_batch_goes_there_and_its_gradient_comes_back(trio: Trio) -> None:
    await trio.start("one")
    sent = trio.first.sends()
    asked = await trio.one.asked()
    assert asked.answer.set_running_or_notify_cancel()
    assert torch.equal(asked.activations, sent.activations) and torch.equal(asked.targets, sent.targets)
    asked.answer.set_result(Answer(3.5, torch.full(sent.activations.shape, 0.25), learned=True))
    came = await trio.first.letter()
    assert isinstance(came, Answered) and came.ticket == 7 and came.answer.loss == 3.5
    assert came.answer.gradient is not None and bool((came.answer.gradient == 0.25).all())
    assert trio.one.service.totals.answered == 1 and not trio.first.blamed
    assert trio.one.transport.given_back == ["first"], "what was learned from does not count as a call"


async def test_of_held_out_data_only_the_loss_comes_back_and_the_route_is_the_same(trio: Trio) -> None:
    await trio.start()
    went = set()
    for _ in range(6):
        trio.first.sends(evaluates=True, tries=True)
        done, _ = await asyncio.wait(
            [asyncio.create_task(node.asked()) for node in (trio.one, trio.two)], return_when=asyncio.FIRST_COMPLETED
        )
        asked = done.pop().result()
        assert asked.evaluates and asked.tries
        went.add("one" if trio.one.service._held.callers else "two")
        asked.answer.set_result(Answer(2.0, None))
        assert await trio.first.answered() == Answer(2.0, None)
    assert len(went) == 1


async def test_of_two_peers_each_gets_what_it_is_to_measure_with_and_the_same_one_counts(trio: Trio) -> None:
    await trio.start()
    says, losses = {trio.one: 2.0, trio.two: 3.0}, set()
    async with measuring(says):
        for sent in range(1, 4):
            trio.first.sends(evaluates=True)
            losses.add((await trio.first.answered()).loss)
            await until(lambda sent=sent: all(node.service.totals.answered == sent for node in says))  # type: ignore[misc]
    assert len(losses) == 1


async def test_a_peer_that_dies_does_not_lose_the_micro_batch(trio: Trio) -> None:
    await trio.start()
    trio.first.sends()
    waiting = {node: asyncio.create_task(node.asked()) for node in (trio.one, trio.two)}
    done, _ = await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    dying = next(node for node, task in waiting.items() if task in done)
    other = trio.two if dying is trio.one else trio.one
    trio.network.vanish(dying.name)
    answer(await waiting[other])
    assert isinstance(await trio.first.letter(), Answered)
    assert trio.first.service.totals.retried == 1 and trio.first.service.totals.lost == 0


async def test_a_silent_peer_costs_a_while_where_there_is_another(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_stage, "LEAST_PATIENCE_S", 0.2)
    trio.first.service._next._took_s.append(0.01)
    trio.first.service._next._took_s.append(0.01)
    await trio.start()
    trio.first.sends()
    both = [await node.asked() for node in (trio.one, trio.two)]  # the first one never answers
    for asked in both:
        if not asked.answer.cancelled():
            answer(asked)
    assert isinstance(await trio.first.letter(), Answered)


async def test_without_an_answer_it_is_lost_at_its_deadline(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock(monkeypatch)
    await trio.start("one")
    micro = trio.first.sends(within_s=100.0)
    asked = await trio.one.asked()
    clock.moves(90.0)
    with pytest.raises(TimeoutError):
        await trio.first.letter(0.1)
    clock.moves(10.0)
    assert await trio.first.letter() == Lost(7)
    assert time.monotonic() >= micro.until
    await until(asked.answer.cancelled)
    await until(lambda: asked.activations.numel() == asked.targets.numel() == 0)
    assert trio.one.service._held.free == held_module.MOST_HELD, "nothing of it is kept"


async def test_micro_batches_that_nobody_answers_in_time_are_said_while_this_node_may_ask(trio: Trio) -> None:
    """As where many stages on slow links share 20 s: each gets 0.9 of what is left to the one before it."""
    await trio.start("one")
    seen = [SimpleNamespace(stage=2, state="training")]
    says: Any = lambda: trio.first.service.health(cast("Any", seen), "training")  # noqa: E731
    for _ in range(LEAST_JUDGED):
        trio.first.sends(within_s=0.05)
    for _ in range(LEAST_JUDGED):
        assert isinstance(await trio.first.letter(), Lost)
    (finding,) = says()
    assert f"{LEAST_JUDGED} of its last {LEAST_JUDGED} micro-batches got no answer in time" in finding.text
    trio.first.service._next._may_send = lambda: False
    trio.first.sends(within_s=0.01)
    assert isinstance(await trio.first.letter(), Lost)
    assert says() == (finding,), "what its own limits keep back is not late"
    trio.first.service._next._may_send = lambda: True
    answering = asyncio.create_task(answers(trio.one))
    for _ in range(LEAST_JUDGED):
        trio.first.sends()
        assert isinstance(await trio.first.letter(), Answered)
    answering.cancel()
    assert says() == ()


async def answers(node: Node) -> None:
    while True:
        asked = await node.letter(60)
        if isinstance(asked, Asked) and asked.answer.set_running_or_notify_cancel():
            answer(asked)


async def test_what_finds_no_memory_to_be_coded_is_lost(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's, which the training thread and others use meanwhile."""
    fails, encode = {"first", "one"}, CastActivations.encode

    def short(codec: CastActivations, values: torch.Tensor) -> bytes:
        who = "first" if bool((values == 1).all()) else "one"
        if who in fails:
            fails.remove(who)
            raise torch.OutOfMemoryError
        return encode(codec, values)

    monkeypatch.setattr(CastActivations, "encode", short)
    await trio.start("one")
    trio.first.sends()
    assert isinstance(await trio.first.letter(), Lost) and not fails ^ {"one"}
    trio.first.sends()
    for _ in range(2):
        answer(await trio.one.asked())
    assert isinstance(await trio.first.letter(), Answered), "another peer, or the same one again, is asked"
    assert not fails and not trio.first.blamed


async def test_with_nobody_there_it_is_lost(trio: Trio) -> None:
    await trio.start("nobody")
    trio.first.sends(within_s=0.3)
    assert await trio.first.letter() == Lost(7)


async def test_more_than_its_share_is_refused(trio: Trio) -> None:
    await trio.start("one")
    for _ in range(held_module.MOST_OF_CALLER + 3):
        trio.first.sends()
    held = [await trio.one.letter() for _ in range(held_module.MOST_OF_CALLER)]
    with pytest.raises(TimeoutError):
        await trio.one.letter(0.2)
    assert len(held) == held_module.MOST_OF_CALLER and not trio.one.blamed
    assert trio.one.service.totals.refused


# ---- a hostile peer --------------------------------------------------------------------------------------------------
class Liar(StageServicer):
    """Answers with what it is given."""

    def __init__(self, frames: Callable[[], list[Any]]) -> None:
        self.frames = frames

    async def Pass(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for _ in request_iterator:
            pass
        for frame in self.frames():
            yield frame if not isinstance(frame, wire.Frame) else wire.encode(frame)


def parts(data: bytes) -> list[wire.Frame]:
    return [wire.Passed(1.0, 1), wire.Part(data)]


SIZE = 4 * 2 * PART.activations[0] * PART.activations[1]
NAN = torch.full((SIZE // 4,), float("nan")).numpy().tobytes()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (parts(NAN), "nonfinite"),
        (parts(bytes(SIZE + 4)), "bad_part"),
        (parts(bytes(SIZE - 4)), "bad_part"),
        ([wire.Passed(1.0, 1), wire.Part(b"")], "bad_part"),
        ([wire.Passed(float("nan"), 1)], "bad_loss"),
        ([wire.Passed(1e300, 1)], "bad_loss"),
        ([wire.Part(b"early")], "unexpected_frame"),
    ],
)
async def test_a_lie_for_an_answer_is_counted_and_another_peer_asked(
    trio: Trio, frames: list[wire.Frame], reason: str
) -> None:
    liar = trio.network.join("liar")
    liar.serve(lambda server: add_StageServicer_to_server(Liar(lambda: frames), server))
    await liar.start()
    await trio.start("liar")
    trio.first.sends()
    await until(lambda: bool(trio.first.blamed))
    assert set(trio.first.blamed) == {("liar", reason)}
    trio.first.service.candidates(["liar", "one"])
    answer(await trio.one.asked())
    assert isinstance(await trio.first.letter(), Answered)
    await liar.close()


async def test_who_answers_no_more_calls_for_now_is_busy_and_not_away(trio: Trio) -> None:
    calls = 0

    class Limited(StageServicer):
        async def Pass(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            nonlocal calls
            calls += 1
            if calls <= 6:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
            async for frame in trio.one.service.Pass(request_iterator, context):
                yield frame

    limited = trio.network.join("limited")
    limited.serve(lambda server: add_StageServicer_to_server(Limited(), server))
    await limited.start()
    await trio.start("limited")
    began = time.monotonic()
    trio.first.sends()
    asked = await trio.one.asked()
    assert time.monotonic() - began < 20 * PATIENCE, "who is left out for a second, two, four ... is back after 63 s"
    answer(asked)
    assert isinstance(await trio.first.letter(), Answered)
    assert trio.one.transport.given_back == [], "it was answered, and nothing was learned from it"
    await limited.close()


HONEST = {"protocol": PROTOCOL, "run_id": RUN_ID, "stage": 1, "examples": 2, "deadline_s": 60.0, "evaluates": False}


def header(**changes: Any) -> wire.MicroBatch:
    return wire.MicroBatch(**{**HONEST, **changes})


GOOD = PART.some_targets(2).to(torch.int32).numpy().tobytes()


@pytest.mark.parametrize(
    ("frames", "blamed"),
    [
        ([header(run_id=bytes(32))], None),
        ([header(stage=0)], None),
        ([header(protocol=99)], None),
        ([header(examples=0)], "bad_examples"),
        ([header(examples=1 << 20)], "bad_examples"),
        ([header(examples=1 << 16)], "too_many_examples"),
        ([header(deadline_s=float("nan"))], "bad_deadline"),
        ([header(deadline_s=1e9)], "bad_deadline"),
        ([wire.Part(b"x")], "unexpected_frame"),
        ([header(), wire.Part(GOOD + bytes(SIZE + 1))], "bad_part"),
        ([header(), wire.Part(GOOD), wire.Part(bytes(SIZE))], "bad_part"),
        ([header(), wire.Part(GOOD + NAN)], "nonfinite"),
        ([header(), wire.Part(b"\xff" * len(GOOD) + bytes(SIZE))], "bad_targets"),
        ([header()], None),
        ([], None),
    ],
)
async def test_what_no_honest_peer_sends_is_refused(
    trio: Trio, frames: list[wire.Frame], blamed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageTask, "most_examples", 4)
    await trio.start()

    async def requests() -> AsyncIterator[Any]:
        for frame in frames:
            yield wire.encode(frame)

    async with asyncio.timeout(30 * PATIENCE):
        try:
            answers = [
                wire.decode(frame) async for frame in StageStub(trio.two.transport.channel("one")).Pass(requests())
            ]
        except PeerLost:
            answers = []
        except Exception as error:  # noqa: BLE001 (grpc's own, for a stream that ended)
            assert "AioRpcError" in type(error).__name__ or isinstance(error, asyncio.CancelledError)
            answers = []
    assert all(isinstance(answer, wire.Refusal) for answer in answers)
    assert trio.one.blamed == ([("two", blamed)] if blamed else [])
    assert trio.one.service._held.free == held_module.MOST_HELD
    assert trio.one.service.letters.empty()


async def test_who_only_announces_micro_batches_keeps_nobody_out(trio: Trio) -> None:
    await trio.start("one")
    liars = [trio.network.join(f"liar {k}") for k in range(3)]

    async def announces(liar: Any) -> None:
        async def requests() -> AsyncIterator[Any]:
            yield wire.encode(header(deadline_s=60.0))
            await asyncio.sleep(60)

        async for _ in StageStub(liar.channel("one")).Pass(requests()):
            pass

    for liar in liars:
        await liar.start()
    calls = [asyncio.create_task(announces(liar)) for liar in liars for _ in range(held_module.MOST_OF_CALLER)]
    held = trio.one.service._held
    await until(lambda: held.calls.total() == len(calls))
    trio.first.sends()
    asked = await trio.one.asked()
    assert asked.caller == "first" and held.callers == {"first": 1}
    assert held.bytes.total() == held.bytes["first"] > 0
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for liar in liars:
        await liar.close()
    answer(asked)
    assert isinstance(await trio.first.letter(), Answered)
    await until(lambda: not held.calls and not held.callers and not held.bytes)


async def test_an_answer_takes_memory_until_its_caller_has_read_it_and_no_place(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who reads none could have any number of them here."""
    await trio.start("one")
    service, reads = trio.one.service, asyncio.Event()
    monkeypatch.setattr(service._frames._pace, "sending", lambda _size: reads.wait())
    trio.first.sends()
    asked = await trio.one.asked()
    held = service._held
    assert held.bytes == {"first": SIZE + len(GOOD)}
    answer(asked)
    await until(lambda: service.totals.answered == 1)
    assert held.bytes == {"first": SIZE} and not held.calls and not held.callers
    reads.set()
    assert isinstance(await trio.first.letter(), Answered)
    await until(lambda: not held.bytes)


async def test_of_what_is_under_way_only_the_bytes_are_kept(trio: Trio) -> None:
    await trio.start("one")
    activations = weakref.ref(trio.first.sends().activations)
    assert isinstance(await trio.one.letter(), Asked)
    assert activations() is None, "they may be in the memory of a GPU"


async def test_whose_data_do_not_come_is_refused_for_a_while(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock(monkeypatch)
    await trio.start("one")
    service = trio.one.service

    async def requests() -> AsyncIterator[Any]:
        yield wire.encode(header(deadline_s=100.0))
        await asyncio.Event().wait()

    async def answers(caller: Node, *, waits: bool) -> list[wire.Frame]:
        call = StageStub(caller.transport.channel("one")).Pass(requests(), timeout=100)
        if waits:
            await until(lambda: bool(service._held.calls))
            clock.moves(service_module.FIRST_S + 1)
        return [wire.decode(frame) async for frame in call]

    busy = [wire.Refusal(wire.Code.BUSY)]
    assert await answers(trio.two, waits=True) == busy and service.totals.refused == 0
    assert await answers(trio.two, waits=False) == busy and service.totals.refused == 1, "before its data"
    assert not trio.one.blamed, "its link may be broken"
    await answers(trio.first, waits=True)
    assert service.totals.refused == 1, "only that caller is"
    service._late["two"] = time.monotonic()
    await answers(trio.two, waits=True)
    assert service.totals.refused == 1, "and only for a while"


class Middle:
    """A node of the middle stage with a next one; `first` is its caller, the test its training thread."""

    def __init__(self, trio: Trio) -> None:
        self.trio, self.node, self.last = trio, trio.one, Node(trio.network, "last", 2)
        self.held = self.node.service._held
        for stage, node in ((1, self.node), (2, self.last)):
            cast("StageTask", node.service._task).at = Position(stage, 3)

    async def start(self) -> None:
        await self.last.transport.start()
        await self.trio.start("one")
        self.node.service.candidates(["last"])

    async def called(self) -> tuple[Asked, asyncio.Task[Any]]:
        """A micro-batch whose work has begun; to cancel the task is to hang up."""

        async def requests() -> AsyncIterator[Any]:
            yield wire.encode(header(deadline_s=60.0))
            yield wire.encode(wire.Part(GOOD + bytes(SIZE)))

        async def reads() -> None:
            async for _ in StageStub(self.trio.first.transport.channel("one")).Pass(requests()):
                pass

        call = asyncio.create_task(reads())
        asked = await self.node.asked()
        assert asked.answer.set_running_or_notify_cancel()
        return asked, call

    def passes_on(self, asked: Asked, *, evaluates: bool = False) -> None:
        until = time.monotonic() + 60
        self.node.service._next.send(Sent(7, asked.activations, asked.targets, evaluates, until, asked))


@pytest.fixture
async def middle(trio: Trio) -> AsyncIterator[Middle]:
    there = Middle(trio)
    await there.start()
    yield there
    await there.last.service.close()
    await there.last.transport.close()


@pytest.mark.parametrize("evaluates", [False, True])
async def test_what_a_caller_gave_up_keeps_its_place_until_its_call_to_the_next_stage_is_over(
    middle: Middle, evaluates: bool
) -> None:
    held, last = middle.held, middle.last.service._held
    asked, call = await middle.called()
    middle.passes_on(asked, evaluates=evaluates)
    there = await middle.last.asked()
    assert last.callers == {"one": 1}
    call.cancel()
    await until(there.answer.cancelled)
    assert await middle.node.letter() == Lost(7), "the training thread forgets it"
    assert held.callers == held.calls == {"first": 1} and held.bytes["first"], "until then it is here"
    asked.answer.set_exception(LostMicroBatch(""))
    await until(lambda: not held.callers and not held.calls and not held.bytes)
    await until(lambda: not last.callers)
    service = middle.node.service
    assert (
        not service._next._given_up
        and not service._next._carrying
        and service._next._routes._peers["last"].under_way == 0
    )


async def test_what_a_caller_gave_up_before_it_was_passed_on_is_not_passed_on(middle: Middle) -> None:
    asked, call = await middle.called()
    call.cancel()
    await until(lambda: asked in middle.node.service._next._given_up)
    middle.passes_on(asked)
    assert await middle.node.letter() == Lost(7)
    assert not middle.last.service._held.calls and middle.held.callers == {"first": 1}
    asked.answer.set_exception(LostMicroBatch(""))
    await until(lambda: not middle.held.callers)


async def test_a_stage_in_the_middle_takes_nothing_that_it_cannot_pass_on(middle: Middle) -> None:
    """So its caller asks another one at once."""
    middle.node.service.candidates([])
    middle.trio.first.sends()
    await until(lambda: middle.node.service.totals.refused > 0)
    assert middle.node.service.letters.empty() and not middle.node.service.totals.received_bytes
    middle.node.service.candidates(["last"])
    assert isinstance(await middle.node.letter(), Asked)


async def test_hanging_up_brings_no_more_micro_batches_into_a_node(middle: Middle) -> None:
    begun = []
    for _ in range(held_module.MOST_OF_CALLER):
        asked, call = await middle.called()
        call.cancel()
        begun.append(asked)
    refused = middle.node.service.totals.refused
    middle.trio.first.sends()
    await until(lambda: middle.node.service.totals.refused > refused)
    assert middle.node.service.letters.empty()
    for asked in begun:
        asked.answer.set_exception(LostMicroBatch(""))
    assert isinstance(await middle.node.letter(), Asked), "there is a place again"


class Quartet(Trio):
    """A first stage, and three nodes of the second one."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.three = Node(network, "three", 1)

    async def start(self, *candidates: str) -> None:
        await self.three.transport.start()
        await super().start("one", "two", "three")

    async def close(self) -> None:
        await self.three.service.close()
        await self.three.transport.close()
        await super().close()


@pytest.fixture
async def quartet() -> AsyncIterator[Quartet]:
    there = Quartet(MemoryNetwork(random.Random(1)))
    yield there
    await there.close()


async def test_who_sends_other_gradients_than_its_stage_is_left_out(
    quartet: Quartet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three turns the sign of its gradients."""
    monkeypatch.setattr(next_stage, "COMPARED", 1.0)
    await quartet.start()
    stop = threading.Event()

    def work(node: Node, sign: float) -> None:
        while not stop.is_set():
            try:
                asked = node.service.letters.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(asked, Asked) and asked.answer.set_running_or_notify_cancel():
                asked.answer.set_result(Answer(1.0, sign * (1 + asked.activations)))

    signs = {quartet.one: 1.0, quartet.two: 1.0, quartet.three: -1.0}
    threads = [threading.Thread(target=work, args=pair) for pair in signs.items()]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            quartet.first.sends()
            await quartet.first.letter()
            if quartet.first.blamed:
                break
        assert quartet.first.blamed == [("three", "wrong_gradient")]
        went = []
        for _ in range(10):
            quartet.first.sends()
            went.append(float((await quartet.first.answered()).gradient.mean()))
        assert min(went) > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("lie", [0.5, 1.95, 2.5, 1e9])
async def test_a_held_out_loss_is_the_middle_of_three_whatever_one_says(quartet: Quartet, lie: float) -> None:
    await quartet.start()
    async with measuring({quartet.one: 2.0, quartet.two: 2.06, quartet.three: lie}):
        for _ in range(4):
            quartet.first.sends(evaluates=True)
            assert 1.9 <= (await quartet.first.answered()).loss <= 2.1
    wrong = [("three", "wrong_gradient")] if abs(lie - 2) > 1 else []
    assert quartet.first.blamed == wrong, "and who lies by far is not asked any more"


async def test_who_lies_is_not_believed_while_another_one_is_busy(quartet: Quartet) -> None:
    await quartet.start()
    async with measuring({quartet.one: 2.0, quartet.two: 2.06, quartet.three: 1e9}):
        quartet.first.service._next._routes.full("one", asyncio.get_running_loop().time())
        quartet.first.sends(evaluates=True)
        assert 1.9 <= (await quartet.first.answered()).loss <= 2.1


@pytest.mark.parametrize("refuses", [False, True])
async def test_one_that_is_silent_or_refuses_does_not_stop_an_evaluation(
    quartet: Quartet, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    await quartet.start()
    monkeypatch.setattr(quartet.first.service._next, "_patience_s", lambda peer, now: 0.2 if peer == "three" else 60.0)
    quartet.three.service._works = lambda: not refuses
    async with measuring({quartet.one: 2.0, quartet.two: 2.06}):
        quartet.first.sends(within_s=10.0, evaluates=True)
        assert (await quartet.first.answered()).loss == pytest.approx(2.03)
