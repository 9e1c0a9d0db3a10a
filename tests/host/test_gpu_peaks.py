"""A GPU's peak is found by the name that torch gives, and none is made up."""

import pytest

from noloco_node.host.gpu_peaks import bf16_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_known_and_unknown_cards(name: str, tera: float | None) -> None:
    assert bf16_flops(name) == (None if tera is None else tera * 1e12)
