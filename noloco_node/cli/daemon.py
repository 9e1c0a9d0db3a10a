"""The verbs that run a node: `start`, `join`, `bootstrap`.

A user's mistakes are found before anything heavy is imported (a GPU that is named: by torch), in this order (with their
exit codes): flags and manifest (2), a node that runs here already (4), a port in use (5), a swarm that cannot be
reached (10). node/main.py handles signals.
"""

import argparse
import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.base.units import count, loss
from noloco_node.checkpoints import listing
from noloco_node.checkpoints.listing import About
from noloco_node.cli import log_setup
from noloco_node.cli.terminal_lines import report
from noloco_node.errors import Incompatible, SwarmUnreachable, UsageError
from noloco_node.host import config, remembered
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home, home_dir
from noloco_node.host.imports import large_import
from noloco_node.transport.probe import check_port, probe, reach

if TYPE_CHECKING:
    from noloco_node.run.manifest import Signed
    from noloco_node.run.schema import Manifest
    from noloco_node.run.signed_file import RunFile

_MAX_TRIED, _OF_PEER = 32, 2
"""Addresses of earlier peers that are tried, and of one of them."""


Train = Callable[[NodeConfig, "Signed | None", Callable[[NodeConfig], Awaitable[NodeConfig]]], int]
"""Runs a node to its end and returns the exit code: as node/main.py's `train`."""


def _train(settings: NodeConfig, signed: "Signed | None", again: Callable[[NodeConfig], Awaitable[NodeConfig]]) -> int:
    seen = partial(_answering, Home(settings.home))
    return _run(lambda main: main.train(settings, signed, report, again, seen), trains=True)


def start(args: argparse.Namespace, train: Train = _train) -> int:
    from noloco_node.data import sources
    from noloco_node.run import first_weights, manifest, toml

    settings, run = _settings(args), toml.load(Path(args.manifest), report)
    if settings.weights is None and run.model.weights:
        args.weights = toml.weights(Path(args.manifest))  # and remembered, as what is typed
        settings = _settings(args)
        if settings.weights is None:
            first_weights.check(None, run.model.weights)
    _check_device(settings)
    if not settings.linger and _is_over(run, Home(settings.home)):
        return 0
    sources.check(run.data, sources.Sources(settings.data, settings.tokenizer))
    with _prepared(settings, whole=train is _train) as (home, settings):
        from noloco_node.data.pin_commit import pinned

        signed = manifest.sign(pinned(run, home), Identity.load_or_create(home.identity))
        return train(settings, signed, partial(_afresh, home))


def _is_over(run: "Manifest", home: Home) -> bool:
    """Whether this node has trained the run to its end; says so then, and what comes next."""
    from noloco_node.node import outcome

    if (found := _end_of(run, home)) is None:
        return False
    known, reached = found
    measured = "" if reached.eval_loss is None else f", held-out loss {loss(reached.eval_loss)}"
    report(f"{known.label} is over: {count(reached.round, 'round')}, step {reached.step}{measured}")
    report(f"its checkpoints: {home.run(known.run_id) / 'checkpoints'}")
    for line in outcome.to_use(home, known.label, known.model.task, of_a_stage=known.stages is not None):
        report(line)
    report("to train on: another run.toml (its name, seed or rounds make it another run), or another invitation")
    return True


def _end_of(run: "Manifest", home: Home) -> "tuple[Manifest, About] | None":
    """Its last checkpoint here, if the run is over, as far as this home knows."""
    from noloco_node.data.pin_commit import without_asking

    known = without_asking(run, home)
    reached = listing.newest(home.run(known.run_id) / "checkpoints") if known else None
    if known is None or reached is None:
        return None
    file = _earlier(home, known.run_id)
    over = file.is_over(reached.round) if file else reached.round >= known.rounds
    return (known, reached) if over else None


def join(args: argparse.Namespace, train: Train = _train) -> int:
    flags = {**config.among(vars(args)), "invitation": " ".join(args.invitation) or None}
    if flags.get("run"):
        flags["run"] = _of_this_home(str(flags["run"]), flags)
    settings = replace(config.load(flags, os.environ, coming_back=True), start_over=args.start_over)
    _check_device(settings)
    home = Home(settings.home)
    earlier = _earlier(home, settings.run)
    signed, say, over = None, None, False
    if earlier is not None:
        run = earlier.run
        over = not settings.linger and _is_over(run, home)
        there = listing.newest(home.run(run.run_id) / "checkpoints")
        say = f"going on with {run.label}, round {there.round} of {run.rounds}" if there else f"joining {run.label}"
        if earlier.signed.author == Identity.load_or_create(home.identity).peer_id:
            signed = earlier.signed
    if over and (signed or not settings.bootstrap):
        return 0
    if over:
        say = "asking the others whether its author has given it more rounds"
    if not (settings.bootstrap or signed):
        author = settings.trust or (earlier.signed.author if earlier else None)  # no node was chosen that could say it
        settings = replace(settings, trust=author, seen=_seen(home) if settings.run else ())
    if not (settings.ways_in or signed):
        raise UsageError(
            "join needs an invitation: `noloco-node join <invitation>`, as the run's author hands it out. Without one "
            f"it goes on with the run of last time, and {home.root} knows no {'way to it' if earlier else 'run'}"
        )
    try:
        with _prepared(settings, whole=train is _train) as (home, settings):
            if say:
                report(say)
            return train(settings, signed, partial(_afresh, home))
    except SwarmUnreachable:
        if not over or earlier is None or _end_of(earlier.run, home) is None:
            raise
        return 0  # nobody is there to ask


