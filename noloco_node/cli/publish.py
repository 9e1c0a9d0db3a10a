"""The verbs that look at what was trained: `export`, `eval`, `sample`. They read files; no node need run here."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_node.errors import UsageError
from noloco_node.host import config
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.views.documents import SCHEMA

if TYPE_CHECKING:
    from noloco_node.data.sources import Sources
    from noloco_node.publish.evaluate import Measured
    from noloco_node.publish.weights import Trained, Weights

_SETTINGS = ("home", "device", "threads", "data", "tokenizer")
_MAX_TOKENS = 100_000


# ---- what can be typed -----------------------------------------------------------------------------------------------
def export_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--to", metavar="DIR", required=True, help="the folder to write; an earlier export there is replaced")
    add(
        "--average",
        metavar="N or LIST",
        help="the mean of it and of others: of so many peers, whose present weights the running node fetches; or of "
        "homes, checkpoints or exported folders of the same run, with commas between",
    )
    _which(parser)
    _how(parser)


def eval_options(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    _which(parser)
    _how(parser)


def sample_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("text", metavar="TEXT", help="what the model is to go on from")
    _path(parser)
    add("--tokens", metavar="N", type=int, default=100, help="at most so many more (default: 100)")
    add("--temperature", metavar="X", type=float, default=0.8, help="0: always the likeliest (default: 0.8)")
    add("--seed", metavar="N", type=int, default=1, help="the same seed says the same (default: 1)")
    _which(parser)
    _how(parser)


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="a checkpoint, a home or an exported folder (default: the home)"
    )


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="ID", help="of several runs in the home this one; its first digits do")
    parser.add_argument("--checkpoint", metavar="STEP", help="this checkpoint (default: the newest that is whole)")
    parser.add_argument("--home", metavar="DIR", help="state directory (default: $NOLOCO_HOME)")


def _how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--threads", metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--data", metavar="FILES", action="append", help="the data, where the run leaves it to you")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json that the run asks for")
    parser.add_argument("--json", action="store_true", help="for programs")


# ---- what is done ----------------------------------------------------------------------------------------------------
def export(args: argparse.Namespace) -> int:
    settings, to = _settings(args), Path(args.to).absolute()
    from noloco_node.publish import hf_folder, model_card

    hf_folder.check(to)
    live = (args.average or "").isdecimal()
    trained, journal = (_live_mean if live else _kept_mean)(args, settings)
    measured = _measured_if_possible(trained, settings)
    rows = model_card.history(journal, trained.round)
    hf_folder.write(to, trained, measured, rows)
    if args.json:
        _print_json(trained, {"to": str(to), **_figures(measured)})
    else:
        loss = f", held-out loss {measured.loss:.4f}" if measured else ""
        print(f"wrote {to}: {_called(trained)}{loss}")
    return 0


def _live_mean(args: argparse.Namespace, settings: NodeConfig) -> "tuple[Trained, Path]":
    """Of this node and some peers, and what this node wrote of its rounds."""
    from noloco_node.cli import gather
    from noloco_node.publish import weights

    home = Home(settings.home)
    fetched = gather.live(args, home, int(args.average))
    try:
        trained = weights.load(fetched, _sources(settings))
    finally:
        gather.forget(fetched)
    return trained, home.run(trained.run.run_id) / "events.jsonl"


def _kept_mean(args: argparse.Namespace, settings: NodeConfig) -> "tuple[Trained, Path]":
    """Of what lies in files, and what the first one's node wrote of its rounds."""
    from noloco_node.publish import weights

    first = _place(args, settings)
    others = [Path(word.strip()) for word in (args.average or "").split(",") if word.strip()]
    places = [first, *(weights.find(path, first.file.run.run_id) for path in others)]
    trained = weights.load(places, _sources(settings))
    return trained, trained.paths[0].parent.parent / "events.jsonl"


def evaluate(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from noloco_node.base.units import span
    from noloco_node.publish import weights

    trained = weights.load([_place(args, settings)], _sources(settings))
    measured = _measured(trained, settings)
    if args.json:
        _print_json(trained, _figures(measured))
    else:
        print(
            f"{_called(trained)}: loss {measured.loss:.4f} nats a token, perplexity {measured.perplexity:.3f}, "
            f"{measured.bits_per_byte:.3f} bits a byte ({measured.tokens} held-out tokens, {span(measured.seconds)})"
        )
    return 0


def sample(args: argparse.Namespace) -> int:
    if not 1 <= args.tokens <= _MAX_TOKENS:
        raise UsageError(f"--tokens must be a whole number from 1 to {_MAX_TOKENS}, not {args.tokens}")
    if not 0 <= args.temperature <= 100:
        raise UsageError(f"--temperature must be a number from 0 to 100, not {args.temperature:g}")
    if not 0 <= args.seed < 2**63:
        raise UsageError("--seed must be a whole number from 0 on")
    settings = _settings(args)
    from noloco_node.publish import weights
    from noloco_node.publish.sample import Manner
    from noloco_node.publish.sample import sample as continuation

    trained = weights.load([_place(args, settings)], _sources(settings))
    pieces = continuation(trained, args.text, Manner(args.tokens, args.temperature, args.seed), settings.device)
    if args.json:
        _print_json(trained, {"text": args.text, "continuation": "".join(pieces)})
        return 0
    sys.stdout.write(args.text)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _settings(args: argparse.Namespace) -> NodeConfig:
    return config.load({name: getattr(args, name) for name in _SETTINGS}, os.environ)


def _place(args: argparse.Namespace, settings: NodeConfig) -> "Weights":
    from noloco_node.publish import weights

    named = getattr(args, "path", None)
    return weights.find(Path(named) if named else settings.home, args.run, args.checkpoint)


def _sources(settings: NodeConfig) -> "Sources":
    from noloco_node.data.sources import Sources

    return Sources(settings.data, settings.tokenizer, Home(settings.home).data)


def _measured(trained: "Trained", settings: NodeConfig) -> "Measured":
    import torch

    from noloco_node.data.corpus import load as load_corpus
    from noloco_node.publish.evaluate import measure

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    corpus = load_corpus(trained.run.data, _sources(settings))
    with _progress() as progress:
        return measure(trained, corpus, settings.device, progress)


def _measured_if_possible(trained: "Trained", settings: NodeConfig) -> "Measured | None":
    """An export without its loss is better than none: its data may lie elsewhere, or on the hub."""
    if trained.run.data.source == "hub":
        return None
    try:
        return _measured(trained, settings)
    except UsageError as error:
        print(f"exported without its loss: {error}", file=sys.stderr)
        return None


@contextmanager
def _progress() -> "Iterator[Callable[[float], None]]":
    """A bar on a terminal's stderr, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    out = Console(stderr=True)
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("evaluating", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _called(trained: "Trained") -> str:
    many = f", mean of {len(trained.states)} states" if len(trained.states) > 1 else ""
    return f"{trained.run.label} at round {trained.round}, step {trained.step}{many}"


def _figures(measured: "Measured | None") -> dict[str, Any]:
    if measured is None:
        return {"eval_loss": None}
    return {
        "eval_loss": measured.loss,
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte,
        "tokens": measured.tokens,
        "seconds": measured.seconds,
    }


def _print_json(trained: "Trained", more: dict[str, Any]) -> None:
    from noloco_node.cli.show import print_json

    about = {"run_id": trained.run.run_id, "run": trained.run.label, "round": trained.round, "step": trained.step}
    states = [
        {"path": str(path), "round": r, "step": s} for path, (r, s) in zip(trained.paths, trained.states, strict=True)
    ]
    print_json({"schema": SCHEMA, **about, "states": states, **more})
