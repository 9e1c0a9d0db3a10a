"""What fits into this machine's memory: the plan of a run, item by item, and how many examples go through at once.

On a GPU lie θ, its gradient and AdamW's moments; in a forward pass autocast's copies of the weights in bf16, and what
the backward pass needs of one micro-batch. φ and δ, what the length correction owes them, the snapshot of an open offer
and the corrections of a swap lie beside them where that leaves room for activations, else in host memory, where a
boundary and a correction reach them piece by piece. A checkpoint is in host memory until it is on the disk; where there
is no room for that, its copy goes to a file instead (background_copy.py). A machine that cannot hold the rest is
refused before it trains, instead of being killed by the system later.

What the tensors take is known from the manifest; what an example takes is found by trying one, before a state is
downloaded. How many examples go through the model at once is found by trying on a GPU; on a CPU it is the task's own
number, so that results there are the same to the bit each time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.base.units import size
from noloco_node.core import gpu
from noloco_node.errors import OutOfMemory
from noloco_node.host import memory
from noloco_node.host.config import EIGHT_BIT, FULL

MOMENT_BYTES = {FULL: 8.0, EIGHT_BIT: 2 + 8 / 256}
"""Per parameter, of both moments; those of 8 bits have a scale for each block of 256."""
COPY_BYTES = 8
"""Per parameter: φ and δ."""
SLOW: dict[str, float] = {
    "slow weights and momentum": COPY_BYTES,
    "owed length": 2,
    "open offer": 4,
    "corrections until judged": 1,
}
"""Per parameter: what a round needs besides training (core/length_correction.py, core/verdict.py). Corrections take 4
with codecs without units."""
CHECKPOINT, PROGRAM = "checkpoint being written", "program"
HOLES = 0.03
"""The share of a GPU's memory that stays unused: allocators leave holes, and libraries take some MB for themselves."""
HEAP = 0.06
"""The share of the tensors in a CPU's training that the C library keeps beside them, between freed blocks."""
SPILL_ROOM = 1.25
"""Times its size that is to be free for a copy in memory: activations, and other programs, come and go."""
SPARE = 0.9
"""The share of free memory that a micro-batch may take: the next ones may be a little larger."""
CALM_STEPS = 50
"""Steps after which a halved micro-batch is tried with twice its size where nothing says that it fits: a try that fails
costs less than one step."""


@dataclass(frozen=True, slots=True)
class Item:
    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The most that a run takes at once; on a GPU copies for a checkpoint take more for a while, where that is free."""

    parameters: int
    device: tuple[Item, ...]
    """On the GPU; nothing on a CPU."""
    host: tuple[Item, ...]

    @property
    def device_bytes(self) -> int:
        return sum(item.bytes for item in self.device)

    @property
    def host_bytes(self) -> int:
        return sum(item.bytes for item in self.host)

    @property
    def host_least(self) -> tuple[Item, ...]:
        """Without what may go to a file."""
        return tuple(item for item in self.host if item.what != CHECKPOINT)

    @property
    def host_least_bytes(self) -> int:
        return sum(item.bytes for item in self.host_least)


def plan(  # noqa: PLR0913
    parameters: int,
    *,
    on_gpu: bool = False,
    slow_on_gpu: bool = False,
    bf16: bool = False,
    moments: str = FULL,
    activations: int = 0,
    program: int = 0,
) -> Plan:
    """`bf16`: whether autocast makes copies of the weights; `activations`: what a micro-batch took when it was tried,
    those copies included; `program`: what the process has beside the model."""

    def items(table: dict[str, float]) -> list[Item]:
        return [Item(what, round(each * parameters)) for what, each in table.items()]

    # a verdict's copy of the weights lies where the gradient does in a step
    fast: dict[str, float] = {"weights": 4, "gradient": 4, "moments": MOMENT_BYTES[moments]}
    copies = Item("weights in bf16", 2 * parameters)
    tried = [Item("activations", max(0, activations - (copies.bytes if bf16 else 0)))]
    train = items(fast) + ([copies] if bf16 else []) + tried
    slow = items(SLOW)
    apart = items({**SLOW, "open offer": 8})  # a boundary may make one before the last is over
    rest = [*items({CHECKPOINT: 12 + MOMENT_BYTES[moments]}), Item(PROGRAM, program)]
    if not on_gpu:
        tensors = (*train, *slow)
        heap = Item("between freed blocks", round(HEAP * sum(item.bytes for item in tensors)))
        return Plan(parameters, (), (*tensors, heap, *rest))
    if slow_on_gpu:
        return Plan(parameters, (*train, *slow), tuple(rest))
    return Plan(parameters, tuple(train), (*apart, *rest))


def check(planned: Callable[[str], Plan], moments: str, device: torch.device, fraction: float) -> None:
    """Raises OutOfMemory where a run does not fit. `planned` gives its plan with either kind of moments."""
    ours, smaller = planned(moments), planned(EIGHT_BIT)
    if ours.device and not fits(ours, room := gpu_room(device, fraction)):
        remedy = "end other programs there, or use a larger card"
        if smaller.device_bytes < ours.device_bytes and fits(smaller, room):
            remedy = f"use --moments 8bit, with which it needs {size(smaller.device_bytes)}, or a larger card"
        raise _refused(ours.device, room, "of the GPU" + held_by_others(device, fraction), remedy)
    if ours.host_least_bytes > (there := memory.total_bytes()):
        raise _refused(ours.host_least, there, "beside the GPU" if ours.device else "here", "use a larger machine")


def most_parameters(gpu: int | None, host: int | None, moments: str = FULL, *, bf16: bool = False) -> int | None:
    """Of a model that can be trained with so many bytes, without activations; None where they are not known. `gpu`: on
    the card, None without one; `bf16`: as in `plan`."""
    some = 10**6
    found = plan(some, on_gpu=gpu is not None, bf16=bf16, moments=moments)
    rooms = [some * host / found.host_least_bytes] if host is not None else []
    rooms += [some * (1 - HOLES) * gpu / found.device_bytes] if gpu is not None else []
    return int(min(rooms)) if rooms else None


def round_bytes(parameters: int, slow_on_gpu: bool) -> int:
    """What a GPU holds of a round from a boundary on, until its swap is judged."""
    return round(parameters * (SLOW["open offer"] + SLOW["corrections until judged"])) if slow_on_gpu else 0


def fits(plan: Plan, room: int) -> bool:
    """On a GPU with so many bytes for it."""
    return plan.device_bytes <= (1 - HOLES) * room


def _refused(items: tuple[Item, ...], there: int, where: str, remedy: str) -> OutOfMemory:
    parts = ", ".join(f"{item.what} {size(item.bytes)}" for item in items if item.bytes)
    return OutOfMemory(
        f"to be trained, the run's model needs {size(sum(item.bytes for item in items))} and there are {size(there)} "
        f"{where} ({parts}): {remedy}, or join another run"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host: torch says the latter in words only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def has_room(size: int) -> bool:
    """Whether memory has room for a copy of so many bytes."""
    free = memory.free_bytes()
    return free is None or free >= SPILL_ROOM * size


def check_free(needed: int, what: str) -> None:
    """Raises OutOfMemory where memory has no room for so many bytes."""
    free = memory.free_bytes()
    if free is not None and needed > free:
        raise OutOfMemory(f"{what} needs {size(needed)} and {size(free)} are free")


def free_bytes(device: torch.device, fraction: float) -> int:
    """What torch could still take of a GPU: what is free, and what torch has reserved and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = int(fraction * total) - torch.cuda.memory_allocated(device)
    return min(free + cached, allowed)


