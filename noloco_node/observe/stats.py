"""Sums over the events of one node: the figures behind `status` and `peers`. Knows no clock and no other part."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from statistics import median_high

from noloco_node.base.events import (
    Evaluated,
    Event,
    PeerFaulted,
    PhaseDone,
    RolledBack,
    RoundCommitted,
    Sampled,
    TakenBack,
    WentSolo,
)
from noloco_node.base.states import AT_WORK, NodeState
from noloco_node.core.round import TOO_SLOW
from noloco_node.training.time_accounts import Spent
from noloco_node.views.peers import PeerRow
from noloco_node.views.status import LastRound, LastTakenBack, Phase, Rounds, SampleView, StatusView

MINUTE_S = 60.0
PACE_ROUNDS = 20
"""The rounds whose pace says how long the rest takes: some are slower than others."""
SHORTENED_SWAPS, SHORTENED = 8, 1 / 3
"""A node whose own bounds left less than this share of most of so many last corrections stays behind the others. Where
three of four machines did 20 times the steps of the fourth, that one had 0.06; with 5 times the steps 0.4 (simulated).
"""
PEERS = 256
"""The latest partners that are kept: each is part of every status, and a node may swap with thousands."""
_START = Spent({}, 0.0)


@dataclass(slots=True)
class PeerStats:
    """Committed rounds with one peer, and their bytes."""

    exchanges: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class NodeStats:
    round: int = 0
    step: int = 0
    """At the last boundary."""
    phase: Phase | None = None
    rounds_target: int | None = None
    """The round at which this node stops."""
    steps_a_round: int | None = None
    """None where phases last so many seconds."""
    seconds_a_round: float | None = None
    """None where phases have so many steps."""
    tokens: int = 0
    """With those of earlier processes."""
    last: PhaseDone | None = None
    """The last complete phase."""
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    sample: SampleView | None = None
    committed: int = 0
    solo: Counter[str] = field(default_factory=Counter)
    swaps_fit: bool = True
    """Whether the last swap ended otherwise than by being too slow."""
    allowed: deque[float] = field(default_factory=lambda: deque(maxlen=SHORTENED_SWAPS))
    """What this node's own bounds left of the last swaps' corrections."""
    rolled_back: int = 0
    taken_back: int = 0
    last_taken_back: LastTakenBack | None = None
    faults: Counter[str] = field(default_factory=Counter)
    with_peer: dict[str, PeerStats] = field(default_factory=dict)
    """In the order of their last committed round."""
    last_round: LastRound | None = None
    spent: Spent = field(default_factory=lambda: Spent({}))
    """The training thread's seconds."""
    device_bytes: int | None = None
    short_of_memory: str | None = None
    phase_s: float = 0.0
    """What the last phase took, as a whole one: the part that a resumed node trained of one is reckoned up."""
    _ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACE_ROUNDS + 1))
    """Round and training clock at the end of the last phases, of rounds one after the other."""
    _step_now: int = 0
    _minute: deque[Spent] = field(default_factory=deque)
    """`spent` through the last minute, the oldest first."""

    def observe(self, event: Event) -> None:
        match event:
            case PhaseDone():
                self.round, self.step = event.round, event.steps
                self.progress(event.steps, None, event.device_bytes)
                self.last = event
                if self._ends and self._ends[-1][0] != event.round - 1:  # a peer's state was adopted
                    self._ends.clear()
                self._ends.append((event.round, self.spent.clock_s))
                self.loss_first = event.loss if self.loss_first is None else self.loss_first
                self.tokens = event.tokens_total
            case Evaluated(_, eval_loss):
                self.eval_loss = eval_loss
                self.eval_loss_first = eval_loss if self.eval_loss_first is None else self.eval_loss_first
            case Sampled(round, prompt, text):
                self.sample = SampleView(round, prompt, text)
            case RoundCommitted():
                self._commit(event)
            case WentSolo():
                self.solo[event.reason] += 1
                if event.partner is not None:
                    self.swaps_fit = event.reason != TOO_SLOW
            case RolledBack():
                self.rolled_back += 1
            case TakenBack(round, partner, loss_with, loss_without):
                self.taken_back += 1
                self.last_taken_back = LastTakenBack(partner, round, loss_with, loss_without)
            case PeerFaulted(_, reason):
                self.faults[reason] += 1

    def move_to(self, round: int, step: int | None = None) -> None:
        """To the boundary of a checkpoint, or of a peer's state: that says no step, and with phases by time a replica
        counts its own."""
        by_round = round * self.steps_a_round if self.steps_a_round else self.step
        self.round, self.step = round, by_round if step is None else step
        self._step_now = self.step

    def progress(self, step: int, phase: Phase | None, device_bytes: int | None = None) -> None:
        """The progress of training; to be called every second or so."""
        self._step_now, self.phase, self.device_bytes = step, phase, device_bytes

    @property
    def shortened_to(self) -> float | None:
        """The middle of what was left of corrections lately, where that is little; None where it is enough."""
        if len(self.allowed) < SHORTENED_SWAPS or (left := median_high(self.allowed)) >= SHORTENED:
            return None
        return left

    @property
    def steps_target(self) -> int | None:
        return self.rounds_target * self.steps_a_round if self.rounds_target and self.steps_a_round else None

    @property
    def left_s(self) -> float | None:
        """Seconds of training until the target: at the pace of the last rounds; before there is one, as the run says of
        phases by time, or at the pace of the first phase so far."""
        if self.rounds_target is None:
            return None
        phase, round_s, ends = self.phase, None, self._ends
        if len(ends) > 1:
            round_s = (ends[-1][1] - ends[0][1]) / (len(ends) - 1)
        elif self.seconds_a_round:
            round_s = self.seconds_a_round
        elif phase and phase.left_s is not None and phase.part < 1:
            round_s = phase.left_s / (1 - phase.part)
        elif self.last and self.last.tokens:
            round_s = self.phase_s
        left = max(0.0, self.rounds_target - self.round - (phase.part if phase else 0.0))
        return None if round_s is None else left * round_s

    def spend(self, spent: Spent) -> None:
        """The training thread's time so far; to be called every second or so."""
        self.spent = spent
        self._minute.append(spent)
        while len(self._minute) > 1 and self._minute[1].all_s <= spent.all_s - MINUTE_S:
            self._minute.popleft()

    def _commit(self, event: RoundCommitted) -> None:
        self.committed += event.swap == 1
        self.swaps_fit = True
        self.allowed.append(event.allowed)
        together = self.with_peer[event.partner] = self.with_peer.pop(event.partner, PeerStats())
        if len(self.with_peer) > PEERS:
            del self.with_peer[next(iter(self.with_peer))]
        together.exchanges += 1
        together.sent += event.sent_bytes
        together.received += event.received_bytes
        self.last_round = LastRound(
            event.partner,
            event.seconds,
            event.sent_bytes,
            event.received_bytes,
            event.resent_blocks,
            event.relative_error,
        )

    def fill(self, view: StatusView) -> StatusView:
        """With the figures that events decide."""
        last, phase = self.last_round, self.last
        minute = _busy(self._minute[0] if self.spent.all_s > MINUTE_S else _START, self.spent)
        return replace(
            view,
            round=self.round,
            rounds_target=self.rounds_target,
            step=self._step_now,
            steps_target=self.steps_target,
            left_s=None if view.state == NodeState.PAUSED else self.left_s,
            phase=self.phase,
            tokens=self.tokens,
            tokens_per_s=phase.tokens_per_s if phase else None,
            loss=phase.loss if phase else None,
            loss_first=self.loss_first,
            learning_rate=phase.learning_rate if phase else None,
            gradient_norm=phase.gradient_norm if phase else None,
            mfu=phase.mfu if phase else None,
            eval_loss=self.eval_loss,
            eval_loss_first=self.eval_loss_first,
            sample=self.sample,
            partner=last.partner if last else None,
            last_round=last,
            resent_block_fraction=last.resent_block_fraction if last else None,
            relative_error=last.relative_error if last else None,
            rounds=Rounds(self.committed, self.solo.total(), dict(self.solo)),
            partners={peer: together.exchanges for peer, together in self.with_peer.items()},
            busy_fraction=_busy(_START, self.spent),
            busy_fraction_minute=minute if view.state in AT_WORK else None,
            time_s=self.spent.accounts,
            stall_ms=phase.stall_ms if phase else None,
            faults=dict(self.faults),
            rolled_back=self.rolled_back,
            taken_back=self.taken_back,
            last_taken_back=self.last_taken_back,
        )

    def fill_row(self, row: PeerRow) -> PeerRow:
        """The row with what was swapped with that peer."""
        together = self.with_peer.get(row.peer_id, PeerStats())
        return replace(row, exchanges=together.exchanges, sent=together.sent, received=together.received)

    def per_param_round(self, parameters: int | None, sent_bytes: int) -> float | None:
        """Bytes sent per parameter and committed round. Swaps that broke count too."""
        return sent_bytes / parameters / self.committed if parameters and self.committed else None


def _busy(before: Spent, now: Spent) -> float | None:
    """The inner steps' share of the time between; pauses are left out. A GPU may end in it what it began before."""
    total = now.clock_s - before.clock_s
    return min(1.0, (now.trained_s - before.trained_s) / total) if total > 0 else None
