"""What a hostile neighbour of a stage sends that no check of size, shape or finiteness finds.

Its messages are an honest node's, with other numbers in them: `HostileService` spoils what the real service is about to
send, so that it needs no protocol of its own, in a test's process as in a node's.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from noloco_node.stages.letters import Answer, Sent
from noloco_node.stages.next_stage import NextStage
from noloco_node.stages.service import StageService

Values = np.ndarray[Any, np.dtype[np.float32]]
CHANCE = np.random.default_rng(1)


def negated(gradient: Values, before: Values) -> Values:
    return -gradient


def noise(gradient: Values, before: Values) -> Values:
    found = CHANCE.standard_normal(gradient.shape).astype(np.float32)
    return found * np.float32(np.linalg.norm(gradient) / np.linalg.norm(found))


def another(gradient: Values, before: Values) -> Values:
    """Of the micro-batch before."""
    return before


def long(gradient: Values, before: Values) -> Values:
    """As long as this stage's bound lets it be, and turned."""
    return -12 * gradient


def bent(gradient: Values, before: Values) -> Values:
    """With a bias that always points the same way, and is longer than it."""
    return _biased(gradient, 1.2)


def leaning(gradient: Values, before: Values) -> Values:
    """... and is so short that it is not found."""
    return _biased(gradient, 0.55)


def _biased(gradient: Values, share: float) -> Values:
    to = np.resize(np.random.default_rng(2).standard_normal(997), gradient.shape).astype(np.float32)
    return gradient + to * np.float32(share * np.linalg.norm(gradient) / np.linalg.norm(to))


ANSWERS: dict[str, Callable[[Values, Values], Values]] = {
    "negated": negated,
    "noise": noise,
    "another": another,
    "long": long,
    "bent": bent,
    "leaning": leaning,
}
"""In place of a gradient; `before`: the one of the micro-batch before."""
AT_ONCE = 24
CALLS = ("wrong targets", "shuffled targets", "noise", "the same", "turned", "large")
"""In place of activations and targets."""


class _Attack:
    """`NAME` or `NAME:SHARE`, of ANSWERS or CALLS; with `flood ` before it, of as many micro-batches as it can send."""

    def __init__(self, attack: str) -> None:
        self.name, _, share = attack.removeprefix("flood ").partition(":")
        self.share, self.floods = float(share or 1), attack.startswith("flood ")

    def now(self) -> bool:
        return bool(CHANCE.random() < self.share)


class HostileService(StageService):
    """Says what an honest one says, but for one attack."""

    attack: _Attack
    _before: Values | None = None

    @classmethod
    def with_attack(cls, attack: str) -> "type[HostileService]":
        return type("HostileService", (cls,), {"attack": _Attack(attack)})

    def __init__(self, channels: Any, random: Any, *rest: Any) -> None:
        super().__init__(channels, random, *rest)
        self._next = _HostileSender(channels, random, self._frames, self.totals, self.letters, self._blame)
        self._next.attack = self.attack

    async def _answer(self, *asked: Any) -> tuple[Answer, bytes, Any]:
        answer, payload, memory = await super()._answer(*asked)
        return answer, self._spoiled(payload), memory

    def _spoiled(self, payload: bytes) -> bytes:
        if self.attack.name not in ANSWERS or not payload:
            return payload
        shape = (len(payload) // 4,)
        gradient = self._codec.decode(payload, shape, torch.device("cpu")).numpy()
        before, self._before = self._before, gradient.copy()
        if before is None or before.shape != shape or not self.attack.now():
            return payload
        return self._codec.encode(torch.from_numpy(ANSWERS[self.attack.name](gradient, before)))


class _HostileSender(NextStage):
    attack: _Attack
    _first: bytes | None = None
    _last_sent: Sent | None = None

    def begin(self, *terms: Any) -> None:
        super().begin(*terms)
        if self.attack.floods:
            self._own(self._call_without_end())

    def _coded(self, micro: Sent) -> bytes:
        whole: bytes = super()._coded(micro)
        if self.attack.name not in CALLS or micro.evaluates or not self.attack.now():
            return whole
        activations, targets = micro.activations.cpu(), micro.targets.cpu()
        assert self.task is not None
        limit = self.task.part.target_limit
        match self.attack.name:
            case "wrong targets":
                targets = torch.from_numpy(CHANCE.integers(limit, size=targets.shape))
            case "shuffled targets":
                targets = targets.flatten()[torch.from_numpy(CHANCE.permutation(targets.numel()))].view(targets.shape)
            case "turned":
                targets = (targets * 7 + 3) % limit
            case "noise":
                activations = torch.randn_like(activations) * activations.square().mean().sqrt()
            case "large":
                activations = activations * 50
            case "the same":
                if self._first is None or len(self._first) != len(whole):
                    self._first = whole
                return self._first
        return targets.numpy().astype("<i4").tobytes() + self._codec.encode(activations)

    async def _call_without_end(self) -> None:
        """Beside the micro-batches that this node trains with."""
        busy: set[asyncio.Task[None]] = set()
        while True:
            last = self._last_sent
            if last is None or len(busy) >= AT_ONCE:
                await asyncio.sleep(0.002)
                continue
            # nobody waits for the answer
            micro = Sent(-1, last.activations, last.targets, False, time.monotonic() + 5.0)
            work = self._own(self._carry(micro))
            busy.add(work)
            work.add_done_callback(busy.discard)

    def _start(self, micro: Sent) -> None:
        if not micro.evaluates:
            self._last_sent = micro
        super()._start(micro)
