"""What processes of one node send each other."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from noloco_node.errors import UsageError
from noloco_node.loop import island


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process, on gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gloo_has_let_go_of_what_was_sent(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[Tensor]] = []
    real = dist.broadcast

    def noted(tensor: Tensor, source: int) -> None:
        given.append(weakref.ref(tensor))
        real(tensor, source)

    monkeypatch.setattr(dist, "broadcast", noted)
    weights = torch.ones(1000)
    for number in range(1, 201):
        island.broadcast(weights)
        assert len(given) == number and given[-1]() is None
    assert torch.equal(weights, torch.ones(1000))


def test_processes_that_do_not_know_each_other_yet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a node, and change weights that DistributedDataParallel takes for the same in all of them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert island.Island.here() is None, "somebody else's variable"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as torchrun sets it")
    with pytest.raises(UsageError, match=r"call torch\.distributed\.init_process_group before"):
        island.Island.here()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert island.Island.here() is None
