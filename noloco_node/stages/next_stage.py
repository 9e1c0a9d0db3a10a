"""Micro-batches to the next stage: which peer gets one, what is done where it does not answer, and whom to believe.

- A micro-batch that a peer does not answer goes to another one of that stage, until its deadline; then it is lost.
- The gradient of a peer that is not proven is believed once another peer has answered alike; of a proven one, some are
  compared. A held-out loss is believed once two of three peers say the same (stages/agreement.py).
- What its caller gave up is not carried on.
"""

import asyncio
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any, Protocol

import grpc
import torch

from noloco_node.core.codecs.activations import ActivationCodec, activation_codec
from noloco_node.errors import NonFinite, PeerFault, PeerLost, PeerMisbehaved, PeerRefused
from noloco_node.stages import shown
from noloco_node.stages.agreement import Agreement, Likeness, believed, lying
from noloco_node.stages.frames import Frames, next_frame
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Lost, Sent
from noloco_node.stages.passes import DEADLINE_S, StageTask
from noloco_node.stages.routes import Routes
from noloco_node.transport.base import TOO_MANY, peer_faults
from noloco_node.version import PROTOCOL
from noloco_node.wire import stage_messages as wire
from noloco_node.wire.stage_pb2_grpc import StageStub

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


class NextStage:
    """The link of stages/passes.py."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        channels: Channels,
        random: Random,
        frames: Frames,
        totals: shown.LinkTotals,
        letters: "queue.SimpleQueue[Letter]",
        blame: Callable[[str, BaseException], None],
    ) -> None:
        """`blame`: told of a peer and how it failed."""
        self._channels, self._random, self._frames, self._totals = channels, random, frames, totals
        self._letters, self._blame = letters, blame
        self.task: StageTask | None = None
        self.were_late: deque[bool] = deque(maxlen=shown.JUDGED)
        """Of the last micro-batches that this node sent on: whether no answer came in time, though it might ask."""
        self._routes, self._agreement = Routes(random), Agreement()
        self._peers: Collection[str] = ()
        self._rank = 0
        self._terms: StageTerms | None = None
        self._codec: ActivationCodec = activation_codec("fp32")
        self._may_send: Callable[[], bool] = lambda: True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._given_up: set[Asked] = set()
        self._carrying: dict[Asked, asyncio.Task[Any] | None] = {}
        """Of the stage before: who carries each on."""
        self._took_s: deque[float] = deque([LEAST_PATIENCE_S / PATIENCE], maxlen=REMEMBERED)

    def begin(self, terms: StageTerms, codec: ActivationCodec, may_send: Callable[[], bool]) -> None:
        """`may_send`: whether this node may call others now."""
        self._terms, self._codec, self._may_send = terms, codec, may_send
        self._loop = asyncio.get_running_loop()

    def candidates(self, peers: Collection[str], rank: int) -> None:
        """Who works there now. `rank`: of this node among those of its own stage."""
        self._peers, self._rank = peers, rank
        self._choose_candidates()

    def _choose_candidates(self) -> None:
        """Of those who are there, whom to ask."""
        wrong = self.left_out()
        self._routes.candidates([peer for peer in self._peers if peer not in wrong])

    def left_out(self) -> Collection[str]:
        """Peers that answer otherwise than their whole stage."""
        return self._agreement.left_out(time.monotonic())

    @contextmanager
    def given_up(self, asked: Asked) -> Iterator[None]:
        """Meanwhile a micro-batch that the training thread has begun is not carried on: nobody waits for it."""
        self._given_up.add(asked)
        try:
            if carrying := self._carrying.get(asked):
                carrying.cancel()  # the training thread gets its Lost, and forgets it
            yield
        finally:
            self._given_up.discard(asked)

    async def close(self) -> None:
        self._closed, self._terms = True, None
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # ---- for the training thread ----
    def ready(self) -> bool:
        """From any thread."""
        return self._terms is not None and self._routes.count > 0 and self._may_send()

    def send(self, micro: Sent) -> None:
        """From the training thread."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._start, micro)
                return
        except RuntimeError:  # the loop is closed: the node has left
            pass
        self._letters.put(Lost(micro.ticket))

    def _start(self, micro: Sent) -> None:
        if self._closed:
            self._letters.put(Lost(micro.ticket))
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
        except (NonFinite, torch.OutOfMemoryError) as error:
            log.debug("a micro-batch is lost: %s", error)
        finally:
            if micro.asked:
                del self._carrying[micro.asked]
            self._totals.lost += answer is None
            self._letters.put(Answered(micro.ticket, answer) if answer else Lost(micro.ticket))
        if not micro.evaluates and self.ready():
            self.were_late.append(late)

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
            self._totals.retried += 1
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
                    self._totals.compared += 1
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
            self._blame(peer, PeerMisbehaved("wrong_gradient"))

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
        terms, task = self._terms, self.task
        if terms is None or task is None:
            raise PeerLost("leaving")
        left_s = max(0.01, micro.until - time.monotonic())
        stage, examples = task.at.stage + 1, len(micro.targets)
        kind = (micro.evaluates, terms.admission, micro.tries)
        header = wire.MicroBatch(PROTOCOL, terms.run_id, stage, examples, left_s, *kind)
        shape = () if micro.evaluates else (len(micro.targets), *task.part.activations)
        size = self._codec.encoded_bytes(shape) if shape else 0
        with _faults():
            call = StageStub(self._channels.channel(peer)).Pass(self._frames.sent(header, payload), timeout=left_s)
            try:
                replies = aiter(call)
                match await next_frame(replies):
                    case wire.Passed() as passed:
                        data = await self._frames.received(replies, size)
                    case wire.Refusal(code, retry_in_s):
                        raise PeerRefused(code.reason, retry_in_s)
                    case other:
                        raise PeerMisbehaved("unexpected_frame", type(other).__name__)
            finally:
                call.cancel()
        gradient = await asyncio.to_thread(self._codec.decode, data, shape, CPU) if shape else None
        return passed, Answer(passed.loss, gradient)


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
