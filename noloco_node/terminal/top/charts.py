"""What is drawn: the loss, and this node's own gauges with the facts beneath them."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from noloco_node.base.peer_names import short_id
from noloco_node.base.units import NOTHING, rate, share, size, span
from noloco_node.terminal.top.glyphs import EVAL, OWN, SWAP, SWARM, Frame, PlottedCurve, bars, gauge, plot
from noloco_node.terminal.top.layout import between, clean, joined, title
from noloco_node.terminal.top.picture import Picture
from noloco_node.views.history import Point, Rate

_AXIS = 7  # ` 2.34 ┤`
_LABEL = 8
_VALUE = 13
_TALLEST = 4  # rows of a chart of the network
_SETTLED, _MANY = 0.1, 20  # with so many points, the first tenth of a run does not say how high the chart is
_NARROW = 0.1
_NO_CURVE = 1e9  # who is there has diverged: what he had before is the picture
_WORTH_SHOWING = 0.0005  # a tenth of a per cent, rounded


def losses(picture: Picture, width: int, height: int) -> list[Text]:
    points = picture.history.points
    own = PlottedCurve(_values(points, lambda point: point.loss), OWN)
    swarm = PlottedCurve(_values(points, lambda point: point.swarm_loss), SWARM, dotted=True)
    evals = _values(points, lambda point: point.eval_loss)
    legend = [(("━", OWN), " own", own.points), (("┄", SWARM), " swarm", swarm.points), (("•", EVAL), " eval", evals)]
    there = [Text.assemble(mark, word) for mark, word, values in legend if values]
    head = title("loss", Text("  ").join(there), width)
    settled = _SETTLED if len(points) >= _MANY else 0.0
    frame = Frame.around([own, swarm, PlottedCurve(evals)], settled)
    if frame is None:
        return [head, Text("no round has ended yet", "dim")][:height]
    rows, columns = height - 2, width - _AXIS
    if rows < 1 or columns < 1:
        return [head][:height]
    drawn = plot([swarm, own], frame, columns, rows)
    _dot(drawn, [(x, y) for x, y in evals if y <= frame.high], frame)
    return [head, *_with_axis(drawn, frame), _rounds_axis(frame, width)]


def _values(points: Sequence[Point], of: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    found = ((point.round, of(point)) for point in points)
    return [(float(x), y) for x, y in found if y is not None and abs(y) < _NO_CURVE]  # NaN is not smaller either


def _dot(drawn: list[Text], evals: Sequence[tuple[float, float]], frame: Frame) -> None:
    """The last one, and before it only as many as leave the curves to be seen."""
    width, height = len(drawn[0]), len(drawn)
    apart = math.ceil(len(evals) / max(1, width // 6))
    for x, y in evals[::-1][:: max(1, apart)]:
        column, row = frame.dot(x, y, width, height)
        drawn[row] = Text.assemble(drawn[row][:column], ("•", EVAL), drawn[row][column + 1 :])


def _with_axis(drawn: Sequence[Text], frame: Frame) -> Iterator[Text]:
    last = len(drawn) - 1
    labelled = {0, last} | ({last // 2} if last >= 6 else set())
    for row, line in enumerate(drawn):
        value = frame.high - (frame.high - frame.low) * row / max(1, last)
        label = f"{_short(value, frame.high - frame.low):>5} ┤" if row in labelled else f"{'│':>{_AXIS}}"
        yield Text.assemble((label, "dim"), line)


def _short(value: float, spread: float) -> str:
    """In five characters, and with as many digits as it takes to tell the labels apart."""
    texts = (f"{value:.{3 if spread < _NARROW else 2}f}", f"{value:.2f}", f"{value:.0f}", f"{value:.0e}", "large")
    return next(text for text in texts if len(text) <= 5)


def _rounds_axis(frame: Frame, width: int) -> Text:
    last = f"{frame.right:.0f}" if frame.right > frame.left else ""
    return between(Text(f"{'└':>{_AXIS}}round {frame.left:.0f}", "dim"), Text(last, "dim"), width)


# ---- this node ----
def node(picture: Picture, width: int, height: int) -> list[Text]:
    """Gauges first, then facts; the charts of the network take the rows that are left."""
    status, track = picture.status, max(0, width - _LABEL - _VALUE)
    lines = [_drawn("busy", gauge(status.busy_fraction or 0.0, track, OWN), share(status.busy_fraction, 1), width)]
    speeds = [point.tokens_per_s for point in picture.history.points if point.tokens_per_s and track]
    if speeds := speeds[-track:]:
        chart = bars(speeds, 2 * max(speeds), 1, f"dim {OWN}")[
            0
        ]  # half as high as may be: an even pace is a line, no block
        lines.append(_drawn("speed", chart, f"{rate(status.tokens_per_s)} tok/s", width))
    facts = [_fact(name, pieces, width) for name, pieces in _facts(picture)]
    rows = min(_TALLEST, max(1, (height - 1 - len(lines) - len(facts)) // 2))
    for label, flow in (("out", _sent), ("in", _received)):
        lines += _network(label, [flow(each) if each else 0.0 for each in _seconds(picture.rates, track)], rows, width)
    return [title("this node", "", width), *lines, *facts][:height]


def _drawn(label: str, chart: Text, value: str, width: int) -> Text:
    return between(Text.assemble((label.ljust(_LABEL), "dim"), chart), Text(value), width)


def _network(label: str, flows: Sequence[float], rows: int, width: int) -> list[Text]:
    """Bytes a second, a column each. The scale is the highest that is seen, and is said while nothing flows."""
    top = max(flows, default=0.0)
    chart = bars(flows, top, rows, SWAP)
    now, highest = f"{size(flows[-1])}/s" if flows else NOTHING, f"≤ {size(top)}/s"
    if rows == 1:
        return [_drawn(label, chart[0], highest if top and not flows[-1] else now, width)]
    middle = [_drawn("", line, "", width) for line in chart[1:-1]]
    return [_drawn(label, chart[0], highest if top else "", width), *middle, _drawn("", chart[-1], now, width)]


def _sent(rate: Rate) -> float:
    return rate.sent_per_s


def _received(rate: Rate) -> float:
    return rate.received_per_s


def _seconds(rates: Sequence[Rate], columns: int) -> list[Rate | None]:
    """One a column, up to the last; a second that nobody measured is none."""
    if not rates or columns < 1:
        return []
    begins = [rates[0].at - 1.0, *(before.at for before, _ in pairwise(rates))]
    found: list[Rate | None] = []
    place = len(rates) - 1
    for column in range(columns):
        at = rates[-1].at - column - 0.5
        while place >= 0 and begins[place] > at:
            place -= 1
        if place < 0:
            break
        found.append(rates[place] if at <= rates[place].at else None)
    return found[::-1]


def _fact(label: str, pieces: Sequence[str], width: int) -> Text:
    words = joined([clean(piece) for piece in pieces], width - _LABEL)
    return Text.assemble((label.ljust(_LABEL), "dim"), words)


def _facts(picture: Picture) -> Iterator[tuple[str, list[str]]]:
    """What a volunteer asks first comes first."""
    status = picture.status
    yield "rounds", [f"{status.rounds.committed} together", f"{status.rounds.solo} solo", *_reasons(picture)]
    yield _given(picture)
    if last := status.last_round:
        with_whom = f"{_name(picture, last.partner)} in {span(last.seconds)}"
        yield "last", [with_whom, f"{size(last.sent)} out", f"{size(last.received)} in"]
    if kept := status.checkpoint:
        saved = "nothing saved yet" if kept.saved_round is None else f"saved at round {kept.saved_round}"
        yield "disk", [saved, f"{size(kept.free_bytes)} left"]
    if status.parameters:
        yield "model", [f"{rate(status.parameters)} parameters", *([f"on {status.device}"] if status.device else [])]
    if status.bytes.per_param_round is not None:
        yield "cost", [f"{status.bytes.per_param_round:.2f} bytes per parameter and round"]
    if idle := _besides_steps(picture):
        yield "idle", idle
    if status.last_error:
        yield "error", [status.last_error]


def _reasons(picture: Picture) -> Iterator[str]:
    """Of the solo rounds, the most frequent first."""
    for reason, number in sorted(picture.status.rounds.by_reason.items(), key=lambda item: -item[1]):
        yield f"{number} {reason.replace('_', ' ')}"


def _given(picture: Picture) -> tuple[str, list[str]]:
    """Today where the day has a limit, else since the start."""
    day, all_of_it = picture.status.today, picture.status.bytes
    if day is None or (day.sent_limit, day.received_limit) == (None, None):
        return "traffic", [f"gave {size(all_of_it.sent)}", f"took {size(all_of_it.received)}"]
    return "today", [f"gave {_of(day.sent, day.sent_limit)}", f"took {_of(day.received, day.received_limit)}"]


def _of(used: int, limit: int | None) -> str:
    return size(used) + (f" of {size(limit)}" if limit is not None else "")


def _besides_steps(picture: Picture) -> list[str]:
    spent = {account: s for account, s in picture.status.time_s.items() if account != "paused"}
    total = sum(spent.values())
    rest = sorted(((s, account) for account, s in spent.items() if account != "step"), reverse=True)
    return [f"{account} {share(s / total, 1)}" for s, account in rest if s > _WORTH_SHOWING * total]


def _name(picture: Picture, peer: str) -> str:
    named = {row.peer_id: row.name for row in picture.peers.peers} | dict(picture.history.names)
    return named.get(peer, short_id(peer))
