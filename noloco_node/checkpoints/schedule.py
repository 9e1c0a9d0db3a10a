"""When a node's checkpoints are written: every EVERY_ROUNDS or EVERY_S, as far as the disk is not written to faster
than MOST_BYTES_PER_S, when its work is done, and before it leaves.

One at a time, since each removes unfinished ones, and in the background. The training thread takes its state between
two inner steps, perhaps after an evaluation. There is no timeout, except when the node leaves: then the wait for that
ends after max(LEAST_S, the thread's patience_s). What is written, and where, is in checkpoints/keeper.py and
checkpoints/checkpoint.py.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from noloco_node.errors import NolocoError

EVERY_ROUNDS, EVERY_S = 10, 600.0
"""Whichever comes first. A kill costs this node the work since then at most; the swarm loses nothing."""
MOST_BYTES_PER_S, MOST_APART_S = 20e6, 3600.0
"""A flash disk bears some hundred TB. 125 M parameters with rounds of 8 s would be 2.7 TB a day."""
LEAST_S = 20.0
"""Shortest timeout when the node leaves, however short its steps are. It is long because a thread that is not stuck
answers long before."""

log = logging.getLogger(__name__)

S = TypeVar("S")


class StateSource(Protocol[S]):
    """What is needed of the training thread."""

    @property
    def patience_s(self) -> float:
        """How long an answer may take."""

    def state(self) -> "Future[S]":
        """`running` from the moment whose state it is; nothing holds the rest up."""


class CheckpointSchedule(Generic[S]):
    """Calls `keep` with a state, in a thread, and `failed` with the reason where no checkpoint came of it, or where
    there was no state to keep."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        source: StateSource[S],
        keep: Callable[[S], None],
        failed: Callable[[NolocoError], None],
        round: int,
        now: float,
        size: int,
    ) -> None:
        """`size`: bytes of a checkpoint."""
        self._source = source
        self._keep = keep
        self._failed = failed
        self._round, self._at = round, now
        self._apart_s = min(MOST_APART_S, size / MOST_BYTES_PER_S)
        self._step: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked: Future[S] | None = None
        """For the state, until it is written."""

    def save_if_due(self, round: int, step: int, now: float) -> None:
        """Start writing one if it is due: not the same again, of a node that waits for data or for memory, or has done
        its work, unless it was not written."""
        in_rounds = round // EVERY_ROUNDS > self._round // EVERY_ROUNDS
        in_time = now >= self._at + EVERY_S and step != self._step
        if self._under_way or now < self._at + self._apart_s or not (in_rounds or in_time):
            return
        self._round, self._step, self._at = round, step, now
        self._begin()

    def weights_replaced(self) -> None:
        """Those of the newest checkpoint were given up: the next one is due at once."""
        self._step, self._at = None, -math.inf

    async def save_now(self, *, leaving: bool = False) -> None:
        """Write one of the present state, without a timeout unless the node is `leaving`."""
        within_s = max(LEAST_S, self._source.patience_s) if leaving else None
        if self._taken and self._task:
            await asyncio.wait({self._task})  # its state is an earlier one
        task = self._task if self._under_way and self._task else self._begin()
        done, _ = await asyncio.wait({task}, timeout=within_s)
        if not done and not self._taken:
            task.cancel()
            late = f"the training thread sent no state within {within_s:.0f} s"
            self._say(NolocoError(f"{late}: its work since the last checkpoint is lost"))
        await asyncio.wait({task})

    @property
    def _under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _taken(self) -> bool:
        """Whether the state is of a moment that is over: it is being copied or written."""
        return self._asked is not None and (self._asked.running() or self._asked.done())

    def _begin(self) -> "asyncio.Task[None]":
        self._task = asyncio.create_task(self._save())
        self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("no checkpoint, by a bug in this node", exc_info=error)
            self._failed(NolocoError(f"no checkpoint, by a bug in this node ({type(error).__name__})"))

    async def _save(self) -> None:
        try:
            self._asked = self._source.state()
            state = await asyncio.wrap_future(self._asked)
            await asyncio.to_thread(self._keep, state)
        except NolocoError as error:
            self._say(error)
        finally:
            self._asked = None

    def _say(self, why: NolocoError) -> None:
        self._step = None
        log.warning("no checkpoint: %s", why)
        self._failed(why)
