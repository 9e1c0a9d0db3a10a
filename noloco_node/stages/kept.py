"""Held-out data that callers of the stage before sent: of each the last ones, and of nobody more than a share. Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

MOST_CALLERS = 3
"""Of whom some are kept, those who sent last: of three, one that lies does not move the middle."""

T = TypeVar("T")


class Kept(Generic[T]):
    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()

    def keep(self, caller: str, data: T, examples: int, most: int) -> None:
        """`most`: examples of all callers together."""
        if examples > most:
            return
        self._of.setdefault(caller, deque()).append((data, examples))
        self._of.move_to_end(caller)
        if len(self._of) > MOST_CALLERS:
            self._of.popitem(last=False)
        for found in self._of.values():
            while len(found) > 1 and sum(size for _, size in found) > most / len(self._of):
                found.popleft()

    def of_each(self) -> Iterator[list[T]]:
        return ([data for data, _ in found] for found in self._of.values())
