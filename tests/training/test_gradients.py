"""A batch through the model in parts: they add up to the whole, and they shrink until they fit into memory."""

import pytest
import torch
from torch import Tensor, nn

from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.run.schema import InnerSpec
from noloco_node.training.gradients import Gradients
from noloco_node.training.optimizer import Optimizer
from noloco_node.training.task import Batch

EXAMPLES = 8
SPEC = InnerSpec(batch_tokens=EXAMPLES)


class Line:
    """Linear regression, on a machine that has room for some examples at once."""

    tokens_per_example = 1
    micro_examples = 4

    def __init__(self, room: int = EXAMPLES) -> None:
        self._room = room
        self.tried: list[int] = []

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0))

    def stream(self, peer_id: str) -> None:
        raise NotImplementedError

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        self.tried.append(len(inputs))
        if len(inputs) > self._room:
            raise torch.OutOfMemoryError
        return nn.functional.mse_loss(module(inputs), targets)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        parts = zip(*(part.split(examples) for part in BATCH), strict=True)
        return sum(self.loss(module, part).item() * len(part[0]) for part in parts) / EXAMPLES


BATCH = torch.linspace(-1, 1, 3 * EXAMPLES).view(EXAMPLES, 3), torch.linspace(0, 2, 2 * EXAMPLES).view(EXAMPLES, 2)


def passes(task: Line, micro_batch: int | None = None) -> tuple[Gradients, nn.Module]:
    module = task.model().train()
    return Gradients(task, module, Optimizer(module, SPEC), SPEC, micro_batch, 1.0), module


@pytest.mark.parametrize("micro_batch", [1, 3, EXAMPLES, 100])
def test_parts_add_up_to_the_batch(micro_batch: int) -> None:
    parts, module = passes(Line(), micro_batch)
    plain = Line().model()
    expected = nn.functional.mse_loss(plain(BATCH[0]), BATCH[1])
    expected.backward()
    for _ in range(2):  # what the first one left does not count for the second
        loss, norm = parts.gradient(BATCH)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-6)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


def test_parts_are_halved_until_they_fit() -> None:
    task, roomy = Line(room=1), Line()
    narrow, _ = passes(task)
    assert narrow.gradient(BATCH) == pytest.approx(passes(roomy)[0].gradient(BATCH), rel=1e-6)
    assert task.tried == [4, 4, 2, *[1] * EXAMPLES] and roomy.tried == [4, 4]
    assert narrow.micro_batch == 1
    assert passes(Line(room=2))[0].evaluate() == pytest.approx(passes(Line())[0].evaluate(), rel=1e-6)


def test_not_even_one_example_fits() -> None:
    with pytest.raises(OutOfMemory, match="not even one example fits"):
        passes(Line(room=0))[0].gradient(BATCH)


def test_evaluation_is_without_dropout_and_leaves_training_as_it_was() -> None:
    parts, module = passes(Line())
    module[1].p = 0.5
    parts.gradient(BATCH)
    assert parts.evaluate() == parts.evaluate() == pytest.approx(Line().evaluate(Line().model(), EXAMPLES))
    assert module.training and all(p.grad is None for p in module.parameters()), "and memory is free again"


class Odd(Line):
    """Its model does not take what its stream gives."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (KeyError("logits"), UsageError, "the run's model cannot be trained on its data: 'logits'"),
        (
            RuntimeError("mat1 and mat2\ncannot be multiplied"),
            UsageError,
            "mat1 and mat2 cannot be multiplied",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory, "this machine's memory"),
        (torch.OutOfMemoryError(), OutOfMemory, "not even one example fits"),
        (MemoryError("full"), MemoryError, "full"),
        (UsageError("as the task says"), UsageError, "as the task says"),
    ],
)
def test_what_cannot_be_trained_is_found_before_the_first_step(
    error: Exception, kind: type[Exception], says: str
) -> None:
    tried, _ = passes(Odd(error))
    with pytest.raises(kind, match=says.replace("(", "\\(")):
        tried.try_out(BATCH)


def test_trying_out_leaves_no_gradients() -> None:
    task = Line(room=2)
    tried, module = passes(task)
    tried.try_out(BATCH)
    assert task.tried == [4, 4, 2], "at once again, then half of it"
    assert all(p.grad is None for p in module.parameters())
