"""The verbs about other nodes: `peers` and `ping`, through the node on this machine or, with `--bootstrap`, without."""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from noloco_node.base.addresses import Address
from noloco_node.base.peer_names import find, name_of, short_id
from noloco_node.base.units import count, size
from noloco_node.base.validation import did_you_mean, listed
from noloco_node.cli.options import home_of, print_json, show, whole_number
from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NotReached, UsageError
from noloco_node.host import config
from noloco_node.terminal.filter import COLUMNS, STATES, PeerFilter
from noloco_node.views.documents import document
from noloco_node.views.peers import PeerRow, PeersView, PingView

if TYPE_CHECKING:
    from noloco_node.peers.visitor import Visitor

GetPeers = Callable[[], Awaitable[PeersView]]
SendPing = Callable[[str, int], Awaitable[PingView]]

_WATCH_S = 2.0
_PAYLOAD_BYTES = 512 << 10
"""A link of 1 Mbit/s needs 4 s for it."""
_BETWEEN_S = 0.5
_MAX_COUNT = 1000


# ---- peers ----
def peers(args: argparse.Namespace) -> int:
    if args.sort not in COLUMNS:
        raise UsageError(f"--sort does not know {args.sort!r}, {did_you_mean(args.sort, COLUMNS)}")
    if args.state not in (None, *STATES):
        raise UsageError(f"--state must be {listed(STATES)}, not {args.state!r}")
    peer_filter = PeerFilter(args.sort, args.state, args.name)
    bootstrap = _bootstrap(args)

    async def show() -> None:
        async with _asked(args, bootstrap) as asked:
            await (_watch if args.watch else _show)(asked.peers, peer_filter, args.json)

    _run(show(), bootstrap)
    return 0


async def _show(get_peers: GetPeers, peer_filter: PeerFilter, as_json: bool) -> None:
    view = peer_filter.of(everybody := await get_peers())
    if as_json:
        print_json(view)
        return
    from noloco_node.terminal.text import console, print_peers

    if everybody.peers and not view.peers:
        print(f"none of {count(len(everybody.peers), 'peer')} matches")
        return
    print_peers(view, console())


async def _watch(get_peers: GetPeers, peer_filter: PeerFilter, as_json: bool) -> None:
    """Until Ctrl-C, or until the node ends, which is an error."""
    from rich.console import Group
    from rich.live import Live

    from noloco_node.terminal.text import can_redraw, console, peers_parts

    out = console()
    if as_json or not can_redraw(out):
        await _print_changes(get_peers, peer_filter, as_json)
    with Live(console=out, auto_refresh=False) as live:
        while True:
            view = peer_filter.of(await get_peers())
            live.update(Group(*peers_parts(view, out.width), "", "Ctrl-C ends this"), refresh=True)
            await asyncio.sleep(_WATCH_S)


async def _print_changes(get_peers: GetPeers, peer_filter: PeerFilter, as_json: bool) -> None:
    """A JSON document each time; or a line for each peer that came, went, or changed its state or round."""
    from noloco_node.terminal.text import peer_line

    before: dict[str, PeerRow] = {}
    while True:
        view = peer_filter.of(await get_peers())
        now = {peer.peer_id: peer for peer in view.peers}
        if as_json:
            print(json.dumps(document(view)), flush=True)
        else:
            clock = time.strftime("%H:%M:%S")
            for peer in now.values():
                old = before.get(peer.peer_id)
                if old is None or _news(old) != _news(peer):
                    print(f"{clock} {peer_line(peer)}", flush=True)
            for gone in before.keys() - now.keys():
                print(f"{clock} {before[gone].name} is gone ({short_id(gone)})", flush=True)
        before = now
        await asyncio.sleep(_WATCH_S)


def _news(peer: PeerRow) -> tuple[str, int, bool]:
    """What a line is printed for when it changes."""
    return peer.state, peer.round, peer.quarantined_s > 0


# ---- ping ----
@dataclass(slots=True)
class Pinged:
    peer_id: str
    via: str | None = None
    connect_s: float | None = None
    """Of the first one, which also connects."""
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    bytes_per_s: float | None = None
    """Towards the peer."""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def ping(args: argparse.Namespace) -> int:
    count, bootstrap = whole_number(args.count, "--count", _MAX_COUNT), _bootstrap(args)

    async def measure() -> Pinged:
        async with _asked(args, bootstrap) as asked:
            return await _series(await _meant(args.peer, asked, bootstrap), asked.ping, count, say)

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    found = _run(measure(), bootstrap)
    if not found.seconds:
        raise NotReached(
            f"{name_of(found.peer_id)} answered only the first of {count + 1} calls: try again in a moment"
        )
    return show(args, _pinged_document(found), _summary(found))


