"""`bench`: what the parts of a node take on this machine, and what synchronising costs beside rivals."""

import argparse
from types import ModuleType

from noloco_node.cli.bench import averaging, exchange, machine, sync

_MODULES: dict[str, ModuleType] = {
    "training": machine,
    "codec": machine,
    "sync": sync,
    "exchange": exchange,
    "averaging": averaging,
}
"""What can be measured, and the module that has its options and its work."""


def options(parser: argparse.ArgumentParser) -> None:
    names = "|".join(_MODULES)
    what = parser.add_subparsers(title="what to measure", dest="what", metavar=names, required=True)
    for module in dict.fromkeys(_MODULES.values()):
        module.options(what)


def run(args: argparse.Namespace) -> int:
    return int(_MODULES[args.what].run(args))
