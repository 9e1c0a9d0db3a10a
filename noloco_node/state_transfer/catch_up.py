"""How a node comes level with the others: when it is new, after a long absence, and when it has come to stand apart.

Whose state is worth taking is decided here, from presence records; state_transfer/choose_donor.py asks for it and
fetches it. What has to hold still meanwhile, training and exchanges, is node/trainer.py's: it is asked to stand aside,
and told to go on.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median_low
from typing import Protocol

import grpc

from noloco_node.base.states import AT_WORK
from noloco_node.errors import NolocoError
from noloco_node.host.traffic import Pace
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import choose_donor
from noloco_node.state_transfer.choose_donor import Others
from noloco_node.state_transfer.client import LiveState
from noloco_node.wire.state_format import Coding

CATCH_UP_ROUNDS = 10
"""A node that is so far behind, after a restart or a pause, takes a peer's state instead of its own."""
DIVERGED_ROUNDS = 3
"""Swaps of the only two there are that diverged, and none committed between: no accident."""
ALONE_ROUNDS = 10
"""Who stood apart from somebody, and has not committed a round for so long, is the one that is astray."""
AT_REST = ("paused", "finished")
"""Those who do not train at the moment, or any more, but have something to give."""
LOOKS = 3
"""Times that a newcomer must have seen nobody to begin from nothing: among others that have come far, it would only be
in the way until it is found to stand apart."""
LONG_DOWNLOAD_S = 1800.0
"""For a state at the rate that a volunteer allows: beyond it, the state is fetched in bf16."""
_PARTNERS = 32  # so many of those that it stands apart from are remembered

log = logging.getLogger(__name__)


class CatchUpNode(Protocol):
    """What is needed of the node that comes level."""

    @property
    def round(self) -> int: ...

    async def look(self) -> Collection[PeerRecord]:
        """The others, looked up anew."""

    def seen(self) -> Collection[PeerRecord]:
        """The others, as they were looked up last."""

    def waits_for(self, what: str | None) -> None: ...

    def stands_aside(self) -> bool:
        """Train and exchange no more, until told to go on. False where that may not be now."""

    async def quiet(self) -> bool:
        """Whether the swap that was under way, which changes what would be replaced, is over."""

    async def adopts(self, state: LiveState) -> None: ...

    def goes_on(self) -> None: ...


def ahead(records: Collection[PeerRecord], own: int) -> list[str]:
    """Whose state is worth more than that of `own` rounds, which is worth more than a few rounds: nobody's, unless most
    are far ahead, as one record may lie. Of two the lower one counts, and one that is alone is believed. A newcomer
    asks everybody: the round in a record may be 20 s old, and the state itself says how far it is."""
    found = _under_way(records)
    least = own + CATCH_UP_ROUNDS if own else 0
    if not found or median_low([record.round for record in found]) < least:
        return []
    return [record.peer_id for record in found if record.round >= least]


def training(records: Collection[PeerRecord]) -> list[str]:
    return [record.peer_id for record in records if record.state in AT_WORK]


def _under_way(records: Collection[PeerRecord]) -> list[PeerRecord]:
    """Who trains, and where nobody does, who has come somewhere."""
    found = [record for record in records if record.state in AT_WORK]
    return found or [record for record in records if record.state in AT_REST]


def is_astray(apart_from: Sequence[str], rounds: int, others: Collection[str], me: str) -> bool:
    """Whether it is this node that stands apart, and not some other. `apart_from`: the partners of its swaps that
    diverged since it committed a round; `rounds`: how many ended since the first of them; `others`: who trains.

    Two partners who are strangers to each other do not agree by chance, and who is sound finds a partner before long.
    Where there is one other only, nobody can tell: one of the two turns to the other."""
    if not apart_from:
        return False
    if len({*apart_from}) > 1:
        return True
    if {*others} == {*apart_from}:
        return len(apart_from) >= DIVERGED_ROUNDS and apart_from[0] > me
    return rounds >= ALONE_ROUNDS


