"""Whether others can call this node, and where: asked of those it joined by, and kept true while it lives.

    directly     a peer reached us at an address of this machine
    mapped       a peer reached us at the router's address: its port is mapped here, by UPnP or by hand
    relayed      nobody could; a peer that we joined by passes calls on to us
    outgoing     nobody could, and nobody passes calls on: we call others, that is all

A node that joined by nobody, or only on this machine, has nobody to ask: no verdict.
"""

import asyncio
import ipaddress
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc.aio

from noloco_node.base import periodic
from noloco_node.base.addresses import is_of_this_machine, seen_outside
from noloco_node.transport import relay, self_view
from noloco_node.transport.p2pd.control import P2pdControl

DIRECTLY, MAPPED, RELAYED, OUTGOING = "directly", "mapped", "relayed", "outgoing"
AUTO, ONLY, OFF = "auto", "only", "off"

KEEP_S = 30.0
"""How often a relay is asked to keep our place, which is gone when our connection to it breaks."""
_ROUTER_S = 7.0
"""How long a start waits for a router to map a port, which takes 5 s, where nobody can call us otherwise."""
_GLANCE_S = 0.5
_CLOCKS = 5  # peers whose clocks are compared with ours
_SURVEY_EVERY = 10
"""A place is asked for so many times between two looks at whether a port is open by now."""


class Reachability:
    def __init__(
        self,
        peer_id: str,
        relays: str,
        helpers: Mapping[str, Sequence[str]],
        others: Callable[[], Iterable[str]],
        channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """`relays`: AUTO, ONLY or OFF; `helpers`: whom this node joined by, with their addresses; `others`: more peers
        that have a clock."""
        self._peer_id = peer_id
        self._relays = relays
        self.helpers = helpers
        self._others = others
        self._channel = channel
        self._asked: set[tuple[str, int]] = set()
        """Where p2pd believed that we can be reached, at the last survey."""
        self._outside: list[str] = []
        self._relayed: list[str] = []
        self.verdict: str | None = None
        self.skew: self_view.ClockSkew | None = None

    def addresses(self, own: Sequence[str]) -> list[str]:
        """`own` and what was found, the best first."""
        if self._relays == ONLY:
            return list(self._relayed)
        return list(dict.fromkeys([*self._outside, *own, *self._relayed]))

    async def begin(self, orders: P2pdControl, found: Callable[[], Sequence[str]]) -> None:
        """The first verdict, by which a node decides whether to carry records for others."""
        router = asyncio.get_running_loop().time() + _ROUTER_S
        await self.survey(orders, found())
        if self._relays != ONLY and self.verdict in (RELAYED, OUTGOING) and await self._moved(found, until=router):
            await self.survey(orders, found())

    async def keep(self, orders: Callable[[], P2pdControl], found: Callable[[], Sequence[str]]) -> None:
        """For ever."""
        turns = itertools.count(1)

        async def turn() -> None:
            moved = await self._moved(found, until=asyncio.get_running_loop().time() + KEEP_S)
            number = next(turns)
            if moved or number == 1 or number % _SURVEY_EVERY == 0:  # at the start, who was asked may have been busy
                await self.survey(orders(), found())
            elif self.verdict in (RELAYED, OUTGOING):
                await self._reserve(orders())

        await periodic.every(
            lambda: _GLANCE_S, turn, (OSError,)
        )  # a machine may be out of file descriptors for a while

    async def survey(self, orders: P2pdControl, found: Sequence[str]) -> None:
        """Ask how we look from outside, and for a place with a relay where that is needed."""
        ours = seen_outside(found)
        self._asked = set(ours)
        ports = sorted({port for _, port in ours})
        clocks = [*self.helpers, *self._others()][:_CLOCKS]
        looks = asyncio.gather(*(self_view.look(self._channel(peer), ports) for peer in self.helpers))
        self.skew, seen_by = await asyncio.gather(self_view.skew([self._channel(peer) for peer in clocks]), looks)
        images = [image for image in seen_by if image and (self._relays == ONLY or not _is_here(image.host))]
        if not (ours or self._relays == ONLY):
            return
        seen = [(image.host, port) for image in images for port in image.open]
        if seen and self._relays != ONLY:
            self._outside = [_address(host, port, self._peer_id) for host, port in seen]
            self._relayed = []
            self.verdict = DIRECTLY if any(is_of_this_machine(host) for host, _ in seen) else MAPPED
        elif images:
            self._outside = []
            await self._reserve(orders)

    async def _moved(self, found: Callable[[], Sequence[str]], *, until: float) -> bool:
        """Whether p2pd finds other addresses than at the last survey: a port is mapped, or no longer; a cable is in."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            if set(seen_outside(found())) != self._asked:
                return True
            await asyncio.sleep(_GLANCE_S)
        return False

    async def _reserve(self, orders: P2pdControl) -> None:
        helpers = {} if self._relays == OFF else self.helpers
        granted = await asyncio.gather(*(relay.reserve(orders, peer) for peer in helpers))
        places = [by for addresses, place in zip(helpers.values(), granted, strict=True) if place for by in addresses]
        self._relayed = [relay.relayed(by, self._peer_id) for by in places]
        self.verdict = RELAYED if places else OUTGOING


def _is_here(host: str) -> bool:
    """Who is on this machine sees us at a loopback address, and tells nothing of how others do."""
    return bool(host) and ipaddress.ip_address(host).is_loopback


def _address(host: str, port: int, peer_id: str) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}/p2p/{peer_id}"
