"""A loop as the training thread sees it: a task that brings its model and its optimizer, and whose data are steps.

A step of the loop is what a batch is for other tasks: the training thread waits for it and reads its mailbox meanwhile.
When it is there, weights and moments have changed already; what a step of a replica still does is to count it.

The loop's optimizer is any of torch's. A checkpoint holds its moments where they are AdamW's; another one begins afresh
when a node resumes. Evaluations are the loop's own function. Without one, swaps are bounded and not judged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.errors import UsageError
from noloco_node.loop.turns import Turns
from noloco_node.training import model
from noloco_node.training.inner.gradients import Gradients, NotMeasured
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.task import Batch


class Loop:
    """A Task, and Driven."""

    tokens_per_example = 1
    micro_examples = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], float] | None,
        turns: Turns,
    ) -> None:
        """Raises UsageError for weights that cannot be averaged."""
        self.device = _device(module)
        self._module, self._optimizer, self._evaluate, self._turns = module, optimizer, evaluate, turns
        self._steps = Steps(turns)
        self.theta: Tensor
        """All weights in one vector; there, and `moments` too, once the node trains."""
        self.moments: LoopOptimizer

    def model(self) -> nn.Module:
        return self._module

    def stream(self, peer_id: str) -> "Steps":
        return self._steps

    def gradients(self, *whole: Any) -> Gradients:
        made = LoopGradients(self._turns, self._optimizer, *whole)
        self._steps.working = lambda: made.working()  # noqa: PLW0108 - it is set later
        return made

    def optimizer(self, module: nn.Module, theta: Tensor, before_step: Callable[[], None]) -> Optimizer:
        self.theta, self.moments = theta, LoopOptimizer(module, self._optimizer, before_step)
        return self.moments

    def over(self) -> None:
        self._turns.end()

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError("a loop computes its losses itself")

    def evaluate(self, module: nn.Module, examples: int) -> float:
        if self._evaluate is None:
            raise NotMeasured("the loop has no evaluation")
        return float(self._evaluate())


class Steps:
    """A stream without examples. The position is how many steps there were."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._made = turns, False
        self.position = 0
        self.working: Callable[[], Any] = nullcontext

    def seek(self, position: Any) -> None:
        if type(position) is not int or position < 0:
            raise ValueError(position)
        self.position = position

    def ready(self, examples: int, within_s: float) -> bool:
        """Without time to wait there is none: a step takes some."""
        self._made = self._made or (within_s > 0 and self._turns.step(within_s, self.working))
        return self._made

    def next(self, examples: int) -> Batch:
        self.position += self._made
        self._made = False
        return ()


class LoopGradients(Gradients):
    """They were taken, and the step was made, before a replica's step begins."""

    def __init__(self, turns: Turns, optimizer: torch.optim.Optimizer, *whole: Any) -> None:
        super().__init__(*whole)
        self._turns, self._theirs = turns, optimizer

    def begin(self, batch: Batch) -> None:
        pass

    def finish(self) -> tuple[float, float | None]:
        """Raises UsageError where the weights are no longer those that the node has."""
        if isinstance(self._optimizer, LoopOptimizer):
            self._optimizer.check()
        return self._turns.loss, None

    def step(self, rate: float) -> float:
        return float(self._theirs.param_groups[0]["lr"])

    def try_out(self, batch: Batch) -> None:
        pass

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Each part of the module is in the mode that it was in afterwards. The precision is the loop's business."""
        self._optimizer.free_gradients()
        modes = [(part, part.training) for part in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode


class LoopOptimizer(Optimizer):
    """The loop makes its steps; what is here are its moments, for checkpoints and for weights that become others."""

    MOMENTS = "exp_avg", "exp_avg_sq"

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, before_step: Callable[[], None]) -> None:
        """`before_step` is called by the loop's thread before it changes weights and moments."""
        self._parameters = [p for _, p in model.parameters(module)]
        self._adamw: Any = optimizer
        self.held = 0
        self.changes = 0
        """How often the moments became others."""
        self._pointers = [p.data_ptr() for p in self._parameters]
        optimizer.register_step_pre_hook(lambda *_: before_step())

    def check(self) -> None:
        """Raises UsageError where parameters are no views of the node's vector any more."""
        if [p.data_ptr() for p in self._parameters] != self._pointers:
            raise UsageError("the model's weights were moved or replaced: do that before the swarm is entered")

    def restart(self) -> None:
        self.changes += 1
        self._adamw.state.clear()

    def new_moments(self, at: int, step: float) -> dict[str, Tensor]:
        """Of the parameter at this position, to be filled."""
        zeros = {name: torch.zeros_like(self._parameters[at], requires_grad=False) for name in self.MOMENTS}
        return {"step": torch.tensor(step), **zeros}

    def state(self) -> dict[int, dict[str, Any]]:
        found = {at: dict(self._adamw.state[p]) for at, p in enumerate(self._parameters) if self._adamw.state.get(p)}
        if not all(_are_adamws(moments, self._parameters[at]) for at, moments in found.items()):
            return {}
        return {at: {**moments, "step": torch.as_tensor(moments["step"]).float()} for at, moments in found.items()}

    def is_kin(self, state: Mapping[int, Mapping[str, Any]]) -> bool:
        return all(self.MOMENTS[0] in moments for moments in state.values())

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self.restart()
        on_device = any(group.get("fused") or group.get("capturable") for group in self._adamw.param_groups)
        for at, moments in state.items():
            p = self._parameters[at]
            there = {name: moments[name].to(p.device, copy=True) for name in self.MOMENTS}
            step = moments["step"].to(p.device if on_device else "cpu", copy=True)
            self._adamw.state[p] = {"step": step, **there}


def _are_adamws(moments: Mapping[str, Any], p: nn.Parameter) -> bool:
    both = [moments.get(name) for name in LoopOptimizer.MOMENTS]
    alike = all(isinstance(of, Tensor) and of.shape == p.shape and of.dtype == torch.float32 for of in both)
    return alike and moments.keys() == {"step", *LoopOptimizer.MOMENTS}


def _device(module: nn.Module) -> torch.device:
    """Where the weights that are trained are. Raises UsageError."""
    trained = [p for _, p in model.parameters(module)]
    if not trained:
        raise UsageError("the model has no weights to train: none has requires_grad")
    if others := {p.dtype for p in trained} - {torch.float32}:
        what = str(others.pop()).removeprefix("torch.")
        raise UsageError(f"the weights that are trained must be float32, and some are {what}: use torch.autocast")
    devices = {p.device for p in trained}
    if len(devices) > 1 or next(iter(devices)).type not in {"cpu", "cuda"}:
        raise UsageError(f"the weights that are trained must be on the CPU or on one GPU, not on {devices}")
    return devices.pop()
