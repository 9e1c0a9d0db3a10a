"""`simulate`: NoLoCo and other methods trained in one process; `simulate network`: their time and bytes, modelled."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_node.base import plots
from noloco_node.base.units import span
from noloco_node.base.validation import did_you_mean, explain
from noloco_node.cli.options import as_json, gathered, option, print_json, verb
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.core.codecs.activations import ActivationCodec
    from noloco_node.simulate.network import Cost
    from noloco_node.simulate.settings import Choice, Curve, Settings

T = TypeVar("T")

LARGEST_NETWORK = 1 << 14
"""Nodes. A ring's time grows with their square: 13 s here, and hours for a million."""
LARGEST_CHAIN, LARGEST_THREADS = 1024, 1024
LARGEST_SIGMA = 5
"""Of a logarithm. At 5, one in twenty is 3,700 times the median, and a mean of some thousands is mere chance."""


def options(parser: argparse.ArgumentParser) -> None:
    _training(parser)
    what = parser.add_subparsers(title="without training", dest="what", metavar="network")
    about = "model the time, idling and bytes of each method, in virtual time"
    network = verb(what, "network", about, "--latency 0.1 --bandwidth 50")
    _network(network)


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        if args.what is None and args.links is not None:
            raise UsageError("--plot does not draw what --links models: leave one of them out")
        plots.check(args.plot)
    return _run_network(args) if args.what == "network" else _run_training(args)


def _training(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser.add_argument_group("what to compare"))
    add(
        "--algorithms LIST",
        "of noloco, noloco-paper, diloco, streaming, sparta, gasloc, fedavg, ddp, local; each may have settings, "
        "as noloco:beta=1:swaps=2 (alpha, beta, gamma, swaps, keep_norm, inner_steps, fragments, own, share); default: "
        "noloco,diloco,fedavg,ddp,local, with --links noloco",
    )
    add("--overlap LIST", "eager, blocking, or delay=N: inner steps that a swap takes (default: as in run.toml)")
    add("--seed LIST", "one, or several with commas: mean and deviation (default: 1)", default="1")
    add("--sweep", "try the same alphas and betas for each algorithm that has them")
    add("--sweep-alphas LIST", "default: 0.1,0.3,0.5")
    add("--sweep-betas LIST", "default: 0.7,1,1.3")
    add = partial(option, parser.add_argument_group("how to train"))
    add("--run FILE", "a run.toml: its model, phases and codec, on Python's library (default: tiny)")
    add("--replicas N", "default: 8", type=int, default=8)
    add("--inner-steps H", "steps of a phase (default: as in run.toml)", type=int)
    add("--rounds N", "phases of H steps (default: 24)", type=int, default=24)
    add("--codec NAME", "the encoding of what is sent (default: as in run.toml)")
    add("--non-iid", "each replica has its own modules (default: all read all)", dest="iid", action="store_false")
    add("--learning-rate X", "peak of the inner learning rate (default: 0.003)", type=float)
    add("--batch-tokens N", "tokens of one step of one replica (default: 1024)", type=int)
    add("--held-out N", "sequences of each evaluation (default: 64)", type=int, default=64)
    add("--precision P", "of matrix products: fp32, bf16 or auto (default)", default="auto")
    add("--device DEVICE", "auto, cpu or cuda (default: auto)", default="auto")
    add("--threads N", "CPU threads (default: torch's choice)", type=int)
    add("--compile", "use torch.compile: faster from a few hundred steps on")
    _stages(parser)
    _attack(parser)
    _clock(parser)
    _output(parser)


def _stages(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser.add_argument_group("a model cut into stages (with --no-defences)"))
    add("--stages LIST", "so many, each with --replicas of its own; 1 is the whole model (default: 1)", default="1")
    add("--routing LIST", "of micro-batches between stages: random (default), fixed")
    add("--activations LIST", "how they are coded: fp32 (default), bf16, int8")


def _attack(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser.add_argument_group("attackers among the replicas (only noloco)"))
    add(
        "--attack LIST",
        "of nan, scale, sign-flip, noise, stale, creep, collude, hold, capture, or all; with --sweep with the "
        "defences and without them, and without attackers",
    )
    add("--attackers LIST", "how many of the replicas attack (default: 1)")
    add("--no-defences", "honest replicas believe whatever they get", dest="defences", action="store_false")


