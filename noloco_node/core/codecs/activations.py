"""How activations cross a stage's boundary, and the gradients at them on the way back.

Unlike a fragment of u (codec.py) they go one way and nothing is learned from them, so there is no conversation: one
side encodes, the other decodes. How many bytes that makes follows from the shape alone, so who receives knows it
before the first byte is there. What comes from a peer is checked: only PeerMisbehaved comes out, and a payload of the
wrong length is refused before anything is allocated for it.

    fp32    4 bytes an element, to the bit
    bf16    2 bytes, 8 bits of precision
    int8    1 byte and 1/64: each 128 elements of a token share a scale, so one large channel costs its own block only

Decoded tensors are fp32 and nobody else's: they may be changed, and may require a gradient.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.core import gpu
from noloco_node.core.codecs.codec import Payload, all_finite, check_length
from noloco_node.errors import NonFinite, PeerMisbehaved

GROUP = 128
"""Elements of a token that share a scale in int8."""
SMALLEST, LARGEST = 2.0**-100, 2.0**126
"""A group below the first is sent as zeros, as some devices flush subnormal numbers; one above the second is refused:
decoded, it might be infinite."""


class CastActivations:
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def encoded_bytes(self, shape: Sequence[int]) -> int:
        """Of any values of this shape (..., hidden)."""
        return math.prod(shape) * self._dtype.itemsize

    def encode(self, values: Tensor) -> bytes:
        """`values`: floating point, on any device; the calling thread waits for them. Raises NonFinite."""
        coded = values.detach().to(self._dtype).contiguous()
        host, total = gpu.to_host(coded.view(-1).view(torch.uint8), coded.sum().float())
        if not (np.isfinite(total) or coded.isfinite().all()):
            raise _not_finite()
        return host.tobytes()

    def decode(self, payload: Payload, shape: Sequence[int], device: torch.device) -> Tensor:
        """fp32, of this shape, on that device. Raises PeerMisbehaved."""
        check_length(payload, self.encoded_bytes(shape))
        values = _received(payload, 0, len(payload), device).view(self._dtype).view(*shape).float()
        if not all_finite(values):
            raise PeerMisbehaved("nonfinite", "activations")
        return values


class Int8Activations:
    """Codes are value / scale, rounded; a scale is a bf16 number, a little more than 1/127 of its group's largest
    element, so nothing is clipped. The error is at most half a scale: 0.4% of that element."""

    name = "int8"

    def encoded_bytes(self, shape: Sequence[int]) -> int:
        return self._scales(shape) * 2 + math.prod(shape)

    def encode(self, values: Tensor) -> bytes:
        grouped = _grouped(values.detach().float())  # (tokens, groups, at most GROUP)
        peaks = grouped.abs().amax(2, keepdim=True)
        finite = (peaks < LARGEST).all()  # false for NaN too
        scales = (peaks * ((1 + 2.0**-8) / 127)).bfloat16()
        scales[peaks < SMALLEST] = 0
        codes = (grouped / scales.float().clamp(min=SMALLEST / 128)).round_().to(torch.int8)
        codes = codes.flatten(1)[:, : values.shape[-1]].contiguous()
        *parts, is_finite = gpu.to_host(scales.view(torch.int16), codes, finite)
        if not is_finite:
            raise _not_finite()
        return b"".join(part.tobytes() for part in parts)

    def decode(self, payload: Payload, shape: Sequence[int], device: torch.device) -> Tensor:
        check_length(payload, self.encoded_bytes(shape))
        head = self._scales(shape) * 2
        scales = _received(payload, 0, head, device).view(torch.bfloat16).float()
        if not (scales.abs() < LARGEST / 64).all():  # false for NaN too; 128 of the largest are still finite
            raise PeerMisbehaved("nonfinite", "activations")
        codes = _received(payload, head, len(payload) - head, device).view(torch.int8).view(*shape)
        grouped = _grouped(codes.float())
        return grouped.mul_(scales.view(*grouped.shape[:2], 1)).flatten(1)[:, : shape[-1]].reshape(*shape)

    @staticmethod
    def _scales(shape: Sequence[int]) -> int:
        return math.prod(shape[:-1]) * -(-shape[-1] // GROUP)


ActivationCodec = CastActivations | Int8Activations
"""Serves any number of threads: it has no state."""

CODECS: dict[str, ActivationCodec] = {
    "fp32": CastActivations("fp32", torch.float32),
    "bf16": CastActivations("bf16", torch.bfloat16),
    "int8": Int8Activations(),
}


def activation_codec(name: str) -> ActivationCodec:
    """ValueError names what is allowed."""
    if name not in CODECS:
        raise ValueError(f"no codec of activations is called {name!r}: there are {', '.join(CODECS)}")
    return CODECS[name]


def _grouped(values: Tensor) -> Tensor:
    """(tokens, groups, GROUP), with zeros after a token's end; narrow tokens are one group as they are."""
    rows = values.reshape(-1, values.shape[-1])
    width = min(GROUP, max(1, rows.shape[1]))
    return nn.functional.pad(rows, (0, -rows.shape[1] % width)).view(len(rows), -(-rows.shape[1] // width), width)


def _received(payload: Payload, start: int, size: int, device: torch.device) -> Tensor:
    """These bytes of it, in memory of their own. A payload may end on any address, so they are copied first."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return gpu.to_device(np.frombuffer(payload, np.uint8, size, start).copy(), device)


def _not_finite() -> NonFinite:
    return NonFinite("an activation or its gradient is NaN, infinite or too large to send: the training has diverged")
