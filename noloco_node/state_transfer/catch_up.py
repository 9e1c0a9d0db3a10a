"""Catching up: when a node replaces its weights by a peer's state, and which peer's.

A node does so when it is new, after a long absence, pause or standstill, and when its weights have diverged from
everybody else's. That they have is no hearsay: only what its own codec found counts, with several partners that it has
committed rounds with before. It then never takes the state of one it diverged from: two nodes alone that diverged keep
what they have, and `health` says what to do.

Which peers' state is worth having is decided here, from presence records; state_transfer/choose_donor.py picks one of
them and downloads, state_transfer/cross_check.py says whether to keep what came. Training and rounds are paused
meanwhile: node/lifecycle.py says when this starts and stops.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import grpc

from noloco_node.base.latest import remember
from noloco_node.base.places import RELAYED
from noloco_node.base.states import AT_REST, AT_WORK, ON_THE_WAY
from noloco_node.errors import NolocoError
from noloco_node.host.traffic import Traffic
from noloco_node.peers.directory import SILENT
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import choose_donor, cross_check
from noloco_node.state_transfer.choose_donor import Checks, Others
from noloco_node.state_transfer.client import LiveState
from noloco_node.state_transfer.copies import StateOwner
from noloco_node.state_transfer.cross_check import CrossCheck, middle_round
from noloco_node.views.status import Health
from noloco_node.wire.state_format import Coding

CATCH_UP_ROUNDS = 10
"""A node that is so far behind, after a restart or a pause, fetches a peer's state."""
SEVERAL = 2
"""Partners: two have hardly both diverged, and a node that has not soon finds a partner that has not either."""
DIVERGED_ROUNDS = 3
"""Diverged swaps without a committed round between them that `health` speaks of."""
LOOKS = 3
"""How often in a row a joining node must have found no peer before it begins with new weights: where others have
trained for long, its swaps with them would all diverge."""
FAILING_S = 30.0
"""How long look-ups may fail: as long as another network daemon takes to be there, also on a busy machine."""
LONG_DOWNLOAD_S = 1800.0
"""Where a state would take longer at the volunteer's --max-download, it is fetched in bf16."""
DIVERGED = "diverged"
"""Why a round was solo: this node's own codec found it (rounds/swap.py); what a partner says has another word."""
_PARTNERS = 256  # that are remembered

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


def ahead(records: Collection[PeerRecord], own: int, place_of: Callable[[str], str]) -> list[str]:
    """Whose state to ask for: those CATCH_UP_ROUNDS ahead of `own`, but nobody unless the middle is so far ahead, as
    one record may lie. A single record is believed. A new node (own = 0) may ask everybody: a record may be 20 s old,
    and the state itself says its round."""
    found = _under_way(records)
    least = own + CATCH_UP_ROUNDS if own else 0
    if not found or middle_round({record.peer_id: record.round for record in found}, place_of) < least:
        return []
    return [record.peer_id for record in found if record.round >= least]


def training(records: Collection[PeerRecord]) -> list[str]:
    return [record.peer_id for record in records if record.state in AT_WORK]


def _under_way(records: Collection[PeerRecord]) -> list[PeerRecord]:
    """Those that train; where none does, those that have weights."""
    found = [record for record in records if record.state in AT_WORK]
    return found or [record for record in records if record.state in AT_REST]


def has_diverged(
    diverged_from: Collection[str], partners: Collection[str], others: Collection[str], place_of: Callable[[str], str]
) -> bool:
    """Whether it is this node that diverged. `diverged_from`: partners of diverged swaps since it committed a round;
    `partners`: those that it ever committed with; `others`: who trains.

    A node that has committed with nobody, as a newcomer whose state was bad, counts the places of those it diverged
    from, without RELAYED, which a host can add to its own; where all that train are in one place, as on one machine,
    their number."""
    if partners:
        return len({*diverged_from} & {*partners}) >= SEVERAL
    if len({place_of(peer) for peer in (*others, *diverged_from)}) > 1:
        return len({place_of(peer) for peer in diverged_from} - {RELAYED}) >= SEVERAL
    return len(diverged_from) >= SEVERAL


def coding(state_bytes: int, rate_bytes_s: float | None) -> Coding:
    """bf16, half the bytes, for a slow link: rounding changes far less than what replicas differ by."""
    return Coding.BF16 if rate_bytes_s and state_bytes / rate_bytes_s > LONG_DOWNLOAD_S else Coding.FP32


