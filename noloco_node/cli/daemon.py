"""The verbs that become a node: `start`, `join`, `bootstrap`.

What a user can get wrong is found before anything heavy is imported, in this order: flags and manifest (2), a node that
runs here already (4), a swarm that cannot be reached (10). Signals are node.py's, once it runs.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node import config
from noloco_node.cli import logs
from noloco_node.config import NodeConfig
from noloco_node.errors import SwarmUnreachable, UsageError
from noloco_node.home import Home

if TYPE_CHECKING:
    from noloco_node.mission import Mission

_PROBE_S = 5.0
"""A TCP handshake across the world takes well under one."""


def start(args: argparse.Namespace) -> int:
    from noloco_node import manifest

    settings, run = _settings(args), manifest.load(Path(args.manifest))
    with _resident(settings) as home:
        from noloco_node.identity import Identity
        from noloco_node.mission import Start

        return _be(settings, Start(manifest.sign(run, Identity.load_or_create(home.identity))))


def join(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if not settings.bootstrap:
        raise UsageError(
            "join needs an address: `noloco-node join --bootstrap <address>`, as the line says that `start` printed"
        )
    with _resident(settings):
        from noloco_node.mission import Join

        return _be(settings, Join())


def bootstrap(args: argparse.Namespace) -> int:
    settings = _settings(args)
    with _resident(settings):
        from noloco_node.mission import Rendezvous

        return _be(settings, Rendezvous())


def _settings(args: argparse.Namespace) -> NodeConfig:
    flags = {name: value for name, value in vars(args).items() if name not in ("verb", "manifest")}
    return config.load(flags, os.environ)


@contextmanager
def _resident(settings: NodeConfig) -> Iterator[Home]:
    """The home, made and ours alone, its log open, and a bootstrap address that answers."""
    home = Home(settings.home).create()
    with home.lock(), logs.written(home, settings.log_level):
        if settings.bootstrap:
            asyncio.run(_reach(settings.bootstrap))
        yield home


async def _reach(addresses: Sequence[str]) -> None:
    """See that something listens at one of them; any will do. Raises UsageError, SwarmUnreachable."""
    from noloco_node.transport.probe import probe

    found = await asyncio.gather(*(probe(address, _PROBE_S) for address in addresses), return_exceptions=True)
    failures = [outcome for outcome in found if outcome is not None]
    for failure in failures:
        if len(addresses) == 1 or not isinstance(failure, SwarmUnreachable):
            raise failure
    if len(failures) == len(addresses):
        raise SwarmUnreachable(f"none of the {len(addresses)} bootstrap addresses answers. The first: {failures[0]}")


def _be(settings: NodeConfig, mission: "Mission") -> int:
    import uvloop

    from noloco_node import node

    code: int = uvloop.run(node.run(settings, mission, _report))
    return code


def _report(line: str) -> None:
    print(line, flush=True)
