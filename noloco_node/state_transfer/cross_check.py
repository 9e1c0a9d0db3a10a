"""Whom of several donors to ask first, and whether the state of one may be kept.

A node asks several peers, of different places first, for the same random blocks of their slow weights. Honest replicas
are close to each other; random weights, and those of another model, stand apart. But liars who agree may be the most,
and a sample may be another's: so samples only give the order. What a state is worth is measured here, as its loss on
held-out data (`doubt`): against this node's own weights, and against what the donor says of itself.

Knows no model and no tensor: weights are bytes here.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from statistics import median_low

import grpc
import numpy as np
from numpy.typing import NDArray

from noloco_node.base import peer_names, places
from noloco_node.core.verdict import Trial
from noloco_node.errors import PeerFault, PeerMisbehaved
from noloco_node.host.traffic import Traffic
from noloco_node.state_transfer import client
from noloco_node.state_transfer.client import LiveState, StateTerms
from noloco_node.wire import messages as wire

BLOCKS = 64
"""Of 256 parameters each, 64 KiB from each donor: its distance to another is then known to a hundredth."""
ASKED = 7
SOON_S = 5.0
"""When some have answered, the others are not waited for any longer."""
CLOSE = 0.4
"""Distance relative to the norm. Replicas of one run are 0.01 to 0.35 apart in their first rounds, with a fifth of the
swaps missing, and 0.1 later; random weights are 1.2 to 1.4 away from them."""
BETTER = 0.01
"""By so much of its loss a state must be better than new weights."""
WORSE = 0.1
"""By so much it may be worse than a node's own weights, as after a rest."""
NOISE = 0.02
"""Beside these, by so much of what new weights have: where a run has learned nearly all that there is, the losses of
honest replicas differ by a factor of two, and by 0.01 of that."""
WORSE_THAN_CLAIMED, CLAIM_ROUNDS = 0.25, 10
"""By so much its loss may be above what its donor says of itself, for a state at most so many rounds later."""
SPOILED, MOST_ADDED = 0.25, 1.0
"""By so much of its loss the donor's momentum may make it worse at the next boundary, and so long it may be relative to
the weights: a round moves fresh weights by up to 0.7 of their norm."""

log = logging.getLogger(__name__)

Weights = NDArray[np.float32]


def doubt(losses: Trial, claimed: float | None, *, new: bool, agreed: bool) -> str | None:
    """Why a state is not to be kept. `claimed`: its donor's own loss; `new`: this node has new weights only; `agreed`:
    nobody has other weights, so that a run which does not learn can be joined too."""
    own, theirs = losses.own, losses.theirs
    noise = NOISE * abs(losses.new) if math.isfinite(losses.new) else 0.0
    if not (math.isfinite(theirs) and math.isfinite(losses.later)):
        return "nonfinite"
    if claimed is not None and theirs > claimed + WORSE_THAN_CLAIMED * abs(claimed) + noise:
        return "worse_than_claimed"
    if losses.later > theirs + SPOILED * abs(theirs) + noise or not losses.added <= MOST_ADDED:
        return "spoiled_momentum"
    if not math.isfinite(own):
        return None
    if new:
        return None if agreed or theirs < own - BETTER * abs(own) else "no_better_than_new"
    return "worse_than_own" if theirs > own + WORSE * abs(own) + noise else None