def _of_this_home(word: str, flags: Mapping[str, object]) -> str:
    """The id of the run that is meant, where this home has been in it: there its name is enough."""
    from noloco_node.checkpoints import kept_runs

    home = Home(home_dir(flags.get("home"), os.environ))
    with suppress(UsageError):
        return kept_runs.named(home, kept_runs.kept(home, None), word).run_id
    return word


def _check_device(settings: NodeConfig) -> None:
    """Raises UsageError where a GPU that is named is not there, before a file is written or a node is called."""
    if settings.device not in {"auto", "cpu"}:
        from noloco_node.core.device import choose_devices  # with torch

        choose_devices(settings.device)


def _earlier(home: Home, run_id: str | None) -> "RunFile | None":
    """The run of this id, or of one that begins so, if this node was in it before. Raises Incompatible where only a
    newer version can read it."""
    from noloco_node.run import signed_file

    for folder in home.root.glob(f"runs/{run_id}*") if run_id else ():
        try:
            return signed_file.read(folder)
        except UsageError as error:  # a damaged file is written again when the run is found
            if isinstance(error.__cause__, Incompatible):
                raise error.__cause__ from None
    return None


def _seen(home: Home) -> tuple[Address, ...]:
    """Addresses of the peers that this node saw last."""
    from noloco_node.peers.cache import PeerCache

    found = []
    for addresses in PeerCache(home.root / "peers.json").peers().values():
        found += [each for each in addresses if each.transport == "tcp" and not each.relay][:_OF_PEER]
    return tuple(found[:_MAX_TRIED])


def bootstrap(args: argparse.Namespace) -> int:
    settings = _settings(args)
    with _prepared(settings) as (_, settings):
        return _run(lambda main: main.rendezvous(settings, report), trains=False)


def _settings(args: argparse.Namespace) -> NodeConfig:
    return config.load(config.among(vars(args)), os.environ)


@contextmanager
def _prepared(settings: NodeConfig, *, whole: bool = True) -> Iterator[tuple[Home, NodeConfig]]:
    """Creates and locks the home, opens its log, checks the port, and finds an address that answers. `whole`: whether
    the process is the node's."""
    home = Home(settings.home).create()
    with home.lock(), log_setup.written(home, settings.log_level, settings.log_format, whole=whole):
        check_port(settings.listen)
        yield home, asyncio.run(_afresh(home, settings))


async def _afresh(home: Home, settings: NodeConfig) -> NodeConfig:
    return replace(settings, last_port=remembered.port(home), seen=await _needed(settings, home))


async def _needed(settings: NodeConfig, home: Home) -> tuple[Address, ...]:
    """Of the peers seen earlier, those by which it joins: if none of its addresses answers, all that answer now."""
    try:
        if settings.ways_in:
            await reach(settings.ways_in)
    except SwarmUnreachable:
        if not (answering := await _answering(home)):
            raise
        report("no bootstrap address answers: joining through peers seen earlier")
        return answering
    return settings.seen


async def _answering(home: Home) -> tuple[Address, ...]:
    """Of the peers that this node saw last, those that accept connections now."""
    tried = _seen(home)
    found = await asyncio.gather(*(probe(address) for address in tried), return_exceptions=True)
    return tuple(address for address, failure in zip(tried, found, strict=True) if failure is None)


def _run(node: Callable[[ModuleType], Coroutine[Any, Any, int]], *, trains: bool) -> int:
    """`node` makes one, of node/main.py. One that trains imports torch, so the checks before it come first, and the
    event loop after it: a signal ends a long import at once."""
    import uvloop

    with large_import():
        from noloco_node.node import main

        if trains:
            from noloco_node.node import trainer  # noqa: F401
        gc.freeze()  # of all this nothing becomes garbage; there is no node yet, whose model may
    code: int = uvloop.run(node(main))
    return code
