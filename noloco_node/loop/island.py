"""Several processes, a GPU each, as one node: torch.distributed within, one peer outside.

Every process runs the same script, as torchrun starts it. The first one has the node. After the node's turn it tells
the others what has changed, and sends them that: weights after boundaries and corrections, moments where they begin
afresh. After any other step it is one number, over gloo, to which a long pause is no failure as it would be to NCCL.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntFlag
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from noloco_node.errors import NolocoError
from noloco_node.loop.task import LoopOptimizer
from noloco_node.training import model

if TYPE_CHECKING:
    from noloco_node.views.status import StatusView

PATIENCE = timedelta(days=365)
"""A node may be paused, or wait for a run, for as long as its volunteer likes."""

FAILED_WITHIN = timedelta(seconds=5)


class News(IntFlag):
    NONE = 0
    WEIGHTS = 1
    MOMENTS = 2
    OVER = 4
    FAILED = 8


class Island:
    """One process's part of it."""

    def __init__(self) -> None:
        """Every process of the island makes one."""
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.is_first = dist.get_rank() == 0

    @classmethod
    def here(cls) -> "Island | None":
        """None: this process is alone."""
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls() if together else None

    def share(self, theta: Callable[[], Tensor], optimizer: Callable[[], LoopOptimizer], news: News) -> News:
        """The first one's news, and with them what has changed. All call it at the same time."""
        said = torch.tensor([int(news)])
        dist.broadcast(said, 0, group=self._control)
        news = News(int(said))
        if News.WEIGHTS in news:
            dist.broadcast(theta(), 0)
        if News.MOMENTS in news:
            self._share_moments(optimizer())
        return news

    def say_failed(self) -> None:
        """The others may be gone themselves, or in the middle of a step."""
        said = torch.tensor([int(News.FAILED)])
        with suppress(RuntimeError):
            dist.broadcast(said, 0, group=self._control, async_op=True).wait(FAILED_WITHIN)

    def _share_moments(self, optimizer: LoopOptimizer) -> None:
        state = optimizer.state() if self.is_first else {}
        steps: list[Any] = [{at: float(moments["step"]) for at, moments in state.items()}]
        dist.broadcast_object_list(steps, 0, group=self._control)
        if not self.is_first:
            state = {at: optimizer.new_moments(at, step) for at, step in steps[0].items()}
        for moments in state.values():
            for name in optimizer.MOMENTS:
                dist.broadcast(moments[name], 0)
        if not self.is_first:
            optimizer.load(state)


class Follower:
    """The swarm as the other processes of an island have it: `step` makes their weights those of the first one."""

    def __init__(self, island: Island, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._island = island
        self._theta = model.flatten(module)
        self._optimizer = LoopOptimizer(module, optimizer, lambda: None)
        self.over = False

    def __enter__(self) -> "Follower":
        self._hear()
        return self

    def step(self, loss: Tensor | float) -> None:
        """See Swarm."""
        self._optimizer.check()
        if not self.over:
            self._hear()

    def status(self) -> "StatusView":
        raise NolocoError("the first process of the island has the node")

    def _hear(self) -> None:
        news = self._island.share(lambda: self._theta, lambda: self._optimizer, News.NONE)
        if News.FAILED in news:
            raise NolocoError("the node has failed: the first process of the island says why")
        self.over = News.OVER in news

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """The first one leaves."""
