"""The snapshot of one boundary while partners may swap it, and the codec thread that it lives on.

What an offer holds changes on the codec thread alone: each method sends work there and returns a future. A correction
that is whole stays there until `apply`, which sends it straight to the training thread. No other thread uses the
snapshot; only corrections change it, for the round's next partner.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from noloco_node.core import gpu
from noloco_node.core.bounds import CorrectionBounds, Movement
from noloco_node.core.codecs.codec import (
    BLOCK,
    Codec,
    CodecStats,
    Conversation,
    Packed,
    Payload,
    Received,
    hints,
    scaled,
)
from noloco_node.core.fragments import Cut
from noloco_node.errors import NonFinite, OutOfMemory, PeerFault, PeerMisbehaved
from noloco_node.training.mailbox import Command, Correct

log = logging.getLogger(__name__)

T = TypeVar("T")


def _begin_thread() -> None:
    torch.get_num_threads()  # from here on, another thread's number does not become this one's
    torch.set_num_threads(1)  # training needs the cores
    torch.set_flush_denormal(True)  # what a partner sends may be such numbers; the training thread does it, too


class CodecThread:
    """Codes and decodes fragments for all open offers."""

    def __init__(self, codec: Codec, post: Callable[[Command], None], fragment_elements: int) -> None:
        """`fragment_elements`: at least."""
        self.codec = codec
        self.post = post
        self.fragment_elements = fragment_elements
        self._stream: torch.cuda.Stream | None = None
        """On a GPU: beside the training thread's."""
        self._given_up = -1
        """The round in which the weights last became older ones again: offers up to it are void."""
        self.bounds: CorrectionBounds | None = None
        """Made when the first offer says how long the vector is."""
        self._not_begun = -1
        """The round of the last offer for whose beginning a GPU had no memory."""
        self.waiting: dict[int, list[Future[None]]] = {}
        """For verdicts, by the round of their offer."""
        threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "codec", _begin_thread)
        self._executor.submit(bool).result()
        torch.set_num_threads(threads)  # what any thread sets is what later threads begin with

    def do(self, round: int, work: Callable[[], T]) -> "Future[T]":
        """For the offer of a round: NonFinite where it is void."""

        def checked() -> T:
            if round <= self._given_up:
                raise NonFinite(f"the weights that were offered in round {round} have been given up")
            if round == self._not_begun:
                raise OutOfMemory("the GPU had no memory for this offer")
            try:
                with gpu.on(self._stream):
                    return work()
            except torch.OutOfMemoryError:
                raise OutOfMemory("the GPU has no memory for a swap now") from None

        return self._executor.submit(checked)

    def post_behind(self, command: Command) -> None:
        """After the corrections that are on their way to the training thread."""
        with suppress(RuntimeError):  # closed: nobody reads the mailbox any more
            self._executor.submit(self.post, command)

    def give_up(self, round: int) -> None:
        """Offers up to this round are void from now on, and so is what the codec learned from them."""

        def void() -> None:
            self._given_up = round
            self.codec.forget()
            for offered in [each for each in self.waiting if each <= round]:
                self.answer_waiting(offered)

        self._executor.submit(void)

    def answer_waiting(self, round: int) -> None:
        for settled in self.waiting.pop(round, []):
            settled.set_result(None)

    def begin(self, round: int, device: torch.device, work: Callable[[], None]) -> None:
        """For the offer of a round. The training thread has queued its vectors on the device, perhaps not made them
        yet."""
        made = gpu.record(device)

        def begin() -> None:
            if self._stream is None:
                self._stream = gpu.side_stream(device)
            try:
                with gpu.on(self._stream):
                    gpu.wait(made, device)
                    work()
            except torch.OutOfMemoryError:
                self._not_begun = round

        self._executor.submit(begin)

    def bound(self, cut: Cut, movement: Movement) -> None:
        """What one swap may move follows from what the replica itself moves; at each boundary with an offer."""
        if self.bounds is None:
            self.bounds = CorrectionBounds(cut.sizes())
        self.bounds.moved(movement)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A correction before it is applied, in all the memory of a GPU that this takes: from here on the partner counts on
    it."""

    exchange: bytes
    here: Tensor
    """Where u is."""
    near: Tensor
    """Where it is added."""
    kept: Packed


class Offer:
    """What `rounds/swap.py` calls Vectors. All methods fail with NonFinite once the offered weights are given up, and
    with OutOfMemory where a GPU has no memory for a moment."""

    def __init__(
        self,
        codec_thread: CodecThread,
        round: int,
        u: Tensor,
        movement: tuple[Tensor, Tensor],
        device: torch.device | None = None,
    ) -> None:
        """`movement`: the largest |βΔ| and ‖βΔ‖² of each block. `device`: where corrections are added, where that is
        not where u is."""
        self.round = round
        self._cut = Cut.of(len(u), codec_thread.fragment_elements)
        self.fragments = self._cut.count
        self.correction_bytes = 4 * self._cut.each
        self._thread = codec_thread
        self._u = u
        self._device = device or u.device
        self._moved = movement[0]
        self._conversations: dict[int, Conversation] = {}
        self._corrections: dict[int, _Whole] = {}
        """Those that are not applied."""
        self._applied: dict[bytes, dict[int, Packed]] = {}
        """By exchange, until it is judged."""
        self._taken_back: dict[int, list[Packed]] = {}
        """What u still holds, by fragments, until they are coded again."""
        self._exchange = b""
        self._stats = CodecStats()
        codec_thread.begin(round, self._device, lambda: self._begin(*movement))

    def settled(self) -> "Future[None]":
        """Done when it is known what the partners before did to the model."""
        settled = _to_be_answered()
        asked = self._thread.do(self.round, lambda: self._when_settled(settled))
        asked.add_done_callback(lambda asked: _settle(asked, settled))
        return settled

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        """The first payload about a fragment."""
        return self._thread.do(self.round, lambda: self._open(index, exchange_id))

    def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
        """What to send next; or, when the correction is whole, the factor that our bounds allow: `apply` then adds
        it."""
        return self._thread.do(self.round, lambda: self._receive(index, payload))

    def apply(self, index: int, scale: float) -> "Future[None]":
        """Done when the training thread has added the correction, or never will."""
        added = _to_be_answered()
        sent = self._thread.do(self.round, lambda: self._apply(index, scale, added))
        sent.add_done_callback(lambda sent: _settle(sent, added))
        return added

    def stats(self) -> "Future[CodecStats]":
        """Of the last swap, when every correction is on its way."""
        return self._thread.do(self.round, lambda: replace(self._stats))

    # ---- on the training thread ----
    def _when_judged(self, exchange: bytes, taken_back: bool) -> None:
        with suppress(RuntimeError):  # closed
            self._thread.do(self.round, lambda: self._judged(exchange, taken_back))

    # ---- on the codec thread ----
    def _begin(self, peaks: Tensor, squares: Tensor) -> None:
        gpu.keep((self._u, peaks, squares))
        self._thread.bound(self._cut, Movement.of(peaks, squares, self._cut.each // BLOCK))
        (moved,) = gpu.to_host(peaks)  # waits: from here on, u can be read in host memory too
        self._moved = hints(torch.from_numpy(moved))

    def _open(self, index: int, exchange_id: bytes) -> bytes:
        start, end = self._cut.bounds(index)
        moved = self._moved[start // BLOCK : -(-end // BLOCK)]
        self._corrections.pop(index, None)  # of a swap that failed
        self._restore(index)
        self._conversations[index] = self._thread.codec.converse(self._u[start:end], index, exchange_id, moved)
        if exchange_id != self._exchange:
            self._exchange, self._stats = exchange_id, CodecStats()
        return self._conversations[index].open()

    def _receive(self, index: int, payload: Payload) -> bytes | float:
        conversation, bounds = self._conversations.get(index), self._thread.bounds
        if conversation is None or bounds is None:
            raise PeerMisbehaved("out_of_turn", f"fragment {index}")
        start, end = self._cut.bounds(index)
        try:
            received = conversation.receive(payload)
            if received.reply is not None or received.correction is None:
                return received.reply or b""
            scale = bounds.scale(index, received.correction, self._u[start:end])
        except PeerFault as fault:
            if fault.reason == "diverged":
                self._thread.codec.forget()
            raise
        if scale == 1:  # else it was not what is usual, and nothing is learned from it
            conversation.learn()
        self._corrections[index] = self._whole(received, received.correction)
        self._stats.add(conversation.stats)
        del self._conversations[index]
        return scale

    def _whole(self, received: Received, here: Tensor) -> _Whole:
        near = here
        if self._device.type != "cpu":
            near = here.clone() if here.device == self._device else gpu.to_device(here.numpy(), self._device)
        return _Whole(self._exchange, here, near, Packed(here, received.unit, most=received.most))

    def _apply(self, index: int, scale: float, added: "Future[None]") -> None:
        whole = self._corrections.pop(index)
        whole.kept.scale = scale
        on_cpu = self._device.type == "cpu"
        near = scaled(whole.here, scale) if on_cpu else whole.near.mul_(scale)  # a GPU is asked for no memory any more
        start, end = self._cut.bounds(index)
        ready = gpu.record(self._device)
        judged = partial(self._when_judged, whole.exchange)
        self._thread.post(Correct(self.round, start, near, added, whole.kept, whole.exchange, judged, ready))
        # a further partner of the round swaps u + c
        self._u[start:end] += near if near.device == self._u.device else scaled(whole.here, scale)
        self._applied.setdefault(whole.exchange, {})[index] = whole.kept

    def _when_settled(self, settled: "Future[None]") -> None:
        self._thread.waiting.setdefault(self.round, []).append(settled)
        if not self._applied:
            self._thread.answer_waiting(self.round)

    def _judged(self, exchange: bytes, taken_back: bool) -> None:
        """What was taken back is offered to nobody else."""
        applied = self._applied.pop(exchange, {})
        for index, kept in applied.items() if taken_back else ():
            self._taken_back.setdefault(index, []).append(kept)
        if not self._applied:
            self._thread.answer_waiting(self.round)

    def _restore(self, index: int) -> None:
        """Before a fragment is coded. Not as soon as it is known: a conversation under way needs u as it was."""
        start, end = self._cut.bounds(index)
        for kept in self._taken_back.pop(index, ()):
            self._u[start:end] -= kept.applied(self._u.device)


def _to_be_answered() -> "Future[None]":
    """By a thread that works on, also where who waits for it is cancelled: so this future cannot be."""
    answer: Future[None] = Future()
    answer.set_running_or_notify_cancel()
    return answer


def _settle(sent: "Future[None]", added: "Future[None]") -> None:
    """A correction that did not get to the training thread will not be added."""
    error = None if sent.cancelled() else sent.exception()
    if error or sent.cancelled():
        added.set_result(None)
    if error and not isinstance(error, NonFinite):
        log.error("an offer is worked on no further, by a fault of this node", exc_info=error)
