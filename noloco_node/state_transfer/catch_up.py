"""Catching up: when a node replaces its weights by a peer's state, and which peer's.

A node does so when it is new, after a long absence or pause, and when its weights have diverged from everybody else's.
Which peers' state is worth having is decided here, from presence records; state_transfer/choose_donor.py picks one of
them and downloads. Training and rounds are paused meanwhile: node/lifecycle.py says when this starts and stops.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median_low
from typing import Protocol

import grpc

from noloco_node.base.states import AT_REST, AT_WORK
from noloco_node.errors import NolocoError
from noloco_node.host.traffic import Pace
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import choose_donor
from noloco_node.state_transfer.choose_donor import Others
from noloco_node.state_transfer.client import LiveState
from noloco_node.wire.state_format import Coding

CATCH_UP_ROUNDS = 10
"""A node that is so far behind, after a restart or a pause, fetches a peer's state."""
DIVERGED_ROUNDS = 3
"""Diverged swaps without a committed round between them that are not by chance, where only two nodes train."""
ALONE_ROUNDS = 10
"""A node that commits no round for so many after a diverged swap is assumed to have diverged."""
LOOKS = 3
"""How often a joining node must have found no peer before it begins with new weights: where others have trained for
long, its swaps with them would all diverge."""
LONG_DOWNLOAD_S = 1800.0
"""Where a state would take longer at the volunteer's --max-download, it is fetched in bf16."""
_PARTNERS = 32  # of diverged swaps, that are remembered

log = logging.getLogger(__name__)


class CatchUpNode(Protocol):
    """The part of the node that is used."""

    @property
    def round(self) -> int: ...

    async def look(self) -> Collection[PeerRecord]:
        """The other nodes of the run, looked up now."""

    def seen(self) -> Collection[PeerRecord]:
        """The other nodes, as they were looked up last."""

    def waits_for(self, what: str | None) -> None: ...

    async def swap_is_over(self) -> bool:
        """Waits a little for the swap under way, whose corrections would still change the weights."""

    async def adopt(self, state: LiveState) -> None: ...

    def caught_up(self) -> None:
        """Called at the end of each attempt, failed or not."""


def ahead(records: Collection[PeerRecord], own: int) -> list[str]:
    """Whose state to ask for: those CATCH_UP_ROUNDS ahead of `own`, but nobody unless the (lower) median is so far
    ahead, as one record may lie. A single record is believed. A new node (own = 0) may ask everybody: a record may be
    20 s old, and the state itself says its round."""
    found = _under_way(records)
    least = own + CATCH_UP_ROUNDS if own else 0
    if not found or median_low([record.round for record in found]) < least:
        return []
    return [record.peer_id for record in found if record.round >= least]


def training(records: Collection[PeerRecord]) -> list[str]:
    return [record.peer_id for record in records if record.state in AT_WORK]


def _under_way(records: Collection[PeerRecord]) -> list[PeerRecord]:
    """Those that train; where none does, those that have weights."""
    found = [record for record in records if record.state in AT_WORK]
    return found or [record for record in records if record.state in AT_REST]


def has_diverged(partners: Sequence[str], rounds: int, others: Collection[str], me: str) -> bool:
    """Whether it is this node that diverged, and not its partner. `partners`: of its diverged swaps since it committed
    a round; `rounds`: how many rounds ended since the first of them; `others`: who trains.

    Two partners have hardly both diverged, and a node that has not soon finds a partner that has not. Where there is
    only one other node, neither can know: the one with the higher peer id fetches the other's state."""
    if not partners:
        return False
    if len({*partners}) > 1:
        return True
    if {*others} == {*partners}:
        return len(partners) >= DIVERGED_ROUNDS and partners[0] > me
    return rounds >= ALONE_ROUNDS


def coding(state_bytes: int, rate_bytes_s: float | None) -> Coding:
    """bf16, half the bytes, for a slow link: rounding changes far less than what replicas differ by."""
    return Coding.BF16 if rate_bytes_s and state_bytes / rate_bytes_s > LONG_DOWNLOAD_S else Coding.FP32


class CatchUp:
    """`wanted`: which state a node without weights accepts; `first`: this node has no bootstrap address, so that
    seeing nobody is normal."""

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
        self._task: asyncio.Task[None] | None = None
        self._diverged_from: list[str] = []
        """The partners of diverged swaps since a round was committed."""
        self._rounds = 0
        """How many rounds ended since the first of them."""

    async def fetch_first_state(self) -> None:
        """Before training begins. Raises SwarmUnreachable where there are other nodes, but none sends its state."""
        await self._take()

    def is_behind(self) -> bool:
        """Whether this node is too far behind to go on with its own weights after a pause."""
        return bool(ahead(self._node.seen(), self._node.round or 1))

    def round_over(self, solo: str | None, partner: str | None) -> bool:
        """`solo`: why, if it was not committed. Returns whether this node's weights are assumed to have diverged."""
        if solo is None:
            self._diverged_from, self._rounds = [], 0
        elif solo == "diverged" and partner is not None:
            self._diverged_from = [*self._diverged_from, partner][-_PARTNERS:]
        self._rounds += bool(self._diverged_from)
        others = training(self._node.seen())
        return bool(others) and has_diverged(self._diverged_from, self._rounds, others, self._peer_id)

    def start(self, *, diverged: bool) -> None:
        """Catch up in the background; `caught_up` follows. `diverged`: an earlier round than its own will do too."""
        if diverged:
            log.warning("this node's weights have diverged from the others': fetching a peer's state")
            self._diverged_from, self._rounds = [], 0
        self._task = asyncio.create_task(self._run(diverged=diverged))
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """No `caught_up` follows."""
        if self._task:
            self._task.cancel()
            self._task = None

    async def _run(self, *, diverged: bool) -> None:
        if await self._node.swap_is_over():
            await self._take(diverged=diverged)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task is not self._task:
            return
        match task.exception():
            case None:
                pass
            case NolocoError() | OSError() as error:
                log.warning("going on with this node's own weights: %s", error)
            case error:
                log.error("going on with this node's own weights, after an internal error", exc_info=error)
        self._task = None
        self._node.caught_up()

    async def _take(self, *, diverged: bool = False) -> None:
        node, own = self._node, self._node.round
        looks = 1 if own or self._first else LOOKS

        async def others() -> Others:
            """A look that fails, as when p2pd has just died, is no sign of an empty swarm."""
            nonlocal looks
            while True:
                with suppress(NolocoError, OSError):
                    records = await node.look()
                    donors = training(records) if diverged else ahead(records, own)
                    looks -= 1
                    if donors or looks <= 0:
                        return Others(donors, [record.peer_id for record in _under_way(records)])
                await asyncio.sleep(choose_donor.RETRY_S)

        wanted = replace(self._wanted, own_round=own, goes_back=diverged)
        state = await choose_donor.fetch_state(self._channel, others, wanted, node.waits_for, pace=self._pace)
        if state is not None:
            await node.adopt(state)
