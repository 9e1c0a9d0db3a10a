"""Held-out data that callers of the stage before sent: of each the last ones, and of nobody more than a share. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_CALLERS = 3
"""Of whom some are kept, those who sent last: of three, one that lies does not move the middle."""
MOST_USES = 24
"""Of a caller's data, of which a round takes three or four, before it sends anew. Then it has left, or sends to other
peers, and what its weights were says nothing any more."""

T = TypeVar("T")


@dataclass(slots=True)
class _Of(Generic[T]):
    found: deque[tuple[T, int]] = field(default_factory=deque)
    uses: int = 0
    """Since the last one came."""


class Kept(Generic[T]):
    def __init__(self) -> None:
        self._of: OrderedDict[str, _Of[T]] = OrderedDict()

    def keep(self, caller: str, data: T, examples: int, most: int) -> None:
        """`most`: examples of all callers together."""
        if examples > most:
            return
        its = self._of.setdefault(caller, _Of())
        its.found.append((data, examples))
        its.uses = 0
        self._of.move_to_end(caller)
        if len(self._of) > MOST_CALLERS:
            self._of.popitem(last=False)
        for each in self._of.values():
            while len(each.found) > 1 and sum(size for _, size in each.found) > most / len(self._of):
                each.found.popleft()

    def of_each(self) -> list[list[T]]:
        """To measure with once."""
        for caller, its in [*self._of.items()]:
            its.uses += 1
            if its.uses > MOST_USES:
                del self._of[caller]
        return [[data for data, _ in each.found] for each in self._of.values()]
