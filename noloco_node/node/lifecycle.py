"""A node's life as a pure state machine: events in, actions out, and `handle` the only method that changes anything.

It knows no clock, no thread and no network: node/base.py and node/trainer.py pass it events and carry out the actions.
What rounds, training and catching up may do follows from the state, so there is one rule: after each event, what should
be is compared with what was ordered last, and the differences are the actions. So every hold has exactly one release.

    STARTING -> JOINING -> TRAINING -> FINISHED      JOINING takes a peer's state, or finds that nobody has one
    TRAINING <-> PAUSED, SOLO                        the volunteer's limits
    TRAINING, PAUSED -> JOINING -> TRAINING          catching up: after a divergence, or a pause that took too long
    STARTING -> RENDEZVOUS                           a node that trains nothing
    any -> LEAVING                                   the end
"""

from dataclasses import dataclass

from noloco_node.base.states import AT_WORK, NodeState
from noloco_node.host.limits import PAUSED, QUOTA

DIVERGED, ROLLED_BACK = "diverged", "rolled_back"
"""Why rounds are paused, beside PAUSED and QUOTA; the rounds that end meanwhile are solo for this reason."""
NETWORK, LAST_PARTNER = "the network daemon", "a partner for the last round"
"""What a node waits for."""

_STOPPED = "stopped"


# ---- events: what happened -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WaitsFor:
    """A node that is starting, joining or leaving waits for something, in words."""

    what: str | None


@dataclass(frozen=True, slots=True)
class DirectoryEntered:
    """A rendezvous can be found."""


@dataclass(frozen=True, slots=True)
class ModelReady:
    """Model, data and checkpoint are loaded."""

    resumed: bool
    """From a checkpoint: a node whose limits forbid swaps then trains without asking for a peer's state."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """No peer's state is needed, or none could be had: training can begin, or go on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The volunteer's limits at this moment: before ModelReady, and then every second."""

    hold: str | None
    """PAUSED, QUOTA or None."""
    until: str = ""
    """What ends a pause, in words."""
    behind: bool = False
    """Whether this node is so far behind the others that it has to catch up after a pause."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """This node's weights are assumed to have diverged from everybody else's."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The weights that open offers are made of were replaced by a checkpoint's."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """An inner phase ended; an offer of the weights as they are now comes next."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The last inner phase is over; its round may still find a partner."""


@dataclass(frozen=True, slots=True)
class LastRoundOver:
    """No partner is waited for any more."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last evaluation is over, or was not waited for."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The last checkpoint is written, or cannot be."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The training thread ended by an error: there is nothing to save."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The user asked for it, the work is done, or something failed."""


Event = (
    WaitsFor
    | DirectoryEntered
    | ModelReady
    | CaughtUp
    | Limits
    | Diverged
    | RolledBack
    | Boundary
    | WorkDone
    | LastRoundOver
    | Finished
    | Saved
    | Failed
    | Leave
)


# ---- actions: what is to be done -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PauseRounds:
    """No offers and no calls until ResumeRounds; another PauseRounds only changes the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRounds:
    pass


@dataclass(frozen=True, slots=True)
class StopRounds:
    """For good; a swap under way may end."""


@dataclass(frozen=True, slots=True)
class PauseTraining:
    pass


@dataclass(frozen=True, slots=True)
class ResumeTraining:
    pass


@dataclass(frozen=True, slots=True)
class BeginTraining:
    pass


@dataclass(frozen=True, slots=True)
class StartCatchUp:
    """Take a peer's state; CaughtUp follows, also where that failed."""

    diverged: bool
    """An earlier round than one's own will do."""


@dataclass(frozen=True, slots=True)
class StopCatchUp:
    """It is over, or something else is to be done now."""


Action = (
    PauseRounds
    | ResumeRounds
    | StopRounds
    | PauseTraining
    | ResumeTraining
    | BeginTraining
    | StartCatchUp
    | StopCatchUp
)


@dataclass(frozen=True, slots=True)
class _Orders:
    """What rounds, training and catching up were last ordered to do."""

    rounds: str | None = None
    """Why there are none; None: they go on."""
    paused: bool = False
    begun: bool = False
    catch_up: str | None = None


