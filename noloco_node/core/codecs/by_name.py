"""Which codec a name like `lattice:4` stands for. A new family of codecs gets a module of its own and a place here."""

from collections.abc import Callable

import torch
from torch import Tensor

from noloco_node.core.codecs.cast import CastConversation
from noloco_node.core.codecs.codec import BLOCK, Codec, Conversation, carry
from noloco_node.core.codecs.int8 import Int8Conversation

PLAIN: dict[str, Callable[[Tensor], Conversation]] = {
    "bf16": lambda u: CastConversation(u.bfloat16()),
    "fp32": CastConversation,
    "int8": Int8Conversation,
}


class _Plain:
    """Learns nothing, so its conversations know one fragment alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def converse(self, u: Tensor, index: int, exchange_id: bytes, moved: Tensor | None = None) -> Conversation:
        return PLAIN[self.name](u)

    def forget(self) -> None:
        pass


def codec(name: str) -> Codec:
    """A new codec object, for one node. ValueError names what is allowed."""
    family, _, bits = name.partition(":")
    if family == "lattice":
        from noloco_node.core.codecs.lattice import Lattice  # it brings numba, which takes half a second to import

        return Lattice.parse(bits)
    if name not in PLAIN:
        raise ValueError(f"no codec is called {name!r}: there are lattice, {', '.join(PLAIN)}")
    return _Plain(name)


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
