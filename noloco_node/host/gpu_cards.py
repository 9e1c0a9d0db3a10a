"""Whether there is an NVIDIA GPU in this machine, found without torch, whose driver or build may be the wrong one."""

from collections.abc import Mapping
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def has_nvidia_card(environ: Mapping[str, str], pci: Path = PCI) -> bool:
    """False also where the user hides them from CUDA, or where the system does not tell."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return False
    for device in pci.glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            return True
    return False
