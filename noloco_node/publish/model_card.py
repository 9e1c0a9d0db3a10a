"""The model card of an export: what was trained, on what data, how, and up to which round and loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_node.base.units import count, loss
from noloco_node.observe.jsonl import records
from noloco_node.publish.evaluate import Measured
from noloco_node.publish.weights import Trained
from noloco_node.run.schema import Manifest
from noloco_node.version import VERSION

_ROWS = 12
"""Of the table of losses."""


@dataclass(frozen=True, slots=True)
class TableRow:
    round: int
    loss: float | None
    """Mean training loss of the phase that ended there."""
    eval_loss: float | None


History = tuple[TableRow, ...]


def history(events_file: Path, up_to: int) -> History:
    """The losses of each round in a node's events.jsonl; damaged lines are skipped, a missing file is empty."""
    losses: dict[int, float] = {}
    measured: dict[int, float] = {}
    for event in records(events_file):
        match event:
            case {"event": "PhaseDone", "round": int(round_), "loss": float(loss)}:
                losses[round_] = loss
            case {"event": "Evaluated", "round": int(round_), "eval_loss": float(loss)}:
                measured[round_] = loss
    rounds = sorted(round_ for round_ in losses.keys() | measured.keys() if round_ <= up_to)
    return tuple(TableRow(round_, losses.get(round_), measured.get(round_)) for round_ in rounds)


def card(trained: Trained, measured: Measured | None, rows: History) -> str:
    run = trained.run
    parameters = sum(p.numel() for p in trained.module.parameters())
    return _CARD.format(
        name=run.name,
        label=run.label,
        run_id=run.run_id,
        author=trained.signed.author,
        parameters=f"{parameters / 1e6:.2f} M",
        architecture=type(trained.module).__name__,
        what=_what(trained),
        how_far=_how_far(trained),
        measured=_measured(measured),
        recipe=_recipe(run),
        losses=_losses(_spread(rows)),
        version=VERSION,
    )


def _how_far(trained: Trained) -> str:
    run, step = trained.run, trained.step
    steps = "" if step is None else f", step {step}, {step * run.inner.batch_tokens:,} tokens a replica"
    return f"round {trained.round} of {run.rounds}{steps}"


def _what(trained: Trained) -> str:
    if len(trained.states) == 1:
        return "the slow weights of one replica"
    rounds = [str(state.round) for state in trained.states]
    return (
        f"the mean of the slow weights of {len(rounds)} replicas, at rounds {', '.join(rounds[:-1])} and {rounds[-1]}"
    )


def _measured(measured: Measured | None) -> str:
    if measured is None:
        return "not measured: the run's data was not at hand"
    return (
        f"loss {measured.loss:.4f} nats a token, {measured.bits_per_byte:.3f} bits a byte, "
        f"on {measured.tokens:,} held-out tokens"
    )


def _recipe(run: Manifest) -> str:
    inner, outer = run.inner, run.outer
    phase = count(inner.steps, "step") if inner.steps else f"{inner.seconds:g} s"
    rows = {
        "begun with": f"weights of {run.model.weights}" if run.model.weights else "random weights",
        "data": run.data.dataset or run.data.source,
        "tokenizer": run.data.tokenizer,
        "sequence length": run.data.sequence_length,
        "inner optimizer": f"AdamW, {inner.batch_tokens} tokens a step, learning rate {inner.learning_rate:g}",
        "inner phase": phase,
        "outer step": f"NoLoCo: α {outer.alpha:g}, β {outer.beta:g}, γ {outer.gamma:g}, {outer.overlap}",
        "update's length": "kept" if outer.keep_norm else "as averaging leaves it",
        "partners a round": outer.swaps_per_round,
        "codec": outer.codec,
        "seed": run.seed,
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _losses(rows: Sequence[TableRow]) -> str:
    if not rows:
        return ""
    lines = [f"| {row.round} | {loss(row.loss)} | {loss(row.eval_loss)} |" for row in rows]
    return "\n".join(["", "| round | training loss | held-out loss |", "|---|---|---|", *lines, ""])


def _spread(rows: History) -> Sequence[TableRow]:
    """The first, the last, and as many evenly between as make a short table."""
    if len(rows) <= _ROWS:
        return rows
    return [rows[round(place * (len(rows) - 1) / (_ROWS - 1))] for place in range(_ROWS)]


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- noloco
- decentralized-training
---

# {name}

Trained by volunteers on ordinary internet links with NoLoCo (arXiv 2506.10911): each machine trains by itself and
averages with one random other machine after every inner phase. This is {what}, exported by noloco-node {version}.

| | |
|---|---|
| run | `{label}` |
| run id | `{run_id}` |
| author's peer id | `{author}` |
| model | {architecture}, {parameters} parameters |
| how far | {how_far} |
| held-out | {measured} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

`noloco-node eval this-folder` measures it again; `noloco.json` holds the run's manifest with its author's signature.

## How it was trained

| | |
|---|---|
{recipe}
{losses}"""
