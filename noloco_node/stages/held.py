"""What of others may be here at once: so many micro-batches and bytes, and held-out data of the last callers.

A micro-batch has a place once its data are whole, and takes memory as they come: who only announces some keeps nobody
out. Its answer has no place, and takes memory until its caller has read it. Who has MOST_OF_CALLER of them here, or
finds no place, is refused as busy. One that its caller gave up counts until nothing is done for it any more.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from noloco_node.errors import PeerRefused
from noloco_node.wire import stage_messages as wire

MOST_HELD, MOST_OF_CALLER = 16, 8
"""Micro-batches here at once: more would only wait longer, in our memory."""
MOST_HELD_BYTES, MOST_BYTES_OF_CALLER = 1 << 30, 1 << 29
"""As they were sent, in all and of a caller that sends more than one."""
MOST_CALLERS = 3
"""Whose held-out data are kept, those who sent last: of three, one that lies does not move the middle."""
MOST_ROUNDS = 8
"""In which a caller's held-out data are used before it sends anew. Then it has left, or sends to other peers, and what
its weights were says nothing any more."""

T = TypeVar("T")


@dataclass(slots=True)
class Held:
    """What is here of others' micro-batches."""

    callers: Counter[str] = field(default_factory=Counter)
    """Of those that are whole."""
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    @property
    def free(self) -> int:
        return max(0, MOST_HELD - self.callers.total())

    @contextmanager
    def call(self, caller: str) -> Iterator["HeldCall"]:
        """Raises PeerRefused."""
        if self.calls[caller] >= MOST_OF_CALLER or not self.free:
            raise PeerRefused(wire.Code.BUSY.reason)
        call = HeldCall(self, caller)
        self.calls[caller] += 1
        try:
            yield call
        finally:
            call.leave(0)


@dataclass(slots=True)
class HeldCall:
    held: Held
    caller: str
    bytes: int = 0
    whole: bool = False
    answered: bool = False

    def take(self, size_bytes: int) -> None:
        """So many more. Raises PeerRefused."""
        others = self.held.bytes[self.caller] - self.bytes
        too_much = others and others + self.bytes + size_bytes > MOST_BYTES_OF_CALLER
        if too_much or self.held.bytes.total() + size_bytes > MOST_HELD_BYTES:
            raise PeerRefused(wire.Code.BUSY.reason)
        self.held.bytes[self.caller] += size_bytes
        self.bytes += size_bytes

    def arrive(self) -> None:
        """Raises PeerRefused."""
        if not self.held.free:
            raise PeerRefused(wire.Code.BUSY.reason)
        self.whole = True
        self.held.callers[self.caller] += 1

    def leave(self, size_bytes: int) -> None:
        """So many are left here, of its answer."""
        self.held.calls -= Counter([self.caller] * (not self.answered))
        self.held.callers -= Counter([self.caller] * self.whole)
        self.held.bytes -= Counter({self.caller: self.bytes - size_bytes})
        self.bytes, self.whole, self.answered = size_bytes, False, True


# ---- held-out data ----
@dataclass(slots=True)
class _Of(Generic[T]):
    found: deque[tuple[T, int]] = field(default_factory=deque)
    rounds: int = 0
    """Since the last one came."""


class Kept(Generic[T]):
    """Of each caller the last ones, and of nobody more than a share."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _Of[T]] = OrderedDict()

    def keep(self, caller: str, data: T, examples: int, most: int) -> None:
        """`most`: examples of all callers together."""
        if examples > most:
            return
        its = self._of.setdefault(caller, _Of())
        its.found.append((data, examples))
        its.rounds = 0
        self._of.move_to_end(caller)
        if len(self._of) > MOST_CALLERS:
            self._of.popitem(last=False)
        for each in self._of.values():
            while len(each.found) > 1 and sum(size for _, size in each.found) > most / len(self._of):
                each.found.popleft()

    def next_round(self) -> None:
        """Not between two measurements that are compared: who is forgotten is in neither."""
        for caller, its in [*self._of.items()]:
            its.rounds += 1
            if its.rounds > MOST_ROUNDS:
                del self._of[caller]

    def of_each(self) -> list[list[T]]:
        return [[data for data, _ in each.found] for each in self._of.values()]
