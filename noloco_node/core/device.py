"""Which device trains, or which devices: `cpu`, or a GPU that torch calls `cuda`.

torch's build for AMD GPUs (ROCm) calls them `cuda` too, and the same code is meant for both; on AMD nothing of it has
been run. What differs there: `torch.version.hip` is set and `torch.version.cuda` is not; a capability is the number of
AMD's architecture, so it says nothing of bf16, which is taken as it is; host/gpu_peaks.py knows no AMD GPU, so there is
no MFU; Triton compiles the codec's kernels, and where it cannot, torch's own operations encode.
"""

import re

import torch

from noloco_node.errors import UsageError

REMEDY = "update the GPU's driver, install a torch that is built for it, or give this container the GPU"
MPS = (
    "--device mps cannot be used, as the memory plan, page-locked copies, streams and the codec's kernels know only "
    "CUDA and ROCm: use --device cpu"
)


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1`. Raises UsageError where it is not here."""
    if name == "mps":
        raise UsageError(MPS)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|cuda(:[0-9]{1,2})?", name):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:<number>, not {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name} cannot be used, as {why_no_gpu()}: {REMEDY}, or use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
        known = "cuda:0" if there == 1 else f"one of cuda:0 to cuda:{there - 1}"
        raise UsageError(f"--device {name} is not among the GPUs that torch sees here: name {known}, or take auto")
    return device


def choose_devices(names: str) -> list[torch.device]:
    """One or several, with commas between; `all`: each GPU that torch sees. The first is the node's own. Raises
    UsageError."""
    if names == "all":
        names = ",".join(f"cuda:{number}" for number in range(torch.cuda.device_count())) or "cuda"
    devices = [choose_device(name) for name in names.split(",")]
    if len({device.type for device in devices}) > 1:
        raise UsageError(f"--device {names}: a step is shared by devices of one kind only")
    return devices


def multiplies_bf16(device: torch.device) -> bool:
    """Whether its matrix products are quicker in bf16 than in fp32: a GPU's, and a CPU's with AMX. With AVX-512's
    instructions for bf16 alone they take 1.3 to 1.6 times as long, without any 3 to 20 times (torch 2.13, models of 0.4
    to 110 M parameters, one core of a Xeon)."""
    return device.type == "cuda" or (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for CPUs only"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return f"torch {torch.__version__} finds no GPU ({str(error).split('. ')[0].strip() or type(error).__name__})"
    return f"torch {torch.__version__} finds no GPU"
