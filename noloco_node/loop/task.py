"""A loop as the training thread sees it: a task that brings its model and its optimizer, and whose data are steps.

A step of the loop is what a batch is for other tasks: the training thread waits for it and reads its mailbox meanwhile.
When it is there, weights and moments have changed already; what a step of a replica still does is to count it.

The loop's optimizer is any of torch's. A checkpoint holds its moments where they are AdamW's; another one begins afresh
when a node resumes. Evaluations are the loop's own function. Without one, swaps are bounded and not judged.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.loop.turns import Turns
from noloco_node.training import model
from noloco_node.training.inner.gradients import Gradients, NotMeasured
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.task import Batch

log = logging.getLogger(__name__)


class Trained(nn.Module):
    """The weights of a loop's model that are trained. What else it has is nobody's business but the loop's, and only
    the names of weights that stay are compared: each node may hold them in the precision that it has room for."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = (plain(whole), whole)  # in a tuple they are no parts of this module, which changes nothing of them
        self.part = "".join(f"{name} stays\n" for name, p in self._named() if not p.requires_grad)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._named() if p.requires_grad)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """A part of the model may be compiled, too."""
        return ((name.replace("_orig_mod.", ""), p) for name, p in self.whole[0].named_parameters())


def plain(module: nn.Module) -> nn.Module:
    """Without what names its weights otherwise: torch's ways to use several GPUs, and its compiler, whose import takes
    seconds."""
    parallel = isinstance(module, (DistributedDataParallel, nn.DataParallel))
    inner: Any = module.module if parallel else getattr(module, "_orig_mod", None)
    return plain(inner) if inner is not None else module


