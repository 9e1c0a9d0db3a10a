"""What a newcomer has to find out before it trains: which run there is, and how far the others have come.

It asks and waits, with deadlines, and says what it waits for. What it fetches is checked by runs.py and statesync.py.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

import grpc

from noloco_node import names, runs, statesync
from noloco_node.donor import MAX_WAITING
from noloco_node.errors import Incompatible, NolocoError, PeerFault, PeerLost, PeerMisbehaved, SwarmUnreachable
from noloco_node.manifest import Signed
from noloco_node.statesync import Download, LiveState, Terms
from noloco_node.traffic import Pace
from noloco_node.wire.livestate import Coding

FIND_RUN_S = 60.0
"""For a rendezvous to learn of a run: its first node may be starting at this moment."""
TAKE_STATE_S = 300.0
"""For some peer to begin to give its state, and from one sign of progress to the next; a queue may be long."""
RETRY_S = 1.0
RESUME_TRIES = 3
"""For a donor whose stream broke to go on, before another one is asked for its own version."""
WITNESSES = 3
STALE_ROUNDS = 10
"""A donor so far behind the others is not the one to begin with."""

Channel = Callable[[str], grpc.aio.Channel]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


async def find_run(
    channel: Channel, rendezvous: Sequence[str], choose: Callable[[list[Signed], str], Signed], waits_for: Say
) -> Signed:
    """Ask the rendezvous nodes which run there is. `choose` is given what one of them knows, and its peer id."""
    waits_for("a run to be announced")
    failure: NolocoError = SwarmUnreachable("no bootstrap node answers: check the addresses, or try again later")
    try:
        async with asyncio.timeout(FIND_RUN_S):
            while True:
                for peer in rendezvous:
                    try:
                        known = await runs.ask(channel(peer))
                    except PeerFault as fault:
                        log.debug("%s does not say what it runs: %s", peer, fault)
                        continue
                    if known:
                        return choose(known, peer)
                    failure = Incompatible("no run is announced there: start its first node with --bootstrap, too")
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise failure from None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What would do."""

    terms: Terms
    numbers: int
    """fp32 numbers: two a parameter."""
    budget: int
    """Rounds of the run: nobody can be further."""
    own_round: int = 0
    """Nobody goes back."""
    coding: Coding = Coding.FP32


async def take_state(
    channel: Channel,
    donors: Callable[[], Awaitable[Sequence[str]]],
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
            while candidates := await donors():
                peer = choice.next(candidates)
                if peer is not None:
                    others = [other for other in candidates if other != peer and other not in choice.liars]
                    turn = _Turn(peer, channel, wanted, others, patience, waits_for)
                    try:
                        state = await statesync.fetch(channel(peer), wanted.terms, download, turn, pace)
                    except PeerFault as fault:
                        log.info("%s does not give its state (%s)", turn.name, fault)
                        choice.failed(peer, fault, begun=bool(download.done))
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
    """Whom to ask next: whoever has what was begun with, as long as it may come back; else anybody but liars."""

    def __init__(self) -> None:
        self.liars: set[str] = set()
        self.failure: PeerFault | None = None
        self._last: str | None = None
        self._tries_left = 0

    def next(self, candidates: Sequence[str]) -> str | None:
        honest = [peer for peer in candidates if peer not in self.liars]
        if not (self._tries_left and self._last in honest):
            fresh = [peer for peer in honest if peer != self._last]
            self._last, self._tries_left = random.choice(fresh or honest or [None]), RESUME_TRIES
        return self._last

    def failed(self, peer: str, fault: PeerFault, *, begun: bool) -> None:
        self.failure = fault
        if isinstance(fault, PeerMisbehaved):
            self.liars.add(peer)
        self._tries_left = self._tries_left - 1 if begun and isinstance(fault, PeerLost) else 0


class _Turn:
    """One donor's: says how far one is, renews the patience, and asks others whether that donor is far behind them."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        donor: str,
        channel: Channel,
        wanted: Wanted,
        others: Sequence[str],
        patience: asyncio.Timeout,
        waits_for: Say,
    ) -> None:
        self.name = names.name_of(donor)
        self._channel, self._wanted, self._others = channel, wanted, others
        self._patience, self._waits_for = patience, waits_for
        self._place = MAX_WAITING + 1
        self._headway = statesync.Headway()
        waits_for(f"state from {self.name}")

    def waits(self, place: int) -> None:
        if place < self._place:
            self._renew()
        self._place = min(place, self._place)
        self._waits_for(f"state from {self.name}" + (f", {place} before us" if place else ", which copies it"))

    async def begins(self, round: int) -> None:
        if round > self._wanted.budget:
            raise PeerMisbehaved("bad_round", f"{round}")
        if round < self._wanted.own_round:  # an honest donor's copy may be a few rounds old
            raise PeerFault("old_state", f"of round {round}")
        witnesses = random.sample(self._others, min(WITNESSES, len(self._others)))
        asked = (statesync.progress(self._channel(peer), self._wanted.terms) for peer in witnesses)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        rounds = [answer for answer in answers if isinstance(answer, int) and answer <= self._wanted.budget]
        if rounds and round < median_low(rounds) - STALE_ROUNDS:
            raise PeerMisbehaved("stale_state", f"of round {round}, where others are at {median_low(rounds)}")

    def has(self, done_bytes: int, total_bytes: int) -> None:
        self._renew()
        self._waits_for(f"state from {self.name}, {self._headway(done_bytes, total_bytes)}")

    def _renew(self) -> None:
        """A large state over a slow link takes hours."""
        self._patience.reschedule(asyncio.get_running_loop().time() + TAKE_STATE_S)
