"""Whether others can call this node, and where: its bootstrap peers are asked, at the start and from time to time.

    directly     a peer reached us at an address of this machine
    mapped       a peer reached us at the router's address: its port is mapped here, by UPnP or by hand
    relayed      no peer could; a bootstrap peer forwards calls to us, until a direct way is found (hole_punching.py)
    outgoing     no peer could, and none forwards calls: we can only call others

Where no bootstrap peer answered at the start, peers seen earlier are asked in their place, which anybody may be.
Without bootstrap peers, or with some on this machine only, nothing is known.
"""

import asyncio
import ipaddress
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import grpc.aio

from noloco_node.base import periodic, places
from noloco_node.base.addresses import Address, for_others, ip_address, seen_outside
from noloco_node.transport import relay, self_view
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.probe import is_of_this_machine

DIRECTLY, MAPPED, RELAYED, OUTGOING = "directly", "mapped", "relayed", "outgoing"
AUTO, ONLY, OFF = "auto", "only", "off"

KEEP_S = 30.0
"""How often a reservation with a relay is renewed: it is gone when our connection to the relay breaks."""
_ROUTER_S = 7.0
"""How long a start waits for a router to map a port, which takes 5 s, where no peer can call us otherwise."""
_POLL_S = 0.5
_CLOCKS = 5  # peers whose clocks are compared with ours, each of another place
_SURVEY_EVERY = 10
"""Renewals after which peers are asked again whether a port is open by now."""


class Reachability:
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        peer_id: str,
        relays: str,
        helpers: Mapping[str, Sequence[Address]],
        chosen: Set[str],
        others: Callable[[], Iterable[str]],
        channel: Callable[[str], grpc.aio.Channel],
        place_of: Callable[[str], str],
        may_answer: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`relays`: AUTO, ONLY or OFF; `helpers`: the peers to ask and their addresses; `chosen`: the bootstrap peers
        among them, others were seen earlier; `others`: more peers to compare clocks with; `may_answer`: whether a
        helper is there."""
        self._peer_id = peer_id
        self._relays = relays
        self.helpers = helpers
        self._chosen = chosen
        self._others = others
        self._channel = channel
        self._place_of = place_of
        self._may_answer = may_answer
        self._asked: set[tuple[str, int]] = set()
        """Where p2pd believed that we can be reached, at the last survey."""
        self._answered = True
        """Whether anybody answered it, where there is anybody to ask."""
        self._doubts = False
        """Whether no port was open at the last survey where one was before: on a busy link an answer may be late."""
        self._outside: list[Address] = []
        self._relayed: list[Address] = []
        self.verdict: str | None = None
        self.skew: self_view.ClockSkew | None = None

    def addresses(self, own: Sequence[Address]) -> list[Address]:
        """`own` and those that were found, the best first; loopback only if there is nothing else."""
        if self._relays == ONLY:
            return list(self._relayed)
        return for_others(list(dict.fromkeys([*self._outside, *own, *self._relayed])))

    async def begin(self, control: P2pdControl, found: Callable[[], Sequence[Address]]) -> None:
        """The first verdict, by which a node decides whether to store records for others."""
        router = asyncio.get_running_loop().time() + _ROUTER_S
        await self.survey(control, found())
        if self._relays != ONLY and self.verdict in (RELAYED, OUTGOING) and await self._moved(found, until=router):
            await self.survey(control, found())

    async def keep(
        self, control: Callable[[], P2pdControl], found: Callable[[], Sequence[Address]], asked: Callable[[], None]
    ) -> None:
        """Ask and renew for as long as the node runs; call `asked` each time."""
        turns = itertools.count(1)

        async def turn() -> None:
            moved = await self._moved(found, until=asyncio.get_running_loop().time() + KEEP_S)
            number = next(turns)
            # At the start the peers may have been busy. And where this machine has moved to another network, the
            # connections of the old one seem to be there for a while.
            if moved or number == 1 or self._doubts or not self._answered or number % _SURVEY_EVERY == 0:
                await self.survey(control(), found())
            if self.verdict in (RELAYED, OUTGOING):
                await self.reserve(control())
            asked()

        await periodic.every(lambda: _POLL_S, turn, (OSError,))  # there may be no free file descriptor for a while

    async def survey(self, control: P2pdControl, found: Sequence[Address]) -> None:
        """Ask peers where they see us and whether they can call us there; reserve with a relay where none can."""
        ours = seen_outside(found)
        moved, self._asked = self._asked != set(ours), set(ours)
        ports = sorted({port for _, port in ours})
        clocks: dict[str, str] = {}
        for peer in (*self.helpers, *self._others()):
            clocks.setdefault(self._place_of(peer), peer)
        looks = asyncio.gather(*(self_view.look(self._channel(peer), ports) for peer in self.helpers))
        skew = self_view.skew(list(clocks.values())[:_CLOCKS], self._channel, self._place_of)
        self.skew, seen_by = await asyncio.gather(skew, looks)
        self._answered = any(seen_by) or not self.helpers
        views = {
            peer: view
            for peer, view in zip(self.helpers, seen_by, strict=True)
            if view and (self._relays == ONLY or not _is_here(view.host))
        }
        if not (ours or views or self._relays == ONLY):  # with views alone, others can call no address of ours
            return
        said: dict[tuple[str, int], set[str]] = {}
        for peer, view in views.items():
            for port in view.open:
                said.setdefault((view.host, port), set()).add(peer)
        seen = [where for where, by in said.items() if self._are_believed(by)]
        same = {view.host for view in views.values()} & {address.host for address in self._outside}
        self._doubts = bool(same) and not (seen or moved or self._doubts)
        if seen and self._relays != ONLY:
            self._outside = [ip_address(host, port, self._peer_id) for host, port in seen]
            self._relayed = []
            self.verdict = DIRECTLY if any(is_of_this_machine(host) for host, _ in seen) else MAPPED
        elif views and not self._doubts:
            self._outside = []
            await self.reserve(control)

    def _are_believed(self, peers: Set[str]) -> bool:
        """That this node can be called somewhere, so that it gives up its relay: one that its user chose, or two in
        different places, and not the one that a host with a relay can add to its own."""
        there = {self._place_of(peer) for peer in peers} - {places.RELAYED}
        return bool(self._chosen & peers) or len(there) > 1

    async def _moved(self, found: Callable[[], Sequence[Address]], *, until: float) -> bool:
        """Whether p2pd finds other addresses than at the last survey: a port is mapped, or no longer; a cable is in."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            if set(seen_outside(found())) != self._asked:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def reserve(self, control: P2pdControl) -> None:
        """Make or renew a reservation with each relay."""
        helpers = {} if self._relays == OFF else self.helpers

        async def granted(peer: str) -> bool:
            return await self._may_answer(peer) and await relay.reserve(control, peer)

        by_helper = await asyncio.gather(*map(granted, helpers))
        relays = [by for addresses, ok in zip(helpers.values(), by_helper, strict=True) if ok for by in addresses]
        self._relayed = [replace(by, relay=by.peer, peer=self._peer_id) for by in relays]
        self.verdict = RELAYED if relays else OUTGOING


def _is_here(host: str) -> bool:
    """A peer on this machine sees us at a loopback address, which does not show how others see us."""
    return bool(host) and ipaddress.ip_address(host).is_loopback
