"""Several processes, a GPU each, as one node: torch.distributed within, one peer outside.

Every process runs the same script, as torchrun starts it. The first one has the node. After the node's turn it tells
the others what has changed, and sends them that: weights after boundaries and corrections, moments where they begin
afresh. After any other step it is one small number in a store of their own, which they wait for as long as a pause of
the node lasts. So a process that fails never waits for the others to hear of it.
"""

import json
import os
import socket
import threading
import weakref
from datetime import timedelta
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from noloco_node.errors import NolocoError, UsageError
from noloco_node.loop.task import LoopOptimizer, Trained
from noloco_node.training import model

if TYPE_CHECKING:
    from noloco_node.views.status import StatusView

PATIENCE = timedelta(days=365)
"""A node may be paused, or wait for a run, for as long as its volunteer likes."""
LET_GO_S = 10.0
KEPT = 100
"""News that are kept for processes that are behind: with steps that wait for each other, at most one."""


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
        self.is_first = dist.get_rank() == 0
        self._number = 0
        where: list[Any] = [None]
        if self.is_first:
            self._store = _store(os.environ.get("MASTER_ADDR", socket.gethostname()), 0, is_master=True)
            where = [(self._store.host, self._store.port)]
        dist.broadcast_object_list(where, 0)
        if not self.is_first:
            self._store = _store(*where[0], is_master=False)

    @classmethod
    def here(cls) -> "Island | None":
        """None: this process is alone. Raises UsageError where it is not, and does not know the others yet."""
        if not dist.is_available():
            return None
        if not dist.is_initialized():
            if dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UsageError(
                    "torchrun has started several processes: call torch.distributed.init_process_group before the "
                    "swarm is made, else each of them is a node"
                )
            return None
        return cls() if dist.get_world_size() > 1 else None

    # ---- the first process ----
    def tell(self, news: News, theta: Tensor, optimizer: LoopOptimizer) -> None:
        """With what has changed."""
        state = optimizer.state() if News.MOMENTS in news else {}
        steps = {at: float(moments["step"]) for at, moments in state.items()}
        self._say(json.dumps([int(news), steps]))
        if News.WEIGHTS in news:
            broadcast(theta)
        self._exchange(state)

    def fail(self) -> None:
        self._say(json.dumps([int(News.FAILED), {}]))

    def _say(self, what: str) -> None:
        self._number += 1
        self._store.set(f"{self._number}", what)
        self._store.delete_key(f"{self._number - KEPT}")

    # ---- the others ----
    def hear(self, theta: Tensor, optimizer: LoopOptimizer) -> News:
        """What the first one tells at this step. Raises NolocoError where it is gone."""
        found, steps = json.loads(self._wait())
        news = News(found)
        if News.WEIGHTS in news:
            broadcast(theta)
        if News.MOMENTS in news:
            state = {int(at): optimizer.new_moments(int(at), step) for at, step in steps.items()}
            self._exchange(state)
            optimizer.load(state)
        return news

    def _wait(self) -> str:
        self._number += 1
        try:
            said: bytes = self._store.get(f"{self._number}")
        except RuntimeError:
            raise NolocoError("the first process of the island is gone") from None
        return said.decode()

    # ---- all ----
    @staticmethod
    def _exchange(state: dict[int, dict[str, Any]]) -> None:
        for _, moments in sorted(state.items()):
            for name in LoopOptimizer.MOMENTS:
                broadcast(moments[name])


def broadcast(tensor: Tensor) -> None:
    """From the first process to the others. With gloo it returns when gloo has let go of the tensor: its thread needs
    the interpreter for that, and aborts the process where its turn comes only as the interpreter ends (1 in 40)."""
    alias, let_go = tensor.detach(), threading.Event()
    weakref.finalize(alias, let_go.set).atexit = False
    dist.broadcast(alias, 0)
    del alias
    if not tensor.is_cuda or dist.get_backend() == "gloo":
        let_go.wait(LET_GO_S)


def _store(host: str, port: int, *, is_master: bool) -> Any:
    return dist.TCPStore(host, port, is_master=is_master, timeout=PATIENCE)  # type: ignore[attr-defined]


class Follower:
    """The swarm as the other processes of an island have it: `step` makes their weights those of the first one."""

    def __init__(self, island: Island, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._trained = Trained(module)
        self._island, self._theta = island, model.flatten(self._trained)
        self._pointers = model.pointers(self._trained)
        self._optimizer = LoopOptimizer(self._trained, optimizer, lambda: None)
        self._entered = self.over = False

    def __enter__(self) -> "Follower":
        self._hear()
        self._entered = True
        return self

    def step(self, loss: Tensor | float) -> None:
        """See Swarm."""
        if not self._entered:
            raise UsageError("the swarm is to be entered before its first step: `with loop.join(...) as swarm:`")
        model.require_in_place(self._trained, self._pointers)
        if not self.over:
            self._hear()

    def status(self) -> "StatusView":
        raise NolocoError("the first process of the island has the node")

    def _hear(self) -> None:
        news = self._island.hear(self._theta, self._optimizer)
        if News.FAILED in news:
            raise NolocoError("the node has failed: the first process of the island says why")
        self.over = News.OVER in news

    def __exit__(self, *_: object) -> None:
        """The first one leaves."""
