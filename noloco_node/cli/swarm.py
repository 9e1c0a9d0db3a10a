"""`swarm`: several real nodes on this machine, to see a run before anybody else takes part."""

import argparse
import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from noloco_node.base import atomic_files
from noloco_node.cli.options import print_json, whole_number
from noloco_node.errors import NolocoError, PortInUse, UsageError
from noloco_node.host.config import web_address
from noloco_node.host.home import whole_path
from noloco_node.node import local_swarm
from noloco_node.node.local_swarm import LocalSwarm
from noloco_node.run import toml
from noloco_node.run.schema import Manifest, StagesSpec
from noloco_node.terminal.swarm_board import LiveBoard, PlainBoard
from noloco_node.terminal.swarm_report import Outcome
from noloco_node.terminal.table import fill
from noloco_node.terminal.text import can_redraw, console
from noloco_node.version import VERSION
from noloco_node.views.documents import as_error

_MAX_NODES = 64  # each is a process with torch in it
_DEMO_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    run: Manifest
    manifest: Path | None
    """The user's run.toml; None for the demonstration."""
    nodes: int
    rounds: int | None
    """The nodes' --rounds; None: the manifest's."""
    keep: Path | None
    pages: tuple[str, ...]
    """Where each node serves its web page; none when empty."""

    @property
    def target(self) -> int:
        return min(self.rounds or self.run.rounds, self.run.rounds)


def swarm(args: argparse.Namespace) -> int:
    plan, out = _plan(args), console(stderr=args.json)
    outcome = asyncio.run(_train(plan, out))
    failure, code = outcome.failure(), NolocoError.exit_code
    if failure and not plan.keep:
        failure += ". Use --keep DIR to keep the logs"
    if lost := outcome.not_kept:
        failure, code = (f"{failure}. {lost}", code) if failure else (str(lost), lost.exit_code)
    if args.json:
        error = {"error": as_error(failure, code)} if failure else {}
        print_json({**outcome.as_document(), **error})
    else:
        for line in outcome.lines():
            out.print(line, markup=False)
    if failure:
        print(failure, file=sys.stderr)
        return code
    return 0


def _plan(args: argparse.Namespace) -> _Plan:
    nodes = whole_number(args.nodes, "--nodes", _MAX_NODES, least=2)
    rounds = None if args.rounds is None else whole_number(args.rounds, "--rounds", 10_000_000)
    path = whole_path(args.manifest) if args.manifest else None
    stages = StagesSpec(count=whole_number(args.stages, "--stages", 2, least=2)) if args.stages else None
    if path and stages:
        raise UsageError("--stages is for the tiny model: of another run, its run.toml says how it is cut")
    run = toml.load(path) if path else Manifest(name="tiny", rounds=rounds or _DEMO_ROUNDS, stages=stages)
    if run.stages and nodes < run.stages.count:
        raise UsageError(
            f"--nodes must be at least {run.stages.count}, as each stage of the run needs one, not {nodes}"
        )
    if run.membership == "invite":
        raise UsageError('--run: nodes of `swarm` have no tokens: name one without membership = "invite"')
    if run.data.source == "files":
        raise UsageError('swarm cannot pass --data to its nodes: use source = "stdlib", or start the nodes one by one')
    keep = whole_path(args.keep) if args.keep else None
    if keep:
        with atomic_files.writing(keep, "name another folder with --keep"):  # now, and not after the training
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise UsageError(f"--keep: {keep} is not empty, and files there might be replaced: name another folder")
    return _Plan(run, path, nodes, rounds, keep, tuple(_pages(args.web, nodes)) if args.web else ())


def _pages(first: str, nodes: int) -> Iterator[str]:
    """Addresses on consecutive ports, each checked to be free."""
    try:
        host, _, port = web_address(first).rpartition(":")
    except ValueError as error:
        raise UsageError(f"--web {error}, not {first!r}") from None
    if not 0 < int(port) <= 65536 - nodes:
        raise UsageError(f"--web must leave room for a port above 0 for each of {nodes} nodes, not {first!r}")
    for number in range(int(port), int(port) + nodes):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host.strip("[]"), number), family=family).close()
        except OSError as error:
            kind = PortInUse if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else UsageError
            why = os.strerror(error.errno or 0).lower()
            raise kind(
                f"a web page cannot be served at {host}:{number} ({why}): choose another address or port with --web"
            ) from None
        yield f"{host}:{number}"


async def _train(plan: _Plan, out: Console) -> Outcome:
    began = time.monotonic()
    head = f"{plan.nodes} nodes on this machine", f"run {plan.run.label}", "Ctrl-C stops everything"
    out.print(fill([f"noloco-node {VERSION}", *head], out.width))
    outcome = None
    try:
        async with local_swarm.opened(plan.keep, local_swarm.COMMAND, os.environ) as nodes:
            outcome = await _outcome(plan, out, nodes, began)
    except NolocoError as error:
        if outcome is None:
            raise
        return replace(outcome, not_kept=error)
    return outcome


async def _outcome(plan: _Plan, out: Console, nodes: LocalSwarm, began: float) -> Outcome:
    path = plan.manifest or nodes.root / "run.toml"
    if plan.manifest is None:
        stages = f"\n[stages]\ncount = {plan.run.stages.count}\n" if plan.run.stages else ""
        path.write_text(toml.template(plan.run.name, rounds=plan.run.rounds) + stages, encoding="utf-8")
    if plan.pages:
        out.print(f"web pages, one per node: http://{plan.pages[0]} to http://{plan.pages[-1]}")
    with LiveBoard(out, plan.target) if can_redraw(out) else PlainBoard(out, plan.target, began) as board:
        await nodes.run(
            path,
            plan.nodes,
            plan.rounds,
            lambda nodes: board.update(nodes, time.monotonic()),
            plan.pages,
            plan.run.stages.count if plan.run.stages else 0,
        )
    wall_s = time.monotonic() - began
    with out.status("averaging the weights"):
        average = await asyncio.to_thread(nodes.eval_of_average, plan.run)
    return Outcome(tuple(nodes.members), plan.run.run_id, plan.target, wall_s, average, plan.keep)
