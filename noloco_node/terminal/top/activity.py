"""What happened lately: rounds on an axis of time, the last partners, the last log lines; and how others join.

│──── 38 ────│──── 39 ────│──── 40 ────│╌╌╌ 41 ╌
  ▅▅▅ calm-otter   ○ no partner   ▅▅ dry-falcon

Above, inner phases; below, swaps and solo rounds.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from noloco_node.base.peer_names import short_id
from noloco_node.base.states import NodeState
from noloco_node.base.units import NOTHING, size, span
from noloco_node.terminal.phase import left
from noloco_node.terminal.top.glyphs import LEVELS, OWN, SOLO, SWAP
from noloco_node.terminal.top.layout import between, clean, fit, title
from noloco_node.terminal.top.picture import Picture
from noloco_node.views.history import Piece, Said

PHASE_COLUMNS = 16
"""A phase is about so wide: room for its number, and for a partner's name beneath."""
_TYPICAL = 9  # phases whose middle one says how long they are
_LEAST_S, _MOST_S = 1.0, 1e7
_YEAR_9999 = 253_402_300_799.0  # what a clock can be asked about


def rounds(picture: Picture, now: float, width: int, height: int) -> list[Text]:
    pieces = picture.history.pieces
    if not pieces:
        still = left(picture.status.phase)
        first = "the first one has not ended yet" + (f": {still}" if still else "")
        return [title("rounds", "", width), Text(first, "dim")][:height]
    trains = picture.status.state == NodeState.TRAINING and not picture.absence
    last = max(piece.ended for piece in pieces)
    seen = window(pieces, now if trains else min(now, max(0.0, last)), width)
    over = f"last {span(seen.ended - seen.began)}"
    head = title("rounds", Text.assemble(("▅", SWAP), " together  ", ("○", SOLO), " solo  ", (over, "dim")), width)
    ongoing = picture.status.round + 1 if trains else None
    return [head, *timeline(pieces, picture.history.names, seen, height - 1, ongoing=ongoing)][:height]


def partners(picture: Picture, width: int, height: int) -> list[Text]:
    """The last rounds, the newest first."""
    ended = [piece for piece in picture.history.pieces if piece.kind != "phase"]
    met = len(picture.status.partners)
    head = title("partners", f"{met} met" if met else "", width)
    if not ended:
        return [head, Text("nobody yet", "dim")][:height]
    return [head, *(_partner(picture, piece, width) for piece in reversed(ended[-height:]))][:height]


def _partner(picture: Picture, piece: Piece, width: int) -> Text:
    swapped = piece.kind == "swap"
    mark = ("▅", SWAP) if swapped else ("○", SOLO)
    left = Text.assemble((f"{piece.round:>5} ", "dim"), mark, " ", told(piece, picture.history.names))
    cost = f"{span(piece.ended - piece.began)}  {size(piece.sent):>7}" if swapped else ""
    return between(left, Text(cost, "dim"), width)


def events(picture: Picture, width: int, height: int) -> list[Text]:
    """The last lines of the log, the newest last."""
    head, room = title("events", "", width), height - 1
    if not picture.history.said or room < 1:
        return [head, Text("nothing was said yet", "dim")][:height]
    return [head, *(_said(line, width) for line in picture.history.said[-room:])]


def _said(line: Said, width: int) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(line.at)) if 0 <= line.at < _YEAR_9999 else NOTHING
    return fit(Text.assemble((f"{at}  ", "dim"), (clean(line.text), LEVELS.get(line.level, ""))), width)


def way_in(picture: Picture, width: int, height: int) -> list[Text]:
    """How others join, to be copied: broken where the line ends, as a terminal itself would."""
    address = next(iter(picture.status.addresses), NOTHING)
    words = clean(f"noloco-node join --bootstrap {address}")
    broken = [Text(words[at : at + width]) for at in range(0, len(words), max(1, width))]
    return [title("others join with", "", width), *broken][:height]


# ---- rounds on an axis of time ----
@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From when to when, over so many columns."""

    began: float
    ended: float
    width: int

    def column(self, at: float) -> int:
        return round((at - self.began) / (self.ended - self.began) * self.width)


def window(pieces: Sequence[Piece], now: float, width: int) -> TimeWindow:
    lengths = [piece.ended - piece.began for piece in pieces if piece.kind == "phase"][-_TYPICAL:]
    phase_s = min(_MOST_S, max(_LEAST_S, median(lengths))) if lengths else _LEAST_S
    return TimeWindow(now - phase_s * max(2.0, width / PHASE_COLUMNS), now, width)


def timeline(
    pieces: Sequence[Piece], names: Mapping[str, str], seen: TimeWindow, rows: int, *, ongoing: int | None
) -> list[Text]:
    """`ongoing`: the round whose phase has begun and not ended."""
    if rows < 1 or seen.width < 1:
        return []
    phases = [piece for piece in pieces if piece.kind == "phase" and piece.ended > seen.began]
    rounds = [piece for piece in pieces if piece.kind != "phase" and piece.ended >= seen.began]
    return [_phases(phases, seen, ongoing), *_lanes(rounds, names, seen, rows - 1)]


def told(piece: Piece, names: Mapping[str, str]) -> str:
    """With whom, or why without anybody."""
    whom = clean(names.get(piece.partner) or short_id(piece.partner)) if piece.partner else ""
    if piece.kind == "swap":
        return whom
    why = clean((piece.reason or "alone").replace("_", " "))
    return f"{why} ({whom})" if whom else why


def _phases(phases: Sequence[Piece], seen: TimeWindow, ongoing: int | None) -> Text:
    line = Text(" " * seen.width)
    for piece in phases:
        line = _drawn(line, (seen.column(piece.began), seen.column(piece.ended)), str(piece.round), "─")
    if ongoing is not None:
        begins = seen.column(phases[-1].ended) if phases else 0
        line = _drawn(line, (begins, seen.width), str(ongoing), "╌", OWN)
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
    """A piece in its lane."""

    begins: int
    before: str
    bar: str
    after: str
    style: str

    @property
    def ends(self) -> int:
        return self.begins + len(self.before) + len(self.bar) + len(self.after)


def _lanes(pieces: Sequence[Piece], names: Mapping[str, str], seen: TimeWindow, rows: int) -> list[Text]:
    """The newest find their places first: each in the highest lane that has room for its words, else without them."""
    lanes: list[list[_Mark]] = [[] for _ in range(rows)]
    for piece in reversed(pieces):
        places = ((mark, lane) for mark in _marks(piece, told(piece, names), seen) for lane in lanes)
        for mark, lane in places:
            if _has_room(lane, mark, seen.width):
                lane.append(mark)
                break
    return [_lane(sorted(lane, key=lambda mark: mark.begins), seen.width) for lane in lanes]


def _marks(piece: Piece, words: str, seen: TimeWindow) -> Iterator[_Mark]:
    """The newest may be too near the right edge for words there: they stand left of it."""
    swapped = piece.kind == "swap"
    style = SWAP if swapped else SOLO
    begins = min(seen.width - 1, max(0, seen.column(piece.began)))
    ends = min(seen.width, max(begins + 1, seen.column(piece.ended)))
    bar = "▅" * (ends - begins) if swapped else "○"
    right = _Mark(begins, "", bar, f" {words}", style)
    yield right if right.ends <= seen.width else _Mark(begins - len(words) - 1, f"{words} ", bar, "", style)
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
