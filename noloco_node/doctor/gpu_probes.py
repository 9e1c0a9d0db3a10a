"""Facts about this machine's GPU, and a second of work on it. Nothing is judged or changed here."""

import os
import shutil
import time
from collections.abc import Callable

import torch

from noloco_node.core.kernels import for_device
from noloco_node.doctor.gpu_verdicts import BF16_CAPABILITY, Card, Speed, Unused
from noloco_node.host import gpu_peaks, nvml
from noloco_node.host.gpu_cards import has_nvidia_card

SIDE = 4096
"""Of the matrices that are multiplied: 0.14 T operations, 32 MiB each in 16 bits."""
REPEATS = 20
COPY_BYTES = 256 << 20
WARM_UP_S = 0.2
"""A card that had nothing to do takes so long to run at its full clock."""


def look(device: str) -> Card | Unused | None:
    """`device`: as the user names it, of several the first; None where that is no GPU, or one that is not here. Takes
    seconds."""
    device = device.partition(",")[0]
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return Unused(nvml.driver(), has_nvidia_card(os.environ), torch.__version__, _built_for())
    where = torch.device("cuda" if device in {"auto", "all"} else device)
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        return None
    others = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()) if i != index]
    free, total = torch.cuda.mem_get_info(index)
    compiles, speed, trouble = False, None, None
    try:
        compiles = for_device("cuda").NAME == "triton"
        speed = measure(torch.device("cuda", index))
    except RuntimeError as error:  # torch's OutOfMemoryError too
        trouble = str(error).strip().partition("\n")[0]
    return Card(
        names=(torch.cuda.get_device_name(index), *others),
        capability=torch.cuda.get_device_capability(index),
        torch_cuda=_built_for() or "",
        driver=nvml.driver(),
        free_bytes=free,
        total_bytes=total,
        compiles=compiles,
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        speed=speed,
        trouble=trouble,
    )


def measure(device: torch.device) -> Speed:
    """Raises RuntimeError where the card does not do it."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    dtype = torch.bfloat16 if capability >= BF16_CAPABILITY else torch.float16
    if capability < (7, 0):  # without matrix units some cards take a hundred times as long in 16 bits
        dtype = torch.float32
    with torch.cuda.device(device):
        a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(a)
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        product_s = _seconds(lambda: torch.mm(a, b, out=product), REPEATS)
        to_device_s = _seconds(lambda: there.copy_(here, non_blocking=True), 4)
        to_host_s = _seconds(lambda: here.copy_(there, non_blocking=True), 4)
    return Speed(
        precision=str(dtype).removeprefix("torch."),
        flops=2 * SIDE**3 / product_s,
        peak=gpu_peaks.bf16_flops(name) if dtype == torch.bfloat16 else None,
        to_device=COPY_BYTES / to_device_s,
        to_host=COPY_BYTES / to_host_s,
    )


def _seconds(work: Callable[[], object], times: int) -> float:
    """Of one, by the GPU's clock."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        work()
        torch.cuda.synchronize()
    began.record()
    for _ in range(times):
        work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / times


def _built_for() -> str | None:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None
