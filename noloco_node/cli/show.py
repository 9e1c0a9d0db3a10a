"""The verbs that show the node on this machine: `status`, `top`, `id`."""

import argparse
import asyncio
import shutil
import sys
import time
from contextlib import suppress

from noloco_node.cli.options import home_of, print_json, seconds, show
from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import UsageError
from noloco_node.host.home import Home
from noloco_node.views.documents import plain


def status(args: argparse.Namespace) -> int:
    view = asyncio.run(socket_client.ask(home_of(args), ControlClient.status))
    if args.json:
        print_json(view)
    else:
        from noloco_node.terminal.text import console, print_status

        print_status(view, console())
    return 0


def top(args: argparse.Namespace) -> int:
    from noloco_node.terminal.top import app
    from noloco_node.terminal.top.driver import can_show

    home, every_s = home_of(args), seconds(args.interval, "--interval", 0.2, 3600)
    if args.once:
        return asyncio.run(_once(home, every_s, args.json))
    if args.json:
        raise UsageError("--json needs --once; for JSON again and again, use `noloco-node peers --watch --json`")
    if not can_show():
        with suppress(KeyboardInterrupt):
            asyncio.run(app.as_lines(home, every_s, lambda line: print(line, flush=True)))
        return 0
    live = app.Session(home, every_s)
    code = asyncio.run(live.run())
    if live.last_line:
        print(live.last_line)
    return code


async def _once(home: Home, every_s: float, as_json: bool) -> int:
    from noloco_node.terminal.top.driver import print_once
    from noloco_node.terminal.top.poller import Poller
    from noloco_node.terminal.top.screen import Display, screen

    picture = await Poller(home, every_s, lambda: None).first()
    if as_json:
        print_json({"status": picture.status, **plain(picture.peers), "history": picture.history})
        return 0
    width, height = shutil.get_terminal_size()  # COLUMNS and LINES come first
    print_once(screen(picture, Display(width=width, height=height, now=time.time(), every_s=every_s)))
    return 0


def identity(args: argparse.Namespace) -> int:
    from noloco_node.base.identity import Identity
    from noloco_node.base.peer_names import name_of

    home = home_of(args)
    is_new = not home.identity.exists()
    peer_id = Identity.load_or_create(home.create().identity).peer_id
    lines = f"peer id  {peer_id}", f"name     {name_of(peer_id)}", f"home     {home.root}"
    code = show(args, {"peer_id": peer_id, "name": name_of(peer_id), "home": str(home.root)}, *lines)
    if is_new:  # the user may have mistyped the home
        print(f"{home.root} had no identity: this is a new one", file=sys.stderr)
    return code