async def _series(peer: str, send_ping: SendPing, count: int, say: Callable[[str], None]) -> Pinged:
    first = await send_ping(peer, 0)
    if first.seconds is None:
        raise NotReached(
            f"{name_of(peer)} ({peer}) does not answer ({(first.failure or 'silent').replace('_', ' ')}): "
            "`noloco-node peers` shows when it was last seen, `noloco-node doctor` whether the network works here"
        )
    found = Pinged(peer, first.via, first.seconds)
    say(f"{name_of(peer)} ({short_id(peer)}) answers after {_ms(first.seconds)}, {first.via or 'directly'}")
    for number in range(1, count + 1):
        reply = await send_ping(peer, 0)
        if reply.seconds is None:
            found.lost += 1
        else:
            found.seconds.append(reply.seconds)
        say(f"{number}: {'no answer' if reply.seconds is None else _ms(reply.seconds)}")
        if number < count:
            await asyncio.sleep(_BETWEEN_S)
    loaded = await send_ping(peer, _PAYLOAD_BYTES)
    if loaded.seconds is not None and found.median_s is not None:
        found.bytes_per_s = rate(_PAYLOAD_BYTES, loaded.seconds, found.median_s)
    found.via = loaded.via or found.via
    return found


def rate(payload_bytes: int, seconds: float, empty_s: float) -> float:
    """Bytes per second towards the peer, from the time beyond an empty call's. At most half of `seconds` is subtracted,
    since a small difference is noise."""
    return payload_bytes / max(seconds - empty_s, seconds / 2)


def _summary(found: Pinged) -> str:
    asked = len(found.seconds) + found.lost
    times = f"median {_ms(statistics.median(found.seconds))} ({_ms(min(found.seconds))} to {_ms(max(found.seconds))})"
    fast = f", about {size(found.bytes_per_s)}/s there" if found.bytes_per_s else ""
    return f"{len(found.seconds)} of {asked} answered, {times}{fast}"


def _pinged_document(found: Pinged) -> dict[str, Any]:
    return {
        "peer_id": found.peer_id,
        "name": name_of(found.peer_id),
        "via": found.via,
        "connect_ms": _as_ms(found.connect_s),
        "median_ms": _as_ms(found.median_s),
        "ms": [_as_ms(seconds) for seconds in found.seconds],
        "lost": found.lost,
        "bytes_per_s": found.bytes_per_s,
    }


async def _meant(word: str, asked: "Visitor | ControlClient", bootstrap: Sequence[Address]) -> str:
    """The peer id that `word` means. Raises UsageError if it means the node on this machine."""
    from noloco_node.base.identity import is_peer_id

    named = [address.peer for address in bootstrap]
    if word in named:
        return word
    if isinstance(asked, ControlClient):
        status = await asked.status()
        if word in (status.peer_id, short_id(status.peer_id), status.name):
            raise UsageError(f"{status.name} is the node on this machine: `noloco-node peers` lists the others")
        if is_peer_id(word):  # libp2p may find it although no peer has reported it
            return word
    return find(word, [*named, *(row.peer_id for row in (await asked.peers()).peers)])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _as_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


# ---- for both ----
@asynccontextmanager
async def _asked(args: argparse.Namespace, bootstrap: Sequence[Address]) -> AsyncIterator["Visitor | ControlClient"]:
    """Who knows the peers and can call them: the node on this machine, or with addresses a visitor."""
    if not bootstrap:
        async with socket_client.connected(home_of(args)) as node:
            yield node
        return
    from noloco_node.transport.probe import reach

    await reach(bootstrap)  # first, because the visitor takes a while to import
    from noloco_node.peers.visitor import visiting

    async with visiting(bootstrap) as visit:
        yield visit


def _bootstrap(args: argparse.Namespace) -> tuple[Address, ...]:
    """From the flags only: node.toml and the environment are for the node."""
    return config.resolve({"bootstrap": args.bootstrap}, {}, {}).bootstrap if args.bootstrap else ()


def _run(work: Any, bootstrap: Sequence[Address]) -> Any:
    """hivemind needs uvloop; asking the node on this machine is faster without importing it."""
    if not bootstrap:
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)