class Lifecycle:
    def __init__(self) -> None:
        self.state = NodeState.STARTING
        self.at_work = False
        """From the beginning of training until its last checkpoint: what the training thread has is worth saving."""
        self._waits_for: str | None = NETWORK
        self._limits = Limits(None)
        self._catch_up: str | None = None
        """Why a node that has trained is JOINING again: DIVERGED or PAUSED."""
        self._rolled_back = False
        self._work_done = False
        self._rounds_over = False
        self._orders = _Orders()

    @property
    def waiting_for(self) -> str | None:
        """In words, as `status` shows it."""
        match self.state:
            case NodeState.STARTING | NodeState.JOINING | NodeState.LEAVING:
                return self._waits_for
            case NodeState.PAUSED:
                return self._limits.until
            case NodeState.TRAINING | NodeState.SOLO if self._work_done:
                return LAST_PARTNER
            case _:
                return None

    def handle(self, event: Event) -> list[Action]:
        before = self.state
        if before is not NodeState.LEAVING or isinstance(event, WaitsFor | Saved | Failed):
            self._react(event)
        if self.state is not before and self.state is not NodeState.JOINING:
            self._catch_up = None
        if self.state is NodeState.LEAVING and before is not NodeState.LEAVING:
            self._waits_for = None
        ordered, self._orders = self._orders, self._wanted()
        return _differences(ordered, self._orders)

    def _react(self, event: Event) -> None:  # noqa: PLR0912 (one case an event)
        match event:
            case WaitsFor(what):
                self._waits_for = what
            case DirectoryEntered() if self.state is NodeState.STARTING:
                self.state = NodeState.RENDEZVOUS
            case ModelReady(resumed) if self.state is NodeState.STARTING:
                if not (resumed and self._limits.hold):
                    self.state = NodeState.JOINING
            case CaughtUp() if self._catch_up:
                self.state = NodeState.TRAINING
            case CaughtUp() if self.state in (NodeState.STARTING, NodeState.JOINING) and not self._orders.begun:
                self.at_work = True
                self.state = _LIMITED[self._limits.hold]
            case Limits():
                self._limits = event
                if self.at_work and self.state is not NodeState.FINISHED:
                    self._obey(event)
            case Diverged() if self.state is NodeState.TRAINING and not self._work_done:
                self._join_again(DIVERGED)
            case RolledBack():
                self._rolled_back = True
            case Boundary() if self.state in AT_WORK:
                self._rolled_back = False
            case WorkDone() if self.at_work:
                self._work_done = True
            case LastRoundOver() if self._work_done:
                self._rounds_over = True
            case Finished() if self._rounds_over:
                self.state = NodeState.FINISHED
            case Saved() | Failed():
                self.at_work = False
            case Leave():
                self.state = NodeState.LEAVING
            case _:
                pass  # too late: something else was decided meanwhile

    def _obey(self, limits: Limits) -> None:
        if limits.hold is None and self.state is NodeState.JOINING:
            return  # catching up goes on
        if limits.hold is None and self.state is NodeState.PAUSED and limits.behind and not self._work_done:
            self._join_again(PAUSED)
        else:
            self.state = _LIMITED[limits.hold]

    def _join_again(self, why: str) -> None:
        self.state, self._catch_up, self._waits_for = NodeState.JOINING, why, None

    def _wanted(self) -> _Orders:
        paused = self.state in (NodeState.PAUSED, NodeState.LEAVING) or self._catch_up is not None
        return _Orders(self._rounds_held(), paused, self._orders.begun or self.at_work, self._catch_up)

    def _rounds_held(self) -> str | None:
        if self._rounds_over or self.state is NodeState.LEAVING:
            return _STOPPED
        if self.state is NodeState.PAUSED:
            return PAUSED
        if self._catch_up:
            return self._catch_up
        if self._rolled_back:
            return ROLLED_BACK
        return QUOTA if self.state is NodeState.SOLO else None


_LIMITED = {None: NodeState.TRAINING, QUOTA: NodeState.SOLO, PAUSED: NodeState.PAUSED}


def _differences(ordered: _Orders, wanted: _Orders) -> list[Action]:
    """Stopping comes before pausing, pausing before beginning: no step is made that a pause forbids."""
    actions: list[Action] = []
    if ordered.catch_up and not wanted.catch_up:
        actions.append(StopCatchUp())
    if wanted.rounds != ordered.rounds:
        actions.append(_for_rounds(wanted.rounds))
    if wanted.paused != ordered.paused:
        actions.append(PauseTraining() if wanted.paused else ResumeTraining())
    if wanted.begun and not ordered.begun:
        actions.append(BeginTraining())
    if wanted.catch_up and not ordered.catch_up:
        actions.append(StartCatchUp(diverged=wanted.catch_up == DIVERGED))
    return actions


def _for_rounds(held: str | None) -> Action:
    if held is None:
        return ResumeRounds()
    return StopRounds() if held == _STOPPED else PauseRounds(held)
