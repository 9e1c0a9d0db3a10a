"""Micro-batches between peers of neighbouring stages, over gRPC: calls to the next stage, answers to the one before.

It carries what stages/passes.py sends and asks for, and knows neither weights nor gradients: tensors are coded
(core/codecs/activations.py) on threads of their own, and what crosses to the training thread is a letter.

- What a peer sends is checked before it takes memory: the run says how many bytes so many examples are.
- A micro-batch that a peer does not answer goes to another one of that stage, until its deadline; then it is lost.
- Who finds no room here (stages/held.py) is refused as busy, and asks another peer.
- What a caller gives up is not carried on to the next stage, and keeps its place until it has ended here.
"""

import asyncio
import logging
import math
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any, Protocol

import grpc
import numpy as np
import torch

from noloco_node.base.latest import remember
from noloco_node.core.codecs.activations import ActivationCodec, activation_codec
from noloco_node.errors import NonFinite, PeerFault, PeerLost, PeerMisbehaved, PeerRefused
from noloco_node.host.traffic import Traffic
from noloco_node.peers.record import PeerRecord
from noloco_node.run.admission import Refuses, refuses_nobody
from noloco_node.run.schema import Manifest
from noloco_node.stages import shown
from noloco_node.stages.agreement import Agreement, Likeness, believed, lying
from noloco_node.stages.held import Held
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Lost, LostMicroBatch, Sent
from noloco_node.stages.part import Position, part_of
from noloco_node.stages.passes import DEADLINE_S, StageTask
from noloco_node.stages.routes import Routes
from noloco_node.stages.shown import LinkTotals, MicroBatchRate
from noloco_node.training.task import Task
from noloco_node.transport.base import HUNG_UP, TOO_MANY, peer_faults, taken
from noloco_node.version import PROTOCOL
from noloco_node.views.status import Health, StageView
from noloco_node.wire import stage_messages as wire
from noloco_node.wire import stage_pb2 as pb
from noloco_node.wire.stage_pb2_grpc import StageServicer, StageStub

FIRST_S, LEAST_BYTES_S = 10.0, 32_000
"""How long a caller's first frame may take, and its data beyond that: the least rate that a volunteer may set."""
LATE_S, MOST_LATE = 30.0, 256
"""Whose data did not come in that time is refused for so long, and how many such callers are remembered. It is no proof
of a lie: its link may be broken."""
LEAST_PATIENCE_S, PATIENCE = 3.0, 4
"""An answer that takes longer than this, and so many times the usual, is not waited for where another peer may give
one."""
REMEMBERED = 32
"""Answers from which the usual time is known."""
COMPARED, LEAST_COMPARED = 1 / 16, 3
"""Share of the micro-batches that a second peer is asked for, and of how many peers: of two that differ it cannot be
told which one is wrong. Each costs the next stage the work of one more."""
NEARLY = 0.1
"""Of two held-out losses that are so close the mean counts where no third one comes."""
REFUSED_SHARE = 1 / 4
"""Of its time: for so long a peer that refuses held-out data is asked again. Then the others' word has to do, with time
left for the rest of the evaluation."""
LOOK_S = 0.2
"""How often a peer is looked for, where none has a place."""
CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageTerms:
    run_id: bytes
    activations: str
    """The codec's name."""
    admission: bytes = b""
    """This node's token."""


class Channels(Protocol):
    """The part of a transport that is used."""

    @property
    def peer_id(self) -> str: ...
    def channel(self, peer: str) -> grpc.aio.Channel: ...
    def caller(self, context: Any) -> str: ...
    def give_back(self, context: Any) -> None: ...


