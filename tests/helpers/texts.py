"""Small texts, the files they lie in, and a tokenizer learnt from them: all made here."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "a naïve peer swaps its vector with one random partner, then trains on for hours: 世界, and nobody waits"


def texts(count: int, seed: int = 0) -> list[str]:
    """Each begins with its number, so that no two are the same."""
    rng = np.random.default_rng(seed)
    return [f"{i} {' '.join(rng.choice(TEXT.split(), rng.integers(1, 30)))}" for i in range(count)]


def tokenizer_json(vocabulary: int = 300) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(200), trainer)
    return tokenizer.to_str().encode()


def words_json(**changes: Any) -> bytes:
    """A tokenizer of two tokens, changed."""
    found = json.loads(Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>")).to_str())
    return json.dumps({**found, **changes}).encode()


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a|aa)+$|(a*)*b"}, "behavior": "Isolated", "invert": False}
PANICS = "a" * 40 + "c"
"""A text for which the regex ENDLESS takes more tries than its library allows, which panics then."""


def jsonl(path: Path, written: Sequence[str | None]) -> Path:
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(written)).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def parquet(path: Path, written: Sequence[str | None], row_group: int = 100) -> Path:
    table = pyarrow.table({"id": range(len(written)), "text": list(written)})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group)
    return path
