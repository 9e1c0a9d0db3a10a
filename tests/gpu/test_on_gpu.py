"""What checks/ has that needs a GPU and measures nothing. `python tests/gpu/visit.py` runs it without pytest, too."""

from collections.abc import Callable, Iterator

import pytest
import torch
from checks import commands, kernels, loops, replicas, shortage, stages, swaps
from checks.place import Place, Skip

MODULES = (kernels, replicas, loops, swaps, shortage, commands)
CHECKS = [check for module in MODULES for check in module.CHECKS] + [stages.a_chain_has_the_losses_of_a_cpu]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = Place.of("cuda", quick=False)
    yield place
    place.tidy()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check: Callable[[Place], object], place: Place) -> None:
    try:
        check(place)
    except Skip as why:
        pytest.skip(str(why))
