"""`top`: this machine's node, live, on a whole screen; as lines where there is none."""

import argparse
import asyncio
import math
import time
from contextlib import suppress

from noloco_node.cli.show import home_of, print_json
from noloco_node.errors import UsageError
from noloco_node.host.home import Home
from noloco_node.views.documents import SCHEMA, plain

_LEAST_S, _MOST_S = 0.2, 3600.0


def top(args: argparse.Namespace) -> int:
    from noloco_node.terminal.top import app
    from noloco_node.terminal.top.driver import can_show

    home, every_s = home_of(args), _interval(args.interval)
    if args.once:
        return asyncio.run(_once(home, every_s, args.json))
    if args.json:
        raise UsageError("--json wants --once; what goes on telling is `noloco-node peers --watch --json`")
    if not can_show():
        with suppress(KeyboardInterrupt):
            asyncio.run(app.as_lines(home, every_s, lambda line: print(line, flush=True)))
        return 0
    live = app.Session(home, every_s)
    code = asyncio.run(live.run())
    if live.farewell:
        print(live.farewell)
    return code


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _LEAST_S <= seconds <= _MOST_S:
        raise UsageError(f"--interval must be a number of seconds from {_LEAST_S:g} to {_MOST_S:g}, not {text!r}")
    return seconds


async def _once(home: Home, every_s: float, as_json: bool) -> int:
    from noloco_node.terminal.top.driver import print_once, size_to_print
    from noloco_node.terminal.top.poller import Poller
    from noloco_node.terminal.top.screen import Look, screen

    picture = await Poller(home, every_s, lambda: None).first()
    if as_json:
        told = {"status": plain(picture.status), **plain(picture.peers), "history": plain(picture.history)}
        print_json({"schema": SCHEMA, **told})
        return 0
    width, height = size_to_print()
    print_once(screen(picture, Look(width=width, height=height, now=time.time(), every_s=every_s)))
    return 0
