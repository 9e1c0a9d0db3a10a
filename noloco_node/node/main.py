"""Runs a node of either kind from its start to its exit code, and makes it leave on a signal.

node/trainer.py and node/rendezvous.py build the parts of either kind and connect them; nothing else knows all the
parts.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from noloco_node.errors import EXIT_INTERRUPTED, NolocoError
from noloco_node.host.config import NodeConfig
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.rendezvous import RendezvousNode
from noloco_node.node.trainer import TrainingNode
from noloco_node.run.manifest import Signed


async def train(
    config: NodeConfig,
    signed: Signed | None,
    report: Report,
    again: Callable[[NodeConfig], Awaitable[NodeConfig]],
) -> int:
    """Train in a run. `signed`: its manifest, where this is the first node; None: others say which run there is.
    `again`: the settings for another start, with a port that is free and bootstrap nodes that answer. Returns the exit
    code, as `rendezvous` does; both raise NolocoError for what a user should read."""
    node = TrainingNode(config, report, signed)
    with _told_to_leave(lambda: node, report):
        await node.run()
        while move := node.moves():
            afresh = await again(config)
            if not node.moves():  # told to leave meanwhile
                break
            node = TrainingNode(afresh, report, move.signed, move.to)
            gc.collect()  # what it held of the other stage
            try:
                await node.run()
            except NolocoError as error:
                if node.has_trained:
                    raise
                report(f"stage {move.to} cannot be taken ({error}): back to stage {move.stage}")
                config = replace(config, stage=move.stage)  # and stays there
                node = TrainingNode(await again(config), report, move.signed, move.stage)
                await node.run()
    return 0


async def rendezvous(config: NodeConfig, report: Report) -> int:
    """Train nothing: others find each other through this node."""
    node = RendezvousNode(config, report)
    with _told_to_leave(lambda: node, report):
        await node.run()
    return 0


@contextmanager
def _told_to_leave(node: Callable[[], BaseNode], report: Report) -> Iterator[None]:
    def leave() -> None:
        report("leaving: Ctrl-C again ends it at once, without saving")
        node().leave()

    with _signals(leave):
        yield


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
