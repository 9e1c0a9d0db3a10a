"""What GPUs can compute at most, by their names: the arithmetic that a share of it (MFU) is taken of.

Dense bf16 products with fp32 sums, from NVIDIA's data sheets, and for GeForce cards from the white papers of their
architectures. Both print twice as much where they mean sparse matrices.
"""

import re

_PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200 NVL|H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H200|H100|GH200", 989e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A40", 150e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)
"""The first one whose words are in the name counts."""
_ANOTHER_CHIP = r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b"
"""A part of a GPU, and chips that share a name with a larger or smaller one."""


def bf16_flops(name: str) -> float | None:
    """Operations a second of the GPU that torch calls `name`; None for one that is not in the table."""
    if re.search(_ANOTHER_CHIP, name):
        return None
    return next((flops for words, flops in _PEAKS if re.search(rf"\b({words})\b", name)), None)
