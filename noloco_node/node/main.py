"""A node from its first line to its exit code: which kind it is, and how it hears that it should leave.

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
from noloco_node.node import mission as missions
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.rendezvous import RendezvousNode
from noloco_node.node.trainer import TrainingNode


async def run(config: NodeConfig, mission: missions.Mission, report: Report) -> int:
    """Be a node. Returns the exit code; raises NolocoError for what a user should read."""
    node: BaseNode
    match mission:
        case missions.Rendezvous():
            node = RendezvousNode(config, report)
        case missions.Start(signed):
            node = TrainingNode(config, report, signed)
        case missions.Join():
            node = TrainingNode(config, report, None)
    with _signals(node.leave):
        await node.run()
    return 0


@contextmanager
def _signals(leave: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM leaves cleanly, the second at once."""
    loop = asyncio.get_running_loop()
    asked = False

    def hear() -> None:
        nonlocal asked
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked = True
        leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
