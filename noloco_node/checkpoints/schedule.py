"""When a node's checkpoints are written: now and then while it trains, when its work is done, and before it leaves.

One at a time, since two would take each other's files for left-overs, and in the background. The training thread gives
its state between two inner steps, behind an evaluation perhaps, and nobody hurries it: a save belongs to the life of
the node. Only a node that leaves gives the thread up when it stays away far longer than it ever did. What is written,
and where, is checkpoints/keeper.py's and checkpoints/checkpoint.py's affair.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from noloco_node.errors import NolocoError

EVERY_ROUNDS, EVERY_S = 10, 600.0
"""Whichever comes first: so much of this node's work a kill costs at most; the swarm loses nothing."""
LEAST_S = 20.0
"""For the training thread to answer a node that leaves, however short its steps were: one that is not stuck answers as
soon as it can, so this is long."""

log = logging.getLogger(__name__)

S = TypeVar("S")


class StateSource(Protocol[S]):
    """What is needed of the training thread."""

    @property
    def patience_s(self) -> float:
        """What an answer may take."""

    def state(self) -> "Future[S]": ...


class CheckpointSchedule(Generic[S]):
    """`keep` writes a state, off the event loop; `failed` hears why it could not, which costs that checkpoint only."""

    def __init__(
        self, giver: StateSource[S], keep: Callable[[S], None], failed: Callable[[str], None], round: int, now: float
    ) -> None:
        self._giver = giver
        self._keep = keep
        self._failed = failed
        self._round, self._at = round, now
        self._task: asyncio.Task[None] | None = None
        self._writes = False
        """The state is there and on its way to the disk."""

    def now_and_then(self, round: int, now: float) -> None:
        """Begins to write one where it is time for it."""
        in_rounds = round // EVERY_ROUNDS > self._round // EVERY_ROUNDS
        if self._under_way or not (in_rounds or now >= self._at + EVERY_S):
            return
        self._round, self._at = round, now
        self._begin()

    async def last(self, *, leaving: bool = False) -> None:
        """Writes one of how everything is now. It takes as long as it takes, but for a thread that is stuck when the
        node is `leaving`."""
        within_s = max(LEAST_S, self._giver.patience_s) if leaving else None
        if self._writes and self._task:
            await asyncio.wait({self._task})  # that is of earlier
        task = self._task if self._under_way and self._task else self._begin()
        done, _ = await asyncio.wait({task}, timeout=within_s)
        if not done and not self._writes:
            task.cancel()
            self._say(f"the training thread gave no state within {within_s:.0f} s: what it did since the last is lost")
        await asyncio.wait({task})

    @property
    def _under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def _begin(self) -> "asyncio.Task[None]":
        self._task = asyncio.create_task(self._save())
        self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("no checkpoint, by a fault of this node", exc_info=error)
            self._failed(f"no checkpoint, by a fault of this node ({type(error).__name__})")

    async def _save(self) -> None:
        try:
            state = await asyncio.wrap_future(self._giver.state())
            self._writes = True
            await asyncio.to_thread(self._keep, state)
        except NolocoError as error:
            self._say(str(error))
        finally:
            self._writes = False

    def _say(self, why: str) -> None:
        log.warning("no checkpoint: %s", why)
        self._failed(why)