class CatchUp:
    """`wanted`: which state a node without weights accepts; `first`: this node has no bootstrap address, so that
    seeing nobody is normal; `begins`: it may begin with the run's first weights, else it needs somebody's; `resumed`:
    it goes on from a checkpoint, perhaps of the first round; `same_data`: everybody's held-out data are the same, so
    that losses can be compared; `place_of`: where a peer is (base/places.py)."""

    def __init__(  # noqa: PLR0913
        self,
        node: CatchUpNode,
        owner: StateOwner,
        channel: Callable[[str], grpc.aio.Channel],
        wanted: choose_donor.Wanted,
        pace: Traffic | None = None,
        *,
        first: bool = False,
        begins: bool = True,
        resumed: bool = False,
        same_data: bool = True,
        place_of: Callable[[str], str] = lambda peer: peer,
    ) -> None:
        self._node, self._owner = node, owner
        self._first, self._begins, self._same_data, self._resumed = first, begins, same_data, resumed
        self._channel = channel
        self.wanted = wanted
        self._pace = pace
        self._place_of = place_of
        self._task: asyncio.Task[None] | None = None
        self._partners: dict[str, None] = {}
        """Those that it has committed rounds with; the latest last."""
        self._diverged_from: dict[str, None] = {}
        """The partners of diverged swaps since a round was committed, or since divergence was acted upon."""
        self._apart: dict[str, None] = {}
        """All that it diverged from and has not committed with since: it does not take their states."""
        self._diverged_rounds = 0
        """In a row, other solo rounds left out."""

    async def fetch_first_state(self) -> bool:
        """Before training begins; whether there was one. Raises SwarmUnreachable where this node has no weights of the
        run, and there are other nodes, but none sends its state."""
        try:
            return await self._take()
        except (NolocoError, OSError) as error:
            if not self._resumed:
                raise
            log.warning("going on with this node's own weights: %s", error)
            return False

    def is_behind(self) -> bool:
        """Whether this node is too far behind to go on with its own weights after a pause."""
        return bool(ahead(self._node.seen(), self._node.round or 1, self._place_of))

    def round_over(self, solo: str | None, partner: str | None) -> bool:
        """`solo`: why, if it was not committed. Returns whether this node's weights are assumed to have diverged."""
        if solo is None:
            self._diverged_from.clear()
            self._diverged_rounds = 0
            if partner is not None:
                self._apart.pop(partner, None)
                remember(self._partners, partner, None, _PARTNERS)
        elif solo == DIVERGED and partner is not None and self._task is None:
            self._diverged_rounds += 1
            remember(self._diverged_from, partner, None, _PARTNERS)
            remember(self._apart, partner, None, _PARTNERS)
        others = training(self._node.seen())
        return bool(others) and has_diverged(self._diverged_from, self._partners, others, self._place_of)

    def health(self) -> tuple[Health, ...]:
        if self._diverged_rounds < DIVERGED_ROUNDS:
            return ()
        text = f"weights: the last {self._diverged_rounds} swaps failed, too far apart from the partner"
        remedy = (
            "where the others swap with each other, stop this node, remove the run's folder `checkpoints` from its "
            "home and join again: it then takes a peer's weights. Where nobody does, do so on one node"
        )
        return (Health("warning", text, remedy),)

    def start(self, *, diverged: bool) -> None:
        """Catch up in the background; `caught_up` follows. `diverged`: an earlier round than its own will do too."""
        if diverged:
            log.warning("this node's weights have diverged from the others': fetching a peer's state")
            self._diverged_from.clear()
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

    async def _take(self, *, diverged: bool = False) -> bool:
        node, own = self._node, self._node.round or int(self._resumed)
        looks, empty, loop = 1 if own or self._first else LOOKS, 0, asyncio.get_running_loop()
        failing_since: float | None = None
        terms, parameters = self.wanted.terms, self.wanted.numbers // 2
        samples = CrossCheck(terms, parameters, self._channel, self._place_of, self._sample, self._pace)

        async def others() -> Others:
            """A look that fails, as when p2pd has just died, is no sign of an empty swarm. A node with weights of its
            own goes on with them after FAILING_S."""
            nonlocal empty, failing_since
            while True:
                try:
                    records = await node.look()
                except (NolocoError, OSError) as error:
                    node.waits_for(choose_donor.records(error))
                    failing_since = failing_since or loop.time()
                    if own and loop.time() > failing_since + FAILING_S:
                        why = str(error) or SILENT
                        log.warning("going on with this node's own weights, as nobody says who is in the run: %s", why)
                        return Others((), ())
                else:
                    failing_since = None
                    donors = training(records) if diverged else ahead(records, own, self._place_of)
                    donors = [donor for donor in donors if donor not in self._apart]
                    waits = not (own or self._begins) and any(record.state in ON_THE_WAY for record in records)
                    # the run's first node may read data for minutes before it has weights, and a donor start again
                    empty = 0 if donors else empty + (not waits)
                    if donors or empty >= looks:
                        witnesses = [record.peer_id for record in _under_way(records)]
                        versions = frozenset(record.version for record in records if record.peer_id in donors)
                        return Others(donors, witnesses, versions)
                await asyncio.sleep(choose_donor.RETRY_S)

        async def judge(donor: str, state: LiveState) -> str | None:
            losses = await asyncio.wrap_future(self._owner.try_state(state.data))
            if not math.isnan(losses.own):  # else nothing could be measured, as in a stage before micro-batches come
                log.info("held-out loss: %.4g here, %.4g with the state that came", losses.own, losses.theirs)
            near = samples.is_own(state) and losses.theirs <= losses.own + cross_check.BETTER * abs(losses.own)
            agreed = near or samples.agreed(state)
            claimed = samples.claimed(donor, state) if self._same_data else None
            return cross_check.doubt(losses, claimed, new=not own, agreed=agreed)

        if diverged and await self._has_not_diverged(samples, [r.peer_id for r in _under_way(node.seen())]):
            log.info("this node's weights are like an earlier partner's: it keeps them")
            return False
        self.wanted.own_round, self.wanted.goes_back = own, diverged
        checks, say = Checks(samples, judge), node.waits_for
        state = await choose_donor.fetch_state(self._channel, others, self.wanted, say, checks, pace=self._pace)
        if state is not None:
            await node.adopt(state)
            self._apart.clear()
            self._diverged_from.clear()
            self._diverged_rounds = 0
        return state is not None

    async def _sample(self, blocks: Sequence[int]) -> bytes:
        return (await asyncio.wrap_future(self._owner.sample(blocks)))[1]

    async def _has_not_diverged(self, samples: CrossCheck, there: Collection[str]) -> bool:
        """Asks those first that it has committed with. A codec whose memory of ranges was spoiled finds divergence
        where there is none."""
        await samples.ask([peer for peer in there if peer in self._partners])
        await samples.ask(there)
        return samples.has_not_diverged(self._partners)
