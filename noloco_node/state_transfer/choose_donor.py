"""What a newcomer has to find out before it trains: which run there is, and how far the others have come.

It asks and waits, with deadlines, and says what it waits for. What it fetches is checked by peers/run_registry.py and
state_transfer/client.py.

Nobody's word alone decides how far the run is. A donor counts as far behind, or too far ahead, by the lower median of
what it says itself and what some others say who know. So two others must agree before a donor is too old. Where only
one other answers and the two contradict each other, the lower one is believed, whoever lies: that may cost rounds,
while a false high one would be the end of the run for this node. Where none answers, the donor is believed.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

import grpc

from noloco_node.base import peer_names
from noloco_node.errors import (
    PeerFault,
    PeerLost,
    PeerMisbehaved,
    PeerRefused,
    SwarmUnreachable,
)
from noloco_node.host.traffic import Pace
from noloco_node.state_transfer import client
from noloco_node.state_transfer.client import Download, LiveState, StateTerms
from noloco_node.state_transfer.server import MAX_WAITING
from noloco_node.wire.state_format import Coding

TAKE_STATE_S = 300.0
"""For some peer to begin to give its state, and from one sign of progress to the next; a queue may be long."""
QUEUE_S = 60.0
"""In one donor's queue without getting nearer, or until its copy is made, while there are others to ask. Twice as long
each time that it is that donor's turn again: when all are busy, it is the longest wait that gets there."""
RETRY_S = 1.0
RESUME_TRIES = 3
"""For a donor whose stream broke to go on, before another one is asked for its own version. They count anew whenever
something came: a relay may carry some bytes at a time."""
WITNESSES = 4
"""With the donor itself they are an odd number: more than half of them decide."""
STALE_ROUNDS = 10
"""A donor so far behind the others, or ahead of them, is not the one to begin with."""

