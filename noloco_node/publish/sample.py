"""Text that a trained model generates, token by token."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.errors import Diverged
from noloco_node.publish.weights import Trained
from noloco_node.training.replica import choose_device


def sample(  # noqa: PLR0913 (each is a choice of the user)
    trained: Trained, text: str, device: str, *, tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """The text's continuation, piece by piece as it is generated: `tokens`, or fewer up to the end of the document.
    `temperature` 0: always the likeliest token."""
    module, tokenizer = trained.module.to(choose_device(device)), trained.tokenizer
    (prompt,) = tokenizer.encode([text])
    window = Window(module, trained.run.data.sequence_length, prompt.tolist() or [tokenizer.end])
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    shown = ""
    for _ in range(tokens):
        token = _pick(window.logits()[: tokenizer.vocabulary], temperature, generator)
        if token == tokenizer.end:
            break
        window.add(token)
        drawn.append(token)
        whole = tokenizer.decode(drawn)
        if not whole.endswith("\ufffd"):  # else the last character is not complete yet
            yield whole[len(shown) :]
            shown = whole
    yield tokenizer.decode(drawn)[len(shown) :]


class Window:
    """The model's input: at most as many tokens as it was trained on. When it is full, the later half is kept."""

    def __init__(self, module: nn.Module, longest: int, tokens: list[int]) -> None:
        self._module = module
        self._longest = longest
        self._device = next(module.parameters()).device
        self._tokens: list[int] = []
        self._fresh: list[int] = []
        """Tokens that the model has not processed yet."""
        self._past: Any = None
        self._begin(tokens[-longest:])

    def add(self, token: int) -> None:
        if len(self._tokens) >= self._longest:
            self._begin([*self._tokens, token][-(self._longest // 2 or 1) :])
        else:
            self._tokens.append(token)
            self._fresh = [token] if self._past is not None else self._tokens

    def logits(self) -> Tensor:
        """Of the next token."""
        given = torch.tensor([self._fresh], device=self._device)
        with torch.no_grad():
            out = self._module(input_ids=given, past_key_values=self._past, use_cache=True)
        self._past = getattr(out, "past_key_values", None)
        last: Tensor = out.logits[0, -1].float().cpu()
        return last

    def _begin(self, tokens: list[int]) -> None:
        self._tokens = self._fresh = tokens
        self._past = None


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise Diverged("the model's output is NaN or Inf: its weights are broken, take an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