def held_by_others(device: torch.device, fraction: float = 1.0) -> str:
    """Of a GPU, as the end of a sentence; empty where it is not what keeps training within bounds."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return f", as other programs have {size(others)}" if others > max(HOLES, 1 - fraction) * total else ""


def gpu_room(device: torch.device, fraction: float) -> int:
    """What training may take of a GPU in all, what it has already included."""
    return free_bytes(device, fraction) + torch.cuda.memory_allocated(device)


def slow_fits(parameters: int, free: int, moments: str) -> bool:
    """Whether what a round needs may lie on the GPU, too: with AdamW's moments it may take half of what is free; the
    rest is for the gradient and activations."""
    return parameters * (sum(SLOW.values()) + MOMENT_BYTES[moments]) <= free / 2


def slow_vectors(theta: Tensor, fraction: float, moments: str) -> tuple[Tensor, Tensor]:
    """φ as a copy of θ, and δ of zeros, where they fit."""
    if theta.is_cuda and not slow_fits(len(theta), free_bytes(theta.device, fraction), moments):
        return gpu.pinned(len(theta)).copy_(theta), gpu.pinned(len(theta)).zero_()
    return theta.clone(), torch.zeros_like(theta)


class MicroBatch:
    """How many examples of a step's batch go through the model at once. Which number it is changes results by
    rounding only."""

    def __init__(self, examples: int, start: int | None) -> None:
        """`start` None: yet to be found, by trying with twice as many each time."""
        self._examples = examples
        self.settled = start is not None
        self.size = self._largest = min(examples, start or 1)
        self._calm = 0
        """Steps since it was halved, or tried to grow back."""
        self._counts, self._counted = True, False
        """Whether it grows back by what is free, and whether it did so after the last step."""

    def may_grow(self, taken: int, room: int) -> bool:
        """Whether to try twice as many examples, after a try with `size` took so many bytes. Twice as many take at most
        twice that, as a part of it is the same for any size."""
        if self.settled or self.size == self._examples or 2 * taken > SPARE * room:
            self.settled, self._largest = True, self.size
            return False
        self.size = min(2 * self.size, self._examples)
        return True

    def halve(self) -> bool:
        """Halve it: it does not fit at this moment. False where it cannot be halved."""
        self._calm = 0
        self._counts = self._counts and not self._counted  # what is free lies in pieces
        self._counted = False
        if self.size == 1:
            return False
        self.size //= 2
        if not self.settled:
            self.settled, self._largest = True, self.size
        return True

    def stepped(self, fits: Callable[[], bool] = lambda: False) -> None:
        """A step has found memory. A size that was halved grows back to what had been found at first: at once when that
        `fits`, as when another program has ended; and twice as large after CALM_STEPS in any case."""
        self._calm += 1
        self._counted = False
        if not self.settled or self.size == self._largest:
            return
        if self._counts and fits():
            self.size, self._counted = self._largest, True
        elif self._calm >= CALM_STEPS:
            self._calm, self.size = 0, min(2 * self.size, self._largest)
            self._counts |= self.size == self._largest
