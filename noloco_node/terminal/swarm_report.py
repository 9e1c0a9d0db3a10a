"""The result of a local swarm: a document for programs, lines for people."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_node.base.units import count, loss, rate, span
from noloco_node.errors import NolocoError
from noloco_node.terminal.swarm_board import NodeProcess
from noloco_node.views.documents import plain


@dataclass(frozen=True, slots=True)
class Outcome:
    nodes: Sequence[NodeProcess]
    run_id: str
    rounds: int
    wall_s: float
    average_of_weights: float | None
    """Held-out loss of the mean of the nodes' weights."""
    kept: Path | None = None
    """Where the nodes' homes are kept."""
    not_kept: NolocoError | None = None
    """Why they are not, where they were to be."""

    @property
    def views(self) -> list[Any]:
        return [node.view for node in self.nodes if node.view]

    def mean(self, field: str) -> float | None:
        known = [value for view in self.views if (value := getattr(view, field)) is not None]
        return fmean(known) if known else None

    def failure(self) -> str | None:
        """Why the swarm failed, in a sentence; None if it did not. Who holds a stage alone has nobody to swap with."""
        holders = Counter(view.stage.number for view in self.views if view.stage)
        for node in self.nodes:
            name = node.view.name if node.view else node.label
            if node.exit_code:
                return f"{name} ended with exit code {node.exit_code}: {node.last_output_line()}"
            alone = node.view and node.view.stage and holders[node.view.stage.number] == 1
            if not alone and (node.view is None or not node.view.rounds.committed):
                return f"{name} found no partner in any round"
        return None

    def as_document(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "rounds": self.rounds,
            "wall_s": round(self.wall_s, 3),
            "loss": {"first": self.mean("loss_first"), "last": self.mean("loss")},
            "eval_loss": {
                "first": self.mean("eval_loss_first"),
                "last": self.mean("eval_loss"),
                "average_of_weights": self.average_of_weights,
            },
            "nodes": [_node(node) for node in self.nodes],
        }

    def lines(self) -> Iterator[str]:
        """What was reached, where it lies and what comes next."""
        solo = sum(view.rounds.solo for view in self.views)
        ended = solo + sum(view.rounds.committed for view in self.views)
        how = f"{'ended after' if self.failure() else 'done in'} {span(self.wall_s)}"
        rounds = f"in {count(self.rounds, 'round')} ({solo or 'none'} of {ended} solo)"
        yield f"{how}: each node met {self._met()} {rounds}" if ended else f"{how}: no round was done"
        if (last := self.mean("loss")) is not None:
            held_out = f"on held-out data {loss(self.mean('eval_loss_first'))} → {loss(self.mean('eval_loss'))}"
            average = "" if (of := self.average_of_weights) is None else f", of the averaged weights {loss(of)}"
            yield f"mean loss {loss(self.mean('loss_first'))} → {loss(last)}, {held_out}{average}"
        per_round = [view.bytes.per_param_round for view in self.views if view.bytes.per_param_round is not None]
        sent = f", {fmean(per_round):.2f} bytes sent per parameter and round" if per_round else ""
        yield f"{rate(sum(view.tokens for view in self.views))} tokens trained on{sent}"
        if self.not_kept:
            yield "the nodes' homes could not be kept"
        elif self.kept is None:
            yield "nothing is kept: --keep DIR keeps the nodes' homes, with their checkpoints and logs"
        else:
            yield f"the nodes' homes: {self.kept}"
            home = shlex.quote(str(self.kept / self.nodes[0].label)) if self.nodes else ""
            yield f"to let the first node's model continue a text: noloco-node sample 'Once upon a time' {home}"

    def _met(self) -> str:
        met = [len(view.partners) for view in self.views] or [0]
        low, high = min(met), max(met)
        return count(low, "other") if low == high else f"{low} to {high} others"


def _node(node: NodeProcess) -> dict[str, Any]:
    return {**(plain(node.view) if node.view else {"name": node.label}), "exit_code": node.exit_code}
