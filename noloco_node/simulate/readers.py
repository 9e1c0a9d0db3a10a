"""What each replica reads: a node's token stream, over the whole corpus or over a part that no other replica has.

i.i.d.: every replica reads the whole training text in an order of its own, as nodes do. Not i.i.d.: each replica has
neighbouring modules in the order of their names, about as many bytes as any other, so it has whole packages.
Streams depend only on seed and replica: every algorithm reads the same batches in the same order.
"""

import numpy as np
import torch
from torch import Tensor

from noloco_node.data.corpus import Corpus
from noloco_node.data.stream import TokenStream
from noloco_node.data.tokens import Tokens
from noloco_node.errors import UsageError
from noloco_node.simulate.settings import Settings


class Readers:
    """One stream a replica."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        parts = [corpus.train] * settings.replicas if settings.iid else own_modules(corpus.train[:], settings.replicas)
        length = settings.data.sequence_length
        self._streams = [TokenStream(part, length, settings.seed, f"replica {i}") for i, part in enumerate(parts)]

    def next(self, sequences: int) -> Tensor:
        """Tokens of every replica's next batch, (R, sequences, length + 1)."""
        return torch.stack([stream.next(sequences)[0] for stream in self._streams])


def own_modules(text: Tokens, replicas: int) -> list[Tokens]:
    """The text in that many parts of whole modules. A part ends with the first module that reaches its fair share."""
    ends = np.flatnonzero(text == 0)  # the byte between two modules
    fair = np.arange(1, replicas) * len(text) // replicas
    if len(ends) < replicas:
        raise UsageError(f"the corpus has too few modules for {replicas} replicas")
    cuts = ends[np.minimum(np.searchsorted(ends, fair), len(ends) - 1)]
    return np.split(text, cuts + 1)
