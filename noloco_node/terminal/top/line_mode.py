"""`top` as lines, for a pipe, a log or a simple terminal: what changed between two pictures."""

import re
from collections.abc import Iterator

from noloco_node.base.units import count, loss, of, share, span
from noloco_node.terminal.figures import so_far
from noloco_node.terminal.picture import ABSENCES, Picture
from noloco_node.terminal.top.layout import clean
from noloco_node.views.history import HistoryView
from noloco_node.views.round_line import figures, partner_or_reason, round_line
from noloco_node.views.status import Health, StatusView

SILENT_S = 10.0
"""The longest time without a line."""
_FIGURE = re.compile(r"\s*\d[\d.]*( (d|h|min|s|ms)\b)?")
_FINISHED = "the work is done and the node has ended"


class LineMode:
    def __init__(self) -> None:
        self._before: Picture | None = None
        self._printed_at = 0.0

    def lines(self, picture: Picture, now: float) -> list[str]:
        found = list(_changes(self._before, picture))
        if not found and now - self._printed_at >= SILENT_S and not picture.absence:
            found = [standing(picture.status)]
        if found:
            self._printed_at = now
        self._before = picture
        return found


def standing(status: StatusView) -> str:
    """`brisk-heron training, round 41 of 100: loss 1.87, eval 1.92, 18.4k tokens/s, busy 99%, 17 peers`."""
    head = f"{clean(status.name)} {clean(status.state)}"
    head += f", round {of(status.round, status.rounds_target)}" if status.round else ""
    shown = [f"waiting for {clean(status.waiting_for)}"] if status.waiting_for else []
    shown += [f"step {of(status.step, status.steps_target)}"] if status.step else []
    trained = so_far(status)
    shown += [f"loss {loss(trained.loss)}"] if trained.loss is not None else []
    shown += [f"eval {loss(status.eval_loss)}"] if status.eval_loss is not None else []
    shown += figures(trained)
    shown += [f"busy {share(status.busy_fraction)}"] if status.busy_fraction is not None else []
    shown += [f"{span(status.left_s)} left"] if status.left_s else []
    return f"{head}: {', '.join([*shown, count(status.peers_seen, 'peer')])}"


def _changes(before: Picture | None, now: Picture) -> Iterator[str]:
    if now.absence:
        if before is None or before.absence != now.absence:
            missing = f"{ABSENCES[now.absence]}: waiting for {'one' if now.absence == 'gone' else 'it'}"
            yield _FINISHED if now.is_over else missing
        return
    if before is None or before.absence or _identity(before.status) != _identity(now.status):
        yield standing(now.status)
    if before and before.status.peer_id == now.status.peer_id:
        yield from _rounds(before.history, now)
    known = set(map(_kind, before.status.health)) if before else set()
    for finding in now.status.health:
        if _kind(finding) not in known:
            yield f"! {clean(finding.text)}: {clean(finding.remedy)}"


def _kind(finding: Health) -> tuple[str, str]:
    """Without its figures: for how long no data came is another one each second."""
    return finding.level, _FIGURE.sub("", finding.text)


def _identity(status: StatusView) -> tuple[str, str, str | None]:
    return status.peer_id, status.state, status.run_id


def _rounds(before: HistoryView, now: Picture) -> Iterator[str]:
    known = {(piece.kind, piece.round, piece.ended) for piece in before.pieces}
    phases = {point.round: point for point in now.history.points}
    for piece in now.history.pieces:
        if piece.kind == "phase" or (piece.kind, piece.round, piece.ended) in known:
            continue
        if piece.kind == "taken_back":
            yield f"round {piece.round} {clean(partner_or_reason(piece))}"
        else:
            phase, status = phases.get(piece.round), now.status
            yield clean(round_line(piece, phase, status.steps_target, status.left_s))
