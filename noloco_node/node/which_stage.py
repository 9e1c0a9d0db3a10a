"""Which stage of a run a node holds: the one that its volunteer names, the one that its home held last, else the one
that fewest others hold.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from noloco_node.base.states import NodeState
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host import remembered
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.peers.record import PeerRecord
from noloco_node.run.schema import Manifest
from noloco_node.stages.part import Position

LOOKS, LOOK_S = 3, 1.0
"""How often others are looked for before this node counts as the first."""


async def choose(
    look: Callable[[], Awaitable[Collection[PeerRecord]]], run: Manifest, stages: int, config: NodeConfig, home: Home
) -> Position:
    """`look` gives the other nodes of the run. Raises UsageError."""
    held = remembered.stage(home, run.run_id)
    if config.stage is not None and config.stage > stages:
        raise UsageError(
            f"--stage must be a whole number from 1 to {stages}, as the run has so many, not {config.stage}"
        )
    if None not in (held, config.stage) and held != config.stage:
        raise UsageError(f"this home holds stage {held} of {run.label}: use another --home for stage {config.stage}")
    stage = config.stage or held
    if stage is None:
        stage = thinnest(await _others(look), stages, random.Random())
    return Position(stage - 1, stages)


def thinnest(others: Collection[PeerRecord], stages: int, rng: random.Random) -> int:
    """From 1. Of several the first one that nobody holds, as nothing is trained without it; else any."""
    gone = (NodeState.LEAVING, NodeState.FINISHED)
    holders = Counter(record.stage for record in others if record.state not in gone)
    least = min(holders[stage] for stage in range(1, stages + 1))
    thin = [stage for stage in range(1, stages + 1) if holders[stage] == least]
    return rng.choice(thin) if least else thin[0]


async def _others(look: Callable[[], Awaitable[Collection[PeerRecord]]]) -> Collection[PeerRecord]:
    for _ in range(LOOKS):
        with suppress(NolocoError, OSError):
            if found := await look():
                return found
        await asyncio.sleep(LOOK_S)
    return ()
