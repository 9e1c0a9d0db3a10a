"""Where a check runs, and what it tells: the device, its clock, and rows for the table.

On a CPU everything works too, so that the checks themselves can be tried where there is no GPU.
"""

import gc
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

LONGEST_S = 300.0
"""Of one check, where no end was set."""


class Skip(Exception):
    """Why a check cannot run here."""


@dataclass(frozen=True)
class Row:
    what: str
    wanted: str
    seen: str
    ok: bool | None
    """None: not judged."""


@dataclass
class Seen:
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What one needs to know to mend it."""


@dataclass(frozen=True)
class Place:
    device: torch.device
    quick: bool
    """Tiny sizes; no figure is judged."""
    until: float = math.inf
    """By time.monotonic."""

    @classmethod
    def of(cls, device: str, quick: bool, until: float = math.inf) -> "Place":
        where = torch.device(device)
        if where.type == "cuda":
            if not torch.cuda.is_available():
                raise SystemExit("torch sees no CUDA device here: --device cpu --quick tries this program itself")
            where = torch.device("cuda", where.index or 0)
            torch.cuda.set_device(where)
        else:
            torch.set_num_threads(1)
        return cls(where, quick, until)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return min(self.until - time.monotonic(), LONGEST_S)

    def require_gpu(self, why: str) -> None:
        if not self.on_gpu:
            raise Skip(f"needs a GPU: {why}")

    def require_s(self, seconds: float) -> None:
        if self.left_s < seconds:
            raise Skip("no time was left")

    def judged(self, ok: bool) -> bool | None:
        return None if self.quick else ok

    def figure(self, what: str, wanted: str, seen: str, ok: bool) -> Row:
        return Row(what, wanted, seen, self.judged(ok))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Between two checks."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def sleep_on_stream(self, seconds: float) -> None:
        """The current stream does nothing for about so long; the thread goes on."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles

    # ---- the clock ----
    def mark(self) -> "Mark":
        return Mark(self.on_gpu)

    def seconds_of(self, work: Callable[[], object], times: int = 10, warm_up: int = 3) -> float:
        """The median, on the device's own clock."""
        taken = []
        for _ in range(warm_up + times):
            began = self.mark()
            work()
            ended = self.mark()
            taken.append(began.until(ended))
        return median(taken[warm_up:])

    # ---- what it is ----
    def machine(self) -> dict[str, Any]:
        """For the first line, and for the JSON."""
        about: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "triton": _version("triton"),
            "numba": _version("numba"),
            "cores": os.cpu_count(),
        }
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.device)
            properties = torch.cuda.get_device_properties(self.device)
            about |= {
                "gpu": torch.cuda.get_device_name(self.device),
                "capability": ".".join(map(str, torch.cuda.get_device_capability(self.device))),
                "multiprocessors": properties.multi_processor_count,
                "cuda": torch.version.cuda,
                "hip": torch.version.hip,
                "cudnn": torch.backends.cudnn.version(),
                "driver": _driver(),
                "gpu_bytes": total,
                "gpu_free_bytes": free,
                "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF")),
            }
        return about


class Mark:
    """A moment: of the device's current stream, or of the CPU."""

    def __init__(self, on_gpu: bool) -> None:
        self.at = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self.event is not None:
            self.event.record()

    def until(self, later: "Mark") -> float:
        """Seconds; waits for the later one."""
        if self.event is None or later.event is None:
            return later.at - self.at
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


def same_bits(one: Tensor, other: Tensor) -> bool:
    """−0 is not 0, and NaN is itself. Piece by piece: no whole copy is made."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().view(-1) for tensor in (one, other)]
    if not one.numel():
        return True
    flat = [tensor.view(torch.uint8) if tensor.dtype != torch.bool else tensor for tensor in flat]
    pieces = zip(*(torch.split(tensor, 1 << 28) for tensor in flat), strict=True)
    return all(torch.equal(a, b.to(a.device)) for a, b in pieces)


def require_same(what: str, one: Tensor, other: Tensor) -> None:
    """Raises AssertionError, which says how many differ and where the first one is."""
    if same_bits(one, other):
        return
    if one.shape != other.shape or one.dtype != other.dtype:
        raise AssertionError(f"{what}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}")
    mine, theirs = (tensor.detach().cpu().contiguous().view(-1) for tensor in (one, other))
    size = mine.element_size()
    differs = (mine.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, size).any(1).nonzero().view(-1)
    first = int(differs[0])
    raise AssertionError(
        f"{what}: {len(differs)} of {len(mine)} elements differ, the first at {first}: "
        f"{mine[first].item()!r} and {theirs[first].item()!r}"
    )


def require_close(what: str, one: float, other: float, relative: float) -> None:
    if not abs(one - other) <= relative * max(abs(one), abs(other)):
        raise AssertionError(f"{what}: {one!r} and {other!r} differ by more than {relative:g} of them")


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0] if said else None


def own_frame(stack: Any) -> str | None:
    """The innermost line of this package in a stack."""
    for frame in reversed(stack):
        if f"{os.sep}noloco_node{os.sep}" in frame.filename:
            return f"noloco_node/{frame.filename.rpartition('noloco_node' + os.sep)[2]}:{frame.lineno} {frame.line}"
    return None
