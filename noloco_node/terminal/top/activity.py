"""The latest events: rounds on a time axis, the last partners, log lines, the sample text; and how others join.

│──── 38 ────│──── 39 ────│──── 40 ────│╌╌╌ 41 ╌
  ▅▅▅ calm-otter   ○ no partner   ▅▅ dry-falcon

Above, inner phases; below, swaps, solo rounds, and corrections that are taken back.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from noloco_node.base.states import NodeState
from noloco_node.base.units import NOTHING, size, span
from noloco_node.terminal.figures import left
from noloco_node.terminal.picture import Picture
from noloco_node.terminal.top.glyphs import LEVELS, OWN, SOLO, SWAP, TAKEN_BACK
from noloco_node.terminal.top.layout import between, clean, fit, title, wrapped
from noloco_node.views.history import Piece, Said
from noloco_node.views.round_line import partner_or_reason

PHASE_COLUMNS = 16
"""The usual width of a phase: room for its number, and for a partner's name below."""
_TYPICAL = 9  # phases whose median length sets the scale
_SHORTEST_S, _LONGEST_S = 1.0, 1e7
_YEAR_9999 = 253_402_300_799.0  # the largest time that localtime accepts


def rounds(picture: Picture, now: float, width: int, height: int) -> list[Text]:
    pieces = picture.history.pieces
    if not pieces:
        still = left(picture.status.phase)
        first = "the first one has not ended yet" + (f": {still}" if still else "")
        return [title("rounds", "", width), Text(first, "dim")][:height]
    trains = picture.status.state == NodeState.TRAINING and not picture.absence
    last = max(piece.ended for piece in pieces)
    shown = window(pieces, now if trains else min(now, max(0.0, last)), width)
    over = f"last {span(shown.ended - shown.began)}"
    head = title("rounds", Text.assemble(("▅", SWAP), " together  ", ("○", SOLO), " solo  ", (over, "dim")), width)
    ongoing = picture.status.round + 1 if trains else None
    return [head, *timeline(pieces, shown, height - 1, ongoing=ongoing)][:height]


def partners(picture: Picture, width: int, height: int) -> list[Text]:
    """The last rounds, the newest first."""
    ended = [piece for piece in picture.history.pieces if piece.kind != "phase"]
    met = len(picture.status.partners)
    head = title("partners", f"{met} met" if met else "", width)
    if not ended:
        return [head, Text("none yet", "dim")][:height]
    return [head, *(_partner(piece, width) for piece in reversed(ended[-height:]))][:height]


def _partner(piece: Piece, width: int) -> Text:
    left = Text.assemble((f"{piece.round:>5} ", "dim"), _mark(piece), " ", clean(partner_or_reason(piece)))
    cost = f"{span(piece.ended - piece.began)}  {size(piece.sent):>7}" if piece.kind == "swap" else ""
    return between(left, Text(cost, "dim"), width)


def _mark(piece: Piece) -> tuple[str, str]:
    """A character and its style."""
    return {"swap": ("▅", SWAP), "taken_back": ("×", TAKEN_BACK)}.get(piece.kind, ("○", SOLO))


def events(picture: Picture, width: int, height: int) -> list[Text]:
    """The last lines of the log, the newest last."""
    head, room = title("events", "", width), height - 1
    if not picture.history.said or room < 1:
        return [head, Text("nothing logged yet", "dim")][:height]
    return [head, *(_said(line, width) for line in picture.history.said[-room:])]


def _said(line: Said, width: int) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(line.at)) if 0 <= line.at < _YEAR_9999 else NOTHING
    return fit(Text.assemble((f"{at}  ", "dim"), (clean(line.text), LEVELS.get(line.level, ""))), width)


def sample(picture: Picture, width: int, height: int) -> list[Text]:
    """The latest sample text, on as few lines as it needs."""
    text = picture.status.sample
    if text is None:
        return []
    prompt, rest = clean(text.prompt), " ".join(text.text.split())  # there are few rows
    words = Text.assemble((prompt, OWN), " " if text.text[:1].isspace() else "", clean(rest))
    return [title("sample text", f"after round {text.round}", width), *wrapped(words, width, 0)][:height]


def join_command(picture: Picture, width: int, height: int) -> list[Text]:
    """The command by which others join, to be copied: broken at the width, as a terminal does."""
    words = clean(picture.status.join or NOTHING)
    broken = [Text(words[at : at + width]) for at in range(0, len(words), max(1, width))]
    return [title("others join with", "", width), *broken][:height]


