"""What `status` counts of a stage, and what health says of the run's stages. Pure: time is an argument."""

from collections import defaultdict, deque
from collections.abc import Collection, Set
from dataclasses import dataclass

from noloco_node.base.states import HELD_BACK, ON_THE_WAY, SERVES_STAGE, NodeState
from noloco_node.peers.record import PeerRecord
from noloco_node.stages.part import Position
from noloco_node.views.status import Health

JUDGED, LEAST_JUDGED = 16, 8
"""The last micro-batches that say whether their time is too short for the way to the other stages."""
RATE_S = 30.0
"""Over which micro-batches are counted for a rate."""


@dataclass(slots=True)
class LinkTotals:
    """Since the start."""

    sent_bytes: int = 0
    received_bytes: int = 0
    retried: int = 0
    """Micro-batches that went to another peer after one had not answered."""
    lost: int = 0
    compared: int = 0
    """Calls for a micro-batch that another peer had answered."""
    answered: int = 0
    """For the stage before."""
    refused: int = 0


class MicroBatchRate:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._passed_at: float | None = None

    def note(self, now: float, passed: int, *, works: bool = True) -> None:
        stood_still = bool(self._seen) and now - self._seen[-1][0] > RATE_S  # nobody could send anything
        if not works or self._passed_at is None or passed != self._seen[-1][1] or stood_still:
            self._passed_at = now
        self._seen.append((now, passed))
        while self._seen[0][0] < now - RATE_S:
            self._seen.popleft()

    @property
    def idle_s(self) -> float:
        """For how long this node has worked and none has passed."""
        return 0.0 if self._passed_at is None else self._seen[-1][0] - self._passed_at

    @property
    def per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (since, before), (now, passed) = self._seen[0], self._seen[-1]
        return (passed - before) / (now - since) if now > since else None


def health(
    at: Position, seen: Collection[PeerRecord], state: str, were_late: Collection[bool] = ()
) -> tuple[Health, ...]:
    """A stage where nobody works stops the training of all others. `were_late`: of the last micro-batches that this
    node sent on, whether no answer came in time."""
    states = defaultdict[int, set[str]](set, {at.number: {state}})
    for record in seen:
        states[record.stage].add(record.state)
    every = range(1, at.stages + 1)
    working = SERVES_STAGE | ON_THE_WAY
    if state == NodeState.FINISHED:
        return ()  # the run may be over
    stand = [stage for stage in every if not states[stage] & working]
    if states[1] & working == {NodeState.FINISHED}:
        stand = [1, *stand]  # what has finished there sends nothing
    if found := [_standing(at, stage, states[stage]) for stage in stand]:
        return tuple(found)
    late = sum(were_late)
    if len(were_late) < LEAST_JUDGED or 2 * late <= len(were_late) or not all(states[n] & SERVES_STAGE for n in every):
        return ()
    text = (
        f"stage {at}: {late} of its last {len(were_late)} micro-batches got no answer in time, so little or nothing "
        "is trained: each stage has 0.9 of the time that the one before it has"
    )
    own = "try a smaller --micro-batch, " if at.first else ""
    remedy = (
        f"{own}raise --max-upload and --max-download here and at the next stage, or ask the run's author for a run of "
        'fewer stages or with activations = "int8"'
    )
    return (Health("error" if late == len(were_late) else "warning", text, remedy),)


def _standing(at: Position, stage: int, states: Set[str]) -> Health:
    """`states`: of the nodes that hold it."""
    whose = f"stage {stage} of {at.stages}"
    if states & HELD_BACK:
        return Health(
            "warning",
            f"{whose}: whoever holds it pauses or has used up the day's quota, so nothing is trained",
            f"wait for them, or let another node hold it: `noloco-node join --stage {stage}`",
        )
    if NodeState.FINISHED in states:
        return Health(
            "warning",
            f"{whose}: whoever holds it has done its rounds, so nothing is trained",
            f"let another node hold it: `noloco-node join --stage {stage}`",
        )
    return Health(
        "error",
        f"{whose}: nobody holds it, so nothing is trained",
        "start a node that held it again, with `noloco-node join` in its home: it has the stage's weights on disk. If "
        f"none is left: `noloco-node join --stage {stage} --start-over` begins this stage with its first weights",
    )
