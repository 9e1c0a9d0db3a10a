"""`bench`: what the parts of a node take on this machine, and what synchronising costs beside rivals."""

import argparse
from importlib import import_module
from typing import Any

from noloco_node.base import plots

_MODULES = {
    "training": "machine",
    "codec": "machine",
    "sync": "sync",
    "averaging": "averaging",
    "exchange": "exchange",
    "train": "train",
    "scale": "scale",
}
"""What can be measured, and the module here that has its options and its work."""


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(title="what to measure", dest="what", metavar="what", required=True)
    for name in dict.fromkeys(_MODULES.values()):
        _module(name).options(what)


def run(args: argparse.Namespace) -> int:
    if getattr(args, "plot", None) is not None:  # before minutes of work
        plots.check(args.plot)
    return int(_module(_MODULES[args.what]).run(args))
