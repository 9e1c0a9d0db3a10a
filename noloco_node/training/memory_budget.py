"""What fits into this machine's memory: the training state, a micro-batch, a copy of the state for a joining node.

On a GPU, θ, its gradient and AdamW's two moments must lie there: 16 bytes a parameter. φ and δ, and the length
correction's vector, lie beside them where that leaves room for activations, else in host memory, φ and δ pinned, where
a boundary and a correction reach them piece by piece. The snapshot of an open offer is always in host memory, and so is
a checkpoint until it is on the disk: a machine that cannot hold both is refused before it trains, instead of being
killed by the system at its first checkpoint. How many examples go through the model at once is found by trying on a
GPU; on a CPU it is the task's own number, so that results there are the same to the bit each time.
"""

import torch
from torch import Tensor

from noloco_node.base.units import rate, size
from noloco_node.core import gpu
from noloco_node.errors import OutOfMemory
from noloco_node.host import memory
from noloco_node.training import model

FAST_BYTES = 16
"""Per parameter: θ, its gradient and AdamW's two moments, 4 bytes each."""
COPY_BYTES = 8
"""Per parameter: φ and δ."""
SLOW_BYTES = COPY_BYTES + 2
"""Per parameter: φ, δ and what the length correction owes them (core/length_correction.py)."""
SNAPSHOT_BYTES = 4
"""Per parameter, while an offer is open."""
CHECKPOINT_BYTES = 20
"""Per parameter, while one is written: a copy of θ, φ, δ and AdamW's moments, while training goes on."""
KEPT_BYTES = 1
"""Per parameter, in a swap: its corrections, until it is known whether they did harm; 4 with codecs without units."""
PEAK_BYTES = FAST_BYTES + SLOW_BYTES + SNAPSHOT_BYTES + KEPT_BYTES + CHECKPOINT_BYTES
MOMENT_BYTES = 8
"""Per parameter: what AdamW makes in its first step only."""
SPARE = 0.9
"""The share of free memory that counts: allocators leave holes."""


def check(parameters: int, device: torch.device, fraction: float) -> None:
    """Raises OutOfMemory where the state of this number of parameters does not fit."""
    on_gpu, here = bytes_each(parameters, device, fraction)
    if on_gpu:
        _check(parameters, on_gpu, _gpu_bytes(device, fraction), "on the GPU")
    _check(parameters, here, model.memory_bytes(), "beside the GPU" if on_gpu else "here")


def bytes_each(parameters: int, device: torch.device, fraction: float) -> tuple[int, int]:
    """Per parameter, at least: on the GPU, and in host memory. Activations come on top."""
    if device.type != "cuda":
        return 0, PEAK_BYTES
    return FAST_BYTES, beside_gpu_bytes(parameters, _gpu_bytes(device, fraction))


def _gpu_bytes(device: torch.device, fraction: float) -> int:
    return int(fraction * torch.cuda.get_device_properties(device).total_memory)


def beside_gpu_bytes(parameters: int, of_gpu: int) -> int:
    """Per parameter, in host memory; `of_gpu`: the bytes that training may take there."""
    slow = 0 if slow_fits(parameters, of_gpu - 4 * parameters) else SLOW_BYTES
    return slow + SNAPSHOT_BYTES + KEPT_BYTES + CHECKPOINT_BYTES


def check_copy(parameters: int) -> None:
    """Raises OutOfMemory where a joining node's copy of φ and δ does not fit beside the next checkpoint."""
    needed, free = parameters * (COPY_BYTES + CHECKPOINT_BYTES), memory.free_bytes()
    if free is not None and needed > free:
        raise OutOfMemory(f"a copy of the state, beside a checkpoint, needs {size(needed)} and {size(free)} are free")


def check_trial(parameters: int) -> None:
    """Raises OutOfMemory where a copy of θ and a new model do not fit while a peer's weights are tried."""
    needed, free = 12 * parameters, memory.free_bytes()
    if free is not None and needed > free:
        raise OutOfMemory(f"trying a peer's state needs {size(needed)} and {size(free)} are free")


def free_bytes(device: torch.device, fraction: float) -> int:
    """What torch could still take of a GPU: what is free, and what torch has reserved and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = int(fraction * total) - torch.cuda.memory_allocated(device)
    return min(free + cached, allowed)


def slow_fits(parameters: int, free: int) -> bool:
    """Whether φ, δ and what they are owed may lie on the GPU too: with AdamW's moments they may take half of what is
    free; the rest is for activations."""
    return parameters * (SLOW_BYTES + MOMENT_BYTES) <= free // 2


def slow_vectors(theta: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """φ as a copy of θ, and δ of zeros, where they fit."""
    if theta.is_cuda and not slow_fits(len(theta), free_bytes(theta.device, fraction)):
        return gpu.pinned(len(theta)).copy_(theta), gpu.pinned(len(theta)).zero_()
    return theta.clone(), torch.zeros_like(theta)


class MicroBatch:
    """How many examples of a step's batch go through the model at once. Which number it is changes results by
    rounding only."""

    def __init__(self, examples: int, start: int | None) -> None:
        """`start` None: yet to be found, by trying with twice as many each time."""
        self._examples = examples
        self.settled = start is not None
        self.size = min(examples, start or 1)

    def may_grow(self, taken: int, room: int) -> bool:
        """Whether to try twice as many examples, after a try with `size` took so many bytes. Twice as many take at most
        twice that, as a part of it is the same for any size."""
        if self.settled or self.size == self._examples or 2 * taken > SPARE * room:
            self.settled = True
            return False
        self.size = min(2 * self.size, self._examples)
        return True

    def halve(self) -> None:
        """Halve it: it did not fit. Raises OutOfMemory where it cannot be halved."""
        if self.size == 1:
            raise OutOfMemory("not even one example fits into the device's memory beside the model")
        self.size //= 2
        self.settled = True


def _check(parameters: int, each: int, there: int, where: str) -> None:
    if (needed := parameters * each) > there:
        raise OutOfMemory(
            f"the run's model needs {size(needed)} {where} to be trained ({rate(parameters)} parameters, "
            f"{each} bytes each) and there are {size(there)}: join another run, or use a larger machine"
        )
