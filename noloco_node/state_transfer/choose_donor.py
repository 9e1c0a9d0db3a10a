"""Fetches the state of one of several donors: which to ask, how long to queue, whether to believe its round.

What is fetched is checked by state_transfer/client.py, and what it is worth by state_transfer/cross_check.py. No single
peer's answer decides how far the run is. A state counts as stale, or as too far ahead, by the lower median of the
rounds that its donor and up to WITNESSES other peers answer that they are in, drawn by place first: an honest donor may
send a copy that is old. So two others must agree before an honest donor is refused. Where one other peer answers and
the two contradict each other, the lower round is believed, whichever is wrong: that may cost rounds, while a false high
round would end the run for this node. Where none answers, the donor is believed.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from noloco_node.base import peer_names, places
from noloco_node.errors import Incompatible, PeerFault, PeerLost, PeerMisbehaved, SwarmUnreachable
from noloco_node.host.traffic import Traffic
from noloco_node.peers.directory import SILENT
from noloco_node.state_transfer import client
from noloco_node.state_transfer.client import Download, LiveState, StateTerms
from noloco_node.state_transfer.cross_check import CrossCheck, middle_round
from noloco_node.state_transfer.server import MAX_WAITING
from noloco_node.state_transfer.slow_donors import SlowDonors
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.wire.messages import Code
from noloco_node.wire.state_format import Coding, fragment_bytes

TAKE_STATE_S = 300.0
"""Longest wait for a peer to begin to send its state, and between two signs of progress; a queue may be long."""
QUEUE_S = 60.0
"""Wait in one donor's queue without moving up, or for its copy, while there are other donors. Doubles each time
that this donor is asked: when all donors are busy, only a long wait reaches the head of a queue."""
TOO_SLOW, LONG_QUEUE = "too_slow", "long_queue"
"""Why this node itself leaves a donor."""
RETRY_S = 1.0
RESUME_TRIES = 3
"""Tries to resume a broken stream before another donor is asked for its version. The count restarts whenever more
arrived than this donor ever sent: a relay may carry a few bytes at a time."""
MOST_BREAKS = 8
"""A donor that breaks off so often after a sign of progress could do so for ever: from then on only complete fragments
are progress, beyond the most that it ever came to. A relay breaks a long download a few times."""
WITNESSES = 4
"""With the donor itself they are an odd number: more than half of them decide."""
INCOMPATIBLE_S = 15.0
"""A joining node that every donor refuses as incompatible for so long is of another version than they are. One refusal
is no proof: the donor whose record came first may be the one that differs, or lie."""
STALE_ROUNDS = 10
"""A donor so far behind the others, or ahead of them, is refused."""

RECORDS = "the records of other nodes"

Channel = Callable[[str], grpc.aio.Channel]
Judge = Callable[[str, LiveState], Awaitable[str | None]]
"""Why the state of a donor is not to be kept, after all of it has come; None: it is."""
Say = Callable[[str], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Wanted:
    """Which state is accepted."""

    terms: StateTerms
    numbers: int
    """Count of fp32 numbers: two a parameter."""
    budget: int
    """Rounds of the run: no state can be of a later one. Its author may give it more while a state is fetched."""
    own_round: int = 0
    """The round of this node's own weights; 0: it has none."""
    coding: Coding = Coding.FP32
    goes_back: bool = False
    """Whether an earlier round would do too: for a node that has diverged."""


@dataclass(frozen=True, slots=True)
class Others:
    """Other nodes of the run, by peer id."""

    donors: Sequence[str]
    """Peers whose state is worth asking for."""
    witnesses: Sequence[str]
    """Peers that can say how far the run is."""
    versions: frozenset[str] = frozenset()
    """That the donors say they have."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What decides among donors, beside their answers."""

    samples: CrossCheck
    judge: Judge


