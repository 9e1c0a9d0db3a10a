"""The screen's first lines and its last one, and the page that `?` shows."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from noloco_node.base.peer_names import short_id
from noloco_node.base.states import NodeState
from noloco_node.base.units import count, loss, of, share, span
from noloco_node.terminal.figures import left, micro_batches, so_far
from noloco_node.terminal.picture import ABSENCES, Picture
from noloco_node.terminal.top.glyphs import EVAL, LEVELS, OWN, SOLO, STATES, SWAP, SWARM, TAKEN_BACK, gauge
from noloco_node.terminal.top.keys import KEYS, LEAVE_QUESTION
from noloco_node.terminal.top.layout import Paint, between, clean, fit, joined, title, wrapped
from noloco_node.views.round_line import figures as trained
from noloco_node.views.status import StageView

REACHABLE = {"directly": "reachable", "mapped": "reachable", "relayed": "relayed", "outgoing": "not reachable"}

_BAR = 16


def header(picture: Picture, width: int, _height: int) -> list[Text]:
    """Name, state, progress."""
    status = picture.status
    state = NodeState.FINISHED if picture.is_over else "gone" if picture.absence == "gone" else status.state
    mark = "●" if state in (NodeState.TRAINING, NodeState.RENDEZVOUS) and not picture.absence else "○"
    style = "red" if picture.absence and not picture.is_over else STATES.get(state, "")
    left = Text.assemble((clean(status.name), "bold"), "  ", (f"{mark} {clean(state)}", style))
    run = Text(clean(status.run or short_id(status.peer_id)), "dim")
    pieces = [left, *_progress(picture, width - left.cell_len)]
    least = joined(pieces[:2], width, "  ")  # the round is worth more than the run's name, the rest is not
    more = joined(pieces, width - run.cell_len - 1, "  ")
    return [between(max(least, more, key=lambda line: line.cell_len), run, width)]


def _progress(picture: Picture, room: int) -> Iterator[Text | str]:
    status = picture.status
    if picture.is_rendezvous or not (status.round or status.step):
        return
    target = status.rounds_target
    short, long = f"round {status.round}", f"round {of(status.round, target)}"
    yield long if len(long) + 2 <= room else short
    if target and room >= 4 * _BAR:
        yield Text.assemble(gauge(status.round / target, _BAR, OWN), f" {share(status.round / target)}")
    if status.left_s:
        yield f"{span(status.left_s)} left"
    if still := left(status.phase):
        yield f"this phase {still}"


def figures(picture: Picture, width: int, _height: int) -> list[Text]:
    """The node in a line, the most important first, for a short line."""
    status, now = picture.status, so_far(picture.status)
    own = f"loss {loss(now.loss)}" + " so far" * (status.loss is None and now.loss is not None)
    pieces = [] if picture.is_rendezvous else [own, f"eval {loss(status.eval_loss)}"]
    if status.waiting_for and not (picture.is_rendezvous or picture.is_over):
        pieces = [f"waiting for {clean(status.waiting_for)}", *(pieces if status.loss is not None else [])]
    if status.step and not picture.is_rendezvous:
        pieces.append(f"step {of(status.step, status.steps_target)}")
    if status.stage:
        pieces += stage(status.stage)
    pieces += trained(now)
    if status.busy_fraction is not None:
        pieces.append(f"busy {share(status.busy_fraction)}")
    pieces += [count(status.peers_seen, "peer"), f"up {span(status.uptime_s)}"]
    if status.reachable:
        pieces.append(clean(REACHABLE.get(status.reachable, status.reachable)))
    return [joined(pieces, width)]


def stage(view: StageView) -> Iterator[str]:
    yield f"stage {view.number} of {view.stages}"
    yield from micro_batches(view)


def findings(picture: Picture, now: float, width: int) -> list[Text]:
    """Problems and their remedies, broken between words into as many lines as needed."""
    found = [_absent(picture, now)] if picture.absence else []
    found += [
        Text(f"! {clean(item.text)}: {clean(item.remedy)}", LEVELS.get(item.level, ""))
        for item in picture.status.health
    ]
    return [line for item in found for line in wrapped(item, width, 2)]


def health(lines: Sequence[Text]) -> Paint:
    def paint(width: int, height: int) -> list[Text]:
        if len(lines) <= height:
            return list(lines)
        if height < 2:
            return [fit(Text.assemble(lines[0], "…"), width)]
        return [*lines[: height - 1], Text("  … `noloco-node status` shows all", "dim")]

    return paint


def _absent(picture: Picture, now: float) -> Text:
    ago = span(max(1.0, now - picture.at))
    if picture.is_over:
        return Text(f"the work is done, and the node ended {ago} ago: `noloco-node export` takes the model out")
    what = ABSENCES[picture.absence or "gone"]
    return Text(f"! {what} (for {ago}): waiting for it; these are its last values", "red")


def footer(picture: Picture, said: str | None, every_s: float, width: int, _height: int) -> list[Text]:
    """An answer stands before the keys, as room allows; a question stands alone, as it gives keys another meaning."""
    pieces = [Text(clean(said), "bold reverse")] if said else []
    idle = {"r"} if picture.status.state != NodeState.PAUSED else {"p"}
    idle |= {"p", "r"} if picture.is_rendezvous else set()
    if said != LEAVE_QUESTION:
        pieces += [Text.assemble((key, "bold"), f" {name}") for key, name, _ in KEYS if key not in idle]
    return [between(joined(pieces, width, "   "), Text(f"every {every_s:g} s", "dim"), width)]


def manual(width: int, height: int) -> list[Text]:
    """What `?` shows."""
    lines = [title("keys", "", width)]
    lines += [fit(Text.assemble((f"{key}  ", "bold"), f"{name:<8}{does}"), width) for key, name, does in KEYS]
    lines += [Text(), title("marks", "", width)]
    lines += [
        Text.assemble(("━", OWN), "  this node's loss, the mean of each round's inner phase"),
        Text.assemble(("┄", SWARM), "  the median of the peers that were training then"),
        Text.assemble(("•", EVAL), "  loss on held-out data"),
        Text.assemble(("▅", SWAP), "  a round averaged with a partner; as long as the swap took"),
        Text.assemble(("○", SOLO), "  a round without a complete swap, with its reason; training continued"),
        Text.assemble(("×", TAKEN_BACK), "  a partner's correction, taken back: it had made the model worse"),
        Text.assemble(("≤", "dim"), "  the highest value of the chart"),
        Text("lag: rounds behind this node when that peer was last seen, as its round"),
        Text(),
        Text("More: `noloco-node status`, `peers`, `doctor`; each has --help.", "dim"),
    ]
    return [fit(line, width) for line in lines[:height]]
