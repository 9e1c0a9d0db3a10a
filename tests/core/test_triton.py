"""The lattice kernels in Triton, without a GPU: carried out by its interpreter, and compiled for several GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from test_kernels import BITS

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from noloco_node.core.kernels import cuda  # noqa: E402

HELPERS = Path(__file__).parents[1] / "helpers"
FLOAT, WHOLE, BYTE = "*fp32", "*i32", "*u8"
ARGUMENTS = {
    "_peaks": {"u": WHOLE, "out": WHOLE, "blocks": "i32"},
    "_encode": {
        "u": FLOAT,
        "inverse": FLOAT,
        "seed": "i32",
        "dither": FLOAT,
        "weights": WHOLE,
        "codes": BYTE,
        "sums": WHOLE,
        "blocks": "i32",
    },
    "_decode": {
        "mine": BYTE,
        "theirs": BYTE,
        "half_step": FLOAT,
        "weights": WHOLE,
        "c": FLOAT,
        "sums": WHOLE,
        "energy": WHOLE,
        "blocks": "i32",
    },
}
CASES = [("_peaks", None), *((name, bits) for name in ("_encode", "_decode") for bits in BITS)]


def test_interpreted_they_equal_the_reference() -> None:
    paths = os.pathsep.join(map(str, [Path(__file__).parent, HELPERS]))
    done = subprocess.run(
        [sys.executable, HELPERS / "triton_interpreted.py"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param(75, id="Turing", marks=pytest.mark.slow),
        pytest.param(80, id="Ampere", marks=pytest.mark.slow),
        pytest.param(90, id="Hopper"),
    ],
)
def test_compiled_for_a_gpu_no_product_is_contracted_with_a_sum(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each multiplication and each addition says that it is rounded, so no compiler behind Triton may contract them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, bits in CASES:
        constants = {"ROWS": cuda.ROWS} if bits is None else {"ROWS": cuda.ROWS, "BITS": bits}
        arguments = {**ARGUMENTS[name], **dict.fromkeys(constants, "constexpr")}
        source = triton.compiler.ASTSource(fn=getattr(cuda, name), signature=arguments, constexprs=constants)
        target = triton.backends.compiler.GPUTarget("cuda", generation, 32)
        made = triton.compile(source, target=target, options=cuda._EXACT)
        operations = set(re.findall(r"\b(?:add|sub|mul|div|mad|fma)\.\S*f(?:16|32|64)\b", made.asm["ptx"]))
        assert operations <= {"add.rn.f32", "sub.rn.f32", "mul.rn.f32"}, (name, bits)
        assert (name == "_peaks") == ("mul.rn.f32" not in operations)
        assert made.asm["cubin"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_size_makes_triton_compile_again(name: str) -> None:
    """By default it makes another kernel where a whole number is 1, or a multiple of 16."""
    sizes = [each for each in getattr(cuda, name).params if ARGUMENTS[name].get(each.name) == "i32"]
    assert sizes and all(each.do_not_specialize for each in sizes)
