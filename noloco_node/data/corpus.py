"""The data of a run: tokens to train on, and a held-out part that is the same for every replica.

    stdlib   stdlib.py   the standard library's sources, in memory
    files    files.py    a volunteer's text, jsonl, parquet and token files, as one token file
    hub      hub.py      a data set of the Hugging Face hub, streamed

Of the first two stream.py reads the tokens in an order of each replica's own; the third has a stream with the same
methods. documents.py reads a volunteer's files, parts.py decides what of them is held out, tokens.py turns text into
tokens. Knows nothing of models or peers.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from noloco_node.data import files, hub, sources, stdlib, tokens
from noloco_node.data.hub import HubCorpus
from noloco_node.data.sources import Sources
from noloco_node.data.stream import TokenStream
from noloco_node.data.token_file import FileTokens
from noloco_node.data.tokens import BYTES, Tokenizer, Tokens
from noloco_node.run.schema import DataSpec

NOTHING = Sources()
"""What a volunteer names for a run on the standard library."""


@dataclass(frozen=True)
class Corpus:
    """Tokens in memory or in a file."""

    train: Tokens | FileTokens
    held_out: Tokens | FileTokens
    tokenizer: Tokenizer = BYTES

    def stream(self, sequence_length: int, seed: int, peer_id: str) -> TokenStream:
        return TokenStream(self.train, sequence_length, seed, peer_id)


Readable: TypeAlias = Corpus | HubCorpus


def load(spec: DataSpec, where: Sources = NOTHING, tokenizer: Tokenizer | None = None) -> Readable:
    """Open the data that the manifest names. A volunteer's files are tokenized at the first start. `tokenizer`: the
    run's, where it is at hand."""
    if tokenizer is None:
        sources.check(spec, where)
        tokenizer = tokens.load(spec.tokenizer, where.tokenizer)
    if spec.source == "files":
        return Corpus(*files.load(where, tokenizer, spec.field), tokenizer)
    if spec.source == "hub":
        return replace(hub.load(spec, tokenizer), awaited=where.awaited)
    return standard_library(tokenizer)


def standard_library(tokenizer: Tokenizer = BYTES) -> Corpus:
    """In memory, with an end token between two files."""
    train, held_out = stdlib.read(stdlib.root())
    return Corpus(tokens.packed(train, tokenizer)[:-1], tokens.packed(held_out, tokenizer)[:-1], tokenizer)


def without_text(tokenizer: Tokenizer, sequence_length: int) -> Corpus:
    """For a node that holds a later stage of a model: no text comes to it, but it must know how many tokens there are,
    and how many windows an evaluation has."""
    nothing = np.zeros(sequence_length + 1, np.uint8)
    return Corpus(nothing, nothing, tokenizer)
