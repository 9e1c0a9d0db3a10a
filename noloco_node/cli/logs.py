"""`logs`: the last lines of node.log, new lines as they come, and the running node's log level."""

import argparse
import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from noloco_node.base.validation import listed, printable
from noloco_node.cli.log_setup import LOG_FILES
from noloco_node.cli.options import home_of, print_json, whole_number
from noloco_node.control import socket_client
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host.config import LOG_LEVELS
from noloco_node.host.home import Home
from noloco_node.observe.jsonl import generations

_POLL_S = 0.2
_MAX_LINES = 1_000_000


def logs(args: argparse.Namespace) -> int:
    home, lines = home_of(args), whole_number(args.lines, "--lines", _MAX_LINES)
    if args.json and args.follow:
        raise UsageError(
            "--json cannot follow: for new lines that programs can read, start the node with --log-format json"
        )
    if args.level is not None:
        said = asyncio.run(_set_level(home, args.level))
        if args.json:
            print_json({"level": args.level})
            return 0
        print(said)
        if not args.follow:
            return 0
    if not home.log.exists():
        raise NolocoError(f"there is no log in {home.root}: no node has run there yet. Name another home with --home")
    with home.log.open("rb") as file:
        found = last_lines(file, home.log, lines)
        if args.json:
            print_json({"file": str(home.log), "lines": found})
            return 0
        for line in chain(found, _added(file, home.log) if args.follow else ()):
            print(printable(line), flush=True)
    return 0


async def _set_level(home: Home, level: str) -> str:
    if level not in LOG_LEVELS:
        raise UsageError(f"--level must be {listed(LOG_LEVELS)}, not {level!r}")
    async with socket_client.connected(home) as node:
        await node.log_level(level)
        name = (await node.status()).name
    return f"{name} logs at {level} until it ends: `noloco-node logs -f{home.flag}` shows it"


def last_lines(file: BinaryIO, log: Path, count: int) -> list[str]:
    """Of the log and, if it has too few lines, of the rotated ones, which hold 8 MiB at most. `file` is then at the
    log's end."""
    found = list(deque(file, maxlen=count))
    for path in generations(log, LOG_FILES - 1)[1:]:
        if len(found) < count and path.exists():
            with path.open("rb") as full:
                found = [*deque(full, maxlen=count - len(found)), *found]
    return [line.decode(errors="replace").rstrip("\n") for line in found]


def _added(file: BinaryIO, log: Path) -> Iterator[str]:
    """New lines, without end. A rotated file is read to its end before the next one."""
    rest = b""
    try:
        while True:
            rotated = _rotated(log, file)
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if rotated:
                file.close()
                file = log.open("rb")
            else:
                time.sleep(_POLL_S)
    finally:
        file.close()


def _rotated(log: Path, file: BinaryIO) -> bool:
    """Whether the log was rotated: another file has its name now."""
    try:
        return log.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # just being rotated
