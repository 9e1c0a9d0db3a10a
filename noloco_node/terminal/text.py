"""`status` and `peers` as text, for a terminal of any width and for pipes."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.text import Text

from noloco_node.base.peer_names import name_of, short_id
from noloco_node.base.states import NodeState
from noloco_node.base.units import count, loss, of, rate, share, size, span
from noloco_node.terminal.figures import besides_steps, gpu, left, memory, micro_batches, reasons, so_far, traffic
from noloco_node.terminal.peer_cells import cells, quarantine, worth_showing
from noloco_node.terminal.table import GAP, Column, columns_of, fill, fitting, table
from noloco_node.views.peers import GONE, PeerRow, PeersView, RunView
from noloco_node.views.round_line import figures
from noloco_node.views.status import Checkpoints, Health, LastRound, LastTakenBack, StageView, StatusView

_PIPE_WIDTH = 1000  # no line breaks in a file
_HEALTH_STYLE = {"warning": "yellow", "error": "red"}
_REACHABLE = {
    "directly": "reachable directly",
    "mapped": "reachable at a port of the router",
    "relayed": "reachable through a relay",
    "outgoing": "not reachable",
}
_PEER_COLUMNS = columns_of(
    "peer, id 9, >stage, state, >round, >lag, >tokens/s 7, >loss 8, via 5, >last seen 4, >sent 2, >received 1, "
    ">together 6, >failed 3"
)
"""80 columns have room for those down to `together`, 120 for all, where no swap failed."""
_VISITOR_COLUMNS = [
    each for each in _PEER_COLUMNS if each.title not in ("via", "sent", "received", "together", "failed")
]
"""Columns for a view from outside the run: a visitor has exchanged nothing with anybody."""
_STANDING_COLUMNS = columns_of("peer, >together 3, >failed 1, >refused 2, >taken back 4, quarantined 5")
"""80 columns have room for all."""


def console(*, stderr: bool = False) -> Console:
    """Coloured and as wide as the terminal; plain and wide for a pipe."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def can_redraw(out: Console) -> bool:
    """Whether what is shown can be replaced later: not in a pipe, nor on a terminal without cursor addressing, where
    rich would show nothing before the end."""
    return out.is_terminal and not out.is_dumb_terminal


def print_status(view: StatusView, out: Console) -> None:
    head, *rest = rendezvous_lines(view) if view.state == NodeState.RENDEZVOUS else node_lines(view)
    text = Text(fill(head, out.width))
    text.stylize("bold", 0, len(view.name))
    out.print(text)
    for pieces in rest:
        out.print(Text(fill(pieces, out.width)))
    if view.state == NodeState.RENDEZVOUS:
        for run in view.runs:
            out.print(Text(fill(_run(run), out.width)))
        for address in view.addresses:
            out.print(Text(address), soft_wrap=True)  # whole, to be copied
    if view.last_error:
        out.print(Text(f"last error: {view.last_error}", style="dim"))
    for finding in view.health:
        out.print(_health(finding))


def print_peers(view: PeersView, out: Console) -> None:
    out.print(Group(*peers_parts(view, out.width)))


def peers_parts(view: PeersView, width: int) -> Iterator[Text]:
    """A table of all, and one of those that did wrong; for a visitor, a table for each run below the run's name. In the
    order of the view."""
    if view.runs:
        for run in view.runs:
            yield Text(fill(_run(run), width), style="bold")
            if peers := [peer for peer in view.peers if peer.run == run.run]:
                yield from _peers_table(peers, _VISITOR_COLUMNS, width)
    elif view.peers:
        if here := [peer for peer in view.peers if peer.state != GONE]:
            yield from _peers_table(here, _PEER_COLUMNS, width)
        if bad := [peer for peer in view.peers if peer.quarantined_s or peer.taken_back or peer.refused]:
            yield Text("\nwhat this node itself has seen of some", style="bold")
            yield from _peers_table(bad, _STANDING_COLUMNS, width)
    else:
        yield Text("no other peer is known yet")


def _peers_table(peers: Sequence[PeerRow], columns: Sequence[Column], width: int) -> list[Text]:
    columns = worth_showing(columns, peers)
    rows = [cells(peer, columns) for peer in peers]
    return table(columns, rows, fitting(columns, rows, width + GAP))  # the last column needs no gap


def peer_line(peer: PeerRow) -> str:
    """One peer in a line, for output without a table."""
    where = f" in {peer.run}" if peer.run else ""
    round_ = "" if peer.state == GONE else f", round {peer.round}, loss {loss(peer.loss)}"
    quarantined = f", quarantined for {quarantine(peer)}" if peer.quarantined_s else ""
    return f"{peer.name}{where} {peer.state}{round_}{quarantined} ({short_id(peer.peer_id)})"


def _run(run: RunView) -> list[str]:
    round_ = f"round {run.round} of {run.rounds}" if run.peers else f"{count(run.rounds, 'round')} in all"
    return [run.run, f"{count(run.peers, 'peer')} ({run.training} training)" if run.peers else "0 peers", round_]


