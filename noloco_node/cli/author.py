"""The verbs for the author of a run: `init` writes a run.toml to edit, `tokenize` a token file to share."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.cli.options import print_json
from noloco_node.errors import UsageError
from noloco_node.views.documents import SCHEMA

if TYPE_CHECKING:
    from noloco_node.data.files import FilesProgress, Report
    from noloco_node.data.tokens import Tokenizer

_SUFFIX = ".tokens"
_SAY_S = 1.0


def init(args: argparse.Namespace) -> int:
    from noloco_node.run.toml import template

    path, text = Path(args.path), template()
    if path.is_dir():
        path /= "run.toml"
    try:
        with path.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already: name another file, or replace it with --force") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Name another file") from None
    print(f"wrote {path}: edit it, then run `noloco-node start {path}`")
    return 0


def tokenize(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if not out.name.endswith(_SUFFIX):
        raise UsageError(f"--out must end in {_SUFFIX}, by which --data recognises one: try {out.name}{_SUFFIX}")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing trains at the same time, and nothing forks
    from noloco_node.data import files, sources
    from noloco_node.data.documents import Reading
    from noloco_node.host.config import text_encoding

    try:
        reading = Reading(args.field, text_encoding(args.encoding))
    except ValueError as error:
        raise UsageError(f"--encoding {error}") from None
    paths = sources.find(tuple(args.files))
    if any(path.resolve() == out.resolve() for path in paths):
        raise UsageError(f"--out names {out}, which is one of the files to read: name another")
    tokenizer, name = _tokenizer(args.tokenizer)
    with _progress() as say:
        train, held_out = files.tokenize(paths, out, tokenizer, reading, say)
    lines = {"source": "files", "tokenizer": name, "field": args.field}
    if args.json:
        found = {"tokens": {"train": train, "held_out": held_out}, "vocabulary": tokenizer.vocabulary}
        size = out.stat().st_size
        print_json({"schema": SCHEMA, "path": str(out), "bytes": size, **found, "data": lines})
    else:
        print(f"wrote {out}: {train:,} tokens to train on, {held_out:,} held out. In run.toml:\n\n[data]")
        print("\n".join(f'{key} = "{value}"' for key, value in lines.items()))
    return 0


def _tokenizer(given: str) -> "tuple[Tokenizer, str]":
    """The tokenizer, and its name in a manifest."""
    from noloco_node.data import sources, tokens

    if given == "bytes":
        return tokens.BYTES, given
    found = tokens.FileTokenizer(sources.read_tokenizer(Path(given)))
    return found, f"sha256:{found.digest.hex()}"


@contextmanager
def _progress() -> "Iterator[Report]":
    """On a terminal, a progress line that is erased at the end."""
    from noloco_node.base.units import rate, share, span

    shown, said = sys.stderr.isatty(), time.monotonic()

    def say(progress: "FilesProgress") -> None:
        nonlocal said
        if shown and time.monotonic() - said >= _SAY_S:
            said = time.monotonic()
            left = "" if progress.left_s is None else f", about {span(progress.left_s)} left"
            line = f"\r{share(progress.share)}, {rate(progress.tokens)} tokens{left}\x1b[K"
            print(line, end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
