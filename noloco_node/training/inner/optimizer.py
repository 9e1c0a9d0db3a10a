"""AdamW on a module's parameters, and the gradients that it takes: each backward pass makes its own.

Gradients that stayed would lie beside the next forward pass's activations, at the very peak of memory: one flat vector
of them made that 7% more on the `125m` preset. So autograd makes them, one for each parameter, as in any plain loop,
whose results are the same to the bit, and they are freed right before memory is needed again. Not earlier: freed at a
step's end, they let the C library return a small model's heap to the system, which hands it out again page by page (2%
of a step of `tiny`). A parameter that had no part in the loss is left alone, not decayed.

AdamW is arXiv 1711.05101 and torch's. Its moments may have 8 bits instead of 32 (arXiv 2110.02861), where a model would
not fit into the memory of a GPU otherwise: 2.03 bytes a parameter instead of 8. That is each machine's own choice, and
bitsandbytes does it: its moments are plain tensors, and it leaves the parameters the views that they are. (torchao
needs a C compiler, and its moments are a class that a checkpoint which runs no code cannot hold.) What 8 bits do to the
loss: bench/README.md.

Knows nothing of losses, schedules or rounds.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.base.extras import pip_install
from noloco_node.errors import UsageError
from noloco_node.host.config import EIGHT_BIT, FULL
from noloco_node.run.schema import InnerSpec
from noloco_node.training import model
from noloco_node.training.background_copy import host_memory
from noloco_node.training.memory_budget import MOMENT_BYTES

SMALL = 4096
"""Elements below which a tensor's moments stay fp32, as bitsandbytes has it: a few gains and biases."""


class Optimizer:
    def __init__(self, module: nn.Module, spec: InnerSpec, moments: str = FULL) -> None:
        """`moments`: FULL or EIGHT_BIT. Raises UsageError where the second one's library is missing."""
        self._parameters = list(module.parameters())
        self._spec = spec
        self._small = moments == EIGHT_BIT
        self.clip = spec.clip
        """Largest norm of a step's gradient."""
        self.held = 0
        """Tokens of a step that is under way, whose gradients are to stay (stages/passes.py)."""
        self._adamw = self._fresh()
        self._norm: Tensor

    def _fresh(self) -> Any:
        """Matrices decay; the rest (gains, biases) does not."""
        matrices = [p for p in self._parameters if p.dim() >= 2]
        rest = [p for p in self._parameters if p.dim() < 2]
        decays = ((matrices, self._spec.weight_decay), (rest, 0.0))
        groups = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
        rates: dict[str, Any] = {"lr": self._spec.learning_rate, "betas": self._spec.betas}
        if self._small:
            return _bitsandbytes().AdamW8bit(groups, min_8bit_size=SMALL, **rates)
        return torch.optim.AdamW(groups, fused=True, **rates)

    def _places(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, int, int]]:
        """Each parameter, its group, and where both are."""
        for at, group in enumerate(self._adamw.param_groups):
            for place, p in enumerate(group["params"]):
                yield group, p, at, place

    def missing_bytes(self) -> int:
        """What gradients and moments that are not there would take."""
        gradients = sum(p.nbytes for p in self._parameters if p.grad is None)
        fresh = sum(p.numel() for p in self._parameters if not self._adamw.state.get(p))
        return gradients + round(fresh * MOMENT_BYTES[EIGHT_BIT if self._small else FULL])

    # ---- gradients ----
    def free_gradients(self) -> None:
        """Free the gradients that are not held."""
        if not self.held:
            self._adamw.zero_grad(set_to_none=True)

    def room(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Memory as that of these, of any content: their gradients', which are given up, unless they are held. Autograd
        may have given two of them one memory."""
        found, taken = [], set[int]()
        for p in parameters:
            gradient = None if self.held else p.grad
            if (
                gradient is None
                or gradient.layout != torch.strided
                or not gradient.is_contiguous()
                or (at := gradient.untyped_storage().data_ptr()) in taken
            ):
                found.append(torch.empty_like(p, requires_grad=False) if p.is_cuda else host_memory(p.shape))
                continue
            taken.add(at)
            found.append(gradient)
            p.grad = None
        return found

    def norm(self) -> Tensor:
        """Norm of the whole gradient, as torch's own clipping computes it. `step` clips by it, on its device."""
        self._norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return self._norm

    def divide(self, by: float) -> None:
        """The gradients, and their norm."""
        torch._foreach_mul_([self._norm, *(p.grad for p in self._parameters if p.grad is not None)], 1 / by)

    def step(self, rate: float) -> None:
        """One step of AdamW with the gradient, clipped by what `norm` was last. Where a GPU has no memory for it, no
        parameter has changed: all that is allocated is allocated before."""
        for group, p, at, place in self._places():
            group["lr"] = rate
            if p.grad is not None and not self._adamw.state.get(p):
                self._make_moments(group, p, at, place)
        nn.utils.clip_grads_with_norm_(self._parameters, self.clip, self._norm)
        if not self._small:
            self._adamw.step()
            return
        for group, p, at, place in self._places():  # the library's `step` waits for the whole GPU after each of them
            if p.grad is not None:
                self._adamw.update_step(group, p, at, place)

    # ---- moments ----
    def restart(self) -> None:
        """Restart without moments, and without what is held: it is of other weights."""
        self.held = 0
        self._adamw = self._fresh()

    def _make_moments(self, group: dict[str, Any], p: nn.Parameter, at: int, place: int) -> None:
        """The ones that the first step would make; all of a parameter's or none."""
        if not self._small:
            step = torch.zeros((), device=p.device)
            self._adamw.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            return
        try:
            self._adamw.init_state(group, p, at, place)
        except torch.OutOfMemoryError:
            self._adamw.state.pop(p, None)
            raise

    def state(self) -> dict[int, dict[str, Any]]:
        """Moments and steps by a parameter's position, matrices first. Not a copy."""
        found = {}
        for at, (_, p, _, _) in enumerate(self._places()):
            if moments := self._adamw.state.get(p):
                found[at] = {key: value for key, value in moments.items() if not key.startswith("qmap")}  # a constant
                found[at]["step"] = torch.as_tensor(moments["step"], dtype=torch.float32)
        return found

    def is_kin(self, state: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether these moments have as many bits as ours, or are none at all."""
        return all(("state1" in moments) == self._small for moments in state.values())

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Those of `state`, where `is_kin`."""
        self.restart()
        if not self._small:
            self._adamw.load_state_dict({**self._adamw.state_dict(), "state": dict(state)})
            return
        for number, (group, p, at, place) in enumerate(self._places()):
            if number in state:
                self._make_moments(group, p, at, place)
                ours = self._adamw.state[p]
                for key, value in state[number].items():
                    ours[key] = int(value) if key == "step" else ours[key].copy_(value)


def _bitsandbytes() -> Any:
    """Its optimizers. Raises UsageError."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of what it lacks for other purposes
    try:
        with model.offline():  # on some CPUs it would look for a kernel on the hub
            from bitsandbytes import optim
    except ImportError:
        raise UsageError(f"--moments 8bit needs another package: {pip_install('8bit')}") from None
    return optim