def node_lines(view: StatusView) -> Iterator[list[str]]:
    """Each line as pieces, between which it may be broken."""
    yield [f"{view.name} ({short_id(view.peer_id)}) in {view.run or 'no run yet'}", *_progress(view)]
    if view.amended:
        yield [f"the run's author has {view.amended}"]
    if view.parameters:
        yield list(_model(view))
    if view.stage:
        yield list(stage(view.stage))
    if view.last_round:
        yield list(_last_round(view.last_round))
    if view.rounds.committed + view.rounds.solo:
        yield [_rounds(view)]
    if view.taken_back:
        last = [_last_taken_back(view.last_taken_back)] if view.last_taken_back else []
        yield [f"{count(view.taken_back, 'correction')} taken back", *last]
    if time := list(_time(view)):
        yield time
    if view.checkpoint:
        yield list(_checkpoints(view.checkpoint))
    sent, received, is_today = traffic(view)
    yield [
        *([_REACHABLE.get(view.reachable, view.reachable)] if view.reachable else []),
        f"{count(view.peers_seen, 'peer')} seen",
        *([f"{view.peers_quarantined} quarantined"] if view.peers_quarantined else []),
        f"up {span(view.uptime_s)}",
        f"{sent}, {received}" + (" today" if is_today else ""),
        *([f"page at {view.web}"] if view.web else []),
    ]


def rendezvous_lines(view: StatusView) -> Iterator[list[str]]:
    yield [
        f"{view.name} ({short_id(view.peer_id)}) is a rendezvous and does not train",
        f"{count(view.peers_seen, 'peer')} seen",
        f"up {span(view.uptime_s)}",
    ]


def _progress(view: StatusView) -> Iterator[str]:
    if view.round or view.step:
        step = f", step {of(view.step, view.steps_target)}" if view.step else ""
        yield f"{view.state}, round {of(view.round, view.rounds_target)}{step}"
    else:
        yield view.state
    if view.left_s:
        yield f"{span(view.left_s)} left"
    if view.waiting_for:
        yield f"waiting for {view.waiting_for}"
    if still := left(view.phase):
        yield f"this phase {still}"
    trained = so_far(view)
    if trained.loss is not None:
        yield f"loss {loss(trained.loss)}" + (f" (eval {loss(view.eval_loss)})" if view.eval_loss is not None else "")
    yield from figures(trained)
    if view.busy_fraction is not None:
        minute = view.busy_fraction_minute  # the same in the first minute
        lately = "" if minute in (None, view.busy_fraction) else f" (last minute {share(minute)})"
        yield f"busy {share(view.busy_fraction, 1)}{lately}"


def stage(view: StageView) -> Iterator[str]:
    yield f"stage {view.number} of {view.stages} (nodes at each: {', '.join(map(str, view.nodes))})"
    yield from micro_batches(view)
    if view.lost:
        yield f"{view.lost} lost"
    if view.not_believed:
        yield f"not believed: {', '.join(map(name_of, view.not_believed))}"
    yield f"activations sent {size(view.sent)}, received {size(view.received)}"


def _model(view: StatusView) -> Iterator[str]:
    yield f"{rate(view.parameters)} parameters" + (f" on {view.device}" if view.device else "")
    if view.tokens:
        yield f"{rate(view.tokens)} tokens so far"
    if used := list(memory(view)):
        yield f"memory {', '.join(used)}"
    if card := list(gpu(view)):
        yield f"GPU {', '.join(card)}"


def _last_round(last: LastRound) -> Iterator[str]:
    yield (
        f"last round with {name_of(last.partner)}: {span(last.seconds)}, "
        f"sent {size(last.sent)}, received {size(last.received)}"
    )
    if last.resent_block_fraction:
        yield f"{share(last.resent_block_fraction, 1)} of blocks resent"


def _checkpoints(kept: Checkpoints) -> Iterator[str]:
    if kept.resumed_round is not None:
        yield f"resumed from the checkpoint of round {kept.resumed_round}"
    if kept.saved_round is not None:
        yield f"saved at round {kept.saved_round}"
    yield f"a checkpoint takes {size(kept.bytes)}, {size(kept.free_bytes)} left on the disk"


def _rounds(view: StatusView) -> str:
    ended = count(view.rounds.committed + view.rounds.solo, "round")
    return f"{ended}: {view.rounds.committed} together, {view.rounds.solo} solo{_why(view)}"


def _last_taken_back(last: LastTakenBack) -> str:
    losses = f"eval loss {loss(last.loss_with)} with it, {loss(last.loss_without)} without"
    return f"last that of {name_of(last.partner)}, round {last.round}: {losses}"


def _time(view: StatusView) -> Iterator[str]:
    """The time that was not spent on steps, the largest part first."""
    if any(s for account, s in view.time_s.items() if account != "paused"):
        yield f"besides steps: {', '.join(besides_steps(view)) or 'nothing'}"
    if view.stall_ms is not None:
        yield f"the last round cost {view.stall_ms:.0f} ms of training"
    if paused_s := view.time_s.get("paused"):
        yield f"paused for {span(paused_s)}"


def _why(view: StatusView) -> str:
    """The reasons of the solo rounds; without a number if there is only one."""
    words = list(reasons(view))
    if len(words) == 1:
        words = [words[0].partition(" ")[2]]
    return f" ({', '.join(words)})" if words else ""


def _health(finding: Health) -> Text:
    return Text(f"! {finding.text}: {finding.remedy}", style=_HEALTH_STYLE.get(finding.level, ""))
