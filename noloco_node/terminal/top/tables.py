"""The tables: peers, with their progress and their traffic with this node; and the runs of a rendezvous."""

from collections.abc import Sequence

from rich.text import Text

from noloco_node.base.peer_names import short_id
from noloco_node.base.units import count
from noloco_node.terminal.peer_cells import cells, worth_showing
from noloco_node.terminal.picture import Picture
from noloco_node.terminal.table import GAP, Column, columns_of, fitting, table
from noloco_node.terminal.top.glyphs import STATES
from noloco_node.terminal.top.layout import clean, fit, title
from noloco_node.views.peers import RunView

HEAD = 2
"""Lines above the first row."""

_STATE = "state"
_PEERS = columns_of(
    "peer, >stage 12, state 12, quarantined 14, >taken back 13, >refused 8, >failed 1, >round 11, >lag 10, "
    ">loss 9, >together 8, >seen 7, >tokens/s 6, via 5, >sent 4, >received 3, >eval 2"
)
_RENDEZVOUS_PEERS = columns_of("peer, run 10, state 9, >round 8, >lag 5, >loss 7, >eval 4, >seen 6, >tokens/s 3, via 2")
_RUNS = columns_of("run, >peers 9, >training 8, >round 7, >of 6, author 5")


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
    rows = [[clean(text) for text in row] for row in rows]
    return [fit(line, width) for line in table(columns, rows, fitting(columns, rows, width + GAP), _style)]


def _style(column: Column, text: str) -> str:
    return STATES.get(text, "dim") if column.title == _STATE else ""


def _run(run: RunView) -> list[str]:
    return [run.run, str(run.peers), str(run.training), str(run.round), str(run.rounds), short_id(run.author)]
