"""Everything in checks/ that needs a GPU and does not measure. `python tests/gpu/visit.py` runs it without pytest, too."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
MODULES = ("kernels", "replicas", "swaps", "shortage", "commands")


@pytest.fixture(scope="module")
def place() -> Iterator[object]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from checks.place import Place

    yield Place.of("cuda", False, float("inf"))


def checks() -> list[Callable[..., object]]:
    """Without a GPU their modules are not even imported."""
    from importlib import import_module

    return [check for name in MODULES for check in import_module(f"checks.{name}").CHECKS]
