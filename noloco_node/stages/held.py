"""How many micro-batches of others may be here at once, and how much memory they may take.

A micro-batch has a place once its data are whole, and takes memory as they come: who only announces some keeps nobody
out. Its answer has no place, and takes memory until its caller has read it. Who has MOST_OF_CALLER of them here, or
finds no place, is refused as busy. One that its caller gave up counts until nothing is done for it any more.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from noloco_node.errors import PeerRefused
from noloco_node.wire import stage_messages as wire

MOST_HELD, MOST_OF_CALLER = 16, 8
"""Micro-batches here at once: more would only wait longer, in our memory."""
MOST_HELD_BYTES, MOST_BYTES_OF_CALLER = 1 << 30, 1 << 29
"""As they were sent, in all and of a caller that sends more than one."""


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
