"""Which stage of a run a node holds: the one that its volunteer names, the one that its home held last, else the one
that fewest others hold. One that nobody holds any more is left to those who have its checkpoints.

A run's folder has the checkpoints of that stage where every run has its checkpoints; those of a stage that it held
before lie beside them, and are used again where the node comes back to it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.states import ON_THE_WAY, NodeState
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host.config import NodeConfig
from noloco_node.node.find_run import UNANSWERED_S
from noloco_node.peers.record import PeerRecord
from noloco_node.run.schema import MAX_STAGES
from noloco_node.stages.part import Position
from noloco_node.state_transfer.choose_donor import STALE_ROUNDS

_FILE = "stage.json"
_MAX_BYTES = 64
HEARD_S, IDLE_S = 120.0, 600.0
"""Who sent something so lately must be seen to have come to the end. And where half of them have, and nothing has come
from the rest for so long, nothing is waited for any more: one that says that it trains could hold this node for
ever."""
LOOKS, LOOK_S = 3, 1.0
"""How often others are looked for before this node counts as the first."""


async def choose(
    look: Callable[[], Awaitable[Collection[PeerRecord]]], stages: int, config: NodeConfig, folder: Path
) -> Position:
    """`look` gives the other nodes of the run; `folder`: of the run in this home. Raises UsageError."""
    if config.stage is not None and config.stage > stages:
        raise UsageError(
            f"--stage must be a whole number from 1 to {stages}, as the run has so many, not {config.stage}"
        )
    stage = config.stage or held(folder)
    if stage is None:
        others, every = await _others(look), range(1, stages + 1)
        known = set(holding(others).values())
        can = [stage for stage in every if stage in known or not has_begun(others) or is_kept(folder, stage)]
        stage = thinnest(others, can or every, random.Random())
    return Position(stage - 1, stages)


# ---- in the run's folder ----
def held(folder: Path) -> int | None:
    """The stage that its checkpoints are of."""
    return atomic_files.read_json_or_set_aside(
        folder / _FILE, _checked, _MAX_BYTES, "which stage this node held is forgotten"
    )


def is_kept(folder: Path, stage: int) -> bool:
    """Whether it has checkpoints of a stage that it does not hold now."""
    return _kept(folder, stage).exists()


def take(folder: Path, stage: int) -> None:
    """From now on its checkpoints are those of this stage. What was there of another one is kept; a crash between any
    two lines leaves a folder in which no checkpoint counts as another stage's. Raises DiskFull, UsageError."""
    before, checkpoints = held(folder), folder / "checkpoints"
    with atomic_files.writing(folder):
        if before not in (None, stage) and checkpoints.exists():
            checkpoints.replace(_kept(folder, before))
        if before != stage:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write(folder / _FILE, f"{stage}\n")
        if is_kept(folder, stage) and not checkpoints.exists():
            _kept(folder, stage).replace(checkpoints)


def _kept(folder: Path, stage: int) -> Path:
    return folder / f"checkpoints-of-stage-{stage}"


def _checked(found: object) -> int:
    if type(found) is not int or not 0 < found <= MAX_STAGES:
        raise ValueError("it is not the number of a stage")
    return found


# ---- among the others ----
def holding(others: Collection[PeerRecord]) -> dict[str, int]:
    """The stage of each that has not left or finished."""
    gone = (NodeState.LEAVING, NodeState.FINISHED)
    return {record.peer_id: record.stage for record in others if record.state not in gone}


def thinnest(others: Collection[PeerRecord], stages: Sequence[int], rng: random.Random) -> int:
    """Of several the first one that nobody holds, as nothing is trained without it; else any."""
    holders = Counter(holding(others).values())
    least = min(holders[stage] for stage in stages)
    thin = [stage for stage in stages if holders[stage] == least]
    return rng.choice(thin) if least else thin[0]


def has_begun(others: Collection[PeerRecord]) -> bool:
    """Whether the run has: from then on only who holds or held a stage has its state. By most, as one may lie; those
    that still load say nothing."""
    known = [record.round > 0 for record in others if record.state not in ON_THE_WAY]
    return 2 * sum(known) > len(known)


def stage_before(at: Position, others: Collection[PeerRecord], own_end: int) -> list[PeerRecord]:
    """Nobody, for the first one, whatever a record says. Nor who ended before `own_end`, this node's last round: its
    volunteer's --rounds end no other node's run."""
    before = [] if at.first else [record for record in others if record.stage == at.number - 1]
    return [record for record in before if not 0 < record.ended < own_end]


def ended(
    before: Collection[PeerRecord], own_round: int, own_end: int, heard: Mapping[str, float], idle_s: float
) -> int:
    """The round that the stage before has come to the end of, not before `own_end`; 0: it goes on. Then nothing more is
    sent to this node, which may have had fewer micro-batches than its own rounds need, as routes are random. `heard`:
    for how many seconds each that sends to this node has not; `idle_s`: for how long none has."""
    asked = [record for record in before if record.peer_id in heard] or before
    done = {record.peer_id: record.ended for record in asked if record.ended >= own_end}
    end = min(done.values(), default=0)
    # One that lies may be the first that is heard, or the only one while the others are away: two must say so, but
    # where there was never another one. Near its own end a node loses next to nothing.
    there = heard.keys() | {record.peer_id for record in before}
    agreed = len(done) >= min(2, len(there)) or own_round >= own_end - STALE_ROUNDS
    lately = {peer for peer, ago in heard.items() if ago < HEARD_S}
    if agreed and heard and len(done) == len(asked) and lately <= done.keys():
        return end
    return end if idle_s > IDLE_S and 2 * len(done) >= len(asked) else 0


async def _others(look: Callable[[], Awaitable[Collection[PeerRecord]]]) -> Collection[PeerRecord]:
    """A look that fails says nothing of whether there are any."""
    until, looks = asyncio.get_running_loop().time() + UNANSWERED_S, 0
    while looks < LOOKS and asyncio.get_running_loop().time() < until:
        with suppress(NolocoError, OSError):
            if found := await look():
                return found
            looks += 1
        await asyncio.sleep(LOOK_S)
    return ()
