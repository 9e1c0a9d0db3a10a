"""Which codec a name like `lattice:4` stands for. A new family of codecs gets a module of its own and a place here."""

from collections.abc import Callable

import torch

from noloco_node.core.codecs.cast import Cast
from noloco_node.core.codecs.codec import BLOCK, Codec, carry
from noloco_node.core.codecs.int8 import Int8

PLAIN: dict[str, Callable[[], Codec]] = {
    "bf16": lambda: Cast("bf16", torch.bfloat16),
    "fp32": lambda: Cast("fp32", torch.float32),
    "int8": Int8,
}


def codec(name: str) -> Codec:
    """A new codec object, for one node. ValueError names what is allowed."""
    family, _, bits = name.partition(":")
    if family == "lattice":
        from noloco_node.core.codecs.lattice import Lattice  # it brings numba, which takes half a second to import

        return Lattice.parse(bits)
    if name not in PLAIN:
        raise ValueError(f"no codec is called {name!r}: there are lattice, {', '.join(PLAIN)}")
    return PLAIN[name]()


def rehearse(name: str, device: torch.device) -> None:
    """Code a small fragment once where snapshots will lie, with a block that misses its range, so that all that must be
    compiled is compiled.

    Compiling takes seconds and the interpreter's lock: in the middle of training it would cost ten times as much.
    """
    _trial(name, 64, device)


def bytes_per_element(name: str) -> float:
    """What one side sends, about: of 4,096 blocks one is sent again, as few are between partners."""
    return _trial(name, 4096, torch.device("cpu")) / (4096 * BLOCK)


def _trial(name: str, blocks: int, device: torch.device) -> int:
    """The bytes that one side sent, of a fragment with a block that misses its range."""
    mine = torch.linspace(-1, 1, blocks * BLOCK, device=device)
    theirs = mine + 1e-3
    theirs[:BLOCK] += 1
    moved = torch.full((blocks,), 1e-3)
    one, other = (codec(name).converse(u, 0, bytes(16), moved) for u in (mine, theirs))
    carry(one, other)
    return one.stats.sent_bytes
