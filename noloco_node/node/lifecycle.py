"""A node's life as a pure state machine: events in, actions out, and `handle` the only method that changes anything.

It knows no clock, no thread and no network: node/base.py and node/trainer.py pass it events and carry out the actions.
What rounds, training and catching up may do follows from the state, so there is one rule: after each event, what should
be is compared with what was ordered last, and the differences are the actions. So every hold has exactly one release.

    STARTING -> JOINING -> TRAINING -> FINISHED      JOINING takes a peer's state, or finds that nobody has one
    TRAINING <-> PAUSED, SOLO                        the volunteer's limits
    TRAINING, PAUSED, SOLO -> JOINING -> TRAINING    catching up: after a divergence, or a pause or sleep too long
    STARTING -> RENDEZVOUS                           a node that trains nothing
    any -> LEAVING                                   the end
"""

from dataclasses import dataclass
from enum import Enum, auto

from noloco_node.base.states import AT_WORK, ON_THE_WAY, NodeState
from noloco_node.host.limits import PAUSED, QUOTA

DIVERGED, ROLLED_BACK, UNSEEN = "catching_up", "rolled_back", "others_unseen"
"""Why rounds are paused, beside PAUSED and QUOTA; the rounds that end meanwhile are solo for this reason. The first is
not the word for a swap that diverged: a round that this pause ends would count as another divergence."""
NETWORK, LAST_PARTNER = "the network daemon", "a partner for the last round"
"""What a node waits for."""

_STOPPED = "stopped"


# ---- events: what happened -------------------------------------------------------------------------------------------
class Signal(Enum):
    """The events that say no more than their name."""

    DIRECTORY_ENTERED = auto()
    """A rendezvous can be found."""
    CAUGHT_UP = auto()
    """No peer's state is needed, or none could be had: training can begin, or go on."""
    DIVERGED = auto()
    """This node's weights are assumed to have diverged from everybody else's."""
    STOOD_STILL = auto()
    """This node did, as in a machine's sleep: no swaps until it is seen how far the others are, which would diverge."""
    KEPT_UP = auto()
    """They are not far ahead."""
    LEFT_BEHIND = auto()
    """They are so far ahead that this node has to catch up."""
    ROLLED_BACK = auto()
    """The weights that open offers are made of were replaced by a checkpoint's."""
    BOUNDARY = auto()
    """An inner phase ended; an offer of the weights as they are now comes next."""
    WORK_DONE = auto()
    """The last inner phase is over; its round may still find a partner."""
    LAST_ROUND_OVER = auto()
    """No partner is waited for any more."""
    FINISHED = auto()
    """The last evaluation is over, or was not waited for."""
    SAVED = auto()
    """The last checkpoint is written."""
    FAILED = auto()
    """The training thread ended by an error: there is nothing to save."""
    LEAVE = auto()
    """The user asked for it, the work is done, or something failed."""


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """A node that is starting, joining or leaving waits for something, in words."""

    what: str | None


@dataclass(frozen=True, slots=True)
class ModelReady:
    """Model, data and checkpoint are loaded."""

    resumed: bool
    """From a checkpoint: a node whose limits forbid swaps then trains without asking for a peer's state. Until others
    are seen it makes no swaps, as after a standstill."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The volunteer's limits at this moment: before ModelReady, and then every second."""

    hold: str | None
    """PAUSED, QUOTA or None."""
    until: str = ""
    """What ends a pause, in words."""
    behind: bool = False
    """Whether this node is so far behind the others that it has to catch up after a pause, or after a standstill while
    its quota was used up. One that trained alone on a slow machine is behind, too, and goes on."""


Event = Signal | WaitsFor | ModelReady | Limits


# ---- actions: what is to be done -------------------------------------------------------------------------------------
class Order(Enum):
    """The actions that say no more than their name."""

    RESUME_ROUNDS = auto()
    STOP_ROUNDS = auto()
    """For good; a swap under way may end."""
    PAUSE_TRAINING = auto()
    RESUME_TRAINING = auto()
    BEGIN_TRAINING = auto()
    STOP_CATCH_UP = auto()
    """It is over, or something else is to be done now."""