def _clock(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser.add_argument_group("modelled hours of a large model"))
    add(
        "--links LIST",
        "Mbit/s; how long a swap takes follows from the link (overlaps without a number; all but noloco block)",
    )
    add("--modelled-parameters N", "parameters of that model (default: 1e9)", type=float)
    add(
        "--modelled-step S",
        "seconds of its inner step (default: 3, as 32k tokens of a 1 B model at 66 TFLOP/s, 40%% of an RTX 4090)",
        type=float,
    )


def _network(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    add("--sizes LIST", f"numbers of nodes, up to {LARGEST_NETWORK} (default: 2,4,8 to 4096)")
    add("--latency S", "median seconds of a message (default: 1; with --stages 0.03)", type=float)
    add("--sigma X", "deviation of the latency's logarithm (default: 0.5)", type=float)
    add("--bandwidth MBIT", "of a link, Mbit/s (default: in the latency; with --stages 100)", type=float)
    add("--vector MB", "what a node sends (default: 250)", type=float)
    add("--speeds X", "sigma of the machines' speeds (default: 0.3)", type=float)
    add("--jitter X", "sigma from phase to phase (default: 0.1)", type=float)
    add("--seed N", "default: 1", type=int)
    add = partial(option, parser.add_argument_group("instead: nodes that each hold one stage of a model"))
    add("--stages N", "what links between them need, and how busy they are then", type=int)
    add("--tflops LIST", "what a node really does a second, in TFLOP (default: 10,50)")
    add("--activations LIST", "of fp32, bf16, int8 (default: bf16,int8)")
    add("--tokens N", "of a micro-batch (default: 4096)", type=int)
    _output(parser)


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    option(group, "--plot out.png", "draw the results (needs matplotlib)", type=Path)
    as_json(group)


def _only(args: argparse.Namespace, when: str, holds: object, **usual: object) -> None:
    """Options that count only then: what they are where they are not given. Raises UsageError where one would be
    ignored."""
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif not holds:
            raise UsageError(f"--{name.replace('_', '-')} counts only {when}: leave it out")


def _run_training(args: argparse.Namespace) -> int:
    from noloco_node.simulate import report, sweep

    _only(args, "with --sweep", args.sweep, sweep_alphas="0.1,0.3,0.5", sweep_betas="0.7,1,1.3")
    _only(args, "with --stages", args.stages != "1", routing="random", activations="fp32")
    _only(args, "with --links", args.links, modelled_parameters=1e9, modelled_step=3.0)
    choices, seeds = _choices(args), _list(args.seed, int, "--seed")
    if not all(0 <= seed < 1 << 63 for seed in seeds):
        raise UsageError("--seed must be at least 0, and below 2^63")
    if args.threads is not None and not 1 <= args.threads <= LARGEST_THREADS:
        raise UsageError(f"--threads must be from 1 to {LARGEST_THREADS}, not {args.threads}")
    if args.stages != "1" and (args.attack or args.links):
        raise UsageError("--stages takes neither --attack nor --links")
    if args.attack is not None:
        return _run_attacks(args, choices, seeds)
    if args.attackers is not None:
        raise UsageError("--attackers needs --attack: what they do")
    if args.links is not None:
        return _run_clock(args, choices, seeds)
    overlaps = _list(args.overlap or _overlap(args), str, "--overlap")
    settings = _settings(args, overlaps[0])
    ways = _cut(
        args, {overlap if len(overlaps) > 1 else "": replace(settings, overlap=overlap) for overlap in overlaps}
    )

    def show(curves: "Sequence[Curve]") -> None:
        found = sweep.results(curves)
        if args.sweep:
            found = sorted(found, key=sweep.by_loss)
        parts: list[object] = [report.comparison(found)]
        if args.sweep:
            best = ", ".join(f"{b.algorithm} {b.averaged_model_loss:.3f}" for b in sweep.best(found))
            parts.append(f"best: {best}")
        _show(args, report.comparison_document(settings, curves, found), *parts)

    curves = gathered(_trained(ways, choices, seeds, args.threads), show)
    if args.plot is not None:
        report.plot_comparison(settings, curves, args.plot)
    return 0


def _run_clock(args: argparse.Namespace, choices: "Sequence[Choice]", seeds: Sequence[int]) -> int:
    """One training for each delay that a link causes; blocking is the same on all links, and all that a rival has."""
    from noloco_node.simulate import report, wallclock
    from noloco_node.simulate.noloco import element_bytes
    from noloco_node.simulate.wallclock import OVERLAPS, Large

    links = _list(args.links, float, "--links")
    overlaps = _list(args.overlap, str, "--overlap") if args.overlap else list(OVERLAPS)
    if not all(0 < value < math.inf for value in (*links, args.modelled_parameters, args.modelled_step)):
        raise UsageError("--links, --modelled-parameters and --modelled-step must be above 0")
    if set(overlaps) - set(OVERLAPS):
        raise UsageError(f"--links takes --overlap {','.join(OVERLAPS)}: the link decides the delay")
    settings = _settings(args, "blocking")
    large = Large(args.modelled_parameters, args.modelled_step, element_bytes(settings.codec))
    pairs = [choice for choice in choices if choice.name == "noloco"]
    rivals = [choice for choice in choices if choice.name != "noloco"]
    shown = dict.fromkeys([*overlaps, "blocking"] if rivals else overlaps)
    ways = {(overlap, link): large.simulated(overlap, link) for link in links for overlap in shown}

    def trained() -> "Iterator[Curve]":
        for some, kinds in ((pairs, overlaps), (rivals, ["blocking"])):
            names = [large.simulated(overlap, link) for link in links for overlap in kinds]
            each = {name: replace(settings, overlap=name) for name in names}
            for curve in _trained(each, some, seeds, args.threads) if some else ():
                yield curve if len(each) > 1 else replace(curve, algorithm=f"{curve.algorithm} {names[0]}")

    def show(curves: "Sequence[Curve]") -> None:
        timed = wallclock.timed(curves, ways, large)
        _show(args, report.clock_document(settings, curves, large, timed), report.clock_table(large, timed))

    gathered(trained(), show)
    return 0


def _run_attacks(args: argparse.Namespace, choices: "Sequence[Choice]", seeds: Sequence[int]) -> int:
    from noloco_node.simulate import report, sweep
    from noloco_node.simulate.settings import ATTACKS

    if len(choices) != 1 or choices[0].name != "noloco" or args.links is not None or args.plot is not None:
        raise UsageError("--attack takes one noloco in --algorithms, and neither --links nor --plot")
    attacks = ATTACKS if args.attack == "all" else _list(args.attack, str, "--attack")
    counts = _list(args.attackers or "1", int, "--attackers")
    plain = _settings(args, args.overlap or _overlap(args))
    compared = [replace(plain, attack=attack, attackers=count) for attack in attacks for count in counts]
    if args.sweep:
        compared = [replace(one, defences=on) for one in [plain, *compared] for on in (False, True)]
    ways = {report.attack_label(one): one for one in compared}

    def show(curves: "Sequence[Curve]") -> None:
        found = sweep.results(curves)
        table = report.attack_table(list(zip(ways.values(), found, strict=False)))  # not all, where it is interrupted
        _show(args, report.comparison_document(plain, curves, found), table)

    gathered(_trained(ways, choices, seeds, args.threads), show)
    return 0


def _run_network(args: argparse.Namespace) -> int:
    from noloco_node.simulate import network, report

    staged = args.stages is not None
    _only(args, "with --stages", staged, tflops="10,50", activations="bf16,int8", tokens=4096)
    sizes = ",".join(str(1 << k) for k in range(1, 13))
    _only(args, "without --stages", not staged, sizes=sizes, vector=250.0, sigma=0.5, speeds=0.3, jitter=0.1, seed=1)
    if staged:
        return _run_stages(args)
    latency = 1.0 if args.latency is None else args.latency
    ns = _list(args.sizes, int, "--sizes")
    bandwidth = math.inf if args.bandwidth is None else args.bandwidth * 1e6 / 8
    if min(ns) < 2 or max(ns) > LARGEST_NETWORK or args.seed < 0:
        raise UsageError(f"--sizes must be from 2 to {LARGEST_NETWORK} and --seed at least 0")
    if not (0 < latency < math.inf and 0 < args.vector < math.inf and bandwidth > 0):
        raise UsageError("--latency, --bandwidth and --vector must be above 0")
    if not all(0 <= sigma <= LARGEST_SIGMA for sigma in (args.sigma, args.speeds, args.jitter)):
        raise UsageError(f"--sigma, --speeds and --jitter must be from 0 to {LARGEST_SIGMA}")
    given = network.Network(latency, args.sigma, bandwidth, args.vector * 1e6)
    rows = network.costs(given, ns, args.seed)
    waiting = network.stragglers(ns, args.speeds, args.jitter, args.seed)
    parts = report.network_table(rows), "", report.straggler_table(waiting), f"(of accelerator time; {report.ASSUMED})"
    code = _show(args, report.network_document(given, rows, waiting), *parts)
    if args.plot is not None:
        machines = f"speeds of machines σ {args.speeds:g}, from phase to phase σ {args.jitter:g}", f"seed {args.seed}"
        report.plot_network(given, rows, waiting, args.plot, machines)
    return code


def _run_stages(args: argparse.Namespace) -> int:
    from noloco_node.simulate import network, report

    latency_s = 0.03 if args.latency is None else args.latency
    mbit_s = 100.0 if args.bandwidth is None else args.bandwidth
    tflops = _list(args.tflops, float, "--tflops")
    if args.plot is not None:
        raise UsageError("--plot does not draw stages: leave it out")
    if not all(0 < value < math.inf for value in (mbit_s, args.tokens, *tflops)) or not 0 <= latency_s < math.inf:
        raise UsageError("--bandwidth, --tflops and --tokens must be above 0, and --latency at least 0")
    if not 2 <= args.stages <= LARGEST_CHAIN:
        raise UsageError(f"--stages must be from 2 to {LARGEST_CHAIN}, not {args.stages}")
    link = network.Network(latency_s, bandwidth_bytes_s=mbit_s * 1e6 / 8)
    codecs = {codec.name: lambda width, codec=codec: codec.encoded_bytes((1, width)) for codec in _activations(args)}
    rows = network.stage_rows(_large_models(), link, args.stages, tflops, codecs, args.tokens)
    text = f"({args.stages} stages, {mbit_s:g} Mbit/s, {latency_s:g} s one way, {args.tokens} tokens a micro-batch)"
    return _show(args, report.stage_document(link, args.stages, args.tokens, rows), report.stage_table(rows), text)


def _show(args: argparse.Namespace, document: dict[str, Any], *parts: object) -> int:
    if args.json:
        print_json(document)
    else:
        from noloco_node.terminal.text import console

        console().print(*parts)
    return 0


def _large_models() -> "dict[str, Cost]":
    """The presets but the smallest, with 32,000 tokens."""
    from noloco_node.simulate.network import Cost
    from noloco_node.training.model import PRESETS

    costs = {}
    for name, shape in PRESETS.items():
        if name != "tiny":
            width, inner, layers = (shape[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
            costs[name] = Cost(width, layers * (4 * width * width + 3 * width * inner), 32_000 * width)
    return costs


def _activations(args: argparse.Namespace) -> "list[ActivationCodec]":
    from noloco_node.core.codecs.activations import CODECS

    names = _list(args.activations, str, "--activations")
    if unknown := [name for name in names if name not in CODECS]:
        raise UsageError(f"activations have no codec {unknown[0]!r}, {did_you_mean(unknown[0], CODECS)}")
    return [CODECS[name] for name in names]


def _cut(args: argparse.Namespace, whole: "Mapping[str, Settings]") -> "dict[str, Settings]":
    """Each way with each number of stages; where there are several, with each routing and codec of activations."""
    from noloco_node.run.schema import ModelSpec
    from noloco_node.training.model import PRESETS

    stages = _list(args.stages, int, "--stages")
    if stages == [1]:
        return dict(whole)
    apart = ModelSpec(architecture="LlamaConfig", config=PRESETS["tiny"] | {"tie_word_embeddings": False})
    ways = {}
    for (way, settings), count in product(whole.items(), stages):
        if count == 1:
            ways[f"{way} whole".strip()] = replace(settings, model=apart)
            continue
        for routing, coded in product(_list(args.routing, str, "--routing"), _activations(args)):
            cut = replace(settings, model=apart, stages=count, routing=routing, activations=coded.name)
            ways[f"{way} {count} stages {routing} {coded.name}".strip()] = cut
    return ways


def _overlap(args: argparse.Namespace) -> str:
    """Of the run that is simulated."""
    from noloco_node.run import toml
    from noloco_node.run.schema import OuterSpec

    return (toml.load(Path(args.run)).outer if args.run else OuterSpec()).overlap


def _settings(args: argparse.Namespace, overlap: str) -> "Settings":
    from pydantic import ValidationError

    from noloco_node.run import toml
    from noloco_node.run.schema import CODECS, DataSpec, InnerSpec, Manifest
    from noloco_node.simulate.settings import Settings

    base = toml.load(Path(args.run)) if args.run else Manifest(name="tiny")
    if base.model.task or base.stages or (args.run and args.stages != "1"):
        raise UsageError("--run takes a whole language model: in stages only the tiny one is simulated")
    if base.model.weights:
        raise UsageError("--run takes no run that begins with weights: all simulated replicas begin with random ones")
    given = {"steps": args.inner_steps, "learning_rate": args.learning_rate, "batch_tokens": args.batch_tokens}
    changed = {key: value for key, value in given.items() if value is not None}
    try:
        inner = InnerSpec(**dict(base.inner) | ({"seconds": None} if "steps" in changed else {}) | changed)
    except ValidationError as error:
        raise UsageError(explain(error, InnerSpec)) from None
    if args.codec not in (None, *CODECS):
        raise UsageError(f"there is no codec {args.codec!r}, {did_you_mean(args.codec, CODECS)}")
    return Settings(
        model=base.model,
        data=DataSpec(sequence_length=base.data.sequence_length),
        codec=args.codec or base.outer.codec,
        overlap=overlap,
        seed=_list(args.seed, int, "--seed")[0],
        replicas=args.replicas,
        rounds=args.rounds,
        iid=args.iid,
        defences=args.defences,
        precision=args.precision,
        device=args.device,
        compiled=args.compile,
        held_out_sequences=args.held_out,
        inner=inner,
    )


def _choices(args: argparse.Namespace) -> "list[Choice]":
    from noloco_node.simulate import settings, sweep

    default = "noloco" if args.links or args.attack else "noloco,diloco,fedavg,ddp,local"
    choices = _list(args.algorithms or default, settings.choice, "--algorithms")
    if not args.sweep or args.attack:
        return choices
    alphas = _list(args.sweep_alphas, float, "--sweep-alphas")
    return sweep.grid(choices, alphas, _list(args.sweep_betas, float, "--sweep-betas"))


def _trained(
    ways: "Mapping[str, Settings]", choices: "Sequence[Choice]", seeds: Sequence[int], threads: int | None
) -> "Iterator[Curve]":
    """`ways` differ in what the start and the data do not depend on; if there are several, the way's name is added to
    the algorithm's."""
    import torch

    from noloco_node.simulate.experiment import run, workload
    from noloco_node.terminal.progress import Progress

    if threads is not None:
        torch.set_num_threads(threads)
    total = len(seeds) * len(choices) * sum(settings.steps for settings in ways.values())
    done = 0  # steps of all trainings so far
    with Progress() as say:
        say("building the model", 0, total)
        for seed in seeds:
            work = workload(replace(next(iter(ways.values())), seed=seed))
            for choice, (way, settings) in product(choices, ways.items()):
                title = f"{choice.label} {way}" if len(ways) > 1 else choice.label
                what = f"{title}, seed {seed}" if len(seeds) > 1 else title

                def progress(step: int, loss: float, what: str = what, before: int = done) -> None:
                    say(what, before + step, total, f"loss {loss:.3f}")

                say(what, done, total)
                curve = run(replace(work, settings=replace(settings, seed=seed)), choice, progress)
                done += settings.steps
                say.line(f"{what}: held-out loss {curve.averaged_model_loss[-1]:.3f} after {span(curve.wall_s)}")
                yield replace(curve, algorithm=title)


def _list(text: str, kind: Callable[[str], T], flag: str) -> list[T]:
    """Without repetitions: the same seed twice would look like two seeds."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{flag} takes numbers with commas between them, not {text!r}") from None
