"""Lattice codes: both partners round u to one grid and send the low bits; the other's own vector gives the rest.

u_i and u_j are close to each other and far from zero, so most of what a code of u itself would send, the partner knows
already (quantised decentralised SGD with lattice codes: arXiv 2002.09268; SwarmSGD: 1910.12308). With
k = round(u/step + dither), the same step and dither on both sides, a partner within the range finds all of k from
k mod 2^bits. Both use the difference of the same two whole numbers, so the corrections are opposite to the bit. The
turns:

    1  ranges       the range that each block should have, and a few elements in full: core/codecs/lattice_ranges.py
    2  codes        k mod 2^bits, packed; per block 16 bits of a checksum over what is not sent; a digest of all k
    3  missed       of blocks whose checksum does not fit (the partner was out of range) and that were not repaired:
                    8 more bits of k, a checksum
    4  whole        of blocks that still do not fit: all of k. At last, if the digest does not fit: of all blocks

Where only one element of a block is out of range, and not far, the checksum is off by that element's weight, which
identifies it: both sides repair it, and nothing is sent again. So ranges need to hold all but one element of most
blocks instead of all of them: with the same bytes the error of eight replicas in `simulate` fell from 0.27 to 0.23.

Both sides take the same number of turns, at least two. Guarantees, and their conditions:

- c_j = −c_i to the bit, whatever was missed, between all kernels. An honest pair misses the same blocks on both sides,
  because the decoded difference is antisymmetric even at the range's edge (core/kernels/__init__.py).
- |2 c − (u_j − u_i)| ≤ 1.5 steps in every element of a block that was decoded right, as long as |u| of both sides is
  below 2^21 steps: each side's wish for the range ensures that, unless the other's is 64 times smaller.
- A block out of range is noticed unless its checksum collides: never with up to three elements off by one range each,
  else at 2^-15 or less; the digest finds all but 2^-(16 − bits) of those, and then the whole fragment is sent.
- A block is repaired wrongly never with two elements off by one range each, with three or five about once in 1,000 (as
  measured), most of which no digest finds: four elements of c are then off by a range, and c_j = −c_i still.
- A payload costs what its length says, which is checked first; any bytes of that length give finite corrections.

Knows one fragment at a time, and no partner. The codec's memory is one byte for each block of 256.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.core import gpu
from noloco_node.core.codecs import lattice_ranges
from noloco_node.core.codecs.codec import CodecStats, Payload, Received, blocks_of, check_length
from noloco_node.core.kernels import BLOCK, PHASES, Grid, for_device, reference
from noloco_node.core.kernels.tables import SPOTS, WEIGHTS
from noloco_node.errors import NonFinite, PeerFault, PeerMisbehaved

Array: TypeAlias = NDArray[Any]

BITS = (2, 8)
MORE = 8
"""Bits of a missed block in turn 3: 256 times the range."""
WHOLE = 24
"""Bits of k at most, in two's complement."""
DIGEST_BYTES = 4
DIVERGED = 0.5
"""If a larger share of a fragment's blocks misses, the two replicas have diverged: sending the rest would not help."""
FEW = 32
"""... but so few blocks prove nothing."""
CALM, NEAR = 8, 3
"""A block is repaired only where its differences are below 1/√8 of the range, as a root mean square, and the element
that is out of range lies beyond it by 3/8 of it at most: else the checksum fits one element by chance."""
AT_ONCE = 128
"""Size of the groups in which missed blocks are worked on: temporaries stay within a few hundred KiB."""