# ---- rounds on an axis of time ----
@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A stretch of time, and its width in columns."""

    began: float
    ended: float
    width: int

    def column(self, at: float) -> int:
        return round((at - self.began) / (self.ended - self.began) * self.width)


def window(pieces: Sequence[Piece], now: float, width: int) -> TimeWindow:
    lengths = [piece.ended - piece.began for piece in pieces if piece.kind == "phase"][-_TYPICAL:]
    phase_s = min(_LONGEST_S, max(_SHORTEST_S, median(lengths))) if lengths else _SHORTEST_S
    return TimeWindow(now - phase_s * max(2.0, width / PHASE_COLUMNS), now, width)


def timeline(pieces: Sequence[Piece], shown: TimeWindow, rows: int, *, ongoing: int | None) -> list[Text]:
    """`ongoing`: the round whose phase has not ended yet."""
    if rows < 1 or shown.width < 1:
        return []
    phases = [piece for piece in pieces if piece.kind == "phase" and piece.ended > shown.began]
    rounds = [piece for piece in pieces if piece.kind != "phase" and piece.ended >= shown.began]
    return [_phases(phases, shown, ongoing), *_lanes(rounds, shown, rows - 1)]


def _phases(phases: Sequence[Piece], shown: TimeWindow, ongoing: int | None) -> Text:
    line = Text(" " * shown.width)
    for piece in phases:
        line = _drawn(line, (shown.column(piece.began), shown.column(piece.ended)), str(piece.round), "─")
    if ongoing is not None:
        begins = shown.column(phases[-1].ended) if phases else 0
        line = _drawn(line, (begins, shown.width), str(ongoing), "╌", OWN)
    return line


def _drawn(line: Text, columns: tuple[int, int], name: str, rule: str, style: str = "") -> Text:
    begins, ends = max(0, columns[0]), min(len(line), columns[1])
    length = ends - begins
    if length < 1:
        return line
    label = f" {name} " if length > len(name) + 4 else ""
    before = (length - 1 - len(label)) // 2
    after = length - 1 - len(label) - before
    drawn = Text.assemble(("│", "dim"), (rule * before, style or "dim"), (label, style), (rule * after, style or "dim"))
    return Text.assemble(line[:begins], drawn, line[ends:])


@dataclass(frozen=True, slots=True)
class _Mark:
    """A swap, or anything but a phase, in its lane."""

    begins: int
    before: str
    bar: str
    after: str
    style: str

    @property
    def ends(self) -> int:
        return self.begins + len(self.before) + len(self.bar) + len(self.after)


def _lanes(pieces: Sequence[Piece], shown: TimeWindow, rows: int) -> list[Text]:
    """The newest are placed first: each in the highest lane with room for its words, else without its words."""
    lanes: list[list[_Mark]] = [[] for _ in range(rows)]
    for piece in reversed(pieces):
        places = ((mark, lane) for mark in _marks(piece, clean(partner_or_reason(piece)), shown) for lane in lanes)
        for mark, lane in places:
            if _has_room(lane, mark, shown.width):
                lane.append(mark)
                break
    return [_lane(sorted(lane, key=lambda mark: mark.begins), shown.width) for lane in lanes]


def _marks(piece: Piece, words: str, shown: TimeWindow) -> Iterator[_Mark]:
    """Two ways to draw it: with words, left of the bar if there is no room on the right; and without."""
    mark, style = _mark(piece)
    begins = min(shown.width - 1, max(0, shown.column(piece.began)))
    ends = min(shown.width, max(begins + 1, shown.column(piece.ended)))
    bar = mark * (ends - begins) if piece.kind == "swap" else mark
    right = _Mark(begins, "", bar, f" {words}", style)
    yield right if right.ends <= shown.width else _Mark(begins - len(words) - 1, f"{words} ", bar, "", style)
    yield _Mark(begins, "", bar, "", style)


def _has_room(lane: Sequence[_Mark], mark: _Mark, width: int) -> bool:
    is_free = all(mark.ends < other.begins or other.ends < mark.begins for other in lane)
    return is_free and mark.begins >= 0 and mark.ends <= width


def _lane(marks: Sequence[_Mark], width: int) -> Text:
    line = Text()
    for mark in marks:
        line.append(" " * (mark.begins - line.cell_len))
        line.append(mark.before)
        line.append(mark.bar, mark.style)
        line.append(mark.after)
    return fit(line, width)
