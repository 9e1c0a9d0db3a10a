"""The device that a user names: taken, or one sentence with what there is."""

import pytest
import torch

from noloco_node.core.device import choose_device, why_no_gpu
from noloco_node.errors import UsageError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_here() -> None:
    assert [str(choose_device(name)) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["cuda", "cpu", "cuda", "cuda:1"]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_beyond_those_here() -> None:
    with pytest.raises(
        UsageError, match=r"--device cuda:7 is not among .*: name one of cuda:0 to cuda:1, or take auto$"
    ):
        choose_device("cuda:7")


@pytest.mark.usefixtures("no_gpu")
def test_no_gpu() -> None:
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(
        UsageError, match=r"^--device cuda cannot be used, as torch .*: update .*, or use --device cpu$"
    ):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["x", "", "cuda:-1", "cuda:x", "meta", "xpu"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--device must be auto, cpu, cuda or cuda:<number>, not "):
        choose_device(name)


def test_apples_gpus() -> None:
    with pytest.raises(UsageError, match=r"--device mps cannot be used, as .*: use --device cpu"):
        choose_device("mps")


def test_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_no_gpu() == f"torch {torch.__version__} is a build for CPUs only"

    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by ..."
        )

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert "(The NVIDIA driver on your system is too old (found version 11040))" in why_no_gpu()
