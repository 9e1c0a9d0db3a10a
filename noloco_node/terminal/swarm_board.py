"""Shows a local swarm while it trains: a live table on a terminal that can redraw it, else one line per round.

It is given the nodes' views and the time; it does no network calls and no waiting.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noloco_node.base.peer_names import name_of
from noloco_node.base.states import NodeState
from noloco_node.base.units import NOTHING, loss, rate, share, size, span
from noloco_node.terminal.table import columns_of, fitting, table
from noloco_node.views.round_line import figures
from noloco_node.views.status import StatusView

_COLUMNS = columns_of(
    "node, state, >round, >step 2, >loss, >eval 5, partner 6, >sent 4, >busy 3, >tokens/s 7, waiting for 1"
)
_WAITING = len(_COLUMNS) - 1
_OTHERS = "the others to join"
_SILENT_S = 5.0  # without a terminal: the longest time without a line


class NodeProcess(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def view(self) -> StatusView | None: ...

    @property
    def exit_code(self) -> int | None: ...

    def last_output_line(self) -> str: ...


class SwarmProgress:
    """The share that is done, and the time left if the rest goes as fast as since the first progress."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._first: tuple[float, float] | None = None
        self.fraction = 0.0
        self.left_s: float | None = None

    def update(self, nodes: Sequence[NodeProcess], now: float) -> None:
        done = [1.0 if _is_done(node) else _rounds_done(node.view) / self._rounds for node in nodes]
        self.fraction = max(self.fraction, sum(done) / len(done) if done else 0.0)
        if self._first is None and self.fraction > 0:
            self._first = now, self.fraction
        if self._first and self.fraction > self._first[1]:
            since, began = self._first
            self.left_s = (now - since) * (1 - self.fraction) / (self.fraction - began)

    def __str__(self) -> str:
        if self.left_s is None or self.fraction >= 1:
            return share(self.fraction)
        return f"{share(self.fraction)}   about {span(max(10, round(self.left_s, -1)))} left"


class LiveBoard:
    """For a terminal. A context manager, so that the cursor is always restored."""

    def __init__(self, out: Console, rounds: int) -> None:
        self._live = Live(console=out, auto_refresh=False)
        self._out, self._progress, self._rounds = out, SwarmProgress(rounds), rounds

    def __enter__(self) -> "LiveBoard":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, nodes: Sequence[NodeProcess], now: float) -> None:
        self._progress.update(nodes, now)
        bar = Table.grid(padding=(0, 2, 0, 0))
        width = min(40, self._out.width // 2)
        bar.add_row(ProgressBar(total=1, completed=self._progress.fraction, width=width), str(self._progress))
        parts = table_and_notes(nodes, self._rounds, self._out.width)
        self._live.update(Group(*parts, bar) if self._progress.fraction < 1 else Group(*parts), refresh=True)


class PlainBoard:
    """For a pipe or a log: a line for each round of each node, and all states when no line came for a while."""

    def __init__(self, out: Console, rounds: int, began: float) -> None:
        self._out, self._progress, self._rounds, self._began = out, SwarmProgress(rounds), rounds, began
        self._printed_at = began
        self._seen: dict[str, int | str] = {}
        self._last: Sequence[NodeProcess] = ()

    def __enter__(self) -> "PlainBoard":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.print(Group(*table_and_notes(self._last, self._rounds, self._out.width)))

    def update(self, nodes: Sequence[NodeProcess], now: float) -> None:
        self._progress.update(nodes, now)
        self._last = nodes
        for node in nodes:
            event = _event(node)
            if event and self._seen.get(node.label) != event:
                self._seen[node.label] = event
                self._print(now, _event_line(node, self._rounds))
        if now - self._printed_at >= _SILENT_S:
            self._print(now, f"{self._progress}   {_states(nodes)}")

    def _print(self, now: float, line: str) -> None:
        self._printed_at = now
        self._out.print(Text(f"{span(now - self._began):>11}  {line}"))


def table_and_notes(nodes: Sequence[NodeProcess], rounds: int, width: int) -> list[Text]:
    """The table; below it what nodes wait for, if that column does not fit."""
    rows = [_row(node, rounds) for node in nodes]
    if not rows:
        return [Text("starting the rendezvous …", style="dim")]
    shown = fitting(_COLUMNS, rows, width)
    notes = [] if _WAITING in shown else [f"{_name(node)}: {_trouble(node)}" for node in nodes if _waiting(node)]
    if not any(map(_waiting, nodes)):
        shown = [column for column in shown if column != _WAITING]
    return [*table(_COLUMNS, rows, shown), *(Text(note, style="dim") for note in notes)]


def _row(node: NodeProcess, rounds: int) -> list[str]:
    view = node.view
    if view is None:
        return [node.label, _state(node), *[NOTHING] * (_WAITING - 2), _waiting(node)]
    return [
        view.name,
        _state(node),
        f"{view.round}/{rounds}",
        str(view.step),
        loss(view.loss),
        loss(view.eval_loss),
        name_of(view.partner) if view.partner else NOTHING,
        size(view.bytes.sent),
        share(view.busy_fraction),
        rate(view.tokens_per_s),
        _waiting(node),
    ]


def _rounds_done(view: StatusView | None) -> float:
    return view.round + (view.phase.part if view.phase else 0.0) if view else 0.0


def _is_done(node: NodeProcess) -> bool:
    return node.exit_code is not None or (node.view is not None and node.view.state == NodeState.FINISHED)


def _name(node: NodeProcess) -> str:
    return node.view.name if node.view else node.label


def _state(node: NodeProcess) -> str:
    if node.exit_code:
        return f"exit {node.exit_code}"
    if node.exit_code == 0:
        return "done"
    return node.view.state if node.view else NodeState.STARTING


def _waiting(node: NodeProcess) -> str:
    if node.exit_code:
        return node.last_output_line()
    if node.view is None or node.exit_code is not None:
        return ""
    return _OTHERS if node.view.state == NodeState.PAUSED and not node.view.step else node.view.waiting_for or ""


def _states(nodes: Sequence[NodeProcess]) -> str:
    """`3 training, 1 joining (dry-falcon waits for state from brisk-heron)`, or `(3 nodes wait for data)`."""
    counts = Counter(map(_state, nodes))
    waits: dict[str, list[str]] = {}
    for node in nodes:
        if _waiting(node) and not node.exit_code:
            waits.setdefault(_waiting(node), []).append(_name(node))
    said = [
        f"{who[0]} waits for {what}" if len(who) == 1 else f"{len(who)} nodes wait for {what}"
        for what, who in waits.items()
    ]
    return ", ".join(f"{n} {state}" for state, n in counts.items()) + (f" ({'; '.join(said)})" if said else "")


def _trouble(node: NodeProcess) -> str:
    return f"failed: {node.last_output_line()}" if node.exit_code else f"waiting for {_waiting(node)}"


def _event(node: NodeProcess) -> int | str:
    """What a line is printed for when it changes: a round that has ended, or a failure."""
    if node.exit_code:
        return _trouble(node)
    return node.view.round if node.view and node.view.loss is not None else 0


def _event_line(node: NodeProcess, rounds: int) -> str:
    view = node.view
    if node.exit_code or view is None:
        return f"{_name(node)} {_trouble(node)}"
    left = [f"{span(view.left_s)} left"] if view.left_s else []
    return (
        f"{view.name} round {view.round} of {rounds}: {', '.join([f'loss {loss(view.loss)}', *figures(view), *left])}"
    )
