"""What is told line by line: the rounds on their axis, the last partners, the last words of the log, the way in."""

import time

from rich.text import Text

from noloco_node.base.states import NodeState
from noloco_node.base.units import NOTHING, size, span
from noloco_node.terminal.phase import left
from noloco_node.terminal.top.glyphs import LEVELS, SOLO, SWAP
from noloco_node.terminal.top.layout import between, clean, fit, title
from noloco_node.terminal.top.picture import Picture
from noloco_node.terminal.top.timeline import timeline, told, window
from noloco_node.views.history import Piece, Said

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