async def fetch_state(  # noqa: PLR0913
    channel: Channel,
    look: Callable[[], Awaitable[Others]],
    wanted: Wanted,
    waits_for: Say,
    checks: Checks,
    *,
    pace: Traffic | None = None,
) -> LiveState | None:
    """A donor's state that `checks` accept; None where there is no donor, or where this node has weights of its own and
    every donor sent wrong data. Raises SwarmUnreachable, Incompatible."""
    waits_for(RECORDS)
    choice, download = _Choice(checks), Download(wanted.numbers, wanted.coding)
    try:
        async with asyncio.timeout(TAKE_STATE_S) as patience:
            while (others := await look()).donors:
                await checks.samples.ask(others.donors)
                peer = choice.next(others.donors)
                if peer is not None:
                    witnesses = [w for w in others.witnesses if w != peer and w not in choice.misbehaved]
                    choice.begins(others.donors, peer)
                    queue_s, before = choice.queue_s(others.donors), patience.when()
                    attempt = _Attempt(peer, channel, wanted, witnesses, patience, queue_s, choice, waits_for, checks)
                    try:
                        state = await client.fetch(channel(peer), wanted.terms, download, attempt, pace)
                        await attempt.judge(state)
                    except PeerFault as fault:
                        log.info("%s does not send its state (%s)", attempt.name, fault)
                        if attempt.refuted:
                            del state  # two do not fit into memory
                            download = Download(wanted.numbers, wanted.coding)
                        choice.failed(peer, fault, download.done_bytes, renewed=patience.when() != before)
                        if not wanted.own_round and choice.incompatible_s(others.donors) > INCOMPATIBLE_S:
                            raise Incompatible(_other_version(others.versions)) from fault
                    else:
                        log.info(
                            "received the state of %s at round %d (version %s)",
                            attempt.name,
                            state.round,
                            download.root.hex()[:12],
                        )
                        return state
                elif wanted.own_round:
                    return None
                await asyncio.sleep(RETRY_S)
            return None
    except TimeoutError:
        waited = f"{TAKE_STATE_S:g} s"
        why = f"no peer sent its state within {waited} (the last one: {choice.outcome}): try again later"
        still = (
            f"the other nodes of the run are still starting after {waited}, or cannot be found: try again when one of "
            "them trains"
        )
        raise SwarmUnreachable(why if choice.outcome else still) from None


def records(error: BaseException) -> str:
    """What is waited for where a look-up of other nodes failed."""
    return f"{RECORDS} ({str(error) or SILENT})"


def _other_version(versions: frozenset[str]) -> str:
    return (
        "every node of the run that has weights refuses this one as incompatible: this is version "
        f"{VERSION} with protocol {PROTOCOL}, they say {', '.join(sorted(versions))}. Install "
        "their version, with the libraries that its pyproject.toml names; where a script brings the model, make it the "
        "same as theirs"
    )


class _Choice:
    """Which donor to ask next: the one whose download was begun, while it may resume; else one of those that were asked
    least often, and of these one whose weights most places have. Donors that sent wrong data are left out."""

    def __init__(self, checks: Checks) -> None:
        self.misbehaved: set[str] = set()
        self.outcome: str | None = None
        """Of the last try."""
        self._samples = checks.samples
        self._last: str | None = None
        self._tries_left = 0
        self._turns: Counter[str] = Counter()
        self._incompatible: dict[str, float] = {}
        """Since when each has answered nothing else."""
        self._breaks: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        """Bytes of complete fragments that were here at the end of a try: the most, of each donor."""
        self.slow = SlowDonors()

    def next(self, candidates: Sequence[str]) -> str | None:
        honest = self._honest(candidates)
        if not (self._tries_left and self._last in honest):
            ranks = {peer: self._rank(peer) for peer in honest}
            first = {peer: self._samples.place_of(peer) for peer in honest if ranks[peer] == min(ranks.values())}
            if self.slow.better in honest:
                self._last = self.slow.better
            else:
                self._last = places.draw(random, first) if first else None
            self._tries_left = RESUME_TRIES
            if self._last:
                self._turns[self._last] += 1
        return self._last

    def _rank(self, peer: str) -> tuple[int, int]:
        """The lowest comes first. Who is doubted waits for a turn of the others: an honest donor may be close to one
        whose state was spoiled."""
        return self._turns[peer] + self._samples.doubted(peer), -self._samples.places_alike(peer)

    def queue_s(self, candidates: Sequence[str]) -> float | None:
        """How long to wait in the present donor's queue; None where there is no other donor."""
        turns = min(self._turns[self._last], 10) if self._last else 0
        return QUEUE_S * 2 ** (turns - 1) if len(self._honest(candidates)) > 1 else None

    def begins(self, candidates: Sequence[str], peer: str) -> None:
        """To take the state of this donor."""
        self.outcome = "was still waited for"
        self.slow.begin(peer, [other for other in self._honest(candidates) if other != peer])

    def is_progress(self, peer: str, done_bytes: int = 0) -> bool:
        """Whether what it sends now is. `done_bytes`: of complete fragments that are here then."""
        return self._breaks[peer] < MOST_BREAKS or done_bytes > self._most[peer]

    def failed(self, peer: str, fault: PeerFault, done_bytes: int, *, renewed: bool) -> None:
        """`done_bytes`: of complete fragments that are here; `renewed`: it had made progress in this attempt."""
        self.outcome = str(fault)  # its traceback would hold the frames that hold the state
        further, self._most[peer] = done_bytes > self._most[peer], max(done_bytes, self._most[peer])
        self._breaks[peer] += renewed and fault.reason not in (TOO_SLOW, LONG_QUEUE)
        if fault.reason != TOO_SLOW:
            self.slow.failed(peer)
        if isinstance(fault, PeerMisbehaved):
            self.misbehaved.add(peer)
        if fault.reason == Code.INCOMPATIBLE.reason:
            self._incompatible.setdefault(peer, _now())
        else:
            self._incompatible.pop(peer, None)
        tries = RESUME_TRIES if further else self._tries_left - 1
        self._tries_left = tries if done_bytes and isinstance(fault, PeerLost) else 0

    def incompatible_s(self, candidates: Sequence[str]) -> float:
        """How long all of them have said that this node is."""
        return _now() - max(self._incompatible.get(peer, _now()) for peer in candidates)

    def _honest(self, candidates: Sequence[str]) -> list[str]:
        return [peer for peer in candidates if peer not in self.misbehaved]


