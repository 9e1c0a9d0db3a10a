"""An NVIDIA GPU is found where the system lists it, unless the user hides it."""

from pathlib import Path

import pytest

from noloco_node.host.gpu_cards import has_nvidia_card


def bus(at: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(devices):
        device = at / f"0000:0{number}:00.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (at / "damaged").mkdir()
    return at


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([("0x8086", "0x020000"), ("0x10de", "0x030200")], True),
        ([("0x10de", "0x040300"), ("0x1002", "0x030000")], False),  # its sound, and another maker's GPU
        ([], False),
    ],
)
def test_a_card_on_the_bus(tmp_path: Path, devices: list[tuple[str, str]], found: bool) -> None:
    assert has_nvidia_card({}, bus(tmp_path, *devices)) == found


def test_a_hidden_card_and_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert not has_nvidia_card({}, tmp_path / "absent")
    there = bus(tmp_path, ("0x10de", "0x030000"))
    assert has_nvidia_card({"CUDA_VISIBLE_DEVICES": "0"}, there)
    assert not has_nvidia_card({"CUDA_VISIBLE_DEVICES": ""}, there)
    assert not has_nvidia_card({"CUDA_VISIBLE_DEVICES": "-1"}, there)
