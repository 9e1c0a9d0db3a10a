"""The verbs that look at the node of this machine, through its control socket."""

import argparse
import asyncio
import json
import os
import time
from typing import Any

from noloco_node.base.states import NodeState
from noloco_node.control import socket_client
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host import config
from noloco_node.host.home import Home
from noloco_node.views.documents import SCHEMA, document
from noloco_node.views.status import StatusView

_LEAVE_S = 15.0
"""A node leaves within 10 s, unless it says that it still saves; the rest is for its process to end."""
_POLL_S = 0.1


def status(args: argparse.Namespace) -> int:
    view = asyncio.run(_status(home_of(args)))
    if args.json:
        print_json(document(view))
    else:
        from noloco_node.terminal.text import console, print_status

        print_status(view, console())
    return 0


def leave(args: argparse.Namespace) -> int:
    home = home_of(args)
    name = asyncio.run(_leave(home))
    deadline = time.monotonic() + _LEAVE_S
    while (pid := home.holder()) is not None:
        if time.monotonic() > deadline:
            awaited = asyncio.run(_awaited(home))
            if awaited is None:
                raise NolocoError(f"{name} (pid {pid}) is still leaving after {_LEAVE_S:.0f} s: see {home.log}")
            print(f"{name} is leaving, and waits for {awaited}")
            deadline = time.monotonic() + _LEAVE_S
        time.sleep(_POLL_S)
    print(f"{name} has left; what it knows is kept in {home.root}")
    return 0


def pause(args: argparse.Namespace) -> int:
    view = asyncio.run(_pause(home_of(args)))
    print(f"{view.name} is {view.state}: `noloco-node resume` makes it go on")
    return 0


def resume(args: argparse.Namespace) -> int:
    view = asyncio.run(_resume(home_of(args)))
    print(f"{view.name} is {view.state}" + (f", waiting for {view.waiting_for}" if view.waiting_for else ""))
    return 0


def identity(args: argparse.Namespace) -> int:
    from noloco_node.base.identity import Identity
    from noloco_node.base.peer_names import name_of

    home = home_of(args).create()
    peer_id = Identity.load_or_create(home.identity).peer_id
    if args.json:
        print_json({"schema": SCHEMA, "peer_id": peer_id, "name": name_of(peer_id), "home": str(home.root)})
    else:
        print(f"peer id  {peer_id}\nname     {name_of(peer_id)}\nhome     {home.root}")
    return 0


def print_json(written: dict[str, Any]) -> None:
    print(json.dumps(written, indent=2))


def whole(text: str, flag: str, most: int) -> int:
    """What a flag counts."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{flag} must be a whole number from 1 to {most}, not {text!r}")
    return int(text)


def home_of(args: argparse.Namespace) -> Home:
    return Home(config.home_dir(args.home, os.environ))


async def _status(home: Home) -> StatusView:
    async with socket_client.connected(home) as node:
        return await node.status()


async def _pause(home: Home) -> StatusView:
    async with socket_client.connected(home) as node:
        return _trainer(await node.pause())


async def _resume(home: Home) -> StatusView:
    async with socket_client.connected(home) as node:
        return _trainer(await node.resume())


def _trainer(view: StatusView) -> StatusView:
    if view.state == NodeState.RENDEZVOUS:
        raise UsageError(f"{view.name} is a rendezvous and trains nothing: `noloco-node leave` ends it")
    return view


async def _awaited(home: Home) -> str | None:
    """What a node that leaves waits for, if it says so."""
    try:
        async with socket_client.connected(home) as node:
            return (await node.status()).waiting_for
    except NolocoError:
        return None


async def _leave(home: Home) -> str:
    async with socket_client.connected(home) as node:
        name = (await node.status()).name
        await node.leave()
        return name