class _Attempt:
    """One download: reports its progress, extends the timeout, and asks witnesses how far the run is."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        donor: str,
        channel: Channel,
        wanted: Wanted,
        witnesses: Sequence[str],
        patience: asyncio.Timeout,
        queue_s: float | None,
        choice: _Choice,
        waits_for: Say,
        checks: Checks,
    ) -> None:
        self.name = peer_names.name_of(donor)
        self.refuted = False
        self._donor, self._checks = donor, checks
        self._channel, self._wanted, self._witnesses = channel, wanted, witnesses
        self._patience, self._queue_s, self._choice, self._waits_for = patience, queue_s, choice, waits_for
        self._place, self._since, self._began = MAX_WAITING + 1, _now(), _now()
        self._words = client.DownloadProgress()
        waits_for(f"state from {self.name}")

    def queued(self, place: int) -> None:
        now, forward = _now(), place < self._place
        if forward:
            self._place, self._since = place, now
        if self._queue_s is not None and (
            now - self._since > self._queue_s or (place and now - self._began > 2 * self._queue_s)
        ):
            raise PeerFault(LONG_QUEUE)  # a queue that goes forward step by step may still last for ever
        if forward and self._choice.is_progress(self._donor):
            self._renew()
        self._waits_for(f"state from {self.name}" + (f", {place} before us" if place else ", which copies it"))

    async def check_round(self, round: int) -> None:
        if round > self._wanted.budget:
            raise PeerMisbehaved("bad_round", f"{round}")
        if round < self._wanted.own_round and not self._wanted.goes_back:
            raise PeerFault("old_state", f"of round {round}")  # no misbehaviour: its copy may be a few rounds old
        middle = middle_round({self._donor: round, **await self._witnessed()}, self._checks.samples.place_of)
        if abs(round - middle) > STALE_ROUNDS:  # not PeerMisbehaved: a witness may be the one that is wrong
            why = "stale_state" if round < middle else "far_ahead"
            raise PeerFault(why, f"of round {round}, where others are at {middle}")

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        if self._choice.is_progress(self._donor, done_bytes - done_bytes % fragment_bytes(total_bytes)):
            self._renew()
        self._waits_for(f"state from {self.name}, {self._words(done_bytes, total_bytes)}")
        if self._choice.slow.leaves(done_bytes, total_bytes, _now()):
            raise PeerFault(TOO_SLOW)

    async def judge(self, state: LiveState) -> None:
        """Raises PeerMisbehaved where the state is not to be kept."""
        self._waits_for(f"a test of the state from {self.name}")
        self._patience.reschedule(None)  # the test is this node's own work: no donor is late meanwhile
        why = await self._checks.judge(self._donor, state)
        self._renew()
        if why:
            self.refuted = True
            self._checks.samples.refute(state)
            raise PeerMisbehaved(why, f"of round {state.round}")

    async def _witnessed(self) -> dict[str, int]:
        """The rounds that the donor and some other peers answer."""
        others = {peer: self._checks.samples.place_of(peer) for peer in self._witnesses}
        some = [self._donor, *places.several(random, others, WITNESSES)]
        asked = (client.progress(self._channel(peer), self._wanted.terms) for peer in some)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            peer: answer
            for peer, answer in zip(some, answers, strict=True)
            if isinstance(answer, int) and answer <= self._wanted.budget
        }

    def _renew(self) -> None:
        """A large state over a slow link takes hours."""
        self._patience.reschedule(_now() + TAKE_STATE_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
