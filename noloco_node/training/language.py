"""Language modelling, the built-in task: an example is a window of tokens, each predicted from those before it.

`continuation` is how a model writes text, here and for `noloco-node sample`. Knows models and texts; nothing of
optimizers or peers.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.data import corpus
from noloco_node.data.stream import spread
from noloco_node.data.tokens import Tokenizer
from noloco_node.errors import Diverged
from noloco_node.run.schema import Manifest
from noloco_node.training import model
from noloco_node.training.task import Batch, ExampleStream, device_batch

EVAL_TOKENS, MOST_EVAL_TOKENS = 1024, 8192
"""Held-out tokens of one evaluation: half a step's batch, between these two. A round evaluates three times, at its
boundary and twice when its swap is judged, together half a step's time. 1024 are enough: with and without a swap the
same ones are evaluated, and the attacks of simulate/README.md cost as much as with 2048."""
MICRO_LOGITS = 1 << 25
"""Elements of the largest logits that a CPU makes at once, 128 MiB: more of them are no faster."""
CACHES = ("cache", "past_key_values")
"""Names of what a model keeps of earlier tokens: since transformers 5.24, and before."""


def held_out(run: Manifest, corpus: corpus.Readable) -> Tensor:
    """The windows of an evaluation: (count, length + 1)."""
    tokens = min(max(EVAL_TOKENS, run.inner.batch_tokens // 2), MOST_EVAL_TOKENS)
    return spread(corpus.held_out, run.data.sequence_length, max(1, tokens // run.data.sequence_length))


class Language:
    def __init__(self, manifest: Manifest, corpus: corpus.Readable) -> None:
        self._spec, self._seed = manifest.model, manifest.seed
        self._sample = manifest.sample
        self._corpus = corpus
        self.tokens_per_example = manifest.data.sequence_length
        self.held_out = held_out(manifest, corpus)
        _, vocabulary = model.sizes(self._spec, corpus.tokenizer.vocabulary)
        self.micro_examples = max(1, MICRO_LOGITS // (self.tokens_per_example * vocabulary))

    def model(self) -> nn.Module:
        return model.build(self._spec, self.vocabulary, self._seed, self.tokens_per_example)

    def parameters(self) -> int:
        return sum(p.numel() for p in model.outline(self._spec, self.vocabulary).parameters())

    @property
    def vocabulary(self) -> int:
        """Of the data; the model's may be larger."""
        return self._corpus.tokenizer.vocabulary

    def flops_per_token(self, module: nn.Module) -> float | None:
        return model.flops_per_token(module, self.tokens_per_example)

    def stream(self, peer_id: str) -> ExampleStream:
        return self._corpus.stream(self.tokens_per_example, self._seed, peer_id)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        (windows,) = batch
        return model.next_token_loss(module, windows)

    def prefix(self, batch: Batch, tokens: int) -> Batch:
        (windows,) = batch
        return (windows[:, : tokens + 1],)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        """Averaged in float64, on the CPU as not every device has it: a mean in float32 is off by 1e-6, and by how many
        examples go at once."""
        parts = (device_batch((part,), module) for part in torch.split(self.held_out, examples))
        losses = [model.next_token_loss(module, windows, "none") for (windows,) in parts]
        return float(torch.cat(losses).cpu().double().mean())  # the device is waited for once

    def held_out_digest(self) -> str:
        return hashlib.sha256(self.held_out.numpy().tobytes()).hexdigest()[:16]

    def sample(self, module: nn.Module) -> Iterator[str]:
        """With the same seed each time: the texts of two replicas, and of two rounds, can be compared."""
        if self._sample is not None:
            prompt, tokens = self._sample.prompt, self._sample.tokens
            yield from continuation(module, self._corpus.tokenizer, self.tokens_per_example, prompt, tokens=tokens)


# ---- text that a model writes ----------------------------------------------------------------------------------------
def continuation(  # noqa: PLR0913 (each is a choice of the user)
    module: nn.Module,
    tokenizer: Tokenizer,
    longest: int,
    text: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 1,
) -> Iterator[str]:
    """The text's continuation, a piece a token, which may be empty: `tokens`, or fewer up to the end of the document.
    `longest`: the tokens that the model was trained on at once; `temperature` 0: always the likeliest token. The module
    is in evaluation mode."""
    (prompt,) = tokenizer.encode([text])
    window = Window(module, longest, prompt.tolist() or [tokenizer.end])
    generator = torch.Generator().manual_seed(seed)
    drawn = prompt.tolist()  # decoded with what is drawn: some tokenizers take off a text's first space
    shown = tokenizer.decode(drawn)
    for _ in range(tokens):
        token = _pick(window.logits()[: tokenizer.vocabulary], temperature, generator)
        if token == tokenizer.end:
            break
        window.add(token)
        drawn.append(token)
        whole = tokenizer.decode(drawn)
        if whole.endswith("\ufffd"):  # the last character is not complete yet
            whole = shown
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
        self._cache: dict[str, Any] = {}
        """What the model keeps of the tokens before, by the name that it has among its inputs and outputs."""
        self._begin(tokens[-longest:])

    def add(self, token: int) -> None:
        if len(self._tokens) >= self._longest:
            self._begin([*self._tokens, token][-(self._longest // 2 or 1) :])
        else:
            self._tokens.append(token)
            self._fresh = [token] if self._cache else self._tokens

    def logits(self) -> Tensor:
        """Of the next token."""
        given = torch.tensor([self._fresh], device=self._device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # else it would be compiled for each length
            out = self._module(input_ids=given, use_cache=True, **self._cache)
        self._cache = {name: kept for name in CACHES if (kept := vars(out).get(name)) is not None}
        last: Tensor = out.logits[0, -1].float().cpu()
        return last

    def _begin(self, tokens: list[int]) -> None:
        self._tokens = self._fresh = tokens
        self._cache = {}


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise Diverged("the model's output is NaN or Inf: its weights are broken, take an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
