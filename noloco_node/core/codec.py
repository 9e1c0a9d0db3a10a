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

BLOCK = 256
"""Elements that share a range, where a codec has ranges. Fragments are cut at multiples of it."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a payload came to."""

    say: bytes | None
    """What to send next, if anything."""
    correction: Tensor | None
    """fp32; there when the conversation is complete."""


@dataclass(slots=True)
class CodecStats:
    """What a conversation came to. Sums, so that those of a round's fragments can be added up."""

    blocks: int = 0
    missed: int = 0
    """Told again: out of the agreed range, and not to be mended."""
    sent_bytes: int = 0
    received_bytes: int = 0
    difference: float = 0.0
    """Σ (u_j − u_i)² over the elements sent in full."""
    error: float = 0.0
    """Σ (2 c − (u_j − u_i))² there."""

    def add(self, other: "CodecStats") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def missed_share(self) -> float:
        return self.missed / self.blocks if self.blocks else 0.0

    @property
    def relative_error(self) -> float:
        """Of u_j − u_i, estimated from the elements sent in full."""
        return (self.error / self.difference) ** 0.5 if self.difference else 0.0


class Conversation(Protocol):
    """About one fragment, with one partner."""

    @property
    def stats(self) -> CodecStats:
        """What it came to; complete when the conversation is."""
        ...

    def open(self) -> bytes:
        """The first payload; called once. Raises NonFinite where our own vector cannot be told."""
        ...

    def hear(self, payload: bytes) -> Received:
        """The partner's next payload; after `open`. Raises PeerMisbehaved."""
        ...


class Codec(Protocol):
    """Makes conversations. One object serves one node for its whole life, so what a codec learns from an exchange about
    a fragment (how far apart partners stand) it may keep, by `index`, for the next."""

    @property
    def name(self) -> str: ...

    def converse(self, u: Tensor, index: int, exchange_id: bytes, moved: Tensor | None = None) -> Conversation:
        """`u`: fragment `index` of the snapshot, fp32 on the CPU, which nobody changes. `exchange_id`: the same on both
        sides and never twice, so it may seed whatever chance both sides must share. `moved`: the largest |βΔ| of each
        of the fragment's blocks of 256, a hint at how far apart partners stand."""
        ...


class _Cast:
    """Every element in one dtype, all at once."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def converse(self, u: Tensor, index: int, exchange_id: bytes, moved: Tensor | None = None) -> "_CastConversation":
        return _CastConversation(u.to(self._dtype))


class _CastConversation:
    def __init__(self, mine: Tensor) -> None:
        self.stats = CodecStats()
        self._mine = mine  # coded; fp32 shares the snapshot's memory

    def open(self) -> bytes:
        if not self._mine.isfinite().all():
            raise NonFinite(f"a weight is too large for {self._mine.dtype}: the training has diverged")
        payload = self._mine.view(torch.uint8).numpy().tobytes()
        self.stats.sent_bytes += len(payload)
        return payload

    def hear(self, payload: bytes) -> Received:
        self.stats.received_bytes += len(payload)
        theirs = _decode(payload, self._mine)
        c = outer.correction(self._mine.float(), theirs.float())
        if not c.isfinite().all():  # as it is whenever an element of theirs is not
            raise PeerMisbehaved("nonfinite")
        return Received(None, c)


def _decode(payload: bytes, like: Tensor) -> Tensor:
    theirs = torch.empty_like(like)
    if len(payload) != theirs.nbytes:
        raise PeerMisbehaved("bad_length", f"{len(payload)} bytes instead of {theirs.nbytes}")
    theirs.view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8)
    return theirs


def _without_parameter(make: Callable[[], Codec]) -> Callable[[str], Codec]:
    def checked(parameter: str) -> Codec:
        if parameter:
            raise ValueError(f"takes no parameter, not {parameter!r}")
        return make()

    return checked


def _int8() -> Codec:
    from noloco_node.core.int8 import Int8

    return Int8()


def _lattice(parameter: str) -> Codec:
    from noloco_node.core.lattice import Lattice  # it brings numba, which takes half a second to import

    return Lattice.parse(parameter)


FAMILIES: dict[str, Callable[[str], Codec]] = {
    "bf16": _without_parameter(lambda: _Cast("bf16", torch.bfloat16)),
    "fp32": _without_parameter(lambda: _Cast("fp32", torch.float32)),
    "int8": _without_parameter(_int8),
    "lattice": _lattice,
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


def rehearse(name: str) -> None:
    """Tell a small fragment once, with a block that misses its range, so that all that must be compiled is compiled.

    Compiling takes seconds and the interpreter's lock: in the middle of training it would cost ten times as much.
    """
    mine = torch.linspace(-1, 1, 64 * BLOCK)
    theirs = mine + 1e-3
    theirs[:BLOCK] += 1
    moved = torch.full((64,), 1e-3)
    one, other = (codec(name).converse(u, 0, bytes(16), moved) for u in (mine, theirs))
    turns: tuple[bytes | None, bytes | None] = one.open(), other.open()
    while turns[0] is not None and turns[1] is not None:
        turns = one.hear(turns[1]).say, other.hear(turns[0]).say
