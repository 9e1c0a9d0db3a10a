"""The tables: peers, with their progress and their traffic with this node; and the runs of a rendezvous."""

from collections.abc import Sequence

from rich.text import Text

from noloco_node.base.peer_names import short_id
from noloco_node.base.units import count
from noloco_node.terminal.peer_cells import cells, worth_showing
from noloco_node.terminal.picture import Picture
from noloco_node.terminal.table import Column, fitting
from noloco_node.terminal.top.glyphs import STATES
from noloco_node.terminal.top.layout import clean, fit, title
from noloco_node.views.peers import RunView

HEAD = 2
"""Lines above the first row."""

_GAP = 2
_STATE = "state"
_PEERS = (
    Column("peer"),
    Column("stage", keep=12, right=True),
    Column(_STATE, keep=12),
    Column("quarantined", keep=14),
    Column("taken back", keep=13, right=True),
    Column("refused", keep=8, right=True),
    Column("failed", keep=1, right=True),
    Column("round", keep=11, right=True),
    Column("lag", keep=10, right=True),
    Column("loss", keep=9, right=True),
    Column("together", keep=8, right=True),
    Column("seen", keep=7, right=True),
    Column("tokens/s", keep=6, right=True),
    Column("via", keep=5),
    Column("sent", keep=4, right=True),
    Column("received", keep=3, right=True),
    Column("eval", keep=2, right=True),
)
_RENDEZVOUS_PEERS = (
    Column("peer"),
    Column("run", keep=10),
    Column(_STATE, keep=9),
    Column("round", keep=8, right=True),
    Column("lag", keep=5, right=True),
    Column("loss", keep=7, right=True),
    Column("eval", keep=4, right=True),
    Column("seen", keep=6, right=True),
    Column("tokens/s", keep=3, right=True),
    Column("via", keep=2),
)
_RUNS = (
    Column("run"),
    Column("peers", keep=9, right=True),
    Column("training", keep=8, right=True),
    Column("round", keep=7, right=True),
    Column("of", keep=6, right=True),
    Column("author", keep=5),
)


def peers(picture: Picture, width: int, height: int) -> list[Text]:
    """Those with the most rounds together first; the number of those that do not fit is shown."""
    known = sorted(picture.peers.peers, key=lambda peer: (-peer.exchanges, peer.run or "", peer.name, peer.peer_id))
    head = title("peers", str(len(known)) if known else "", width)
    if not known:
        return [head, Text("no other peer yet", "dim")][:height]
    shown = known if len(known) <= height - HEAD else known[: max(0, height - HEAD - 1)]
    columns = _RENDEZVOUS_PEERS if picture.is_rendezvous else worth_showing(_PEERS, shown)
    drawn = _table(columns, [cells(peer, columns) for peer in shown], width)
    for line, peer in zip(drawn[1:], shown, strict=True):
        if peer.peer_id == picture.status.partner:
            line.stylize("bold", 0, len(clean(peer.name)))
    more = Text(f"and {count(len(known) - len(shown), 'other')}: `noloco-node peers` lists all", "dim")
    return [head, *drawn, *([more] if len(shown) < len(known) else [])][:height]


def runs(picture: Picture, width: int, height: int) -> list[Text]:
    known = picture.status.runs
    head = title("runs", str(len(known)) if known else "", width)
    if not known:
        return [head, Text("no run is known yet", "dim")][:height]
    return [head, *_table(_RUNS, [_run(run) for run in known], width)][:height]


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[Text]:
    """A line of titles, and one per row."""
    rows = [[clean(text) for text in row] for row in rows]
    shown = fitting(columns, rows, width + _GAP)  # the last column needs no gap
    widths = {i: max(len(text) for text in (columns[i].title, *(row[i] for row in rows))) for i in shown}

    def line(texts: Sequence[str], styles: Sequence[str]) -> Text:
        cells = [(texts[i].rjust if columns[i].right else texts[i].ljust)(widths[i]) for i in shown]
        pieces = [Text(cell, styles[i]) for cell, i in zip(cells, shown, strict=True)]
        return fit(Text(" " * _GAP).join(pieces), width)

    titles = line([column.title for column in columns], ["dim"] * len(columns))
    return [titles, *(line(row, [_style(c, text) for c, text in zip(columns, row, strict=True)]) for row in rows)]


def _style(column: Column, text: str) -> str:
    return STATES.get(text, "dim") if column.title == _STATE else ""


def _run(run: RunView) -> list[str]:
    return [run.run, str(run.peers), str(run.training), str(run.round), str(run.rounds), short_id(run.author)]
