"""Gradients by several processes: what one computes alone, and gone when the node is."""

from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
import torch
from replicas import small_run, small_text, train
from torch import nn

from noloco_node.core.device import choose_devices
from noloco_node.errors import NolocoError, UsageError
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training import workers
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

pytestmark = pytest.mark.timeout(180)


def replica(device: str, examples: int = 4, task: str = "blobs", **options: object) -> Replica:
    run = Manifest(
        name="shared", model=ModelSpec(task=task), inner=InnerSpec(steps=3, batch_tokens=examples, precision="fp32")
    )
    return build_replica(run, "a", device=device, threads=1, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("steps", torch.arange(3, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("none", torch.empty(0, 4))
        self.again = self.steps
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


@pytest.fixture
def nobody_left() -> Iterator[None]:
    before = psutil.Process().children()
    yield
    alive = [p for p in psutil.Process().children() if p not in before and p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]  # multiprocessing's own


def test_three_share_a_batch_of_four(nobody_left: None) -> None:
    with closing(replica("cpu")) as alone, closing(replica("cpu,cpu,cpu", micro_batch=1)) as shared:
        assert shared.device == "3 × cpu" and alone.device == "cpu"
        alone.try_out(), shared.try_out()
        assert train(shared, 9) == pytest.approx(train(alone, 9), rel=1e-5)
        assert torch.allclose(shared.phi, alone.phi, rtol=1e-4, atol=1e-6)
        assert shared.last_norm == pytest.approx(alone.last_norm, rel=1e-3)
        state = shared.state()
        goes_on = train(shared, 3)
        with closing(replica("cpu")) as later:
            later.load(state)
            assert train(later, 3) == pytest.approx(goes_on, rel=1e-5), "a checkpoint has nothing of them"


def test_activations_are_computed_again_there_too(nobody_left: None) -> None:
    """Of a language model, whose hooks for that cannot be sent."""

    def built(device: str) -> Replica:
        return build_replica(
            small_run(), "a", device=device, threads=1, corpus=small_text(), checkpoint_activations=True
        )

    with closing(built("cpu")) as alone, closing(built("cpu,cpu")) as shared:
        assert train(shared, 2) == pytest.approx(train(alone, 2), rel=1e-5)


def test_where_one_is_short_of_memory_all_take_less_at_once(nobody_left: None) -> None:
    with (
        closing(replica("cpu", 8, "short", micro_batch=4)) as alone,
        closing(replica("cpu,cpu", 8, "short", micro_batch=4)) as shared,
    ):
        assert train(shared, 3) == pytest.approx(train(alone, 3), rel=1e-5)
        assert (alone.micro_batch, shared.micro_batch) == (4, 2)
        assert (alone.micro_batches, shared.micro_batches) == (2, 2)


def test_one_that_dies_ends_training(nobody_left: None) -> None:
    with closing(replica("cpu,cpu")) as shared:
        shared.step()
        (child,) = shared._workers._all  # type: ignore[union-attr]
        child.process.kill()
        with pytest.raises(NolocoError, match=r"gradients on cpu.* start this node again"):
            train(shared, 2)


def test_too_few_examples(nobody_left: None) -> None:
    with pytest.raises(UsageError, match="4 examples a step, as this run has, are too few for 5"):
        replica("cpu,cpu,cpu,cpu,cpu")


def test_one_that_fails_says_why(nobody_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "packed", lambda module: b"nothing to unpickle")
    with pytest.raises(NolocoError, match=r"gradients on cpu: invalid load key"):
        replica("cpu,cpu")


def test_others_reach_none_of_them(nobody_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with closing(replica("cpu,cpu")):
        mine = psutil.Process()
        found = [c.laddr.ip for p in (mine, *mine.children()) for c in p.net_connections() if c.status == "LISTEN"]
        assert found and set(found) == {"127.0.0.1"}


@pytest.mark.parametrize("devices", ["cpu,mps", "cpu,cuda"])
def test_devices_that_are_not_there(devices: str) -> None:
    with pytest.raises(UsageError):
        choose_devices(devices)


def test_a_model_arrives_as_it_was_without_its_weights() -> None:
    sent = Tied()
    data = workers.packed(sent)
    assert sent.table.weight.detach().numpy().tobytes() not in data
    got = workers._Unpickler(data, torch.device("cpu")).load()
    assert got.out.weight is got.table.weight and got.table.weight.shape == (5, 3)
    assert torch.equal(got.steps, sent.steps) and got.again is got.steps and got.none.shape == (0, 4)
    assert not got.frozen.requires_grad and got.table.weight.requires_grad


def test_a_model_that_cannot_be_sent() -> None:
    module = nn.Linear(2, 2)
    module.hook = lambda: None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        workers.packed(module)