@dataclass(frozen=True, slots=True)
class PauseRounds:
    """No offers and no calls until RESUME_ROUNDS; another PauseRounds only changes the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartCatchUp:
    """Take a peer's state; CAUGHT_UP follows, also where that failed."""

    diverged: bool
    """An earlier round than one's own will do."""


Action = Order | PauseRounds | StartCatchUp


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
        self.stood_still = False
        """Or was off, and it has not been seen since how far the others are."""
        self._was_paused = False
        """Since it last could swap: a used-up quota followed the pause."""
        self._waits_for: str | None = NETWORK
        self._limits = Limits(None)
        self._catch_up: str | None = None
        """Why a node that has trained is JOINING again: DIVERGED, or PAUSED, be it by a standstill."""
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
        if before is not NodeState.LEAVING or isinstance(event, WaitsFor) or event in (Signal.SAVED, Signal.FAILED):
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
            case Signal.DIRECTORY_ENTERED if self.state is NodeState.STARTING:
                self.state = NodeState.RENDEZVOUS
            case ModelReady(resumed) if self.state is NodeState.STARTING:
                self.stood_still |= resumed
                if not (resumed and self._limits.hold):
                    self.state = NodeState.JOINING
            case Signal.CAUGHT_UP if self.state in ON_THE_WAY:
                self.at_work |= not self._orders.begun
                self.state = _LIMITED[self._limits.hold]
            case Limits():
                self._limits = event
                if self.at_work and self.state is not NodeState.FINISHED:
                    self._obey(event)
            case Signal.DIVERGED if self.state is NodeState.TRAINING and not self._work_done:
                self._join_again(DIVERGED)
            case Signal.STOOD_STILL:
                self.stood_still = True
            case Signal.KEPT_UP:
                self.stood_still = False
            case Signal.LEFT_BEHIND if self.state is NodeState.TRAINING:  # else it catches up when it may
                self.stood_still = False
                if not self._work_done:
                    self._join_again(PAUSED)
            case Signal.ROLLED_BACK:
                self._rolled_back = True
            case Signal.BOUNDARY if self.state in AT_WORK:
                self._rolled_back = False
            case Signal.WORK_DONE if self.at_work:
                self._work_done = True
            case Signal.LAST_ROUND_OVER if self._work_done:
                self._rounds_over = True
            case Signal.FINISHED if self._rounds_over:
                self.state = NodeState.FINISHED
            case Signal.SAVED | Signal.FAILED:
                self.at_work = False
            case Signal.LEAVE:
                self.state = NodeState.LEAVING
            case _:
                pass  # too late: something else was decided meanwhile

    def _obey(self, limits: Limits) -> None:
        if limits.hold is not PAUSED and self.state is NodeState.JOINING:
            return  # catching up goes on: its own state may be what used the quota up
        self._was_paused |= self.state is NodeState.PAUSED
        was_away = self._was_paused or (self.state is NodeState.SOLO and self.stood_still)
        self._was_paused &= limits.hold is not None
        if limits.hold is None and was_away and limits.behind and not self._work_done:
            self.stood_still = False
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
        if self.stood_still and self.state is NodeState.TRAINING:
            return UNSEEN
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
        actions.append(Order.STOP_CATCH_UP)
    if wanted.rounds != ordered.rounds:
        actions.append(_for_rounds(wanted.rounds))
    if wanted.paused != ordered.paused:
        actions.append(Order.PAUSE_TRAINING if wanted.paused else Order.RESUME_TRAINING)
    if wanted.begun and not ordered.begun:
        actions.append(Order.BEGIN_TRAINING)
    if wanted.catch_up and not ordered.catch_up:
        actions.append(StartCatchUp(diverged=wanted.catch_up == DIVERGED))
    return actions


def _for_rounds(held: str | None) -> Action:
    if held is None:
        return Order.RESUME_ROUNDS
    return Order.STOP_ROUNDS if held == _STOPPED else PauseRounds(held)
