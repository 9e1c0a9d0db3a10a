"""The whole screen: a picture in, as many lines as there are rows out, each as wide as the screen.

Where there is no room for all, parts go whole, the least important first; those that stay share the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.text import Text

from noloco_node.terminal.top import activity, charts, header_footer, tables
from noloco_node.terminal.top.layout import Paint, Part, beside, fit, share_out
from noloco_node.terminal.top.picture import Picture

ANY = 10_000
"""Rows that a part takes, if there are so many."""
_TWO, _THREE = 66, 150
"""Columns from which on two parts stand side by side, or three."""
_LONG_TABLES = 130
_AIRY = 34
"""Rows from which on there is a blank one between parts."""
_MARGINS = 2
"""Columns left free, one at each side."""
_HEALTH = 6
"""Rows of findings at most: the picture itself is wanted too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What, besides the picture, decides what is drawn."""

    width: int
    height: int
    now: float
    every_s: float
    said: str | None = None
    """An answer or a question, to stand at the foot."""
    shows_help: bool = False


def screen(picture: Picture, look: Look) -> list[Text]:
    head = Part(partial(header_footer.header, picture), 1, 1, keep=100)
    foot = Part(partial(header_footer.footer, picture, look.said, look.every_s), 1, 1, keep=110 if look.said else 80)
    if look.shows_help:
        return _drawn([head, Part(header_footer.manual, 1, ANY, keep=90)], foot, look)
    figures = Part(partial(header_footer.figures, picture), 1, 1, keep=90)
    top = [head, _faded(figures) if picture.absence else figures]
    if found := header_footer.findings(picture, look.now, look.width - _MARGINS):
        lines = min(len(found), _HEALTH, max(1, look.height // 3))
        top.append(Part(header_footer.health(found), lines, lines, keep=95))
    body = _rendezvous(picture, look.width) if picture.is_rendezvous else _trainer(picture, look.now, look.width)
    if look.height >= _AIRY:
        top[-1], body = _airy(top[-1]), [_airy(part) for part in body]
    if picture.absence:
        body = [_faded(part) for part in body]
    return _drawn([*top, *body], foot, look)


def _trainer(picture: Picture, now: float, width: int) -> list[Part]:
    losses, node = partial(charts.losses, picture), partial(charts.node, picture)
    rounds, partners = partial(activity.rounds, picture, now), partial(activity.partners, picture)
    peers, events = partial(tables.peers, picture), partial(activity.events, picture)
    table = max(1, len(picture.peers.peers)) + tables.HEAD
    middle = Part(rounds, 3, 4, keep=50)
    if width < _TWO:
        return [
            Part(losses, 4, 16, keep=70, weight=3),
            Part(node, 3, 11, keep=30),
            Part(partners, 2, 8, keep=60),
            Part(peers, 3, table, keep=50, weight=2),
            Part(events, 2, ANY, keep=40),
        ]
    above = beside((losses, 5), (node, 4)) if width < _THREE else beside((losses, 4), (node, 3), (partners, 2))
    if width < _LONG_TABLES:
        return [
            Part(above, 4, 16, keep=70, weight=2),
            middle,
            Part(peers, 3, table, keep=60, weight=2),
            Part(events, 2, ANY, keep=40),
        ]
    return [
        Part(above, 4, ANY, keep=70, weight=2),
        middle,
        Part(beside((peers, 10), (events, 7)), 3, max(table, 1 + len(picture.history.said)), keep=60, weight=2),
    ]


def _rendezvous(picture: Picture, width: int) -> list[Part]:
    listed = max(1, len(picture.status.runs)) + tables.HEAD
    table = max(1, len(picture.peers.peers)) + tables.HEAD
    way_in = partial(activity.way_in, picture)
    return [
        Part(partial(tables.runs, picture), 2, listed, keep=60),
        Part(partial(tables.peers, picture), 3, table, keep=50, weight=3),
        Part(way_in, 2, len(way_in(width - _MARGINS, ANY)), keep=70, weight=9),
        Part(partial(activity.events, picture), 2, ANY, keep=40),
    ]


def _airy(part: Part) -> Part:
    def paint(width: int, height: int) -> list[Text]:
        return part.paint(width, height - 1)

    return replace(part, paint=paint, least=part.least + 1, most=part.most + 1)


def _faded(part: Part) -> Part:
    """What is no longer so."""

    def paint(width: int, height: int) -> list[Text]:
        return [Text(line.plain, "dim") for line in part.paint(width, height)]

    return replace(part, paint=paint)


def _drawn(parts: Sequence[Part], foot: Part, look: Look) -> list[Text]:
    """The foot at the bottom, however little there is above it."""
    *blocks, last = (
        _block(part.paint, look.width - _MARGINS, rows)
        for part, rows in zip([*parts, foot], share_out([*parts, foot], look.height), strict=True)
    )
    lines = [line for block in blocks for line in block]
    lines += [Text()] * (look.height - len(lines) - len(last)) + last
    return [fit(Text.assemble(" ", line), look.width) for line in lines]


def _block(paint: Paint, width: int, rows: int) -> list[Text]:
    """Exactly so many rows."""
    if rows < 1:
        return []
    lines = paint(max(1, width), rows)[:rows]
    return lines + [Text()] * (rows - len(lines))
