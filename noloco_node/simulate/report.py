"""Results as tables (rich), as documents (`--json`) and as pictures (base/plots.py)."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from noloco_node.base import plots
from noloco_node.base.plots import Line, Panel
from noloco_node.base.units import NOTHING, count
from noloco_node.simulate.network import Network, NetworkRow, StageRow, Straggling
from noloco_node.simulate.settings import Curve, Settings
from noloco_node.simulate.sweep import Result
from noloco_node.simulate.wallclock import Large, Timed, loss_after, seconds_to

ASSUMED = "assuming that a pair which trains on waits for nobody"


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Without rows. `words` and `numbers`: the headings of the columns, those on the left and those on the right."""
    table = Table(box=None, title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def comparison(found: Sequence[Result]) -> Table:
    staged = any(result.bytes_per_token for result in found)
    numbers = "averaged model", "replicas' mean", "spread", "bytes/param", *["bytes/token"] * staged, "seconds"
    table = _table("held-out loss at the end", ["algorithm"], numbers)
    table.columns[0].min_width = max(len(result.algorithm) for result in found)
    for result in found:
        table.add_row(
            result.algorithm,
            _with_error(result.averaged_model_loss, result.averaged_model_loss_sd),
            _with_error(result.replica_mean_loss, result.replica_mean_loss_sd),
            f"{result.replica_std:.2g}",
            f"{result.bytes_per_param:.1f}",
            *[f"{result.bytes_per_token:.0f}"] * staged,
            f"{result.wall_s:.0f}",
        )
    if failed := [f"{result.algorithm} {result.failed_swaps}" for result in found if result.failed_swaps]:
        table.caption = f"swaps given up because the replicas were too far apart for the codec: {', '.join(failed)}"
    return table


def comparison_document(settings: Settings, curves: Sequence[Curve], found: Sequence[Result]) -> dict[str, Any]:
    shared = asdict(settings) | {part: getattr(settings, part).model_dump() for part in ("model", "data", "inner")}
    return {
        "settings": shared,
        "curves": [asdict(curve) for curve in curves],
        "results": [asdict(result) for result in found],
    }


def attack_label(settings: Settings) -> str:
    who = f"{settings.attack} by {settings.attackers}" if settings.attack else "nobody attacks"
    return who if settings.defences else f"{who}, no defences"


def attack_table(rows: Sequence[tuple[Settings, Result]]) -> Table:
    """A row for each attack and number of attackers."""
    tried = sorted({settings.defences for settings, _ in rows})
    losses = [what for defences in tried for what in ("defended" if defences else "without defences", "averaged")]
    title = "held-out loss of the honest replicas at the end: their mean, and of their averaged model"
    table = _table(title, ["attack"], ["by", *losses, "refused", "scaled", "taken back", "of the honest"])
    by_row: dict[tuple[str, int], dict[bool, Result]] = {}
    for settings, result in rows:
        by_row.setdefault((settings.attack, settings.attackers), {})[settings.defences] = result
    for (attack, attackers), results in by_row.items():
        cells = []
        for found in map(results.get, tried):
            own = _with_error(found.replica_mean_loss, found.replica_mean_loss_sd) if found else NOTHING
            cells += [own, f"{found.averaged_model_loss:.3f}" if found else NOTHING]  # else it was interrupted before
        if last := results.get(tried[-1]):
            done = (last.failed_swaps, last.scaled_swaps, last.taken_back, last.taken_back_from_honest)
            cells += map(str, done)
        table.add_row(attack or "nobody", str(attackers), *cells)
    return table


def clock_table(large: Large, timed: Sequence[Timed]) -> Table:
    """For each link: the loss at the end and its hours, the loss of each when the first one ends, and its hours to the
    loss that all reach."""
    goal = max(min(way.losses) for way in timed)
    sizes = f"a model of {large.parameters / 1e9:g} B parameters, {large.step_s:g} s a step"
    ends = "steps late", "swap", "loss at the end", "hours", "when the first ends", f"hours to {goal:.3f}"
    title = f"{sizes}, {large.bytes_per_parameter:.2f} bytes a parameter"
    table = _table(title, ["Mbit/s", "algorithm", "overlap"], [*ends, "bytes/param"])
    for way in timed:
        first_s = min(other.seconds[-1] for other in timed if other.mbit_s == way.mbit_s)
        late = way.simulated.partition("=")[2]
        table.add_row(
            f"{way.mbit_s:g}",
            way.algorithm,
            way.overlap,
            late or "-",
            f"{large.swap_s(way.mbit_s):.0f} s" if way.algorithm.startswith("noloco") else "-",
            f"{way.losses[-1]:.3f}",
            f"{way.seconds[-1] / 3600:.2f}",
            f"{loss_after(way.points, first_s):.3f}",
            f"{seconds_to(way.points, goal) / 3600:.2f}",
            f"{way.bytes_per_param:.1f}",
        )
    return table


def clock_document(settings: Settings, curves: Sequence[Curve], large: Large, timed: Sequence[Timed]) -> dict[str, Any]:
    return comparison_document(settings, curves, []) | {
        "modelled": asdict(large),
        "wall_clock": [asdict(way) for way in timed],
    }


def network_table(rows: Sequence[NetworkRow]) -> Table:
    pairs = {row.n: row for row in rows if row.method == "pair"}
    shown = [row for row in rows if row.method != "pair, blocking"]  # the same seconds
    cells = [(row.n, row.method, _seconds(row, pairs[row.n])) for row in shown]
    return _by_nodes("seconds of one synchronisation (and pair's advantage)", cells)


def straggler_table(rows: Sequence[Straggling]) -> Table:
    return _by_nodes("waiting for slower nodes", [(row.n, row.method, f"{row.idle_fraction:.0%}") for row in rows])


def _by_nodes(title: str, cells: Sequence[tuple[int, str, str]]) -> Table:
    """`cells`: number of nodes, method, and the text for both."""
    methods = list(dict.fromkeys(method for _, method, _ in cells))
    table = _table(title, [], ["nodes", *methods])
    for n in sorted({n for n, _, _ in cells}):
        at = {method: text for nodes, method, text in cells if nodes == n}
        table.add_row(f"{n:,}", *(at.get(method, "-") for method in methods))
    return table


def stage_table(rows: Sequence[StageRow]) -> Table:
    title = "Mbit/s that a node's link needs between stages,\nand how busy nodes are, by micro-batches in flight"
    busy = [f"busy {in_flight}" for in_flight in rows[0].busy]
    table = _table(title, ["model"], ["TFLOP/s", "codec", "bytes/token", "Mbit/s", *busy])
    for row in rows:
        cells = f"{row.tflops:g}", row.activations, f"{row.bytes_per_token:,.0f}", f"{row.needed_mbit_s:,.0f}"
        table.add_row(row.model, *cells, *(f"{share:.0%}" for share in row.busy.values()))
    return table


def stage_document(network: Network, stages: int, tokens: int, rows: Sequence[StageRow]) -> dict[str, Any]:
    link = {"bandwidth_bytes_s": network.bandwidth_bytes_s, "latency_s": network.latency_s}
    chain = {"stages": stages, "micro_batch_tokens": tokens, "link": link}
    return {**chain, "rows": [asdict(row) for row in rows]}


def network_document(network: Network, rows: Sequence[NetworkRow], waiting: Sequence[Straggling]) -> dict[str, Any]:
    return {
        "network": asdict(network),
        "rows": [asdict(row) for row in rows],
        "stragglers": [asdict(row) for row in waiting],
    }


def plot_comparison(settings: Settings, curves: Sequence[Curve], path: Path) -> None:
    """Loss against tokens, loss against bytes sent, spread between replicas; several seeds look alike."""

    by_tokens, by_bytes, spread = [], [], []
    for curve in curves:
        millions = [tokens / 1e6 for tokens in curve.tokens[1:]]  # the first point is before any training
        by_tokens.append(Line(curve.algorithm, millions, curve.averaged_model_loss[1:]))
        by_bytes.append(Line(curve.algorithm, curve.bytes_sent_per_param[1:], curve.averaged_model_loss[1:]))
        spread.append(Line(curve.algorithm, millions, curve.replica_std[1:]))
    loss, tokens = "held-out loss of the averaged model", "million tokens, all replicas"
    panels = [
        Panel("Loss by tokens", tokens, loss, by_tokens),
        Panel("Loss by bytes", "bytes sent a parameter, one replica", loss, by_bytes, x_log=True),
        Panel("Spread between replicas", tokens, "of a weight, root mean square", spread),
    ]
    plots.draw(path, "Held-out loss, bytes and spread, by algorithm", _settings(settings, curves), panels)


def plot_network(
    network: Network, rows: Sequence[NetworkRow], waiting: Sequence[Straggling], path: Path, spread: Sequence[str]
) -> None:
    """`spread`: how the machines differ, in words."""

    shown = [row for row in rows if row.method != "pair, blocking"]  # the same seconds
    seconds = _lines([(row.method, row.n, row.sync_seconds) for row in shown])
    idle = _lines([(row.method, row.n, 100 * row.idle_fraction) for row in waiting])
    link = ", its transfer included"
    if math.isfinite(network.bandwidth_bytes_s):
        mbit_s, size = 8e-6 * network.bandwidth_bytes_s, network.vector_bytes / 1e6
        link = f" and its transfer, {size:g} MB from each node at {mbit_s:g} Mbit/s"
    settings = [
        f"a message takes {network.latency_s:g} s (median, log-normal, σ {network.sigma:g}){link}",
        *spread,
        ASSUMED,
    ]
    panels = [
        Panel("One synchronisation", "nodes", "seconds", seconds, x_log=True, y_log=True),
        Panel("Waiting for slower nodes", "nodes", "% of accelerator time", idle, x_log=True, from_zero=True),
    ]
    plots.draw(path, "What a synchronisation costs, by number of nodes", settings, panels)


def _lines(points: Sequence[tuple[str, int, float]]) -> list[Line]:
    """`points`: method, number of nodes, value."""
    by_method: dict[str, list[tuple[int, float]]] = {}
    for method, n, value in points:
        by_method.setdefault(method, []).append((n, value))
    return [Line(method, *zip(*at, strict=True)) for method, at in by_method.items()]


def _settings(settings: Settings, curves: Sequence[Curve]) -> list[str]:
    """Those of all algorithms, for a picture."""
    seeds = list(dict.fromkeys(curve.seed for curve in curves))
    return [
        count(settings.replicas, "replica"),
        f"{settings.model.preset or settings.model.architecture} model",
        f"{count(settings.rounds, 'phase')} of {count(settings.inner_steps, 'step')}",
        f"{settings.inner.batch_tokens} tokens a step and replica",
        "all read the same text" if settings.iid else "each reads text of its own",
        settings.codec,
        settings.overlap,
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}" if error else f"{value:.3f}"


def _seconds(row: NetworkRow, pair: NetworkRow) -> str:
    ratio = row.sync_seconds / pair.sync_seconds
    return _short(row.sync_seconds) + (f" ({_short(ratio)}x)" if row is not pair else "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
