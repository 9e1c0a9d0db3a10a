"""AdamW on a module's parameters, and the gradients that it takes: each backward pass makes its own.

Gradients that stayed would lie beside the next forward pass's activations, at the very peak of memory: one flat vector
of them made that 7% more on the `125m` preset. So autograd makes them, one for each parameter, as in any plain loop,
whose results are the same to the bit, and they are freed right before memory is needed again. Not earlier: freed at a
step's end, they let the C library return a small model's heap to the system, which hands it out again page by page (2%
of a step of `tiny`). A parameter that had no part in the loss is left alone, not decayed.

AdamW is arXiv 1711.05101 and torch's. Knows nothing of losses, schedules or rounds.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.run.schema import InnerSpec


class Optimizer:
    def __init__(self, module: nn.Module, spec: InnerSpec) -> None:
        self._parameters = list(module.parameters())
        self._spec = spec
        self._adamw = self._fresh()
        self._norm: Tensor

    def _fresh(self) -> torch.optim.AdamW:
        """Matrices decay; the rest (gains, biases) does not."""
        matrices = [p for p in self._parameters if p.dim() >= 2]
        rest = [p for p in self._parameters if p.dim() < 2]
        decays = ((matrices, self._spec.weight_decay), (rest, 0.0))
        groups = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
        return torch.optim.AdamW(groups, lr=self._spec.learning_rate, betas=self._spec.betas, fused=True)

    # ---- gradients ----
    def free_gradients(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def norm(self) -> Tensor:
        """Norm of the whole gradient, as torch's own clipping computes it. `step` clips by it, on its device."""
        self._norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return self._norm

    def divide(self, by: float) -> None:
        """The gradients, and their norm."""
        torch._foreach_mul_([self._norm, *(p.grad for p in self._parameters if p.grad is not None)], 1 / by)

    def step(self, rate: float) -> None:
        """One step of AdamW with the gradient, clipped by what `norm` was last."""
        nn.utils.clip_grads_with_norm_(self._parameters, self._spec.clip, self._norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    # ---- moments ----
    @property
    def has_moments(self) -> bool:
        """As AdamW has after its first step."""
        return bool(self._adamw.state)

    def restart(self) -> None:
        """Restart without moments."""
        self._adamw = self._fresh()

    def state(self) -> dict[int, dict[str, Any]]:
        """Moments and steps by a parameter's position, matrices first. Not a copy."""
        found: dict[int, dict[str, Any]] = self._adamw.state_dict()["state"]
        return found

    def fits(self, state: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether these are moments of such parameters."""
        places = [p for group in self._adamw.param_groups for p in group["params"]]
        return all(
            place in range(len(places)) and moments[key].shape == places[place].shape
            for place, moments in state.items()
            for key in ("exp_avg", "exp_avg_sq")
        )

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self.restart()
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": dict(state)})
