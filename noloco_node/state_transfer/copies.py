"""Copies of this node's live state in memory, from which state_transfer/server.py sends.

One copy serves all downloads that begin in its round, or within SHARED_S and SHARED_ROUNDS, in each coding that is
asked for. Where all copies are read, and the newer by slow readers alone, that is dropped when somebody needs a fresh
one. The older stays until its readers have it: else nobody on a slow link would ever come to the end. What making one
costs the training thread is in training/background_copy.py. The numbers are opaque here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

from noloco_node.base.latest import remember
from noloco_node.core.verdict import Trial
from noloco_node.errors import PeerRefused
from noloco_node.host.limits import TokenBucket
from noloco_node.state_transfer.client import aside
from noloco_node.wire import messages as wire
from noloco_node.wire import state_format
from noloco_node.wire.state_format import Coding

SHARED_S, SHARED_ROUNDS = 20.0, 5
"""A download that begins may use a copy that is at most so old, or of the round that this node is in: to call and hang
up again and again causes no copy each time. Where rounds are short, one of 20 s before would put who takes it far
behind."""
KEPT_S = 60.0
"""A copy is kept for so long after its last download, so that one that broke off can resume."""
COPIED_BYTES_S = 32e6
"""That one place may cause to be copied, on average, without reading them to the end: who calls and hangs up again and
again takes 3% of a core."""
OWED_S = 280.0
"""At most, also for a state above 9 GB, of which that may then be more: a newcomer asks for TAKE_STATE_S
(choose_donor.py)."""
MAX_PLACES = 256
"""Remembered, those that caused a copy last."""
MAX_COPIES = 2
"""Each has 8 bytes a parameter. When both are in use, and the newer not by slow readers alone, a new one gets that."""


class StateOwner(Protocol):
    """The part of the training thread that is used."""

    def live_state(self) -> "Future[tuple[int, memoryview]]": ...
    def sample(self, blocks: Sequence[int]) -> "Future[tuple[int, bytes]]": ...
    def try_state(self, state: memoryview) -> "Future[Trial]": ...


class StateCopy:
    """The state at one moment."""

    _held: memoryview | None

    def __init__(self, round: int, numbers: memoryview, taken_at: float, weights: int) -> None:
        """`weights`: which of those that this node has had one after the other."""
        self.weights = weights
        self.taken_at = self.left_at = taken_at
        self.size = len(numbers)
        self.users: list[Callable[[], bool]] = []
        """Each says whether it reads slowly."""
        self.round, self._held = round, numbers
        self._versions: dict[Coding, wire.StateHeader] = {}
        self.hashing: dict[Coding, asyncio.Task[wire.StateHeader]] = {}
        """Under way."""

    def version(self, coding: Coding) -> wire.StateHeader:
        """Takes a second for a gigabyte, the first time."""
        if coding not in self._versions:
            numbers = self._numbers()
            total = coding.size(self.size // 4)
            size = state_format.fragment_bytes(total)
            digests = b"".join(
                state_format.digest(coding.encode(numbers, start, min(start + size, total)))
                for start in range(0, total, size)
            )
            root = state_format.root(self.round, total, digests)
            self._versions[coding] = wire.StateHeader(self.round, total, root, digests)
        return self._versions[coding]

    def has(self, root: bytes) -> bool:
        return any(version.root == root for version in self._versions.values())

    def chunks(self, coding: Coding, start: int) -> Iterator[wire.StateChunk]:
        """From byte `start` on, where a fragment begins. A fragment is whole chunks but for the last one. Raises
        PeerRefused when the copy has been dropped."""
        total = coding.size(self.size // 4)
        for at in range(start, total, state_format.CHUNK_BYTES):
            yield wire.StateChunk(bytes(coding.encode(self._numbers(), at, min(at + state_format.CHUNK_BYTES, total))))

    def drop(self) -> None:
        """The memory is free at once, although somebody may still read."""
        self._held = None

    def _numbers(self) -> memoryview:
        if self._held is None:
            raise PeerRefused(wire.Code.BUSY.reason)
        return self._held


class StateCopies:
    """The copies in memory: usually one, MAX_COPIES at most."""

    def __init__(self, owner: StateOwner, round: Callable[[], int]) -> None:
        """`round`: the one that this node is in now."""
        self.owner, self._round = owner, round
        self._held: list[StateCopy] = []
        self._weights = 0
        self._taking: asyncio.Task[StateCopy] | None = None
        self._hashing = asyncio.Lock()
        self._caused: dict[str, TokenBucket] = {}
        """By place."""

    def forget(self) -> None:
        """This node has replaced its weights by others: copies of those before are only for who has begun one."""
        self._weights += 1

    async def version(self, root: bytes, coding: Coding, place: str) -> tuple[StateCopy, wire.StateHeader]:
        """The copy of that root hash, else a fresh one. `place`: of who asks. Raises NolocoError."""
        copy = self._fitting(root)
        if copy is None:
            copy = await self._fresh(place)
        with self.using(copy):  # and for a while after that, in which its use begins
            if coding not in copy.hashing:  # not cancelled with its caller: its thread would go on
                copy.hashing[coding] = asyncio.create_task(self._hash(copy, coding))
            return copy, await asyncio.shield(copy.hashing[coding])

    @contextmanager
    def using(self, copy: StateCopy, slowly: Callable[[], bool] = lambda: False) -> Iterator[None]:
        copy.users.append(slowly)
        try:
            yield
        finally:
            copy.users.remove(slowly)
            loop = asyncio.get_running_loop()
            copy.left_at = loop.time()
            loop.call_later(KEPT_S, self._tidy)

    def _fitting(self, root: bytes) -> StateCopy | None:
        now = asyncio.get_running_loop().time()
        same, own = [copy for copy in self._held if root and copy.has(root)], self._own()
        first = (round_ := self._round()) - SHARED_ROUNDS
        fresh = [c for c in own if c.round >= first and (now - c.taken_at <= SHARED_S or c.round == round_)]
        full = len(self._held) == MAX_COPIES and all(copy.users for copy in self._held)
        stays = full and (self._held[-1].round >= first or not all(slowly() for slowly in self._held[-1].users))
        found = next(iter([*same, *fresh[-1:], *(own[-1:] if stays else [])]), None)
        if stays and found is None:  # both are of weights that were given up, and are still read
            raise PeerRefused(wire.Code.BUSY.reason)
        return found

    def _own(self) -> list[StateCopy]:
        """Those of the weights that this node trains now."""
        return [copy for copy in self._held if copy.weights == self._weights]

    def was_read(self, place: str) -> None:
        """A whole state: the next machine of the same house or laboratory gets one, too."""
        self._caused.pop(place, None)

    async def _fresh(self, place: str) -> StateCopy:
        """For a place that has caused too many, the latest one that is still there. Raises PeerRefused."""
        if self._taking is None:
            caused = self._caused.get(place) or TokenBucket(COPIED_BYTES_S)
            if caused.wait_s(asyncio.get_running_loop().time()):
                if own := self._own():
                    return own[-1]
                raise PeerRefused(wire.Code.BUSY.reason)
            remember(self._caused, place, caused, MAX_PLACES)
            self._taking = asyncio.create_task(self._take(caused))
            self._taking.add_done_callback(self._taken)
        return await asyncio.shield(self._taking)

    async def _hash(self, copy: StateCopy, coding: Coding) -> wire.StateHeader:
        try:
            with self.using(copy):
                async with self._hashing:
                    return await aside(copy.size, copy.version, coding)
        finally:
            del copy.hashing[coding]

    async def _take(self, caused: TokenBucket) -> StateCopy:
        self._tidy()
        if len(self._held) >= MAX_COPIES:
            idle = [at for at, copy in enumerate(self._held) if not copy.users]
            self._held.pop(idle[0] if idle else -1).drop()
        weights, loop = self._weights, asyncio.get_running_loop()
        round_, numbers = await asyncio.wrap_future(self.owner.live_state())
        if weights != self._weights:
            raise PeerRefused(wire.Code.BUSY.reason)  # who asked asks again
        copy = StateCopy(round_, numbers, loop.time(), weights)
        caused.take(min(copy.size, int(COPIED_BYTES_S * OWED_S)), loop.time())
        self._held.append(copy)
        loop.call_later(KEPT_S, self._tidy)  # who asked for it may be gone
        return copy

    def _taken(self, _: asyncio.Task[StateCopy]) -> None:
        self._taking = None  # the task holds a reference to the copy

    def _tidy(self) -> None:
        now = asyncio.get_running_loop().time()
        self._held = [copy for copy in self._held if copy.users or now < copy.left_at + KEPT_S]
