"""Runs a node of either kind from its start to its exit code, and makes it leave on a signal.

node/trainer.py and node/rendezvous.py build the parts of either kind and connect them; nothing else knows all the
parts.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from noloco_node.errors import EXIT_INTERRUPTED
from noloco_node.host.config import NodeConfig
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.rendezvous import RendezvousNode
from noloco_node.node.trainer import TrainingNode
from noloco_node.run.manifest import Signed


async def train(config: NodeConfig, signed: Signed | None, report: Report) -> int:
    """Train in a run. `signed`: its manifest, where this is the first node; None: others say which run there is.
    Returns the exit code, as `rendezvous` does; both raise NolocoError for what a user should read."""
    return await _until_signal(TrainingNode(config, report, signed), report)


async def rendezvous(config: NodeConfig, report: Report) -> int:
    """Train nothing: others find each other through this node."""
    return await _until_signal(RendezvousNode(config, report), report)


async def _until_signal(node: BaseNode, report: Report) -> int:
    def leave() -> None:
        report("leaving: Ctrl-C again ends it at once, without saving")
        node.leave()

    with _signals(leave):
        await node.run()
    return 0


@contextmanager
def _signals(leave: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM leaves cleanly, the second at once."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked = True
        leave()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
