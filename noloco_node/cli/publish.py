"""The verbs about the trained model: `export`, `eval`, `sample`. They read files.

Only `export --average N` asks the node that runs here, which fetches the present weights of some peers.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.status import Status

from noloco_node.base.units import count, span
from noloco_node.base.validation import printable
from noloco_node.cli.options import print_json, show
from noloco_node.control import socket_client
from noloco_node.core.device import choose_devices
from noloco_node.data.corpus import load as load_corpus
from noloco_node.data.sources import Sources
from noloco_node.errors import DiskFull, OutOfMemory, UsageError
from noloco_node.host import config
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home, whole_path
from noloco_node.publish import hf_folder, model_card, weights
from noloco_node.publish.evaluate import Measured, measure
from noloco_node.publish.weights import Trained, Weights
from noloco_node.run import signed_file
from noloco_node.run.schema import Manifest
from noloco_node.terminal.progress import Progress
from noloco_node.training.language import continuation
from noloco_node.training.memory_budget import is_out_of_memory
from noloco_node.views.gather import GatherView

_SETTINGS = ("home", "device", "threads", "data", "encoding", "tokenizer")
_MAX_TOKENS = 100_000
_MAX_PEERS = 64
"""For `--average`: more would hardly change the mean, and each costs a donor an upload."""


def export(args: argparse.Namespace) -> int:
    to = whole_path(args.to)
    hf_folder.check(to)
    from_peers = (args.average or "").isdecimal()
    trained, events_file = (_mean_of_peers if from_peers else _mean_of_files)(args)
    measured = _measured_if_possible(trained, args)
    rows = model_card.history(events_file, trained.round)
    hf_folder.write(to, trained, measured, rows)
    wrote = f"wrote {to}: {_described(trained)}" + (f", held-out loss {measured.loss:.4f}" if measured else "")
    return show(args, _document(trained, {"to": str(to), **_figures(measured)}), wrote)


def _mean_of_peers(args: argparse.Namespace) -> tuple[Trained, Path]:
    """The mean of this node's weights and some peers', and this node's event log."""
    home, peers = Home(_settings(args).home), int(args.average)
    if not 1 <= peers <= _MAX_PEERS:
        raise UsageError(f"--average takes 1 to {_MAX_PEERS} peers, not {peers}")
    if args.run or args.checkpoint:
        raise UsageError("--average with a number takes what the running node trains: leave --run and --checkpoint out")
    view = asyncio.run(_gather(home, peers))
    file = signed_file.read(home.run(view.run_id))
    fetched = [
        weights.Fetched(file, Path(of.path), bytes.fromhex(of.layout or view.layout), of.peer_id, of.round, of.step)
        for of in view.states
    ]
    try:
        trained = _load(args, fetched)
    finally:
        for folder in {place.path.parent for place in fetched}:
            shutil.rmtree(folder, ignore_errors=True)
    return trained, home.run(trained.run.run_id) / "events.jsonl"


async def _gather(home: Home, peers: int) -> GatherView:
    """The node's last report. Progress goes to stderr: one line that changes on a terminal, new lines elsewhere."""
    out, shown, view = Console(stderr=True, highlight=False), 0, GatherView()
    with out.status("asking the node") as line:
        async with socket_client.connected(home) as node:
            async for view in node.gather(peers):
                for skipped in view.skipped[shown:]:
                    out.print(f"skipped {skipped}", markup=False, soft_wrap=True)
                shown = len(view.skipped)
                line.update(view.doing)
    if (received := len(view.states) - 1) < peers:
        print(f"{received} of {count(peers, 'peer')} sent their weights", file=sys.stderr)
    return view


def _mean_of_files(args: argparse.Namespace) -> tuple[Trained, Path]:
    """The mean of weights in files, and the event log beside the first of them."""
    first = _place(args)
    others = [Path(word.strip()) for word in (args.average or "").split(",") if word.strip()]
    trained = _load(args, [first, *(weights.find(path, first.file.run.run_id) for path in others)])
    return trained, Path(trained.states[0].source).parent.parent / "events.jsonl"


def evaluate(args: argparse.Namespace) -> int:
    trained = _load(args, [_place(args)])
    measured = _measured(trained, args)
    return show(
        args,
        _document(trained, _figures(measured)),
        f"{_described(trained)}: loss {measured.loss:.4f} nats a token, perplexity {measured.perplexity:.3f}, "
        f"{measured.bits_per_byte:.3f} bits a byte ({measured.tokens} held-out tokens, {span(measured.seconds)})",
    )


