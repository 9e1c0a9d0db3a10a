"""Judges facts about a GPU: can torch use it, and does it do what its kind can?

Pure: facts in, findings of one line out. Limits carry their reasons.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from noloco_node.base.units import share, size
from noloco_node.doctor.verdicts import ERROR, OK, WARNING, Finding
from noloco_node.host.nvml import Driver

BF16_CAPABILITY = (8, 0)
"""Before it bf16 is emulated, and fp16 is what is quick."""
LEAST_OF_PEAK = 0.4
"""A large product reaches 60 to 95% of a card's peak."""
COPY_LOW = 3e9
"""Bytes a second: PCIe 3 with four lanes. Where φ and δ do not fit beside the model, each boundary copies 16 bytes a
parameter, at 1 B parameters 5 s."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that torch uses."""

    names: tuple[str, ...]
    """Of this one, and of the others that torch sees."""
    capability: tuple[int, int]
    torch_cuda: str
    """The version that torch was built for, as `CUDA 12.8` or `ROCm 6.4`."""
    driver: Driver | None
    free_bytes: int
    total_bytes: int
    compiles: bool
    """Whether Triton's kernels were built, or come from its cache."""
    compiler: str | None
    speed: "Speed | None" = None
    trouble: str | None = None
    """Why the speed could not be measured."""


@dataclass(frozen=True, slots=True)
class Speed:
    precision: str
    flops: float
    """Operations a second of a large matrix product."""
    peak: float | None
    """What the card can do at most in bf16; None for another precision or an unknown card."""
    to_device: float
    """Bytes a second between page-locked host memory and the card."""
    to_host: float


@dataclass(frozen=True, slots=True)
class Unused:
    """torch sees no GPU."""

    driver: Driver | None
    nvidia: bool
    """Whether there is an NVIDIA card on the PCI bus."""
    torch: str
    torch_cuda: str | None
    """The version of CUDA or ROCm that torch was built for; None: a build for the CPU."""


def judge(found: Card | Unused) -> Iterator[Finding]:
    if isinstance(found, Unused):
        yield from _unused(found)
        return
    yield _card(found)
    if not found.compiles:
        yield _no_kernels(found.compiler)
    if found.trouble is not None:
        yield _trouble(found, found.trouble)
    elif found.speed is not None:
        yield _arithmetic(found.speed)
        yield _copies(found.speed)


def _unused(found: Unused) -> Iterator[Finding]:
    if found.driver is not None and found.driver.cards:
        driver, cards = found.driver, ", ".join(found.driver.cards)
        runs = f"{cards} with driver {driver.version} is here"
        if found.torch_cuda is None:
            remedy = "`pip install --force-reinstall 'torch>=2.10,<2.14'` takes the one for NVIDIA's cards"
            yield Finding("gpu", WARNING, f"{runs}, and torch {found.torch} is a build for the CPU", remedy)
        elif _major(found.torch_cuda) > driver.cuda[0]:
            newest = ".".join(map(str, driver.cuda))
            text = f"{runs}, which runs CUDA up to {newest}; torch {found.torch} is built for {found.torch_cuda}"
            yield Finding("gpu", WARNING, text, "update the driver, or install a torch for the older CUDA")
        else:
            remedy = "unset CUDA_VISIBLE_DEVICES; in a container, give it the GPU; after an update, restart the machine"
            yield Finding("gpu", WARNING, f"{runs}, and torch {found.torch} does not see it", remedy)
    elif found.nvidia:
        text = "there is an NVIDIA card, and no driver that works"
        yield Finding("gpu", WARNING, text, "install NVIDIA's driver, and restart the machine")


def _card(found: Card) -> Finding:
    name, *others = found.names
    number = ".".join(map(str, found.capability))
    driver = f", driver {found.driver.version}" if found.driver else ""
    low = found.capability < BF16_CAPABILITY and found.torch_cuda.startswith("CUDA")
    pieces = [
        f"{name}, capability {number}" + (" (fp16 instead of bf16)" if low else ""),
        f"{size(found.free_bytes)} of {size(found.total_bytes)} free",
        f"{found.torch_cuda}{driver}",
        *([f"also here: {', '.join(others)}"] if others else []),
    ]
    return Finding("gpu", OK, "; ".join(pieces))


def _no_kernels(compiler: str | None) -> Finding:
    if compiler is None:
        return Finding("gpu", WARNING, "Triton finds no C compiler, so swaps are encoded by plain torch", "install gcc")
    text = f"Triton cannot build its kernels with {compiler}, so swaps are encoded by plain torch"
    return Finding("gpu", WARNING, text, "install Python's headers (python3-dev), or `pip install triton`")


def _trouble(found: Card, why: str) -> Finding:
    if "out of memory" in why:
        return Finding("gpu", WARNING, "its memory is full, so its speed was not measured", "end what else uses it")
    if "no kernel image" in why:
        text = f"this torch, for {found.torch_cuda}, has no code for a card of this capability"
        return Finding("gpu", ERROR, text, "install a torch that has, or train with --device cpu")
    return Finding("gpu", ERROR, f"it fails at a matrix product ({why})", "restart the machine, or use --device cpu")


def _arithmetic(speed: Speed) -> Finding:
    text = f"a matrix product in {speed.precision} runs at {speed.flops / 1e12:.3g} TFLOP/s"
    if speed.peak is None:
        return Finding("gpu", OK, text)
    text += f", {share(speed.flops / speed.peak)} of the card's peak"
    if speed.flops < LEAST_OF_PEAK * speed.peak:
        remedy = "look whether another program uses it, and at its temperature and power limit (`nvidia-smi`)"
        return Finding("gpu", WARNING, text, remedy)
    return Finding("gpu", OK, text)


def _copies(speed: Speed) -> Finding:
    text = f"copies run at {size(speed.to_device)}/s to the card and {size(speed.to_host)}/s back"
    if min(speed.to_device, speed.to_host) < COPY_LOW:
        return Finding("gpu", WARNING, text, "a slot with more lanes makes the ends of rounds shorter")
    return Finding("gpu", OK, text)


def _major(version: str) -> int:
    """Of `CUDA 12.8`."""
    digits = version.rpartition(" ")[2].partition(".")[0]
    return int(digits) if digits.isdecimal() else 0
