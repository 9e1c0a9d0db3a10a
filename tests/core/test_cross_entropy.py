"""Cross-entropy in chunks: torch's own to the bit, without its tables."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.core import cross_entropy

TOKENS, WORDS = 29, 37
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(autouse=True)
def _four_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "WHOLE", 0)
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", 4 * WORDS + 1)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(TOKENS, WORDS, generator=generator)
    return logits.to(dtype).requires_grad_(), torch.randint(0, WORDS, (TOKENS,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [1.0, 3 / 7])
def test_losses_and_gradients_are_torchs_to_the_bit(dtype: torch.dtype, share: float) -> None:
    """`share`: of a step's batch, as a micro-batch has it."""
    logits, targets = given(dtype)
    found = cross_entropy.cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(found * share, logits)
    expected = nn.functional.cross_entropy(logits.float(), targets)
    (theirs,) = torch.autograd.grad(expected * share, logits)
    assert torch.equal(found, expected)
    assert torch.equal(gradient, theirs) and gradient.dtype == dtype


def test_each_tokens_own_loss() -> None:
    logits, targets = given(torch.float32)
    found = cross_entropy.cross_entropy(logits, targets, "none")
    assert torch.equal(found, nn.functional.cross_entropy(logits, targets, reduction="none"))
    weights = torch.linspace(0, 1, TOKENS)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    expected = nn.functional.cross_entropy(logits, targets, reduction="none")
    (theirs,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert torch.equal(gradient, theirs)


class Largest(TorchDispatchMode):
    """The most elements of an fp32 tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.elements = max(self.elements, made.numel())
        return made


def test_no_table_of_all_tokens_in_fp32() -> None:
    logits, targets = given(torch.bfloat16)
    with Largest() as ours:
        cross_entropy.cross_entropy(logits, targets).backward()
    assert 0 < ours.elements <= 4 * WORDS
    with Largest() as torchs:
        nn.functional.cross_entropy(logits.float(), targets).backward()
    assert torchs.elements == TOKENS * WORDS, "as torch's own has it"


# ---- on a GPU, without one -------------------------------------------------------------------------------------------
def test_tritons_kernels_interpreted_are_torchs_but_for_rounding() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    done = subprocess.run(
        [sys.executable, HELPERS / "cross_entropy_interpreted.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 12


@pytest.mark.parametrize("generation", [75, 80, 90], ids=["Turing", "Ampere", "Hopper"])
def test_tritons_kernels_are_compiled_for_a_gpu(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="Triton is for Linux only")
    from noloco_node.core.cross_entropy import cuda

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fp32, constants = "*fp32", {"BLOCK": cuda.BLOCK}
    read = {"logits": "*bf16" if generation >= 80 else "*fp16", "targets": "*i64"}
    arguments = {
        "_forward": {**read, "picked": fp32, "sums": fp32, "words": "i32"},
        "_backward": {**read, "sums": fp32, "gradients": fp32, "found": read["logits"], "words": "i32"},
    }
    for name, types in arguments.items():
        source = triton.compiler.ASTSource(
            fn=getattr(cuda, name), signature={**types, "BLOCK": "constexpr"}, constexprs=constants
        )
        target = triton.backends.compiler.GPUTarget("cuda", generation, 32)
        assert triton.compile(source, target=target, options=cuda.OPTIONS).asm["cubin"]


def test_a_shortage_of_memory_is_no_fault_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    cuda = pytest.importorskip("noloco_node.core.cross_entropy.cuda", reason="Triton is for Linux only")
    cross_entropy._kernels.cache_clear()
    try:
        with monkeypatch.context() as short:
            short.setattr(cuda, "try_out", fail)
            with pytest.raises(torch.OutOfMemoryError):
                cross_entropy._kernels()
        monkeypatch.setattr(cuda, "try_out", lambda: None)
        assert cross_entropy._kernels() is cuda
    finally:
        cross_entropy._kernels.cache_clear()