def sample(args: argparse.Namespace) -> int:
    if not 1 <= args.tokens <= _MAX_TOKENS:
        raise UsageError(f"--tokens must be a whole number from 1 to {_MAX_TOKENS}, not {args.tokens}")
    if not 0 <= args.temperature <= 100:
        raise UsageError(f"--temperature must be a number from 0 to 100, not {args.temperature:g}")
    if not 0 <= args.seed < 2**63:
        raise UsageError("--seed must be a whole number of at least 0")
    args.text = os.fsencode(args.text).decode(errors="replace")  # a word may have been cut within a letter
    trained = _load(args, [_place(args)])
    with _beside_a_node():
        pieces = continuation(
            trained.module.to(choose_devices(_settings(args).device)[0]),
            trained.tokenizer,
            trained.run.data.sequence_length,
            args.text,
            tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
        if args.json:
            print_json(_document(trained, {"text": args.text, "continuation": "".join(pieces)}))
            return 0
        sys.stdout.write(args.text)
        for piece in pieces:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


@contextmanager
def _beside_a_node() -> Iterator[None]:
    """A GPU on which a node trains has hardly any room left."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory("the model does not fit here: end other programs, or, on a GPU, use --device cpu") from None


def _settings(args: argparse.Namespace) -> NodeConfig:
    return config.load({name: getattr(args, name) for name in _SETTINGS}, os.environ)


def _place(args: argparse.Namespace) -> Weights:
    named = getattr(args, "path", None)
    path = Path(named) if named else _settings(args).home
    if not named and not path.exists():
        raise UsageError(f"there is no run in {path}: name a home in which a node has trained, with --home")
    return weights.find(path, args.run, args.checkpoint, lambda line: print(line, file=sys.stderr))


def _load(args: argparse.Namespace, places: Sequence[Weights]) -> Trained:
    if (threads := _settings(args).threads) is not None:
        torch.set_num_threads(threads)
    with _waiting("loading the model"):  # which imports transformers
        return weights.load(places, _sources(args, places[0].file.run))


def _waiting(what: str) -> Status:
    """On a terminal, while it lasts."""
    return Console(stderr=True).status(what)


def _sources(args: argparse.Namespace, run: Manifest) -> Sources:
    """Files that are not named now are those that the node here was given for this run."""
    flags = {name: getattr(args, name) for name in _SETTINGS} | {"run": run.run_id}
    settings = config.load(flags, os.environ, coming_back=True)
    return Sources(settings.data, settings.tokenizer, Home(settings.home).data, settings.encoding)


def _measured(trained: Trained, args: argparse.Namespace) -> Measured:
    with _waiting("reading the text"):
        corpus = load_corpus(trained.run.data, _sources(args, trained.run), trained.tokenizer)
    with Progress() as say, _beside_a_node():
        return measure(trained, corpus, _settings(args).device, partial(say, "evaluating"))


def _measured_if_possible(trained: Trained, args: argparse.Namespace) -> Measured | None:
    """An export without its loss is better than none: the data may be on another machine, or on the hub."""
    if trained.run.data.source == "hub":
        return None
    try:
        return _measured(trained, args)
    except (UsageError, OutOfMemory, DiskFull) as error:
        print(f"exported without its loss: {error}", file=sys.stderr)
        return None


def _described(trained: Trained) -> str:
    many = f", mean of {len(trained.states)} states" if len(trained.states) > 1 else ""
    step = "" if trained.step is None else f", step {trained.step}"
    return f"{trained.run.label} at round {trained.round}{step}{many}"


def _figures(measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {"eval_loss": None}
    return {
        "eval_loss": measured.loss,
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte,
        "tokens": measured.tokens,
        "seconds": measured.seconds,
    }


def _document(trained: Trained, more: dict[str, Any]) -> dict[str, Any]:
    about = {"run_id": trained.run.run_id, "run": trained.run.label, "round": trained.round, "step": trained.step}
    states = [
        {"path" if isinstance(of.source, Path) else "peer_id": str(of.source), "round": of.round, "step": of.step}
        for of in trained.states
    ]
    return {**about, "states": states, **more}
