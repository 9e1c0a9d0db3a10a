"""The latest events, for the live views: loss curves, a timeline of rounds, which peers swapped, network rates.

Input: events (base/events.py) and the presence records of others. Everything is bounded, however long a node runs.
Curves outlive a restart: `replay` reads them from `events.jsonl` again.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

from noloco_node.base.events import Evaluated, Event, PhaseDone, RoundCommitted, TakenBack, WentSolo
from noloco_node.base.peer_names import name_of
from noloco_node.observe.jsonl import records
from noloco_node.peers.record import PeerRecord
from noloco_node.views.history import HistoryView, MeetingView, Piece, Point, Rate, Said

LATEST, _MOST = 1 << 34, 1 << 53
"""Of a time in seconds and of a count, in a file that anybody may have written: what the views can hold."""
POINTS = 500
"""At twice as many, every second one is dropped: a screen has no more pixels."""
LATEST_POINTS = 20
"""Of these none is dropped: a swap may end some rounds later, and is then shown with the figures of its round."""
PIECES, RATES, PAIRS = 300, 120, 2000


class Curves:
    def __init__(self, peer_id: str) -> None:
        self._me = peer_id
        self._points: list[Point] = []
        self._pieces: deque[Piece] = deque(maxlen=PIECES)
        self._rates: deque[Rate] = deque(maxlen=RATES)
        self._rounds: deque[tuple[float, int]] = deque(maxlen=RATES)
        """When this node was in which round, longer back than a presence record lives."""
        self._meetings: Counter[tuple[str, str]] = Counter()
        self._committed: dict[str, tuple[bytes, int]] = {}
        """By peer: boot and committed rounds of its last record."""
        self._others: Collection[PeerRecord] = ()
        self._before: tuple[float, int, int] | None = None
        """When, and the bytes sent and received of the day until then."""

    def observe(self, event: Event, now: float) -> None:
        match event:
            case PhaseDone():
                self._point(event, now)
                self._pieces.append(Piece("phase", event.round, now - event.seconds, now))
            case Evaluated(round, eval_loss):
                others = [other.eval_loss for other in self._others if other.eval_loss]
                self._evaluated(round, eval_loss, median([eval_loss, *others]))
            case RoundCommitted():
                began, sent, received = now - event.seconds, event.sent_bytes, event.received_bytes
                self._pieces.append(Piece("swap", event.round, began, now, event.partner, None, sent, received))
                self._meet(self._me, event.partner)
            case WentSolo():
                self._pieces.append(Piece("solo", event.round, now, now, event.partner, event.reason))
            case TakenBack(round, partner):
                self._pieces.append(Piece("taken_back", round, now, now, partner, "taken_back"))

    def seen(self, others: Collection[PeerRecord]) -> None:
        """The presence records of the others that train."""
        self._others = others
        for other in others:
            boot, count = self._committed.get(other.peer_id, (other.boot, other.committed))
            if other.partner and other.partner != other.peer_id and (boot, count) != (other.boot, other.committed):
                self._meet(other.peer_id, other.partner)
        self._committed = {other.peer_id: (other.boot, other.committed) for other in others}

    def sample(self, sent: int, received: int, round: int, now: float) -> None:
        """The bytes of today so far, and the round of this moment; to be called every second or so."""
        self._rounds.append((now, round))
        before, self._before = self._before, (now, sent, received)
        if before and (passed := now - before[0]) > 0 and sent >= before[1] and received >= before[2]:  # the same day
            self._rates.append(Rate(now, (sent - before[1]) / passed, (received - before[2]) / passed))

    def round_at(self, moment: float) -> int:
        """This node's round then: as of the last `sample` before, or of the first one."""
        before = (round for at, round in reversed(self._rounds) if at <= moment)
        return next(before, self._rounds[0][1] if self._rounds else 0)

    def replay(self, events: Path) -> None:
        """The curves from before a restart, from `events.jsonl`; damaged lines are skipped."""
        for line in records(events):
            try:
                at, kind = float(line["at"]), line["event"]
                if not (0 <= at <= LATEST and all(0 <= int(line.get(key, 0)) <= _MOST for key in ("round", "steps"))):
                    continue
                if kind == "PhaseDone":
                    round, step, loss = int(line["round"]), int(line["steps"]), line["loss"]
                    self._add(Point(at, round, step, None if loss is None else float(loss)))
                elif kind == "Evaluated":
                    self._evaluated(int(line["round"]), float(line["eval_loss"]))
            except (ValueError, TypeError, KeyError, OverflowError):
                continue

    def ended(self) -> tuple[Piece, Point | None]:
        """The last piece, and the inner phase of its round."""
        piece = self._pieces[-1]
        return piece, next((point for point in reversed(self._points) if point.round == piece.round), None)

    def view(self, said: Iterable[Said] = ()) -> HistoryView:
        meetings = tuple(MeetingView(peer, partner, rounds) for (peer, partner), rounds in self._meetings.items())
        named = {peer for meeting in meetings for peer in (meeting.peer, meeting.partner)}
        named |= {piece.partner for piece in self._pieces if piece.partner} | {self._me}
        return HistoryView(
            points=tuple(self._points),
            pieces=tuple(self._pieces),
            rates=tuple(self._rates),
            meetings=meetings,
            said=tuple(said),
            names={peer: name_of(peer) for peer in sorted(named)},
        )

    def _point(self, done: PhaseDone, now: float) -> None:
        own = [] if done.loss is None else [done.loss]
        losses = [*own, *(other.loss for other in self._others if other.loss)]
        swarm_loss = median(losses) if losses else None  # not the mean, which any one of them could make useless
        memory = done.host_bytes if done.device_bytes is None else done.device_bytes
        figures = (done.tokens_per_s, done.learning_rate, done.gradient_norm, done.mfu, memory)
        self._add(Point(now, done.round, done.steps, done.loss, None, swarm_loss, None, *figures))

    def _add(self, point: Point) -> None:
        while self._points and self._points[-1].round >= point.round:
            self._points.pop()  # training has gone back, to an older checkpoint or to the run's beginning
        self._points.append(point)
        if len(self._points) < 2 * POINTS:
            return
        older, latest = self._points[:-LATEST_POINTS], self._points[-LATEST_POINTS:]
        fewer = [p for number, p in enumerate(older) if number % 2 or p.eval_loss is not None]
        if len(fewer) + LATEST_POINTS >= 2 * POINTS:  # nearly all of them have an eval_loss
            fewer = fewer[::2]
        self._points = fewer + latest

    def _evaluated(self, round: int, eval_loss: float, swarm: float | None = None) -> None:
        for number in range(len(self._points) - 1, -1, -1):
            if self._points[number].round == round:
                self._points[number] = replace(self._points[number], eval_loss=eval_loss, swarm_eval_loss=swarm)
                return

    def _meet(self, peer: str, partner: str) -> None:
        if (peer, partner) not in self._meetings and len(self._meetings) >= PAIRS:
            del self._meetings[next(iter(self._meetings))]  # the pair that was seen first
        self._meetings[peer, partner] += 1
