"""What a replica needs to go on exactly where it was: training/replica.py makes it, checkpoints/ keeps it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STATE_BYTES = 20
"""Per parameter: θ, φ, δ and AdamW's two moments, 4 bytes each. The rest is small."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything of it: tensors in fp32 on the CPU, which nobody changes."""

    round: int
    step: int
    weights: "dict[str, Tensor]"
    """θ by the model's own parameter names."""
    outer: "dict[str, Tensor]"
    """`phi` and `delta`, flat."""
    inner: dict[str, Any]
    """Optimizer, data position, random state: plain containers and tensors."""
    eval_loss: float | None = None
    """Of the last evaluation of these weights or of those that they came from; None: not known."""
    loss: float | None = None
    """Of the last steps, on average. It shows what harmed the weights since the evaluation."""
    measured_on: str | None = None
    """Of which data they are; None: not known."""