class StageService(StageServicer):
    def __init__(
        self,
        channels: Channels,
        random: Random,
        misbehaved: Callable[[str, str], None],
        pace: Traffic | None = None,
    ) -> None:
        """`misbehaved`: called with a peer and what it did that no honest one does."""
        self._channels, self._misbehaved, self._pace = channels, misbehaved, pace or Traffic()
        self.letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self.totals = LinkTotals()
        self._routes = Routes(random)
        self._rate = MicroBatchRate()
        self._rank = 0
        self._held = Held()
        self._random, self._agreement = random, Agreement()
        self._next_stage: Collection[str] = ()
        self._terms: StageTerms | None = None
        self._task: StageTask | None = None
        self._codec: ActivationCodec = activation_codec("fp32")
        self._refuses: Refuses = refuses_nobody
        self._works: Callable[[], bool] = lambda: True
        self._may_send: Callable[[], bool] = lambda: True
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._given_up: set[Asked] = set()
        """Begun on the training thread; nobody waits for them any more."""
        self._carrying: dict[Asked, asyncio.Task[Any] | None] = {}
        """Of the stage before: who carries each to the next one."""
        self._late: dict[str, float] = {}
        """Callers that are refused, and until when."""
        self._were_late: deque[bool] = deque(maxlen=shown.JUDGED)
        """Of the last micro-batches that this node sent on: whether no answer came in time, though it might ask."""
        self._took_s: deque[float] = deque([LEAST_PATIENCE_S / PATIENCE], maxlen=REMEMBERED)

    # ---- for node/trainer.py ----
    def part(self, run: Manifest, at: Position, in_flight: int | None = None) -> Callable[[Task], Task]:
        """What this node trains of the run's task; to be called on the training thread."""
        self._loop = asyncio.get_running_loop()

        def cut(whole: Task) -> Task:
            self._task = StageTask(part_of(whole, run, at), whole, at, self, self.letters, in_flight)
            return self._task

        return cut

    def begin(
        self,
        terms: StageTerms,
        refuses: Refuses = refuses_nobody,
        works: Callable[[], bool] = lambda: True,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        """Once the model is ready. `works`: whether this node computes for others now; `may_send`: whether it may call
        others."""
        self._codec = activation_codec(terms.activations)
        self._terms, self._refuses, self._works, self._may_send = terms, refuses, works, may_send

    def heard(self) -> dict[str, float]:
        """For how many seconds each of the stage before has sent nothing, of those that this one learns from."""
        if self._task is None:
            return {}
        counts, now = self._task.counts, time.monotonic()
        return {peer: now - at for peer, at in counts.heard.items() if peer not in counts.not_believed}

    @property
    def idle_s(self) -> float:
        """For how long this node has worked and no micro-batch has passed."""
        return self._rate.idle_s

    @property
    def has_passed(self) -> bool:
        """Whether a micro-batch has, since this node came."""
        return self._task is not None and self._task.counts.passed > 0

    def candidates(self, next_stage: Collection[str], own_stage: Collection[str] = ()) -> None:
        """Who works at the next stage now, and who beside this node at its own."""
        self._next_stage = next_stage
        self._choose_candidates()
        self._rank = sum(peer < self._channels.peer_id for peer in own_stage)

    def _choose_candidates(self) -> None:
        """Of those who are there, whom to ask."""
        wrong = self._agreement.left_out(time.monotonic())
        self._routes.candidates([peer for peer in self._next_stage if peer not in wrong])

    def note(self, now: float) -> None:
        """Once a second, for the rate that `view` shows."""
        if self._task:
            self._rate.note(now, self._task.counts.passed, works=self._works())

    def view(self, seen: Collection[PeerRecord], state: str) -> StageView | None:
        if self._task is None:
            return None
        task, queued = self._task, self._held.callers.total()
        left_out = self._agreement.left_out(time.monotonic())
        return shown.view(
            task.at, seen, state, task.counts, task.window.size, self.totals, queued, self._rate.per_s, left_out
        )

    def health(self, seen: Collection[PeerRecord], state: str) -> tuple[Health, ...]:
        return shown.health(self._task.at, seen, state, self._were_late) if self._task else ()

    async def close(self) -> None:
        self._closed, self._terms = True, None
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # ---- to the next stage ----
    def ready(self) -> bool:
        """From any thread."""
        return self._terms is not None and self._routes.count > 0 and self._may_send()

    def send(self, micro: Sent) -> None:
        """From the training thread."""
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._begin, micro)
                return
        except RuntimeError:  # the loop is closed: the node has left
            pass
        self.letters.put(Lost(micro.ticket))

    def _begin(self, micro: Sent) -> None:
        if self._closed:
            self.letters.put(Lost(micro.ticket))
            return
        self._own(self._carry(micro))

    def _own(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[Any]":
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _carry(self, micro: Sent) -> None:
        answer: Answer | None = None
        late = False
        try:
            if micro.asked:
                self._carrying[micro.asked] = asyncio.current_task()
            if micro.asked in self._given_up:
                return
            payload = await asyncio.to_thread(self._coded, micro)
            micro = replace(micro, activations=micro.activations.new_empty(0))  # only the payload is needed now
            async with asyncio.timeout(max(0.0, micro.until - time.monotonic())):
                answer = await (self._measured(micro, payload) if micro.evaluates else self._learned(micro, payload))
        except TimeoutError:
            late = True
            log.debug("a micro-batch is lost: nobody answered in time")
        except NonFinite as error:
            log.debug("a micro-batch is lost: %s", error)
        finally:
            if micro.asked:
                del self._carrying[micro.asked]
            self.totals.lost += answer is None
            self.letters.put(Answered(micro.ticket, answer) if answer else Lost(micro.ticket))
        if not micro.evaluates and self.ready():
            self._were_late.append(late)

    def _coded(self, micro: Sent) -> bytes:
        return micro.targets.cpu().numpy().astype("<i4").tobytes() + self._codec.encode(micro.activations)

    async def _try_peers(self, micro: Sent, payload: bytes, but: Collection[str] = ()) -> tuple[str, Answer]:
        tried = {*but}
        while True:
            peer = self._chosen(micro, tried)
            if peer is None:
                tried = {*but}
                await asyncio.sleep(LOOK_S)
                continue
            with suppress(PeerFault, TimeoutError):
                return peer, await self._try_peer(peer, micro, payload)
            self.totals.retried += 1
            tried.add(peer)

    async def _try_peer(self, peer: str, micro: Sent, payload: bytes) -> Answer:
        """Raises PeerFault, TimeoutError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._routes.sent(peer)
        try:
            async with asyncio.timeout(self._patience_s(peer, began)):
                passed, answer = await self._ask(peer, micro, payload)
        except PeerRefused:
            self._routes.full(peer, loop.time())
            raise
        except asyncio.CancelledError:
            self._routes.given_up(peer)
            raise
        except (PeerFault, TimeoutError) as fault:
            self._routes.ended(peer, None, loop.time())
            self._blame(peer, fault)
            raise
        self._routes.ended(peer, passed.free, loop.time())
        if not micro.evaluates:
            self._took_s.append(loop.time() - began)
        return answer

    # ---- whom to believe ----
    async def _learned(self, micro: Sent, payload: bytes) -> Answer | None:
        """The answer of a peer; of one that is not proven yet, once another peer has answered the same."""
        peer, answer = await self._try_peers(micro, payload)
        if self._routes.count < LEAST_COMPARED:
            return answer
        if not self._agreement.is_proven(peer):
            return await self._compared(peer, answer, micro, payload, (micro.until - time.monotonic()) / 2)
        if self._random.random() < COMPARED:
            again = replace(micro, until=time.monotonic() + DEADLINE_S, asked=None)
            self._own(self._compared(peer, answer, again, payload, DEADLINE_S))
        return answer

    async def _compared(self, peer: str, answer: Answer, micro: Sent, payload: bytes, within_s: float) -> Answer | None:
        """What two peers answer alike. None: those who answered are not alike."""
        found = {peer: answer}
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                while len(found) < LEAST_COMPARED:
                    other, second = await self._try_peers(micro, payload, found)
                    self.totals.compared += 1
                    pairs = {each: await asyncio.to_thread(_likeness, one, second) for each, one in found.items()}
                    same = [each for each, likeness in pairs.items() if self._agreement.are_alike(likeness)]
                    found[other] = second
                    if same:
                        return found[self._settled(found, other, same)]
        return answer if len(found) == 1 else None

    def _settled(self, found: Collection[str], last: str, same: list[str]) -> str:
        """`same`: with whom the last one agrees. Returns whom to believe."""
        self._agreement.alike(last, *same)
        if len(same) == 1:
            for wrong in {*found} - {last, *same}:
                self._is_alone(wrong)
        return same[0]

    def _is_alone(self, peer: str) -> None:
        if self._agreement.alone(peer, time.monotonic()):
            log.warning("%s answers otherwise than its whole stage: it is not asked any more", peer)
            self._choose_candidates()
            self._misbehaved(peer, "wrong_gradient")

    async def _measured(self, micro: Sent, payload: bytes) -> Answer | None:
        """The loss of held-out data, by three peers that are the same each time; None: they do not say the same. Of
        fewer the first one's counts, but each gets what it is to measure with: who has it from one caller alone would
        have nothing when that one leaves."""
        peers = self._routes.fixed(self._rank, asyncio.get_running_loop().time(), LEAST_COMPARED)
        few = len(peers) < LEAST_COMPARED or not self._may_send()
        losses = dict[str, float]()
        asked = peers if not few else [] if micro.tries else peers[1:]
        calls = [self._own(self._measure(peer, micro, payload, losses)) for peer in asked]
        try:
            if few:
                return (await self._try_peers(micro, payload))[1]
            for each in asyncio.as_completed(calls):
                await each
                if (loss := believed(losses.values())) is not None:
                    for wrong in lying(losses, loss):
                        self._is_alone(wrong)
                    return Answer(loss, None)
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        loss = believed(losses.values(), NEARLY)
        return None if loss is None else Answer(loss, None)

    async def _measure(self, peer: str, micro: Sent, payload: bytes, losses: dict[str, float]) -> None:
        """Put what this peer says into `losses`, if it answers in time."""
        now = time.monotonic()
        until = now + REFUSED_SHARE * (micro.until - now)
        while time.monotonic() < until and self._may_send():
            try:
                losses[peer] = (await self._try_peer(peer, micro, payload)).loss
            except PeerRefused:
                await asyncio.sleep(LOOK_S)
            except (PeerFault, TimeoutError):
                return
            else:
                return

    def _chosen(self, micro: Sent, tried: Collection[str]) -> str | None:
        if self._terms is None or not self._may_send():
            return None
        now = asyncio.get_running_loop().time()
        if micro.evaluates:
            every = self._routes.fixed(self._rank, now, self._routes.count)
            return next((peer for peer in every if peer not in tried), None)
        return self._routes.draw(now, tried)

    def _patience_s(self, peer: str, now: float) -> float | None:
        """None: to the end, as there is nobody else."""
        if not self._routes.others(peer, now):
            return None
        return max(LEAST_PATIENCE_S, PATIENCE * median(self._took_s))

    async def _ask(self, peer: str, micro: Sent, payload: bytes) -> tuple[wire.Passed, Answer]:
        """Raises PeerFault."""
        terms, task = self._terms, self._task
        if terms is None or task is None:
            raise PeerLost("leaving")
        left_s = max(0.01, micro.until - time.monotonic())
        stage, examples = task.at.stage + 1, len(micro.targets)
        kind = (micro.evaluates, terms.admission, micro.tries)
        header = wire.MicroBatch(PROTOCOL, terms.run_id, stage, examples, left_s, *kind)
        shape = () if micro.evaluates else (len(micro.targets), *task.part.activations)
        size = self._codec.encoded_bytes(shape) if shape else 0
        with _faults():
            call = StageStub(self._channels.channel(peer)).Pass(self._frames(header, payload), timeout=left_s)
            try:
                replies = aiter(call)
                match await _next(replies):
                    case wire.Passed() as passed:
                        data = await self._received(replies, size)
                    case wire.Refusal(code, retry_in_s):
                        raise PeerRefused(code.reason, retry_in_s)
                    case other:
                        raise PeerMisbehaved("unexpected_frame", type(other).__name__)
            finally:
                call.cancel()
        gradient = await asyncio.to_thread(self._codec.decode, data, shape, CPU) if shape else None
        return passed, Answer(passed.loss, gradient)

    async def _frames(self, header: wire.MicroBatch | wire.Passed, payload: bytes) -> AsyncIterator[pb.StageFrame]:
        yield wire.encode(header)
        for start in range(0, len(payload), wire.MAX_PART_BYTES):
            part = payload[start : start + wire.MAX_PART_BYTES]
            self.totals.sent_bytes += len(part)
            await self._pace.sending(len(part))
            yield wire.encode(wire.Part(part))

    async def _received(
        self, frames: AsyncIterator[pb.StageFrame], size: int, take: Callable[[int], None] = lambda size: None
    ) -> bytes:
        """So many bytes; `take` is told of each part. Each but the last one is full, as any message costs this
        process up to 0.1 ms, also one of a byte. Raises PeerMisbehaved."""
        data = bytearray()
        while len(data) < size:
            await self._pace.receiving()
            frame = await _next(frames)
            if not isinstance(frame, wire.Part) or len(frame.data) != min(wire.MAX_PART_BYTES, size - len(data)):
                raise PeerMisbehaved("bad_part", type(frame).__name__)
            take(len(frame.data))
            data += frame.data
            self.totals.received_bytes += len(frame.data)
            self._pace.received(len(frame.data))
        return bytes(data)

    def _blame(self, peer: str, fault: BaseException) -> None:
        log.debug("%s: %s", peer, fault)
        if isinstance(fault, PeerMisbehaved):
            self._misbehaved(peer, fault.reason)

    # ---- for the stage before ----
    async def Pass(  # noqa: N802 (the name is the service's)
        self, request_iterator: AsyncIterator[pb.StageFrame], context: Any
    ) -> AsyncIterator[pb.StageFrame]:
        peer = self._channels.caller(context)
        try:
            answer, payload, memory = await self._answer(peer, aiter(request_iterator))
        except PeerRefused as no:
            self.totals.refused += 1
            with taken():
                yield wire.encode(wire.Refusal(wire.Code[no.reason.upper()], no.retry_in_s))
        except (PeerFault, LostMicroBatch, TimeoutError) as fault:
            self._blame(peer, fault)
            with taken():
                yield wire.encode(wire.Refusal(wire.Code.BUSY))
        else:
            self.totals.answered += 1
            with memory, taken():  # all of it: the caller's own deadline is sooner
                if answer.learned:
                    self._channels.give_back(context)
                async for frame in self._frames(wire.Passed(answer.loss, self._held.free), payload):
                    yield frame

    async def _answer(self, peer: str, frames: AsyncIterator[pb.StageFrame]) -> tuple[Answer, bytes, ExitStack]:
        """The answer without its gradient, that as bytes, and what is to be closed once their memory is free."""
        async with asyncio.timeout(FIRST_S):
            asked = await _next(frames)
        if not isinstance(asked, wire.MicroBatch):
            raise PeerMisbehaved("unexpected_frame", type(asked).__name__)
        task = self._agreed(peer, asked)
        shape, targets = (asked.examples, *task.part.activations), 4 * asked.examples * math.prod(task.part.targets)
        size = targets + self._codec.encoded_bytes(shape)
        if peer in task.counts.not_believed and self._held.callers.total() > 0:
            raise PeerRefused(wire.Code.BUSY.reason)
        now = time.monotonic()
        if self._late.get(peer, now) > now:
            raise PeerRefused(wire.Code.BUSY.reason)
        until = now + asked.deadline_s
        with ExitStack() as place:
            call = place.enter_context(self._held.call(peer))
            async with asyncio.timeout(asked.deadline_s):
                try:
                    async with asyncio.timeout(FIRST_S + size / LEAST_BYTES_S):
                        data = await self._received(frames, size, call.take)
                except TimeoutError:
                    remember(self._late, peer, time.monotonic() + LATE_S, MOST_LATE)
                    raise
                call.arrive()
                letter = await asyncio.to_thread(self._letter, task, asked, data, targets, until, peer)
                del data  # it may wait for long
                answer = await self._computed(letter, place)
            try:
                gradient = answer.gradient
                payload = b"" if gradient is None else await asyncio.to_thread(self._codec.encode, gradient)
            except NonFinite as error:
                raise LostMicroBatch(str(error)) from None
            call.leave(len(payload))
            return replace(answer, gradient=None), payload, place.pop_all()

    async def _computed(self, letter: Asked, place: ExitStack) -> Answer:
        self.letters.put(letter)
        try:
            return await asyncio.wrap_future(letter.answer)
        finally:
            if letter.answer.cancel():  # the training thread has not begun it, and may be long in coming to it
                for tensor in (letter.activations, letter.targets):
                    tensor.data = tensor.new_empty(0)
            elif not letter.answer.done() and not self._closed:
                self._own(self._give_up(letter, place.pop_all()))

    async def _give_up(self, letter: Asked, place: ExitStack) -> None:
        """The training thread is at it, or has sent it on: it keeps its place until that has ended, else who hangs up
        each time could have any number of them here."""
        with place, suppress(LostMicroBatch):
            self._given_up.add(letter)
            try:
                if carrying := self._carrying.get(letter):
                    carrying.cancel()  # the training thread gets its Lost, and forgets it
                await asyncio.wrap_future(letter.answer)
            finally:
                self._given_up.discard(letter)

    def _agreed(self, peer: str, asked: wire.MicroBatch) -> StageTask:
        """Raises PeerFault."""
        terms, task = self._terms, self._task
        if terms is None or task is None:
            raise PeerRefused(wire.Code.BUSY.reason)
        if asked.protocol != PROTOCOL or asked.run_id != terms.run_id or asked.stage != task.at.stage or task.at.first:
            raise PeerRefused(wire.Code.INCOMPATIBLE.reason)
        if why := self._refuses(peer, asked.admission):
            raise PeerRefused(why)
        if not self._works():
            raise PeerRefused(wire.Code.PAUSED.reason)
        if not task.at.last and not self.ready():
            raise PeerRefused(wire.Code.BUSY.reason)
        if task.most_examples is not None and asked.examples > task.most_examples:
            raise PeerMisbehaved("too_many_examples")
        return task

    def _letter(  # noqa: PLR0913, PLR0917
        self, task: StageTask, asked: wire.MicroBatch, data: bytes, targets: int, until: float, caller: str
    ) -> Asked:
        """Raises PeerMisbehaved."""
        numbers = torch.from_numpy(np.frombuffer(data, "<i4", targets // 4).astype(np.int64))
        if not bool(((numbers >= 0) & (numbers < task.part.target_limit)).all()):
            raise PeerMisbehaved("bad_targets")
        shape = (asked.examples, *task.part.activations)
        activations = self._codec.decode(data[targets:], shape, CPU)
        answer: Future[Answer] = Future()
        shaped = numbers.view(asked.examples, *task.part.targets)
        return Asked(activations, shaped, asked.evaluates, until, answer, caller, asked.tries)


@contextmanager
def _faults() -> Iterator[None]:
    """Of a call. A peer that answers no more calls this minute is busy: it is not away."""
    try:
        with peer_faults():
            yield
    except PeerLost as lost:
        if lost.reason != TOO_MANY:
            raise
        raise PeerRefused(wire.Code.BUSY.reason) from lost


async def _next(frames: AsyncIterator[pb.StageFrame]) -> wire.Frame:
    with suppress(StopAsyncIteration):
        return wire.decode(await anext(frames))
    raise PeerLost(HUNG_UP)


def _likeness(one: Answer, other: Answer) -> Likeness:
    losses = (one.loss, other.loss)
    if one.gradient is None or other.gradient is None:
        return Likeness(0.0, 1.0, losses)
    a, b = one.gradient.flatten(), other.gradient.flatten()
    lengths = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if not all(lengths):
        return Likeness(0.0, float(lengths[0] == lengths[1]), losses)
    cosine = float(torch.nn.functional.cosine_similarity(a, b, 0))
    return Likeness(1 - cosine, lengths[0] / lengths[1], losses)
