"""What GPUs can compute at most, by their names: the arithmetic that a share of it (MFU) is taken of.

Dense bf16 products with fp32 sums, from NVIDIA's data sheets. They print twice as much where they mean sparse matrices.
"""

import re

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"H200 NVL|H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H200|H100|GH200", 989e12),
    (r"A100", 312e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
)
"""The first one whose words are in the name counts."""


def bf16_flops(name: str) -> float | None:
    """Operations a second of the GPU that torch calls `name`; None for one that is not in the table, and for a part
    of one (MIG) or a smaller chip of the same name (`Laptop`, `Ti`)."""
    if re.search(r"\b(MIG|Laptop|Max-Q|Ti)\b", name):
        return None
    return next((flops for words, flops in _PEAKS if re.search(rf"\b({words})\b", name)), None)
