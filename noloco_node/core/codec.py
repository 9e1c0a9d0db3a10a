"""How a fragment of u is told to a partner: a short conversation of opaque payloads, the same number from both sides.

Whatever the codec, both sides take the difference of the same two *coded* vectors, so c_j == −c_i to the bit and coding
adds no drift: the pair's mean is conserved up to the rounding of one addition. Plain codecs say everything at once;
others may take more turns. What comes from a partner is checked before it is used: only PeerMisbehaved comes out, and a
payload of the wrong length is refused before anything is allocated for it.

Payloads are little-endian, as is every machine that torch is built for today. Knows nothing of sockets, rounds or who
the partner is. New families of codecs enter in FAMILIES, each with a module of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from noloco_node.core import outer
from noloco_node.errors import NonFinite, PeerMisbehaved


@dataclass(frozen=True, slots=True)
class Heard:
    """What a payload came to."""

    say: bytes | None
    """What to send next, if anything."""
    correction: Tensor | None
    """fp32; there when the conversation is complete."""


class Conversation(Protocol):
    """About one fragment, with one partner."""

    def open(self) -> bytes:
        """The first payload; called once. Raises NonFinite where our own vector cannot be told."""
        ...

    def hear(self, payload: bytes) -> Heard:
        """The partner's next payload; after `open`. Raises PeerMisbehaved."""
        ...


class Codec(Protocol):
    """Makes conversations. One object serves one node for its whole life, so what a codec learns from an exchange about
    a fragment (how far apart partners stand) it may keep, by `index`, for the next."""

    @property
    def name(self) -> str: ...

    def converse(self, u: Tensor, index: int, exchange_id: bytes) -> Conversation:
        """`u`: fragment `index` of the snapshot, fp32 on the CPU, which nobody changes. `exchange_id`: the same on both
        sides and never twice, so it may seed whatever chance both sides must share."""
        ...


class _Cast:
    """Every element in one dtype, all at once."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def converse(self, u: Tensor, index: int, exchange_id: bytes) -> "_CastConversation":
        return _CastConversation(u.to(self._dtype))


class _CastConversation:
    def __init__(self, mine: Tensor) -> None:
        self._mine = mine  # coded; fp32 shares the snapshot's memory

    def open(self) -> bytes:
        if not self._mine.isfinite().all():
            raise NonFinite(f"a weight is too large for {self._mine.dtype}: the training has diverged")
        return self._mine.view(torch.uint8).numpy().tobytes()

    def hear(self, payload: bytes) -> Heard:
        theirs = _decode(payload, self._mine)
        c = outer.correction(self._mine.float(), theirs.float())
        if not c.isfinite().all():  # as it is whenever an element of theirs is not
            raise PeerMisbehaved("nonfinite")
        return Heard(None, c)


def _decode(payload: bytes, like: Tensor) -> Tensor:
    theirs = torch.empty_like(like)
    if len(payload) != theirs.nbytes:
        raise PeerMisbehaved("bad_length", f"{len(payload)} bytes instead of {theirs.nbytes}")
    theirs.view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8)
    return theirs


def _without_parameter(name: str, dtype: torch.dtype) -> Callable[[str], Codec]:
    def make(parameter: str) -> Codec:
        if parameter:
            raise ValueError(f"takes no parameter, not {parameter!r}")
        return _Cast(name, dtype)

    return make


FAMILIES: dict[str, Callable[[str], Codec]] = {
    "bf16": _without_parameter("bf16", torch.bfloat16),
    "fp32": _without_parameter("fp32", torch.float32),
}
"""What stands before the colon of a codec's name -> what makes one from what stands after it ("" without a colon)."""


def codec(name: str) -> Codec:
    """A new codec object, for one node. ValueError names what is allowed."""
    family, _, parameter = name.partition(":")
    if family not in FAMILIES:
        raise ValueError(f"no codec is called {name!r}: there are {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](parameter)
    except ValueError as error:
        raise ValueError(f"codec {name!r}: {family} {error}") from None
