"""A Llama whose every weight has a leading axis of replicas: R models run as one, by batched matrix products.

It computes what transformers' `LlamaForCausalLM` computes (a test holds the two together), from one flat vector of
parameters a replica, in the order of `Module.parameters()`. Notable choices:

- One graph for all replicas: an 8-sequence batch of a small model is too little work for one kernel launch, eight of
  them are not. Losses are summed over replicas, so each replica's gradient is its own.
- Weights are views of the flat vectors and gradients are views of flat gradients: the optimizer, the clipping and the
  outer step see (R, P) matrices.
- With `bfloat16` the matrix products run in it and everything else in fp32, like autocast: several times as fast
  on CPUs that have such instructions.

Knows no data, no optimizer, no algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import Tensor

from noloco_node.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """What of a LlamaConfig decides the arithmetic."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rope_theta: float
    epsilon: float
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """From a transformers LlamaConfig. Raises UsageError for what this arithmetic does not cover."""
        if config.model_type != "llama" or not _is_plain(config):
            raise UsageError(
                "simulate runs plain Llamas only: the preset tiny, or LlamaConfig without biases and dropout"
            )
        return cls(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            epsilon=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
        )


class BatchedLlama:
    """The loss of R replicas, from the stacked flat parameters `theta` (R, P)."""

    def __init__(self, shape: Shape, layout: Mapping[str, torch.Size], dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        self.layout = dict(layout)
        self.dtype = dtype
        """Of the matrix products."""

    def loss(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each replica (R,), for tokens (R, B, T + 1): inputs and, shifted by one, targets."""
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        logits = self._logits(weights, inputs)  # (R, B·T, V)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(len(tokens), -1).mean(dim=1)

    def _logits(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        replicas, batch, length = tokens.shape
        embedding = weights["model.embed_tokens.weight"]
        x = _embed(embedding, tokens.reshape(replicas, batch * length))  # (R, B·T, C)
        rotation = _rotation(self.shape, length, x.device)
        for layer in range(self.shape.layers):
            at = f"model.layers.{layer}."
            x = x + self._attention(weights, at, self._norm(x, weights[at + "input_layernorm.weight"]), rotation, batch)
            x = x + self._mlp(weights, at, self._norm(x, weights[at + "post_attention_layernorm.weight"]))
        head = embedding if self.shape.tied else weights["lm_head.weight"]
        return self._linear(self._norm(x, weights["model.norm.weight"]), head).float()

    def _attention(
        self, weights: Mapping[str, Tensor], at: str, x: Tensor, rotation: tuple[Tensor, Tensor], batch: int
    ) -> Tensor:
        at += "self_attn."
        queries, keys, values = (self._heads(self._linear(x, weights[f"{at}{n}_proj.weight"]), batch) for n in "qkv")
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        seen = F.scaled_dot_product_attention(  # in fp32: torch's bf16 kernel for CPUs is slower, its backward fourfold
            queries.float(), keys.float(), values.float(), is_causal=True, enable_gqa=keys.shape != queries.shape
        )  # (R·B, heads, T, head)
        seen = seen.transpose(1, 2).reshape(len(x), x.shape[1], -1)
        return self._linear(seen, weights[at + "o_proj.weight"])

    def _mlp(self, weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
        gate = self._linear(x, weights[at + "mlp.gate_proj.weight"])
        up = self._linear(x, weights[at + "mlp.up_proj.weight"])
        return self._linear(F.silu(gate) * up, weights[at + "mlp.down_proj.weight"])

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.to(self.dtype), weight.to(self.dtype).transpose(1, 2))  # (R, N, in) by (R, out, in)

    def _heads(self, x: Tensor, batch: int) -> Tensor:
        replicas, rows, _ = x.shape
        return x.view(replicas * batch, rows // batch, -1, self.shape.head_width).transpose(1, 2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.shape.epsilon) * weight.unsqueeze(1)


def stacked(theta: Tensor, layout: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of the flat parameters (R, P), one a weight: (R, *its shape)."""
    parts = torch.split(theta, [size.numel() for size in layout.values()], dim=1)
    return {name: part.view(len(theta), *size) for (name, size), part in zip(layout.items(), parts, strict=True)}


def _is_plain(config: Any) -> bool:
    extras = config.attention_bias or config.mlp_bias or config.attention_dropout
    return config.hidden_act == "silu" and config.rope_parameters["rope_type"] == "default" and not extras


def _embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each replica's own table (R, V, C), for tokens (R, N)."""
    replicas, vocabulary, width = table.shape
    offsets = torch.arange(replicas, device=tokens.device).unsqueeze(1) * vocabulary
    return F.embedding(tokens + offsets, table.reshape(replicas * vocabulary, width))


def _rotation(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, (T, head), both halves alike as in transformers."""
    exponents = torch.arange(0, shape.head_width, 2, device=device).float() / shape.head_width
    angles = torch.outer(torch.arange(length, device=device).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
