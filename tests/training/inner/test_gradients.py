"""A batch through the model in parts: they add up to the whole, and they shrink until they fit into memory."""

import math

import pytest
import torch
from torch import Tensor, nn

from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.run.schema import InnerSpec
from noloco_node.training.inner import gradients
from noloco_node.training.inner.gradients import Gradients, LossScale
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.task import Batch

EXAMPLES = 8
SPEC = InnerSpec(batch_tokens=EXAMPLES, precision="fp32")


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


def gradient(parts: Gradients) -> tuple[float, float]:
    parts.begin(BATCH)
    return parts.finish()


@pytest.mark.parametrize("micro_batch", [1, 3, EXAMPLES, 100])
def test_parts_add_up_to_the_batch(micro_batch: int) -> None:
    parts, module = passes(Line(), micro_batch)
    plain = Line().model()
    expected = nn.functional.mse_loss(plain(BATCH[0]), BATCH[1])
    expected.backward()
    for _ in range(2):  # what the first one left does not count for the second
        loss, norm = gradient(parts)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-6)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


def test_parts_are_halved_until_they_fit() -> None:
    task, roomy = Line(room=1), Line()
    narrow, _ = passes(task)
    assert gradient(narrow) == pytest.approx(gradient(passes(roomy)[0]), rel=1e-6)
    assert task.tried == [4, 4, 2, *[1] * EXAMPLES] and roomy.tried == [4, 4]
    assert narrow.micro_batch == 1
    assert passes(Line(room=2))[0].evaluate() == pytest.approx(passes(Line())[0].evaluate(), rel=1e-6)


def test_not_even_one_example_fits() -> None:
    with pytest.raises(OutOfMemory, match="not even one example fits"):
        gradient(passes(Line(room=0))[0])


def test_evaluation_is_without_dropout_and_leaves_training_as_it_was() -> None:
    parts, module = passes(Line())
    module[1].p = 0.5
    gradient(parts)
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


# ---- fp16 with a loss scale, as on a GPU without bf16 ----
class Times(Line):
    """The loss of each try so many times as large: first, second, ...; the last one from then on."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self._factors = factors

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        factor = self._factors[min(len(self.tried) // 2, len(self._factors) - 1)]  # a try is two micro-batches
        return super().loss(module, batch) * factor


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "products", lambda *_: torch.float16)


def exact(factor: float = 1.0) -> tuple[float, float, list[Tensor]]:
    plain = Line().model()
    loss = nn.functional.mse_loss(plain(BATCH[0]), BATCH[1]) * factor
    loss.backward()
    parts = [p.grad for p in plain.parameters() if p.grad is not None]
    return loss.item(), float(nn.utils.get_total_norm(parts)), parts


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("factor", [1.0, 1e-7, 3e3])
def test_fp16_gives_the_gradient_of_fp32(factor: float) -> None:
    """Also one that would be 0 in fp16, and one that is too large for the first scale."""
    task = Times(factor)
    parts, module = passes(task)
    loss, norm = gradient(parts)
    expected_loss, expected_norm, expected = exact(factor)
    assert loss == pytest.approx(expected_loss, rel=1e-2) and norm == pytest.approx(expected_norm, rel=1e-2)
    for ours, theirs in zip(module.parameters(), expected, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=2e-2, atol=1e-3 * expected_norm)
    before = len(task.tried)
    gradient(parts)
    assert len(task.tried) == before + 2, "the scale that fits is kept"


@pytest.mark.usefixtures("half")
def test_what_is_too_large_once_is_tried_again_and_no_step_is_lost() -> None:
    parts, _ = passes(Times(1e5, 1.0))
    loss, norm = gradient(parts)
    assert (loss, norm) == pytest.approx(exact()[:2], rel=1e-2)


@pytest.mark.usefixtures("half")
def test_what_is_never_finite_is_given_back_as_it_is() -> None:
    task = Times(math.inf)
    loss, _ = gradient(passes(task)[0])
    assert not math.isfinite(loss) and len(task.tried) == 2, "no scale is the cause"

    class Steep(Line):
        """Its loss is finite, its gradient is not."""

        def loss(self, module: nn.Module, batch: Batch) -> Tensor:
            return super().loss(module, batch) + (module[0].weight * 0).abs().sqrt().sum()

    steep = Steep()
    parts, _ = passes(steep)
    loss, norm = gradient(parts)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert len(steep.tried) == 2 * 17, "from 2^16 to 1"
    assert loss == pytest.approx(exact()[0], rel=1e-2)


def test_the_scale_grows_after_calm_batches_and_begins_anew_after_a_broken_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LossScale, "CALM", 3)
    scale = LossScale()
    assert scale.is_too_large(1.0, math.inf) and scale.value == 2.0**15
    for _ in range(3):
        assert not scale.is_too_large(1.0, 1.0)
        scale.used(1.0)
    assert scale.value == 2.0**16
    for _ in range(100):
        scale.used(1.0)
    assert scale.value == LossScale.LARGEST
    while scale.is_too_large(1.0, math.nan):
        pass
    assert scale.value == 1.0
    scale.used(math.nan)
    assert scale.value == LossScale.START
    assert not scale.is_too_large(math.nan, math.nan)


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((7, 5), None, torch.float16), ((8, 0), None, torch.bfloat16), ((7, 5), "6.3", torch.bfloat16)],
)
def test_only_an_old_nvidia_gpu_takes_fp16(
    capability: tuple[int, int], hip: str | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    gpu = torch.device("cuda:0")
    assert gradients.products(gpu, "bf16") == expected
    assert gradients.products(gpu, "fp32") is None


@pytest.mark.parametrize(
    ("amx", "may", "expected"), [(True, True, torch.bfloat16), (True, False, None), (False, True, None)]
)
def test_a_cpu_with_amx_takes_bf16_where_the_system_lets_it(
    amx: bool, may: bool, expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: may)
    assert gradients.products(torch.device("cpu"), "bf16") is expected
    assert gradients.products(torch.device("cpu"), "fp32") is None
