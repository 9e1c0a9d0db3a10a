"""`init`: the first step of who makes a run."""

import argparse
from pathlib import Path

from noloco_node.errors import UsageError


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
        raise UsageError(f"cannot write {path}: {error.strerror}. Name a file elsewhere") from None
    print(f"wrote {path}: look through it, then run `noloco-node start {path}`")
    return 0
