"""One byte an element: blocks of 256, each scaled by its own power of two, sent at once.

It codes u itself, so partners may be far apart; where they are close, lattice codes are more exact. A coded element
k · 2^e, |k| ≤ 127, is an fp32 number, so both sides take the difference of the same two coded vectors and c_j = −c_i to
the bit. A block whose largest element is below 2^-100 is sent as zeros: no subnormal number is ever made, which some
devices would flush.
"""

import numpy as np
import torch
from torch import Tensor

from noloco_node.core import gpu, outer
from noloco_node.core.codecs.codec import BLOCK, CodecStats, Payload, Received, blocks_of, check_length
from noloco_node.errors import NonFinite, PeerMisbehaved

LIMIT = 127
LOWEST, HIGHEST = -107, 120
"""Of e: 127 · 2^120 still leaves room for a difference of two such numbers."""


class Int8Conversation:
    def __init__(self, u: Tensor) -> None:
        self.stats = CodecStats()
        self._u = u

    def open(self) -> bytes:
        blocks = blocks_of(self._u)
        peaks = blocks.abs().amax(1)
        if not (peaks < 2.0**126).all():  # false for NaN too
            raise NonFinite("a weight is NaN, infinite or beyond 2^126: the training has diverged")
        # peak = m · 2^e with m < 1, so that peak / 2^(e − 7) < 128; rounding to 128 is clamped.
        self._exponents = (torch.frexp(peaks).exponent - 7).clamp(min=LOWEST)
        scaled = blocks * _power(-self._exponents)
        self._codes = scaled.round_().clamp_(-LIMIT, LIMIT).to(torch.int8)
        exponents, codes = gpu.to_host(self._exponents.to(torch.int8), self._codes.view(-1)[: len(self._u)])
        payload = b"".join((exponents.data, codes.data))
        self.stats.sent_bytes += len(payload)
        return payload

    def receive(self, payload: Payload) -> Received:
        count, size = len(self._exponents), len(self._u)
        check_length(payload, count + size)
        exponents = np.frombuffer(payload, np.int8, count).astype(np.int32)
        if count and not LOWEST <= exponents.min() <= exponents.max() <= HIGHEST:
            raise PeerMisbehaved("bad_range")
        codes = np.zeros(count * BLOCK, np.int8)
        codes[:size] = np.frombuffer(payload, np.int8, size, count)
        theirs = [gpu.to_device(part, self._u.device) for part in (codes, exponents)]
        c = outer.correction(_coded(self._codes, self._exponents), _coded(theirs[0].view(-1, BLOCK), theirs[1]))
        return Received(None, c.view(-1)[:size])

    def learn(self) -> None:
        pass


def _coded(codes: Tensor, exponents: Tensor) -> Tensor:
    return codes.float() * _power(exponents)


def _power(exponents: Tensor) -> Tensor:
    """2^e by an fp32 number's own bits: what a device's `pow` rounds would not be the same everywhere."""
    return ((exponents + 127) << 23).view(torch.float32)[:, None]
