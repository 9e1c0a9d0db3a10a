"""The loss curves; and this node's gauges, with its figures below them."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from noloco_node.base.peer_names import name_of
from noloco_node.base.units import NOTHING, count, rate, share, size, span
from noloco_node.terminal.figures import besides_steps, gpu, memory, reasons, traffic
from noloco_node.terminal.picture import Picture
from noloco_node.terminal.top.glyphs import EVAL, OWN, SWAP, SWARM, Frame, PlottedCurve, bars, gauge, plot
from noloco_node.terminal.top.layout import between, clean, joined, title
from noloco_node.views.history import Point, Rate

_AXIS = 7  # ` 2.34 ┤`
_LABEL = 9
_VALUE = 13
_TALLEST = 4  # rows of a chart of the network
_SETTLED, _MANY = 0.1, 20  # with _MANY points, the first tenth of a run does not set the height of the chart
_NARROW = 0.1
_NO_CURVE = 1e9  # a loss above has diverged, and would flatten the rest of the curve


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
    return [(float(x), y) for x, y in found if y is not None and abs(y) < _NO_CURVE]  # false for NaN too


def _dot(drawn: list[Text], evals: Sequence[tuple[float, float]], frame: Frame) -> None:
    """The last one, and before it only so many that the curves stay visible."""
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
    """In five characters, with enough digits that the labels differ."""
    texts = (f"{value:.{3 if spread < _NARROW else 2}f}", f"{value:.2f}", f"{value:.0f}", f"{value:.0e}", "large")
    return next(text for text in texts if len(text) <= 5)


def _rounds_axis(frame: Frame, width: int) -> Text:
    last = f"{frame.right:.0f}" if frame.right > frame.left else ""
    return between(Text(f"{'└':>{_AXIS}}round {frame.left:.0f}", "dim"), Text(last, "dim"), width)


# ---- this node ----
def node(picture: Picture, width: int, height: int) -> list[Text]:
    """Gauges first, then facts; the traffic charts use the remaining rows."""
    status, track = picture.status, max(0, width - _LABEL - _VALUE)
    lines = [_drawn("busy", gauge(status.busy_fraction or 0.0, track, OWN), share(status.busy_fraction, 1), width)]
    speeds = [point.tokens_per_s for point in picture.history.points if point.tokens_per_s and track]
    if speeds := speeds[-track:]:
        [chart] = bars(speeds, 2 * max(speeds), 1, f"dim {OWN}")  # half height: an even speed is a line, not a block
        lines.append(_drawn("speed", chart, f"{rate(status.tokens_per_s)} tok/s", width))
    facts = [_fact(name, pieces, width) for name, pieces in _facts(picture)]
    rows = min(_TALLEST, max(1, (height - 1 - len(lines) - len(facts)) // 2))
    seconds = _seconds(picture.rates, track)
    lines += _network("sent", [each.sent_per_s if each else 0.0 for each in seconds], rows, width)
    lines += _network("received", [each.received_per_s if each else 0.0 for each in seconds], rows, width)
    return [title("this node", "", width), *lines, *facts][:height]


def _drawn(label: str, chart: Text, value: str, width: int) -> Text:
    return between(Text.assemble((label.ljust(_LABEL), "dim"), chart), Text(value), width)


def _network(label: str, flows: Sequence[float], rows: int, width: int) -> list[Text]:
    """Bytes per second, one column each. The scale is the highest value, which is shown while there is no traffic."""
    top = max(flows, default=0.0)
    chart = bars(flows, top, rows, SWAP)
    now, highest = f"{size(flows[-1])}/s" if flows else NOTHING, f"≤ {size(top)}/s"
    if rows == 1:
        return [_drawn(label, chart[0], highest if top and not flows[-1] else now, width)]
    middle = [_drawn("", line, "", width) for line in chart[1:-1]]
    return [_drawn(label, chart[0], highest if top else "", width), *middle, _drawn("", chart[-1], now, width)]


def _seconds(rates: Sequence[Rate], columns: int) -> list[Rate | None]:
    """One per column, up to the last one; None for a second without a measurement."""
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
    """The most asked first."""
    status = picture.status
    yield "rounds", [f"{status.rounds.committed} together", f"{status.rounds.solo} solo", *reasons(status)]
    if status.taken_back or status.peers_quarantined:
        yield "trust", [f"{status.taken_back} taken back", f"{count(status.peers_quarantined, 'peer')} quarantined"]
    sent, received, is_today = traffic(status)
    yield "today" if is_today else "traffic", [sent, received]
    if last := status.last_round:
        with_whom = f"{name_of(last.partner)} in {span(last.seconds)}"
        yield "last", [with_whom, f"sent {size(last.sent)}", f"received {size(last.received)}"]
    if used := list(memory(status)):
        yield "memory", used
    if card := list(gpu(status)):
        yield "GPU", card
    if status.tokens:
        yield "tokens", [f"{rate(status.tokens)} so far"]
    if kept := status.checkpoint:
        saved = "nothing saved yet" if kept.saved_round is None else f"saved at round {kept.saved_round}"
        yield "disk", [saved, f"{size(kept.free_bytes)} left"]
    if status.parameters:
        yield "model", [f"{rate(status.parameters)} parameters", *([f"on {status.device}"] if status.device else [])]
    if status.bytes.per_param_round is not None:
        yield "cost", [f"{status.bytes.per_param_round:.2f} bytes per parameter and round"]
    if idle := list(besides_steps(status)):
        yield "idle", idle
    if status.last_error:
        yield "error", [status.last_error]
