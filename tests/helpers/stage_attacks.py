"""What a hostile neighbour of a stage sends that no check of size, shape or finiteness finds.

Its messages are an honest node's, with other numbers in them: `HostileService` spoils what the real service is about to
send, so that it needs no protocol of its own, in a test's process as in a node's.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from noloco_node.stages.letters import Answer, Sent
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


class HostileService(StageService):
    """Says what an honest one says, but for one attack: `NAME` or `NAME:SHARE`, of ANSWERS, CALLS, or `evaluations`;
    with `flood ` before it, of as many micro-batches as it can send."""

    attack, share, floods = "", 1.0, False
    _before: Values | None = None
    _first: bytes | None = None
    _last_sent: Sent | None = None

    @classmethod
    def with_attack(cls, attack: str) -> "type[HostileService]":
        name, _, share = attack.removeprefix("flood ").partition(":")
        told = {"attack": name, "share": float(share or 1), "floods": attack.startswith("flood ")}
        return type("HostileService", (cls,), told)

    def begin(self, *terms: Any, **named: Any) -> None:
        super().begin(*terms, **named)
        if self.floods:
            self._own(self._call_without_end())

    def _now(self) -> bool:
        return bool(CHANCE.random() < self.share)

    # ---- what a later stage answers ----
    async def _answer(self, *asked: Any) -> tuple[Answer, bytes, Any]:
        answer, payload, memory = await super()._answer(*asked)
        loss, payload = self._spoiled(answer.loss, payload)
        return replace(answer, loss=loss), payload, memory

    def _spoiled(self, loss: float, payload: bytes) -> tuple[float, bytes]:
        if not payload:
            return (loss * 0.5 if self._now() else loss * 2) if self.attack == "evaluations" else loss, payload
        if self.attack not in ANSWERS:
            return loss, payload
        shape = (len(payload) // 4,)
        gradient = self._codec.decode(payload, shape, torch.device("cpu")).numpy()
        before, self._before = self._before, gradient.copy()
        if before is None or before.shape != shape or not self._now():
            return loss, payload
        return loss, self._codec.encode(torch.from_numpy(ANSWERS[self.attack](gradient, before)))

    # ---- what an earlier stage sends ----
    def _coded(self, micro: Sent) -> bytes:
        whole: bytes = super()._coded(micro)
        if self.attack not in CALLS or micro.evaluates or not self._now():
            return whole
        activations, targets = micro.activations.cpu(), micro.targets.cpu()
        assert self._task is not None
        limit = self._task.part.target_limit
        match self.attack:
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

    def _begin(self, micro: Sent) -> None:
        if not micro.evaluates:
            self._last_sent = micro
        super()._begin(micro)