def coding(state_bytes: int, rate_bytes_s: float | None) -> Coding:
    """Half the bytes where the volunteer's rate would make all of them a long wait: what rounding changes is far less
    than what the replicas differ by."""
    return Coding.BF16 if rate_bytes_s and state_bytes / rate_bytes_s > LONG_DOWNLOAD_S else Coding.FP32


class CatchUp:
    """`wanted`: what would do, for a node that has nothing of its own yet; `first`: it joined by nobody."""

    def __init__(  # noqa: PLR0913
        self,
        node: CatchUpNode,
        peer_id: str,
        channel: Callable[[str], grpc.aio.Channel],
        wanted: choose_donor.Wanted,
        pace: Pace | None = None,
        *,
        first: bool = False,
    ) -> None:
        self._node = node
        self._first = first
        self._peer_id = peer_id
        self._channel = channel
        self._wanted = wanted
        self._pace = pace
        self._returning: asyncio.Task[None] | None = None
        self._apart: list[str] = []
        """The partners of rounds that ended as diverged since one was committed."""
        self._alone = 0
        """Rounds since the first of them."""

    async def arrive(self) -> None:
        """Before training begins. Raises SwarmUnreachable where others are there, but none gives its state."""
        await self._take()

    def after_pause(self) -> bool:
        """Whether a node that stood aside is too far behind to go on from where it was: it will be told to."""
        if not ahead(self._node.seen(), self._node.round or 1):
            return False
        self._return()
        return True

    def round_over(self, solo: str | None, partner: str | None) -> None:
        """`solo`: why, if it was not committed. Who is astray takes the state of a peer."""
        if solo is None:
            self._apart, self._alone = [], 0
        elif solo == "diverged" and partner is not None:
            self._apart = [*self._apart, partner][-_PARTNERS:]
        self._alone += bool(self._apart)
        others = training(self._node.seen())
        if self._returning or not others or not is_astray(self._apart, self._alone, others, self._peer_id):
            return
        if self._node.stands_aside():
            log.warning("standing apart from the others: taking the state of one of them")
            self._apart, self._alone = [], 0
            self._return(astray=True)

    def give_up(self) -> None:
        """Something else is to be done now: pause, or leave."""
        if self._returning:
            self._returning.cancel()
            self._returning = None

    def _return(self, *, astray: bool = False) -> None:
        async def take() -> None:
            if await self._node.quiet():
                await self._take(astray=astray)

        self._returning = asyncio.create_task(take())
        self._returning.add_done_callback(self._returned)

    def _returned(self, returning: asyncio.Task[None]) -> None:
        """Whatever came of it, the node trains on: unless something else is to be done by now."""
        if returning.cancelled() or returning is not self._returning:
            return
        match returning.exception():
            case None:
                pass
            case NolocoError() | OSError() as error:
                log.warning("going on from where it was: %s", error)
            case error:
                log.error("going on from where it was, after a fault of this node", exc_info=error)
        self._returning = None
        self._node.goes_on()

    async def _take(self, *, astray: bool = False) -> None:
        """`astray`: whoever trains will do, even at an earlier round."""
        node, own = self._node, self._node.round

        looks = 1 if own or self._first else LOOKS

        async def others() -> Others:
            """Whoever cannot look, because p2pd has died for one, does not take that for an empty swarm."""
            nonlocal looks
            while True:
                with suppress(NolocoError, OSError):
                    records = await node.look()
                    donors = training(records) if astray else ahead(records, own)
                    looks -= 1
                    if donors or looks <= 0:
                        return Others(donors, [record.peer_id for record in _under_way(records)])
                await asyncio.sleep(choose_donor.RETRY_S)

        wanted = replace(self._wanted, own_round=own, goes_back=astray)
        state = await choose_donor.take_state(self._channel, others, wanted, node.waits_for, pace=self._pace)
        if state is not None:
            await node.adopts(state)
