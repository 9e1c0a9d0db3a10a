"""The whole screen: a picture in, one line per row out, each as wide as the screen.

If there is no room for all parts, whole parts are left out, the least important first; the others share the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.text import Text

from noloco_node.terminal.picture import Picture
from noloco_node.terminal.top import activity, charts, header_footer, tables
from noloco_node.terminal.top.layout import Paint, Part, beside, fit, share_out

ANY = 10_000
"""No limit on the rows of a part."""
_TWO, _THREE = 66, 150
"""From this many columns on, two or three parts are side by side."""
_LONG_TABLES = 130
_SPACED = 34
"""From this many rows on, there is a blank row between parts."""
_MARGINS = 2
"""Columns left free, one at each side."""
_SAMPLE = 4
"""Rows of the sample text at most."""
_HEALTH = 6
"""Rows of findings at most: the rest of the screen needs room too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What decides the drawing besides the picture: the size, the time, and what the user has open."""

    width: int
    height: int
    now: float
    every_s: float
    said: str | None = None
    """An answer or a question, for the last line."""
    shows_help: bool = False


def screen(picture: Picture, display: Display) -> list[Text]:
    head = Part(partial(header_footer.header, picture), 1, 1, keep=100)
    foot = Part(
        partial(header_footer.footer, picture, display.said, display.every_s), 1, 1, keep=110 if display.said else 80
    )
    if display.shows_help:
        return _drawn([head, Part(header_footer.manual, 1, ANY, keep=90)], foot, display)
    figures = Part(partial(header_footer.figures, picture), 1, 1, keep=90)
    top = [head, _dimmed(figures) if picture.absence else figures]
    if found := header_footer.findings(picture, display.now, display.width - _MARGINS):
        lines = min(len(found), _HEALTH, max(1, display.height // 3))
        top.append(Part(header_footer.health(found), lines, lines, keep=95))
    body = (
        _rendezvous(picture, display.width) if picture.is_rendezvous else _trainer(picture, display.now, display.width)
    )
    if display.height >= _SPACED:
        top[-1], body = _spaced(top[-1]), [_spaced(part) for part in body]
    if picture.absence:
        body = [_dimmed(part) for part in body]
    return _drawn([*top, *body], foot, display)


def _trainer(picture: Picture, now: float, width: int) -> list[Part]:
    losses, node = partial(charts.losses, picture), partial(charts.node, picture)
    rounds, partners = partial(activity.rounds, picture, now), partial(activity.partners, picture)
    peers, events = partial(tables.peers, picture), partial(activity.events, picture)
    table = max(1, len(picture.peers.peers)) + tables.HEAD
    middle = [Part(rounds, 3, 4, keep=50)]
    if picture.status.sample:
        sample = partial(activity.sample, picture)
        middle.append(Part(sample, 2, len(sample(width - _MARGINS, _SAMPLE)), keep=20))
    if width < _TWO:
        return [
            Part(losses, 4, 16, keep=70, weight=3),
            Part(node, 3, 11, keep=30),
            Part(partners, 2, 8, keep=60),
            *middle[1:],
            Part(peers, 3, table, keep=50, weight=2),
            Part(events, 2, ANY, keep=40),
        ]
    above = beside((losses, 5), (node, 4)) if width < _THREE else beside((losses, 4), (node, 3), (partners, 2))
    if width < _LONG_TABLES:
        return [
            Part(above, 4, 16, keep=70, weight=2),
            *middle,
            Part(peers, 3, table, keep=60, weight=2),
            Part(events, 2, ANY, keep=40),
        ]
    return [
        Part(above, 4, ANY, keep=70, weight=2),
        *middle,
        Part(beside((peers, 10), (events, 7)), 3, max(table, 1 + len(picture.history.said)), keep=60, weight=2),
    ]


def _rendezvous(picture: Picture, width: int) -> list[Part]:
    listed = max(1, len(picture.status.runs)) + tables.HEAD
    table = max(1, len(picture.peers.peers)) + tables.HEAD
    join_command = partial(activity.join_command, picture)
    return [
        Part(partial(tables.runs, picture), 2, listed, keep=60),
        Part(partial(tables.peers, picture), 3, table, keep=50, weight=3),
        Part(join_command, 2, len(join_command(width - _MARGINS, ANY)), keep=70, weight=9),
        Part(partial(activity.events, picture), 2, ANY, keep=40),
    ]


def _spaced(part: Part) -> Part:
    def paint(width: int, height: int) -> list[Text]:
        return part.paint(width, height - 1)

    return replace(part, paint=paint, least=part.least + 1, most=part.most + 1)


def _dimmed(part: Part) -> Part:
    """For values that are no longer current."""

    def paint(width: int, height: int) -> list[Text]:
        return [Text(line.plain, "dim") for line in part.paint(width, height)]

    return replace(part, paint=paint)


def _drawn(parts: Sequence[Part], foot: Part, display: Display) -> list[Text]:
    """With the foot on the last row, however little is above it."""
    *blocks, last = (
        _block(part.paint, display.width - _MARGINS, rows)
        for part, rows in zip([*parts, foot], share_out([*parts, foot], display.height), strict=True)
    )
    lines = [line for block in blocks for line in block]
    lines += [Text()] * (display.height - len(lines) - len(last)) + last
    return [fit(Text.assemble(" ", line), display.width) for line in lines]


def _block(paint: Paint, width: int, rows: int) -> list[Text]:
    """Exactly `rows` lines."""
    if rows < 1:
        return []
    lines = paint(max(1, width), rows)[:rows]
    return lines + [Text()] * (rows - len(lines))
