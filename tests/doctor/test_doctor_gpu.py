"""`doctor` of a GPU: the verdicts. There is none on the machines of these tests; the measuring is tried on one by
tests/gpu."""

from dataclasses import replace

import pytest

from noloco_node.doctor import gpu_probes, gpu_verdicts
from noloco_node.doctor.gpu_verdicts import Card, Speed, Unused
from noloco_node.doctor.verdicts import ERROR, OK, WARNING
from noloco_node.host.nvml import Driver

DRIVER = Driver("570.86.10", (12, 8), ("NVIDIA L4",))
SPEED = Speed("bfloat16", 620e12, 989e12, 55e9, 52e9)
CARD = Card(("NVIDIA H200",), (9, 0), "CUDA 12.8", DRIVER, 140 * 10**9, 150 * 10**9, True, "/usr/bin/cc", SPEED)
UNUSED = Unused(DRIVER, True, "2.13.0", "CUDA 12.8")


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        (CARD, OK, "NVIDIA H200, capability 9.0; 140 GB of 150 GB free; CUDA 12.8, driver 570.86.10"),
        (CARD, OK, "bfloat16 runs at 620 TFLOP/s, 63% of the card's peak"),
        (CARD, OK, "55.0 GB/s to the card and 52.0 GB/s back"),
        (replace(CARD, names=("Tesla T4", "NVIDIA L4"), capability=(7, 5)), OK, "7.5 (fp16 instead of bf16)"),
        (replace(CARD, names=("Tesla T4", "NVIDIA L4")), OK, "also here: NVIDIA L4"),
        (replace(CARD, compiles=False), WARNING, "python3-dev"),
        (replace(CARD, compiles=False, compiler=None), WARNING, "install gcc"),
        (replace(CARD, speed=replace(SPEED, flops=100e12)), WARNING, "nvidia-smi"),
        (replace(CARD, speed=replace(SPEED, flops=9e12, peak=None)), OK, "9 TFLOP/s"),
        (replace(CARD, speed=replace(SPEED, to_host=1.5e9)), WARNING, "a slot with more lanes"),
        (replace(CARD, speed=None, trouble="CUDA out of memory. Tried"), WARNING, "its memory is full"),
        (replace(CARD, speed=None, trouble="CUDA error: no kernel image is available"), ERROR, "has no code"),
        (replace(CARD, speed=None, trouble="CUDA error: unknown"), ERROR, "restart the machine"),
        (
            replace(UNUSED, torch_cuda=None),
            WARNING,
            "NVIDIA L4 with driver 570.86.10 is here, and torch 2.13.0 is a bu",
        ),
        (replace(UNUSED, torch_cuda="CUDA 13.0"), WARNING, "runs CUDA up to 12.8; torch 2.13.0 is built for CUDA 13.0"),
        (UNUSED, WARNING, "CUDA_VISIBLE_DEVICES"),
        (replace(UNUSED, driver=None), WARNING, "install NVIDIA's driver"),
    ],
)
def test_verdicts_of_a_gpu(found, level, says):
    findings = list(gpu_verdicts.judge(found))
    assert (level, True) in [(f.level, says in f"{f.text}: {f.remedy}") for f in findings], findings
    assert all(f.subject == "gpu" and bool(f.remedy) == (f.level in (WARNING, ERROR)) for f in findings)
    assert level == OK or len({f.level for f in findings}) <= 2, "nothing else is wrong"


def test_a_machine_without_a_gpu_hears_nothing_of_one():
    assert list(gpu_verdicts.judge(Unused(None, False, "2.13.0", None))) == []
    assert gpu_probes.look("cpu") is None