def distance(one: Weights, other: Weights) -> float:
    """0 for the same weights, about 1.4 for random ones."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    longest = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / longest if longest else 0.0


class CrossCheck:
    """The samples of one catching up."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        terms: StateTerms,
        parameters: int,
        channel: Callable[[str], grpc.aio.Channel],
        place_of: Callable[[str], str],
        own: Callable[[Sequence[int]], Awaitable[bytes]],
        pace: Traffic | None = None,
    ) -> None:
        """`own`: those blocks of this node's weights."""
        count = -(-parameters // wire.BLOCK)
        self._blocks = sorted(random.sample(range(count), min(BLOCKS, count)))
        cuts = [(block * wire.BLOCK, min(parameters, (block + 1) * wire.BLOCK)) for block in self._blocks]
        self._size = 4 * sum(end - start for start, end in cuts)
        self._cuts = cuts
        self._terms, self._channel, self.place_of, self._pace = terms, channel, place_of, pace
        self._ask_own = own
        self._own: Weights | None = None
        self._asked: set[str] = set()
        self._silent: set[str] = set()
        """Those that were asked and sent no sample."""
        self._claims: dict[str, wire.StateSample] = {}
        self._weights: dict[str, Weights] = {}
        self._refuted: list[Weights] = []
        """Samples of states that were not worth keeping."""

    # ---- asking ----
    async def ask(self, peers: Collection[str]) -> None:
        """Some of them, until ASKED have sent a sample that nothing speaks against."""
        if self._own is None:
            self._own = np.frombuffer(await self._ask_own(self._blocks), np.float32)
        believed = [peer for peer in self._weights if peer in peers and not self.doubted(peer)]
        left = {peer: self.place_of(peer) for peer in peers if peer not in self._asked}
        some = places.several(random, left, max(0, ASKED - len(believed)))
        if not some:
            return
        self._asked.update(some)
        self._silent.update(some)
        asking = [asyncio.create_task(self._ask(peer)) for peer in some]
        try:
            await asyncio.wait(asking, timeout=SOON_S)
            if not self._weights:
                await asyncio.wait(asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*(task for task in asking if not task.done()), return_exceptions=True)
        for task in asking:
            if not task.cancelled():
                task.result()  # an error of our own
        alike = {peer_names.name_of(peer): self.places_alike(peer) for peer in some}
        log.debug("places whose weights are alike, by donor: %s", alike)

    async def _ask(self, peer: str) -> None:
        try:
            sample = await client.sample(self._channel(peer), self._terms, self._blocks, self._size, self._pace)
            weights = np.frombuffer(sample.blocks, np.float32)
            if not np.isfinite(weights).all():
                raise PeerMisbehaved("nonfinite", "sample")
        except PeerFault as fault:
            log.debug("no sample of %s: %s", peer, fault)
        else:
            self._silent.discard(peer)
            self._claims[peer], self._weights[peer] = sample, weights

    # ---- what follows ----
    def places_alike(self, peer: str) -> int:
        """In how many places weights like this peer's are, its own included; 0: it sent no sample."""
        mine = self._weights.get(peer)
        return 0 if mine is None else len({self.place_of(other) for other in self._near(mine)})

    def doubted(self, peer: str) -> bool:
        """Whether it stood with one whose state was not worth keeping."""
        mine = self._weights.get(peer)
        return mine is not None and any(distance(mine, other) <= CLOSE for other in self._refuted)

    def refute(self, state: LiveState) -> None:
        """This state was not worth keeping: who stood with it is asked after the others."""
        self._refuted.append(self._cut(state))

    def claimed(self, peer: str, state: LiveState) -> float | None:
        """The loss that the donor says it has, where that was said of this state, or one a little earlier."""
        claim = self._claims.get(peer)
        return claim.eval_loss if claim and -1 <= state.round - claim.round <= CLAIM_ROUNDS else None

    def agreed(self, state: LiveState) -> bool:
        """Whether everybody who was asked has such weights."""
        return not self._silent and len(self._near(self._cut(state))) == len(self._weights)

    def is_own(self, state: LiveState) -> bool:
        """Whether these are nearly the weights that this node has."""
        return self._own is not None and distance(self._cut(state), self._own) <= CLOSE

    def has_not_diverged(self, partners: Collection[str]) -> bool:
        """Whether this node's own weights are like those of an earlier partner, or like those in most places."""
        near = self._near(self._own) if self._own is not None else []
        most = max((self.places_alike(peer) for peer in self._weights), default=0)
        return any(peer in partners or self.places_alike(peer) == most for peer in near)

    def _near(self, weights: Weights) -> list[str]:
        return [peer for peer, other in self._weights.items() if distance(weights, other) <= CLOSE]

    def _cut(self, state: LiveState) -> Weights:
        whole = np.frombuffer(state.data, np.float32)
        return np.concatenate([whole[start:end] for start, end in self._cuts] or [whole[:0]])


def middle_round(rounds: Mapping[str, int], place_of: Callable[[str], str]) -> int:
    """How far the run is, as peers say: the lower median. A place has one vote where there are three or more of them,
    and two where there are two: many identities in one place are not many witnesses. Those over a relay have none
    where there are others in three places: a host can add a relay to its own place. Where there are fewer, they may as
    well be honest, and one liar would decide without them. Of one place the earlier ones in `rounds` count."""
    by_place: dict[str, list[int]] = {}
    for peer, round in rounds.items():
        by_place.setdefault(place_of(peer), []).append(round)
    if len(by_place) > 3:
        by_place.pop(places.RELAYED, None)
    votes_each = {1: len(rounds), 2: 2}.get(len(by_place), 1)
    return median_low([vote for votes in by_place.values() for vote in votes[:votes_each]])
