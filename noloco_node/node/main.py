"""Runs a node of either kind from its start to its exit code, and makes it leave on a signal.

node/trainer.py and node/rendezvous.py build the parts of either kind and connect them; nothing else knows all the
parts.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from noloco_node.base.addresses import Address
from noloco_node.errors import EXIT_INTERRUPTED, NolocoError, SwarmUnreachable
from noloco_node.host.config import NodeConfig
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.rendezvous import RendezvousNode
from noloco_node.run.manifest import Signed, verify

ASK_EVERY_S, ASK_FOR_S = 30.0, 600.0
"""A rendezvous that restarts is back in a minute."""


async def train(
    config: NodeConfig,
    signed: Signed | None,
    report: Report,
    again: Callable[[NodeConfig], Awaitable[NodeConfig]],
    seen: Callable[[], Awaitable[Sequence[Address]]],
) -> int:
    """Train in a run. `signed`: its manifest, where this is the first node; None: others say which run there is.
    `again`: the settings for another start, with the last port and bootstrap nodes that answer. `seen`: addresses
    of earlier peers that answer, for where the bootstrap nodes let nobody in. Returns the exit code, as `rendezvous`
    does; both raise NolocoError for what a user should read."""
    from noloco_node.node.trainer import TrainingNode  # with torch, which a rendezvous has no use for

    node, failed = TrainingNode(config, report, signed), ""
    with _told_to_leave(lambda: node, report) as told:
        try:
            await node.run()
        except SwarmUnreachable as error:
            known = {address.peer for address in config.ways_in}
            more = [address for address in await seen() if address.peer not in known] if known else []
            if node.found_others or not more or told.is_set():
                raise
            config, failed = replace(config, seen=(*config.seen, *more)), str(error)
            if node.joins:  # as the bootstrap nodes say: earlier peers do not name another one
                config = replace(config, run=verify(node.joins).run_id, trust=node.joins.author)
        if failed:  # the rendezvous may have lost its key
            report(f"{failed}. Joining through peers seen earlier")
            node = TrainingNode(config, report, signed)
            _collect()  # what it held of the model; the error is gone by now, which would keep it
            await node.run()
        while (move := node.moves()) and (afresh := await _settings(again, config, told, report)):
            node = TrainingNode(afresh, report, move.signed, move.to)
            _collect()  # what it held of the other stage
            try:
                await node.run()
            except NolocoError as error:
                if node.has_trained:
                    raise
                report(f"stage {move.to} cannot be taken ({error}): back to stage {move.stage}")
                config = replace(config, stage=move.stage)  # and stays there
                if (afresh := await _settings(again, config, told, report)) is None:
                    break
                node = TrainingNode(afresh, report, move.signed, move.stage)
                await node.run()
    return 0


def _collect() -> None:
    gc.unfreeze()  # the node that ended was there when its model's library was imported
    gc.collect()


async def _settings(
    again: Callable[[NodeConfig], Awaitable[NodeConfig]], config: NodeConfig, told: asyncio.Event, report: Report
) -> NodeConfig | None:
    """For another start of a healthy node; None: told to leave meanwhile. Raises SwarmUnreachable only when nobody
    has answered for ASK_FOR_S."""
    until = asyncio.get_running_loop().time() + ASK_FOR_S
    while not told.is_set():
        try:
            afresh = await again(config)
            return None if told.is_set() else afresh
        except SwarmUnreachable as error:
            if asyncio.get_running_loop().time() >= until:
                raise
            report(f"{error}. It is tried again in {ASK_EVERY_S:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await told.wait()
    return None


async def rendezvous(config: NodeConfig, report: Report) -> int:
    node = RendezvousNode(config, report)
    with _told_to_leave(lambda: node, report):
        await node.run()
    return 0


@contextmanager
def _told_to_leave(node: Callable[[], BaseNode], report: Report) -> Iterator[asyncio.Event]:
    """The first SIGINT or SIGTERM leaves cleanly, the second at once. A terminal that is closed leaves cleanly, too: it
    may send SIGHUP twice, also when the node has left and its process ends, and SIGTERM."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    asked = False

    def leave() -> None:
        report("leaving: Ctrl-C again ends it at once, without saving")
        told.set()
        node().leave()

    def on_signal() -> None:
        nonlocal asked
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked = True
        leave()

    def on_hang_up() -> None:
        before[signal.SIGHUP] = signal.SIG_IGN
        leave()

    ways = {signal.SIGINT: on_signal, signal.SIGTERM: on_signal}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        ways[signal.SIGHUP] = on_hang_up
    before = {number: signal.getsignal(number) for number in ways}
    for number, way in ways.items():
        loop.add_signal_handler(number, way)
    try:
        yield told
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
