"""Measure seconds and memory of a codec on this machine, beside a plain memory copy.

On the CPU whole conversations are timed, fragment by fragment, as a node has them: *encoding* is all that a side does
until it has sent its codes, *decoding* what comes after, blocks sent again included; the median fragment counts. After
each one a fragment is copied: on a busy machine only the ratios mean something. On CUDA the kernels alone are timed,
over the whole vector, by CUDA's own clock, and a copy from the card's memory to the card's memory.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from noloco_node.bench.replica_pairs import Side, Watched
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, Conversation, carry
from noloco_node.core.codecs.lattice import Lattice
from noloco_node.core.kernels import Grid, for_device
from noloco_node.host import memory
from noloco_node.training.thread import FRAGMENT_ELEMENTS

LEARNED = 4
"""Fragments whose ranges a codec learns before timing begins; the vector is periodic, so these serve all."""
COPIES = 16
"""Fragments that are copied to in turn, 64 MiB: memory that is mapped already, and in no cache."""


IN_A_ROW = 10
"""Times that the work is done between two looks at a GPU's clock."""


@dataclass(frozen=True, slots=True)
class Speed:
    """GB of fp32 a second."""

    encode: float
    decode: float
    copy: float


def speed(name: str, device: str, one: Side, other: Side) -> Speed:
    """Speed of swapping two vectors of any length."""
    return _speed_on_cuda(name, one, other) if device == "cuda" else _speed(name, one, other)


def peak_extra_bytes(name: str, device: str, one: Side, other: Side) -> int | None:
    """Of one side's conversation about one fragment, without u itself; None where the system has no such figure.

    The partner's payloads are recorded in a first conversation, so that only one side is in memory in the second.
    """
    mine, theirs = (side.repeated(FRAGMENT_ELEMENTS).fragments(device)[0] for side in (one, other))
    partner = Watched(_converse(name, theirs))
    carry(partner, _converse(name, mine))
    on_cuda = device == "cuda"
    before = _fresh_mark(on_cuda)
    conversation = _converse(name, mine)
    conversation.open()
    received = [conversation.receive(reply) for reply in partner.sent]  # kept, as a node does until it is sent
    after = torch.cuda.max_memory_allocated() if on_cuda else memory.peak_bytes()
    del received
    return None if before is None or after is None else max(0, after - before)


def _converse(name: str, side: Side) -> Conversation:
    return codec(name).converse(side.u, 0, bytes(16), side.moved)


# ---- seconds ----
def _speed(name: str, one: Side, other: Side) -> Speed:
    mine, theirs = one.fragments(), other.fragments()
    codecs = codec(name), codec(name)
    copies = np.ones((COPIES, len(mine[0].u)), np.float32)
    timings = []
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        place = index % LEARNED
        pair = (c.converse(s.u, place, bytes(16), s.moved) for c, s in zip(codecs, (a, b), strict=True))
        far = mine[(index + len(mine) // 2) % len(mine)]  # in no cache
        timings.append((*_time_conversation(*pair), _time_copy(far, copies[index % len(copies)])))
    whole = [t for t, a in zip(timings, mine, strict=True) if len(a.u) == len(mine[0].u)]
    known = whole[LEARNED:] or whole  # kernels are compiled, and ranges learnt
    return Speed(*(4e-9 * len(mine[0].u) / median(column) for column in zip(*known, strict=True)))


def _time_conversation(mine: Conversation, theirs: Conversation) -> tuple[float, float]:
    """Seconds that our side takes to (encode, decode)."""
    ours = Watched(mine)
    carry(ours, theirs)
    ours.learn()
    theirs.learn()
    encoding = 1 if len(ours.turns_s) == 2 else 2  # where ranges come first, codes are the second payload
    return sum(ours.turns_s[:encoding]), sum(ours.turns_s[encoding:])


def _time_copy(side: Side, into: NDArray[np.float32]) -> float:
    """Seconds, on one thread as the codec."""
    began = time.perf_counter()
    np.copyto(into[: len(side.u)], side.u.numpy())
    return time.perf_counter() - began


def _speed_on_cuda(name: str, one: Side, other: Side) -> Speed:
    kernels, bits = for_device("cuda"), Lattice.parse(name.partition(":")[2]).bits
    mine, theirs = (side.u.cuda().view(-1, BLOCK) for side in (one, other))
    step = torch.full((len(mine),), 2.0**-12, device="cuda")
    grid = Grid(1 / step, step / 2, 0)
    codes_i, codes_j = (kernels.encode(u, grid, bits)[0] for u in (mine, theirs))
    copy = torch.empty_like(mine)

    def encode() -> None:
        kernels.peaks(mine)
        kernels.encode(mine, grid, bits)

    def decode() -> None:
        kernels.decode(codes_i, codes_j, grid.half_step, bits)

    return Speed(*(4e-9 * mine.numel() / _cuda_s(work) for work in (encode, decode, lambda: copy.copy_(mine))))


def _cuda_s(work: Callable[[], object]) -> float:
    """The GPU has the next piece of work before it ends the last one, so what the host takes to hand it over does not
    count."""
    taken = []
    for _ in range(8):  # the first three only warm up
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(IN_A_ROW):
            work()
        ended.record()
        torch.cuda.synchronize()
        taken.append(float(began.elapsed_time(ended)) / 1e3 / IN_A_ROW)
    return median(taken[3:])


# ---- memory ----
def _fresh_mark(on_cuda: bool) -> int | None:
    """What is held now, from where the peak counts again; on the CPU, free memory goes back to the system first."""
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc
    return memory.forget_peak()
