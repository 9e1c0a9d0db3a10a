"""What a codec is: a short conversation of opaque payloads that gives a partner one fragment of u.

Whatever the codec, both sides take the difference of the same two *coded* vectors, so c_j == −c_i to the bit and coding
adds no drift: the pair's mean is conserved up to the rounding of one addition. Plain codecs send everything at once;
others take more turns, the same number on both sides. What comes from a partner is checked before it is used: only
PeerMisbehaved comes out, and a payload of the wrong length is refused before anything is allocated for it.

Payloads are little-endian, as is every machine that torch is built for today. Knows nothing of sockets, rounds or
partners. Which codecs there are: core/codecs/by_name.py.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from noloco_node.errors import PeerMisbehaved

BLOCK = 256
"""Elements that share a range, where a codec has ranges. Fragments are cut at multiples of it."""

LEAST = 1 / 16
"""Of the largest |βΔ| of the whole vector, for `hints`."""

Payload = bytes | memoryview
"""A partner's may be a part of the message that it came in."""


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a partner's payload: the next payload to send, or the correction."""

    reply: bytes | None
    """What to send next, if anything."""
    correction: Tensor | None
    """fp32; there when the conversation is complete."""
    unit: Tensor | None = None
    """Each block of the correction is a whole number of these, one for each block; None: the codec has no such unit."""
    most: int | None = None
    """The largest number of units in one element; None: not known."""


@dataclass(slots=True)
class CodecStats:
    """Figures of a conversation. Sums, so that those of a swap's fragments can be added up."""

    blocks: int = 0
    missed: int = 0
    """Blocks sent again: out of the agreed range, and not repairable."""
    sent_bytes: int = 0
    difference: float = 0.0
    """Σ (u_j − u_i)² over the elements sent in full."""
    error: float = 0.0
    """Σ (2 c − (u_j − u_i))² over the same elements."""

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
    """A conversation about one fragment, with one partner."""

    @property
    def stats(self) -> CodecStats:
        """Complete when the conversation is."""
        ...

    def open(self) -> bytes:
        """The first payload; called once. Raises NonFinite where our own vector cannot be coded."""
        ...

    def receive(self, payload: Payload) -> Received:
        """Takes the partner's next payload; after `open`. Raises PeerMisbehaved."""
        ...

    def learn(self) -> None:
        """For the next conversations: called when the correction was found plausible, and never before."""
        ...


class Codec(Protocol):
    """Makes conversations. One object serves one node for its whole life, so what a codec learns from an exchange about
    a fragment (how far apart partners are) it may keep, by `index`, for the next."""

    @property
    def name(self) -> str: ...

    def converse(self, u: Tensor, index: int, exchange_id: bytes, moved: Tensor | None = None) -> Conversation:
        """`u`: fragment `index` of the snapshot, fp32, which nobody changes; the correction lies on the same device.
        `exchange_id`: the same on both sides and never twice, so it may seed random numbers that both sides must share.
        `moved`: of each of the fragment's blocks of 256, what `hints` makes of the whole vector, on the CPU."""
        ...

    def forget(self) -> None:
        """What was learned: it was of other weights, or of a partner that lied."""
        ...


def carry(one: Conversation, other: Conversation) -> tuple[Tensor, Tensor]:
    """Carries the payloads of two conversations to each other, as a swap does over a link. Both corrections."""
    payloads = one.open(), other.open()
    while True:
        mine, theirs = one.receive(payloads[1]), other.receive(payloads[0])
        if mine.correction is not None and theirs.correction is not None:
            return mine.correction, theirs.correction
        if mine.reply is None or theirs.reply is None:
            raise RuntimeError("the two ends of a conversation do not agree how many turns it has")
        payloads = mine.reply, theirs.reply


class Packed:
    """A correction, kept until it is known whether it did harm: a byte an element where the codec has units."""

    def __init__(
        self, correction: Tensor, unit: Tensor | None = None, scale: float = 1.0, most: float | None = None
    ) -> None:
        """`correction`: before `scale`; nobody changes it. `most`: as in Received; else the device is waited for."""
        self.scale = scale
        self.size = len(correction)
        self._unit = unit
        self._numbers = correction
        if unit is not None:
            steps = blocks_of(correction) / unit[:, None]
            if most is None:
                most = float(torch.maximum(-steps.amin(), steps.amax())) if self.size else 0.0
            kind = next((kind for kind in (torch.int8, torch.int16) if most <= torch.iinfo(kind).max), None)
            self._unit, self._numbers = (unit, steps.to(kind)) if kind else (None, correction)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [self._numbers] if self._unit is None else [self._numbers, self._unit]

    def unscaled(self, device: torch.device) -> Tensor:
        """To the bit as the codec gave it."""
        numbers, *unit = (tensor.to(device) for tensor in self.tensors)
        return (numbers.float() * unit[0][:, None]).view(-1)[: self.size] if unit else numbers

    def applied(self, device: torch.device) -> Tensor:
        return scaled(self.unscaled(device), self.scale)


def hints(peaks: Tensor) -> Tensor:
    """How far apart partners may be, from the largest |βΔ| of each block of the whole vector, on the CPU.

    A block that hardly moved here may have moved there: a row for a user whom only the partner has seen. So no hint is
    below LEAST of the largest one. Then the ranges that lattice.py agrees on, at most 64 times a side's wish, reach as
    far as a correction may go whole (HIGHEST in core/bounds.py). The bounds themselves are made of the movement alone.

    *(Tried on a table of 8,192 rows without weight decay, of which one side trains all, or half, and the other 8 to
    4,096: 30 pairs, 8 rounds. With `lattice:3` and no floor all swaps end as diverged; with 1/64 the last ones of 6
    pairs do, with 1/16 of none. A floor of each fragment alone fails where the other side moved nothing of a fragment.
    Models without such rows have the same error, and at most 0.4% more bytes.)*
    """
    return peaks.clamp(min=LEAST * float(peaks.max())) if len(peaks) else peaks


def blocks_of(u: Tensor) -> Tensor:
    """(blocks, 256), zeros after the end; a copy only where the last block is short."""
    short = -u.numel() % BLOCK
    return (nn.functional.pad(u, (0, short)) if short else u).view(-1, BLOCK)


def check_length(payload: Payload, wanted: int) -> None:
    if len(payload) != wanted:
        raise PeerMisbehaved("bad_length", f"{len(payload)} bytes instead of {wanted}")


def all_finite(values: Tensor) -> bool:
    """NaN and Inf stay in a sum, which takes a thirtieth of the time; it may overflow."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def scaled(correction: Tensor, factor: float) -> Tensor:
    """One fp32 multiplication, the same on both sides: opposite corrections stay opposite to the bit."""
    return correction if factor == 1 else correction * factor
