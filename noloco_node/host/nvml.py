"""What an NVIDIA driver says of its cards, through its own library, NVML: power, utilisation, names, versions.

By ctypes: the library comes with the driver, and torch imports the package nvidia-ml-py wherever it is installed, which
takes 30 ms of each start on a machine without a GPU too. A card is found by its UUID. Numbers do not do: NVML counts
cards by their place, CUDA the fastest first, and CUDA_VISIBLE_DEVICES leaves some out. What a card or a driver does not
tell is None. AMD's cards are not known here.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

from noloco_node.views.status import GpuView

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
"""The longest that NVML writes is a name."""


@dataclass(frozen=True, slots=True)
class Driver:
    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    cards: tuple[str, ...]
    """Their names; here a program may see fewer (CUDA_VISIBLE_DEVICES)."""


class _Utilization(ctypes.Structure):
    """Percent of the last second or less: in which a kernel ran, and in which memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read(uuid: str, library: str = LIBRARY) -> GpuView:
    """Of the card that torch knows by this UUID. May take some milliseconds."""
    nvml, card = _card(uuid, library)
    milliwatts, shares = ctypes.c_uint(), _Utilization()
    if nvml is None:
        return GpuView()
    return GpuView(
        None if nvml.nvmlDeviceGetPowerUsage(card, ctypes.byref(milliwatts)) else milliwatts.value / 1e3,
        None if nvml.nvmlDeviceGetUtilizationRates(card, ctypes.byref(shares)) else shares.gpu / 100,
    )


def driver(library: str = LIBRARY) -> Driver | None:
    """None where there is none that works."""
    nvml = _load(library)
    version, cuda, count = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.c_int(), ctypes.c_uint()
    if (
        nvml is None
        or nvml.nvmlSystemGetDriverVersion(version, len(version))
        or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    ):
        return None
    names = (_name(nvml, number) for number in range(count.value))
    return Driver(version.value.decode(), (cuda.value // 1000, cuda.value % 1000 // 10), tuple(filter(None, names)))


@cache
def _card(uuid: str, library: str) -> tuple[ctypes.CDLL | None, ctypes.c_void_p]:
    """Without the library where its driver does not know the card, as a part of one (MIG)."""
    nvml, card = _load(library), ctypes.c_void_p()
    if nvml is not None and nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(card)):
        nvml = None
    return nvml, card


def _load(library: str) -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


def _name(nvml: ctypes.CDLL, number: int) -> str | None:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return None
    return None if nvml.nvmlDeviceGetName(handle, name, len(name)) else name.value.decode()