Channel = Callable[[str], grpc.aio.Channel]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What would do."""

    terms: StateTerms
    numbers: int
    """fp32 numbers: two a parameter."""
    budget: int
    """Rounds of the run: nobody can be further."""
    own_round: int = 0
    """Of what it has by itself; 0: nothing."""
    coding: Coding = Coding.FP32
    goes_back: bool = False
    """Whether an earlier round would do: for who stands apart, however far it is."""


@dataclass(frozen=True, slots=True)
class Others:
    """Who is there, by peer id."""

    donors: Sequence[str]
    """Whose state is worth asking for."""
    witnesses: Sequence[str]
    """Who knows how far the run is."""


async def take_state(
    channel: Channel,
    look: Callable[[], Awaitable[Others]],
    wanted: Wanted,
    waits_for: Say,
    *,
    pace: Pace | None = None,
) -> LiveState | None:
    """The state of a peer that is under way, or None where nobody is: then there is nothing to catch up with. A node
    that has come somewhere by itself goes on with that, too, when all others are liars. Raises SwarmUnreachable."""
    waits_for("word of the others")
    choice, download = _Choice(), Download(wanted.numbers, wanted.coding)
    try:
        async with asyncio.timeout(TAKE_STATE_S) as patience:
            while (others := await look()).donors:
                peer = choice.next(others.donors)
                if peer is not None:
                    witnesses = [other for other in others.witnesses if other != peer and other not in choice.liars]
                    turn = _Turn(peer, channel, wanted, witnesses, patience, choice.queue_s(others.donors), waits_for)
                    before = download.root, download.done
                    try:
                        state = await client.fetch(channel(peer), wanted.terms, download, turn, pace)
                    except PeerFault as fault:
                        log.info("%s does not give its state (%s)", turn.name, fault)
                        came = (download.root, download.done) != before
                        choice.failed(peer, fault, begun=bool(download.done), came=came)
                    else:
                        log.info(
                            "took the state of %s at round %d (version %s)",
                            turn.name,
                            state.round,
                            download.root.hex()[:12],
                        )
                        return state
                elif wanted.own_round:
                    return None
                await asyncio.sleep(RETRY_S)
            return None
    except TimeoutError:
        why = f"no peer gave its state within {TAKE_STATE_S:g} s (the last one: {choice.failure}): try again later"
        raise SwarmUnreachable(why) from None


class _Choice:
    """Whom to ask next: whoever has what was begun with, as long as it may come back; else one of those whose turn it
    was least often, but no liars."""

    def __init__(self) -> None:
        self.liars: set[str] = set()
        self.failure: PeerFault | None = None
        self._last: str | None = None
        self._tries_left = 0
        self._turns: Counter[str] = Counter()

    def next(self, candidates: Sequence[str]) -> str | None:
        honest = self._honest(candidates)
        if not (self._tries_left and self._last in honest):
            least = min((self._turns[peer] for peer in honest), default=0)
            self._last = random.choice([peer for peer in honest if self._turns[peer] == least] or [None])
            self._tries_left = RESUME_TRIES
            if self._last:
                self._turns[self._last] += 1
        return self._last

    def queue_s(self, candidates: Sequence[str]) -> float | None:
        """How long to stand in the queue of the one whose turn it is; None where there is nobody else to ask."""
        turns = min(self._turns[self._last], 10) if self._last else 0
        return QUEUE_S * 2 ** (turns - 1) if len(self._honest(candidates)) > 1 else None

    def failed(self, peer: str, fault: PeerFault, *, begun: bool, came: bool) -> None:
        """`begun`: there is a part of its version here; `came`: more than before it was asked."""
        self.failure = fault
        if isinstance(fault, PeerMisbehaved):
            self.liars.add(peer)
        tries = RESUME_TRIES if came else self._tries_left - 1
        self._tries_left = tries if begun and isinstance(fault, PeerLost) else 0

    def _honest(self, candidates: Sequence[str]) -> list[str]:
        return [peer for peer in candidates if peer not in self.liars]


class _Turn:
    """One donor's: says how far one is, renews the patience, and asks others how far the run is."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        donor: str,
        channel: Channel,
        wanted: Wanted,
        witnesses: Sequence[str],
        patience: asyncio.Timeout,
        queue_s: float | None,
        waits_for: Say,
    ) -> None:
        self.name = peer_names.name_of(donor)
        self._channel, self._wanted, self._witnesses = channel, wanted, witnesses
        self._patience, self._queue_s, self._waits_for = patience, queue_s, waits_for
        self._place, self._since = MAX_WAITING + 1, _now()
        self._headway = client.DownloadProgress()
        waits_for(f"state from {self.name}")

    def waits(self, place: int) -> None:
        if place < self._place:
            self._place, self._since = place, _now()
            self._renew()
        elif self._queue_s is not None and _now() - self._since > self._queue_s:
            raise PeerRefused("busy")
        self._waits_for(f"state from {self.name}" + (f", {place} before us" if place else ", which copies it"))

    async def begins(self, round: int) -> None:
        if round > self._wanted.budget:
            raise PeerMisbehaved("bad_round", f"{round}")
        if round < self._wanted.own_round and not self._wanted.goes_back:
            raise PeerFault("old_state", f"of round {round}")  # an honest donor's copy may be a few rounds old
        middle = median_low([round, *await self._heard()])
        if abs(round - middle) > STALE_ROUNDS:  # no proof of a lie: a witness may be the liar
            why = "stale_state" if round < middle else "far_ahead"
            raise PeerFault(why, f"of round {round}, where others are at {middle}")

    def has(self, done_bytes: int, total_bytes: int) -> None:
        self._renew()
        self._waits_for(f"state from {self.name}, {self._headway(done_bytes, total_bytes)}")

    async def _heard(self) -> list[int]:
        """The rounds in which some others say they are."""
        some = random.sample(self._witnesses, min(WITNESSES, len(self._witnesses)))
        asked = (client.progress(self._channel(peer), self._wanted.terms) for peer in some)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, int) and answer <= self._wanted.budget]

    def _renew(self) -> None:
        """A large state over a slow link takes hours."""
        self._patience.reschedule(_now() + TAKE_STATE_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