class Loop:
    """A Task, and Driven."""

    tokens_per_example = 1
    micro_examples = 1

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Callable[[], float] | None, turns: Turns
    ) -> None:
        """Raises UsageError for weights that cannot be averaged."""
        self._trained = Trained(module)
        _require_whole(self._trained)
        self.device = _device(self._trained)
        _require_optimizer_of(self._trained, optimizer)
        if name := model.with_running_statistics(plain(module)):
            log.warning(
                "the model's part %s %s. A node that joins late may find no state that it can use",
                name,
                model.BUFFERS_STAY,
            )
        self._optimizer, self._evaluate, self._turns = optimizer, evaluate, turns
        self._steps = Steps(turns)
        self.theta: Tensor
        """All weights in one vector; there, and `moments` too, once the node trains."""
        self.moments: LoopOptimizer

    def model(self) -> nn.Module:
        return self._trained

    def stream(self, peer_id: str) -> "Steps":
        return self._steps

    def gradients(self, *whole: Any) -> Gradients:
        made = LoopGradients(self._turns, self._trained, self.moments, *whole)
        self._steps.working = lambda: made.working()  # noqa: PLW0108 - it is set later
        return made

    def optimizer(self, module: nn.Module, theta: Tensor, before_step: Callable[[], None]) -> Optimizer:
        self.theta, self.moments = theta, LoopOptimizer(module, self._optimizer, before_step)
        self._steps.close = self.moments.close
        return self.moments

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
        self.close: Callable[[], None] = lambda: None

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

    def __init__(self, turns: Turns, trained: Trained, moments: "LoopOptimizer", *whole: Any) -> None:
        super().__init__(*whole)
        self._turns, self._trained, self._moments = turns, trained, moments

    def begin(self, batch: Batch) -> None:
        pass

    def finish(self) -> tuple[float, float | None]:
        return self._turns.loss, None

    def step(self, rate: float) -> float:
        return self._moments.rate

    def try_out(self, batch: Batch) -> None:
        pass

    def _short(self) -> OutOfMemory:
        """How many examples go at once is the loop's business, so there is nothing to wait for."""
        return OutOfMemory("the loop's evaluation does not fit beside the model: use fewer examples")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Each part of the model is in the mode that it was in afterwards. The precision is the loop's business. The
        other processes of an island do not evaluate, so DistributedDataParallel is kept from asking them."""
        bare, wrapped = self._trained.whole
        self._moments.free_gradients()
        modes = [(part, part.training) for part in bare.modules()]
        bare.eval()
        try:
            with torch.no_grad(), _within_this_process(wrapped):
                yield
        finally:
            for part, mode in modes:
                part.training = mode


@contextmanager
def _within_this_process(module: nn.Module) -> Iterator[None]:
    """Its forward pass sends no buffers, and the next one in training sends them again."""
    sends = next((part for part in module.modules() if isinstance(part, DistributedDataParallel)), None)
    if sends is None:
        yield
        return
    before = sends.broadcast_buffers, sends.require_forward_param_sync
    sends.broadcast_buffers = False
    try:
        yield
    finally:
        sends.broadcast_buffers, sends.require_forward_param_sync = before


class LoopOptimizer(Optimizer):
    """The loop makes its steps; what is here are its moments, for checkpoints and for weights that become others."""

    MOMENTS = "exp_avg", "exp_avg_sq"

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, before_step: Callable[[], None]) -> None:
        """`before_step` is called by the loop's thread before an optimizer changes these weights: this one, or another
        that has some of them."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._parameters = [p for _, p in model.parameters(module)]
        self._adamw: Any = optimizer
        self.held = 0
        self.changes = 0
        """How often the moments became others."""
        for p in self._parameters:  # a vector has them in one order, whatever the model had
            moments = optimizer.state.get(p, {})
            moments.update({name: of.contiguous() for name, of in moments.items() if isinstance(of, Tensor)})
        ours = {id(p) for p in self._parameters}

        def about_to_step(which: torch.optim.Optimizer, *_: object) -> None:
            if any(id(p) in ours for group in which.param_groups for p in group["params"]):
                before_step()

        self._hook = register_optimizer_step_pre_hook(about_to_step)

    def close(self) -> None:
        """Optimizers outlive the node, and hold nothing of it any more."""
        self._hook.remove()

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self._adamw.param_groups[0]["lr"])

    @property
    def _is_kept(self) -> bool:
        """Whether a checkpoint holds its moments."""
        kind, groups = type(self._adamw), self._adamw.param_groups
        return kind in {torch.optim.Adam, torch.optim.AdamW} and not any(group["amsgrad"] for group in groups)

    def restart(self) -> None:
        self.changes += 1
        self._adamw.state.clear()

    def new_moments(self, at: int, step: float) -> dict[str, Tensor]:
        """Of the parameter at this position, to be filled."""
        zeros = {name: torch.zeros_like(self._parameters[at], requires_grad=False) for name in self.MOMENTS}
        return {"step": torch.tensor(step), **zeros}

    def state(self) -> dict[int, dict[str, Any]]:
        if not self._is_kept:
            return {}
        found = {at: dict(self._adamw.state[p]) for at, p in enumerate(self._parameters) if self._adamw.state.get(p)}
        return {at: {**moments, "step": torch.as_tensor(moments["step"]).float()} for at, moments in found.items()}

    def is_kin(self, state: Mapping[int, Mapping[str, Any]]) -> bool:
        return self._is_kept and all(self.MOMENTS[0] in moments for moments in state.values())

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self.restart()
        on_device = any(group.get("fused") or group.get("capturable") for group in self._adamw.param_groups)
        for at, moments in state.items():
            p = self._parameters[at]
            there = {name: moments[name].to(p.device, copy=True) for name in self.MOMENTS}
            step = moments["step"].to(p.device if on_device else "cpu", copy=True)
            self._adamw.state[p] = {"step": step, **there}


def _require_whole(trained: Trained) -> None:
    """Raises UsageError where each process has a part of the weights, which would be taken for all of them."""
    wrapped = any(type(part).__name__ == "FullyShardedDataParallel" for part in trained.whole[1].modules())
    if wrapped or any(type(p.data) is not Tensor for p in trained.parameters()):  # a DTensor, say
        raise UsageError(
            "the weights that are trained must be whole in each process: use DistributedDataParallel in place of FSDP "
            "or tensor parallelism"
        )


def _require_optimizer_of(trained: Trained, optimizer: Any) -> None:
    """Raises UsageError where it is another model's, or was made before the weights became others."""
    theirs = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if theirs.isdisjoint(map(id, trained.parameters())):
        raise UsageError("the optimizer has none of the weights that are trained: name one that changes them")


def _device(module: nn.Module) -> torch.device:
    """Where the weights that are trained are. Raises UsageError."""
    trained = list(module.parameters())
    if not trained:
        raise UsageError("the model has no weights to train: none has requires_grad")
    model.require_float32(module, "torch.autocast")
    devices = {p.device for p in trained}
    if len(devices) > 1 or next(iter(devices)).type not in {"cpu", "cuda"}:
        there = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the weights that are trained must be on the CPU or on one GPU, and are on {there}")
    return devices.pop()
