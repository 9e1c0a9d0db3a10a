"""What other stages call: micro-batches of the stage before, over gRPC. And all of a stage that node/ holds.

It carries what stages/passes.py answers, and knows neither weights nor gradients: tensors are coded
(core/codecs/activations.py) on threads of their own, and what crosses to the training thread is a letter.

- What a peer sends is checked before it takes memory: the run says how many bytes so many examples are.
- Who finds no room here (stages/held.py) is refused as busy, and asks another peer.
- What a caller gives up keeps its place until it has ended here.
"""

import asyncio
import logging
import math
import queue
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from random import Random
from typing import Any, Protocol

import numpy as np
import torch

from noloco_node.base.latest import remember
from noloco_node.base.states import SERVES_STAGE
from noloco_node.core.codecs.activations import ActivationCodec, activation_codec
from noloco_node.errors import NonFinite, PeerFault, PeerMisbehaved, PeerRefused
from noloco_node.host.traffic import Traffic
from noloco_node.peers.record import PeerRecord
from noloco_node.run.admission import Refuses, refuses_nobody
from noloco_node.run.schema import Manifest
from noloco_node.stages import next_stage, shown
from noloco_node.stages.frames import Frames, next_frame
from noloco_node.stages.held import Held
from noloco_node.stages.letters import Answer, Asked, Letter, LostMicroBatch
from noloco_node.stages.next_stage import CPU, NextStage, StageTerms
from noloco_node.stages.part import Position, part_of
from noloco_node.stages.passes import StageTask
from noloco_node.stages.shown import LinkTotals, MicroBatchRate
from noloco_node.training.task import Task
from noloco_node.transport.base import taken
from noloco_node.version import PROTOCOL
from noloco_node.views.status import Health, StageView
from noloco_node.wire import stage_messages as wire
from noloco_node.wire import stage_pb2 as pb
from noloco_node.wire.stage_pb2_grpc import StageServicer

FIRST_S, LEAST_BYTES_S = 10.0, 32_000
"""How long a caller's first frame may take, and its data beyond that: the least rate that a volunteer may set."""
LATE_S, MOST_LATE = 30.0, 256
"""Whose data did not come in that time is refused for so long, and how many such callers are remembered. It is no proof
of a lie: its link may be broken."""

log = logging.getLogger(__name__)


class Channels(next_stage.Channels, Protocol):
    def caller(self, context: Any) -> str: ...
    def give_back(self, context: Any) -> None: ...


class StageService(StageServicer):
    def __init__(
        self, channels: Channels, random: Random, misbehaved: Callable[[str, str], None], pace: Traffic | None = None
    ) -> None:
        """`misbehaved`: called with a peer and what it did that no honest one does."""
        self._channels, self._misbehaved = channels, misbehaved
        self.letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self.totals = LinkTotals()
        self._frames = Frames(pace or Traffic(), self.totals)
        self._next = NextStage(channels, random, self._frames, self.totals, self.letters, self._blame)
        self._rate = MicroBatchRate()
        self._held = Held()
        self._terms: StageTerms | None = None
        self._task: StageTask | None = None
        self._codec: ActivationCodec = activation_codec("fp32")
        self._refuses: Refuses = refuses_nobody
        self._works: Callable[[], bool] = lambda: True
        self._closed = False
        self._given_up: set[asyncio.Task[None]] = set()
        """Of micro-batches that the training thread had begun."""
        self._late: dict[str, float] = {}
        """Callers that are refused, and until when."""

    # ---- for node/trainer.py ----
    def part(self, run: Manifest, at: Position, in_flight: int | None = None) -> Callable[[Task], Task]:
        """What this node trains of the run's task; to be called on the training thread."""

        def cut(whole: Task) -> Task:
            task = StageTask(part_of(whole, run, at), whole, at, self._next, self.letters, in_flight)
            self._task = self._next.task = task
            return task

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
        self._terms, self._refuses, self._works = terms, refuses, works
        self._next.begin(terms, self._codec, may_send)

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
        self._next.candidates(next_stage, rank=sum(peer < self._channels.peer_id for peer in own_stage))

    def note(self, now: float) -> None:
        """Once a second, for the rate that `view` shows."""
        if self._task:
            self._rate.note(now, self._task.counts.passed, works=self._works())

    def view(self, seen: Collection[PeerRecord], state: str) -> StageView | None:
        """`seen`: the other nodes of the run; `state`: of this one."""
        if self._task is None:
            return None
        at, counts, totals = self._task.at, self._task.counts, self.totals
        holders = Counter(record.stage for record in seen if record.state in SERVES_STAGE)
        holders[at.number] += state in SERVES_STAGE
        return StageView(
            number=at.number,
            stages=at.stages,
            nodes=tuple(holders[stage] for stage in range(1, at.stages + 1)),
            micro_batches_per_s=self._rate.per_s,
            passed=counts.passed,
            under_way=counts.under_way,
            most_under_way=self._task.window.size if at.first else 0,
            queued=self._held.callers.total(),
            lost=counts.lost,
            retried=totals.retried,
            compared=totals.compared,
            answered=totals.answered,
            not_counted=counts.not_counted,
            not_believed=(*self._next.left_out(), *counts.not_believed),
            refused=totals.refused,
            sent=totals.sent_bytes,
            received=totals.received_bytes,
        )

    def health(self, seen: Collection[PeerRecord], state: str) -> tuple[Health, ...]:
        return shown.health(self._task.at, seen, state, self._next.were_late) if self._task else ()

    async def close(self) -> None:
        self._closed, self._terms = True, None
        for each in self._given_up:
            each.cancel()
        await asyncio.gather(self._next.close(), *self._given_up, return_exceptions=True)

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
                async for frame in self._frames.sent(wire.Passed(answer.loss, self._held.free), payload):
                    yield frame

    async def _answer(self, peer: str, frames: AsyncIterator[pb.StageFrame]) -> tuple[Answer, bytes, ExitStack]:
        """The answer without its gradient, that as bytes, and what is to be closed once their memory is free."""
        async with asyncio.timeout(FIRST_S):
            asked = await next_frame(frames)
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
                        data = await self._frames.received(frames, size, call.take)
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
            except (NonFinite, torch.OutOfMemoryError) as error:
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
                giving_up = asyncio.create_task(self._give_up(letter, place.pop_all()))
                self._given_up.add(giving_up)
                giving_up.add_done_callback(self._given_up.discard)

    async def _give_up(self, letter: Asked, place: ExitStack) -> None:
        """The training thread is at it, or has sent it on: it keeps its place until that has ended, else who hangs up
        each time could have any number of them here."""
        with place, suppress(LostMicroBatch), self._next.given_up(letter):
            await asyncio.wrap_future(letter.answer)

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
        if not task.at.last and not self._next.ready():
            raise PeerRefused(wire.Code.BUSY.reason)
        if task.most_examples is not None and asked.examples > task.most_examples:
            raise PeerMisbehaved("too_many_examples")
        return task

    def _letter(  # noqa: PLR0913, PLR0917
        self, task: StageTask, asked: wire.MicroBatch, data: memoryview, targets: int, until: float, caller: str
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
