"""The last lines of a node that trained: what was reached, where it lies, and which commands come next."""

from collections.abc import Iterator

from noloco_node.base.units import NOTHING, count, loss, rate, size, span
from noloco_node.host import paths
from noloco_node.host.home import Home
from noloco_node.views.status import StatusView


def lines(
    view: StatusView, rounds: int, home: Home, task: str | None = None, *, is_loop: bool = False
) -> Iterator[str]:
    """`view`: the last status; `rounds` and `task`: of the run; `is_loop`: a script brought the task. A node that had
    no weights says nothing."""
    kept = view.checkpoint
    saved = kept.saved_round if kept else None
    if view.run_id is None or view.run is None or (view.loss is None and saved is None):
        return
    reached = max(view.round, saved or 0)  # a phase may end while a node leaves: after its last event, before it saves
    is_over = reached >= rounds
    yield f"{'finished' if is_over else 'left'} {view.run} at round {reached} of {rounds}{_trained(view)}"
    last = kept.resumed_round if kept and saved is None else saved
    if saved is None:
        since, why = "" if last is None else f" since round {last}", f" ({view.last_error})" if view.last_error else ""
        yield f"no checkpoint was written: what was trained{since} is lost{why}"
    if kept is None or last is None:
        return
    yield f"its checkpoint of round {last} ({size(kept.bytes)}): {home.run(view.run_id) / 'checkpoints'}"
    if not is_over:
        yield f"to go on: {'run the script again' if is_loop else f'noloco-node join{_which(home)}'}"
    yield from to_use(home, view.run, task, of_a_stage=view.stage is not None)


def to_use(home: Home, run: str, task: str | None, *, of_a_stage: bool = False) -> Iterator[str]:
    """What can be done with a run's checkpoints; `run`: its label."""
    if task is not None:  # whose model its volunteers have
        yield "to take the model out: `model.safetensors` in the newest folder there, by the names of the parameters"
        return
    which = _which(home, run)
    if of_a_stage:
        average = "noloco-node export --to my-model --average"
        yield f"to take the whole model out: {average} <a home of each other stage>{which}"
        yield f"the same while nodes hold all stages, and one of them runs here: {average} 1{home.flag}"
        return
    yield f"to take the model out: noloco-node export --to my-model{which}"
    yield f"to let it continue a text: noloco-node sample 'Once upon a time'{which}"


def _trained(view: StatusView) -> str:
    if view.loss is None:  # all that it has is a peer's, or of an earlier time
        measured = "" if view.eval_loss is None else f": loss on held-out data {loss(view.eval_loss)}"
        return f", without a round of its own{measured}"
    ended = view.rounds.committed + view.rounds.solo
    trained_s = sum(s for account, s in view.time_s.items() if account != "paused")
    return (
        f": {count(ended, 'round')} ({view.rounds.committed} together, {view.rounds.solo} solo) in {span(trained_s)}, "
        f"{rate(view.tokens)} tokens in all, loss {_change(view.loss_first, view.loss)}, "
        f"on held-out data {_change(view.eval_loss_first, view.eval_loss)}"
    )


def _change(first: float | None, last: float | None) -> str:
    return f"{loss(first)} → {loss(last)}" if last is not None else NOTHING


def _which(home: Home, run: str | None = None) -> str:
    """The flags that name the home and the run, where they are needed."""
    return home.flag + (f" --run {run}" if run and len(paths.runs(home)) > 1 else "")
