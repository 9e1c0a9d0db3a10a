"""`export --average N`: the running node fetches the present weights of some peers; here it is shown how that goes."""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.control import socket_client
from noloco_node.errors import UsageError
from noloco_node.host.home import Home
from noloco_node.run import signed_file
from noloco_node.views.gather import GatherView

if TYPE_CHECKING:
    from noloco_node.publish.weights import Fetched

_MAX_PEERS = 64
"""More would hardly move the mean, and each costs a donor an upload."""


def live(args: argparse.Namespace, home: Home, peers: int) -> "list[Fetched]":
    """The weights of this node, and of so many others at most. `forget` them. Raises what the node could not do."""
    from noloco_node.publish.weights import Fetched

    if not 1 <= peers <= _MAX_PEERS:
        raise UsageError(f"--average takes 1 to {_MAX_PEERS} peers, not {peers}")
    if args.run or args.checkpoint:
        raise UsageError("--average with a number takes what the running node trains: leave --run and --checkpoint out")
    view = asyncio.run(_gather(home, peers))
    file, layout = signed_file.read(home.run(view.run_id)), bytes.fromhex(view.layout)
    return [Fetched(file, Path(state.path), layout, state.round, state.step) for state in view.states]


def forget(places: "Sequence[Fetched]") -> None:
    """The files: their mean has been taken."""
    for folder in {place.path.parent for place in places}:
        shutil.rmtree(folder, ignore_errors=True)


async def _gather(home: Home, peers: int) -> GatherView:
    """The last view. Progress goes to stderr: one line that changes on a terminal, else what is new."""
    from rich.console import Console

    out, told, view = Console(stderr=True, highlight=False), 0, GatherView()
    with out.status("asking the node") as line:
        async with socket_client.connected(home) as node:
            async for view in node.gather(peers):
                for skipped in view.skipped[told:]:
                    out.print(f"skipped {skipped}", markup=False, soft_wrap=True)
                told = len(view.skipped)
                line.update(view.doing)
    if (came := len(view.states) - 1) < peers:
        print(f"{came} of {peers} peers gave their weights", file=sys.stderr)
    return view
