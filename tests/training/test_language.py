"""How a language model continues a text: what it is shown, where it stops, and what a run asks of it."""

from typing import Any

import pytest
import torch
from replicas import small_replica, small_run, small_text
from torch import nn

from noloco_node.data.tokens import BYTES
from noloco_node.errors import Diverged
from noloco_node.run.schema import SampleSpec
from noloco_node.training.language import Language, Window, continuation, held_out


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return small_replica().module.eval()


def written(module: nn.Module, text: str = "import", **wishes: float) -> str:
    return "".join(continuation(module, BYTES, 16, text, **{"tokens": 20, **wishes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [3, 8, 100])
def test_a_window_shows_the_model_what_it_was_trained_on(module: nn.Module, longest: int) -> None:
    text = list(b"import os, sys")
    window = Window(module, longest, text)
    seen = text[-longest:]
    for token in b"\n\ndef main():":
        with torch.no_grad():
            alone = module(input_ids=torch.tensor([seen])).logits[0, -1]
        assert torch.allclose(window.logits(), alone, atol=1e-5)
        window.add(token)
        seen = [*seen, token]
        if len(seen) > longest:
            seen = seen[-(longest // 2) :]


def test_the_likeliest_token_needs_no_seed_and_every_other_is_of_its_seed(module: nn.Module) -> None:
    assert written(module, temperature=0.0, seed=1) == written(module, temperature=0.0, seed=2) != ""
    assert written(module, seed=1) == written(module) != written(module, seed=2)


class Says(nn.Module):
    """Each byte of a text in turn, whatever it is shown; like some models, it remembers nothing between two calls."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._left = list(text)

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        said = nn.functional.one_hot(torch.tensor(self._left.pop(0)), 256).float()
        return type("Out", (), {"logits": said.expand(1, input_ids.shape[1], 256)})()


def test_it_stops_at_the_end_of_a_document_and_never_within_a_character() -> None:
    said = "né\0more".encode()
    assert list(continuation(Says(said), BYTES, 16, "", tokens=20, temperature=0)) == ["n", "", "é", ""]
    assert "".join(continuation(Says("né".encode()), BYTES, 16, "a", tokens=2, temperature=0)) == "n\ufffd"


def test_weights_that_are_broken_say_so() -> None:
    broken = small_replica()
    broken.theta.fill_(float("nan"))
    with pytest.raises(Diverged, match="take an earlier checkpoint"):
        written(broken.module.eval())


def test_a_run_asks_for_a_prompt_and_a_length(module: nn.Module) -> None:
    run = small_run()
    asked = run.model_copy(update={"sample": SampleSpec(prompt="import", tokens=20)})
    assert "".join(Language(asked, small_text()).sample(module)) == written(module)
    assert list(Language(run, small_text()).sample(module)) == [], "nothing where it does not"


@pytest.mark.parametrize(("batch_tokens", "evaluated"), [(64, 1024), (6144, 3072), (1 << 19, 8192)])
def test_an_evaluation_is_as_long_as_half_a_steps_batch_within_limits(batch_tokens: int, evaluated: int) -> None:
    run = small_run()
    run = run.model_copy(update={"inner": run.inner.model_copy(update={"batch_tokens": batch_tokens})})
    assert held_out(run, small_text())[:, 1:].numel() == evaluated


def test_a_decoder_that_takes_off_a_first_space_loses_none_of_the_continuation(module: nn.Module) -> None:
    """As those of Llama 2 and Mistral."""

    class Stripping:
        end, vocabulary = 256, 257

        def encode(self, texts: list[str]) -> list[Any]:
            return BYTES.encode(texts)

        def decode(self, tokens: Any) -> str:
            return BYTES.decode(tokens).removeprefix(" ")

    wishes = {"tokens": 8, "temperature": 0.0}
    plain = "".join(continuation(module, BYTES, 16, "the cat", **wishes))  # type: ignore[arg-type]
    assert "".join(continuation(module, Stripping(), 16, "the cat", **wishes)) == plain  # type: ignore[arg-type]