class Lattice:
    def __init__(self, bits: int = 4) -> None:
        if not BITS[0] <= bits <= BITS[1]:
            raise ValueError(f"the codec lattice takes {BITS[0]} to {BITS[1]} bits, not {bits}")
        self.name = f"lattice:{bits}"
        self.bits = bits
        self._memories: dict[int, lattice_ranges.RangeMemory] = {}

    @classmethod
    def parse(cls, parameter: str) -> "Lattice":
        """Made from the part after the colon of `lattice:4`."""
        if parameter and not parameter.isdecimal():
            raise ValueError(f"the codec lattice takes {BITS[0]} to {BITS[1]} bits, not {parameter!r}")
        return cls(int(parameter or 4))

    def converse(self, u: Tensor, index: int, exchange_id: bytes, moved: Tensor | None = None) -> "LatticeConversation":
        """`moved`: of each of the fragment's blocks, as `hints` gives them (codec.py)."""
        blocks = -(-u.numel() // BLOCK)
        memory = self._memories.get(index)
        if memory is None or memory.blocks != blocks:
            memory = self._memories[index] = lattice_ranges.RangeMemory(blocks, self.bits)
        return LatticeConversation(self.bits, memory, u, _seed(exchange_id, index), moved)

    def forget(self) -> None:
        self._memories.clear()


class LatticeConversation:
    def __init__(
        self, bits: int, memory: lattice_ranges.RangeMemory, u: Tensor, seed: int, moved: Tensor | None
    ) -> None:
        self.stats = CodecStats(blocks=memory.blocks)
        """Complete when the conversation is."""
        self._bits = bits
        self._memory = memory
        self._kernels = for_device(u.device.type)
        self._size = u.numel()
        self._u = blocks_of(u)
        self._seed = seed
        self._moved = None if moved is None else moved.numpy()
        self._seen: Array | None = None
        """The elements of the correction that were sent in full, while it is as it was decoded."""
        self._turn: Callable[[Payload], Received] = self._receive_ranges

    def open(self) -> bytes:
        where = lattice_ranges.places(self._size, self._seed)
        # what is asked of a peak is in its upper half: its exponent and the first bits
        upper = (self._kernels.peaks(self._u) >> 16).to(torch.int16)
        upper_peaks, sample = gpu.to_host(upper, self._picked(self._u, where))
        peaks = upper_peaks.astype(np.int32) << 16
        if peaks.max(initial=0) >= lattice_ranges.LARGEST:
            raise NonFinite("a weight is NaN, infinite or beyond 2^110: the training has diverged")
        self._wish = self._memory.wish(peaks, self._moved, sample, where)
        return self._send(self._wish.pack())

    def receive(self, payload: Payload) -> Received:
        return self._turn(payload)

    # ---- turn by turn ----
    def _receive_ranges(self, payload: Payload) -> Received:
        theirs = lattice_ranges.RangeWish.parse(payload, self._wish)
        self._apart = np.subtract(theirs.sample, self._wish.sample, dtype=np.float64)
        self._agreed = lattice_ranges.agree(self._wish, theirs)
        self._half_steps = lattice_ranges.value_of(self._agreed - 4 * self._bits)  # an octave of range is four codes
        inverse = np.float32(0.5) / self._half_steps
        self._grid = Grid(self._on_device(inverse), self._on_device(self._half_steps), self._seed % PHASES)
        self._codes, sums = self._kernels.encode(self._u, self._grid, self._bits)
        codes, self._sums = gpu.to_host(self._codes, sums)
        self._turn = self._receive_codes
        return Received(self._send(codes, _checks(self._sums, self._bits), _digest(self._sums)), None)

    def _receive_codes(self, payload: Payload) -> Received:
        blocks = self.stats.blocks
        cut = 32 * self._bits * blocks
        check_length(payload, cut + 2 * blocks + DIGEST_BYTES)
        codes = np.frombuffer(payload, np.uint8, cut).reshape(blocks, 32 * self._bits)
        self._their_digest = bytes(payload[-DIGEST_BYTES:])
        theirs = self._on_device(codes.copy())  # a tensor over a bytes object's own memory could be written to
        self._c, *found = self._kernels.decode(self._codes, theirs, self._grid.half_step, self._bits)
        sums, energy, self._seen = gpu.to_host(*found, self._picked(self._c, self._wish.where))
        self._their_sums, self._energy = self._sums + sums, energy.astype(np.float64)
        del self._codes
        missed = self._repair(_missed(self._their_sums, self._bits, payload, cut), payload, cut)
        self.stats.missed = len(missed)
        if len(missed) > max(FEW, DIVERGED * blocks):
            raise PeerFault("diverged", f"{len(missed)} of {blocks} blocks out of range")
        self._their_codes = codes[missed]  # numpy's: torch would wake its threads for a few rows
        return self._ask(missed, MORE) if len(missed) else self._finish()

    def _repair(self, missed: lattice_ranges.Places, payload: Payload, at: int) -> lattice_ranges.Places:
        """Repair blocks with one element out of range, which the checksum identifies. Returns the other blocks."""
        half = 1 << self._bits - 1
        spots = SPOTS[_off(self._their_sums, self._bits, payload, at)[missed]].astype(np.int64)
        named = (spots != 0) & (self._energy[missed] <= BLOCK * half * half / CALM)
        if not named.any():
            return missed
        self._seen = None
        blocks, places, up = missed[named], np.abs(spots[named]) - 1, np.sign(spots[named])
        where = self._on_device(blocks), self._on_device(places)
        steps = self._half_steps[blocks]
        (found,) = gpu.to_host(self._c[where])
        wrong = (found / steps).astype(np.int64)
        right = wrong + (up << self._bits)
        near = np.abs(right) <= half + NEAR * half // 8
        right = np.where(near, right, wrong)
        self._c[where] = self._on_device(right.astype(np.float32) * steps)
        self._their_sums[blocks] += ((right - wrong) * WEIGHTS[places]).astype(np.int32)
        self._energy[blocks] += right**2 - wrong**2
        return np.setdiff1d(missed, blocks[near], assume_unique=True)

    def _receive_missed(self, payload: Payload) -> Received:
        blocks, width = self._sent_again, self._bits + MORE
        cut = BLOCK * len(blocks)
        check_length(payload, cut + 2 * len(blocks))
        more = np.frombuffer(payload, np.uint8, cut).reshape(-1, BLOCK)
        for some in _groups(len(blocks)):
            low = reference.unpack(self._on_device(self._their_codes[some]), self._bits)
            more_bits = self._on_device(more[some].astype(np.int32) << self._bits)
            self._resolve(blocks[some], low | more_bits, width)
        still = blocks[_missed(self._their_sums[blocks], width, payload, cut)]
        return self._ask(still, WHOLE) if len(still) else self._finish()

    def _receive_whole(self, payload: Payload) -> Received:
        blocks = self._sent_again
        check_length(payload, WHOLE // 8 * BLOCK * len(blocks))
        planes = np.frombuffer(payload, np.uint8).reshape(-1, WHOLE // 8, BLOCK)
        for some in _groups(len(blocks)):
            low, middle, high = planes[some].astype(np.int32).swapaxes(0, 1)
            self._resolve(blocks[some], self._on_device(low | middle << 8 | high << 16), WHOLE)
        return self._finish(everything=len(blocks) == self.stats.blocks)

    def _finish(self, everything: bool = False) -> Received:
        if _digest(self._their_sums) != self._their_digest:
            if everything:
                raise PeerMisbehaved("bad_digest")
            return self._ask(np.arange(self.stats.blocks), WHOLE)
        self._turn = _over
        most: int | None = 1 << self._bits - 1
        if self._seen is None:
            (self._seen,), most = gpu.to_host(self._picked(self._c, self._wish.where)), None
        error = 2 * self._seen.astype(np.float64) - self._apart
        self.stats.error, self.stats.difference = float(error @ error), float(self._apart @ self._apart)
        return Received(None, self._c.view(-1)[: self._size], self._grid.half_step, most)

    def learn(self) -> None:
        self._memory.learn(self._wish, self._agreed, self._energy, self.stats.missed)

    # ---- blocks that are sent again ----
    def _ask(self, blocks: lattice_ranges.Places, bits: int) -> Received:
        """Send, and expect, more of these blocks: the next bits of k with a checksum, or all of them."""
        self._sent_again = blocks
        self._turn = self._receive_whole if bits == WHOLE else self._receive_missed
        first = 0 if bits == WHOLE else self._bits
        sent = np.empty((len(blocks), bits // 8, BLOCK), np.uint8)
        for some in _groups(len(blocks)):
            k = reference.steps(self._u, self._grid, self._on_device(blocks[some]))
            planes = [(k >> first + 8 * plane & 0xFF).to(torch.uint8) for plane in range(bits // 8)]
            (sent[some],) = gpu.to_host(torch.stack(planes, 1))
        checks = b"" if bits == WHOLE else _checks(self._sums[blocks], self._bits + bits)
        return Received(self._send(sent, checks), None)

    def _resolve(self, blocks: lattice_ranges.Places, low: Tensor, width: int) -> None:
        self._seen = None
        found = reference.resolve(self._u, self._grid, self._on_device(blocks), low, width, self._c)
        self._their_sums[blocks], self._energy[blocks] = gpu.to_host(*found)

    def _picked(self, rows: Tensor, where: lattice_ranges.Places) -> Tensor:
        if not rows.is_cuda:  # numpy's: torch would wake its threads for a few elements
            return torch.from_numpy(rows.numpy().reshape(-1)[where])
        return rows.view(-1)[self._on_device(where)]

    def _on_device(self, array: Array) -> Tensor:
        return gpu.to_device(array, self._u.device)

    def _send(self, *parts: bytes | Array) -> bytes:
        payload = b"".join(part.data if isinstance(part, np.ndarray) else part for part in parts)
        self.stats.sent_bytes += len(payload)
        return payload


def _over(payload: Payload) -> Received:
    raise PeerMisbehaved("too_much", "a payload after the end")


def _seed(exchange_id: bytes, index: int) -> int:
    """31 random bits that both sides share, different in every conversation."""
    drawn = hashlib.blake2b(exchange_id, digest_size=4, key=index.to_bytes(8, "little")).digest()
    return int.from_bytes(drawn, "little") >> 1


def _groups(count: int) -> list[slice]:
    return [slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE)]


# ---- checksums, one entry a block ----
def _checks(sums: Array, width: int) -> bytes:
    """Σ (k >> width) · w mod 2^16, plus what Σ (k mod 2^width) · w carries over, which the low bits give."""
    return ((sums >> width) & 0xFFFF).astype("<u2").tobytes()


def _missed(sums: Array, width: int, payload: Payload, at: int) -> lattice_ranges.Places:
    """The blocks whose checksums differ from those of the partner."""
    return np.flatnonzero(_off(sums, width, payload, at))


def _off(sums: Array, width: int, payload: Payload, at: int) -> NDArray[np.uint16]:
    """By how much the partner's checksums exceed what they should be, modulo 2^16."""
    off: NDArray[np.uint16] = np.frombuffer(payload, "<u2", len(sums), at) - (sums >> width).astype(np.uint16)
    return off


def _digest(sums: Array) -> bytes:
    """Of all k of a fragment."""
    odd = np.arange(1, 2 * len(sums), 2, dtype=np.uint32)
    return int((sums.view(np.uint32) * odd).sum(dtype=np.uint32)).to_bytes(DIGEST_BYTES, "little")
