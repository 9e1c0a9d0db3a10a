"""Which candidates a node does not call for a while, because they refused its calls or did not answer them.

Pure: the time is an argument. The first wait after a refusal is a share of a phase, and doubles with each one in a row.
"""

from collections.abc import Collection
from dataclasses import dataclass

FIRST_SHARE = 1 / 8
"""First back-off after a refusal, as a share of a phase; it doubles with each refusal in a row."""
MAX_BACKOFF_S, MAX_BACKOFF_PHASES = 60.0, 8.0
"""The longer of the two. 60 s are no back-off where a phase takes ten minutes: 20 identities that refused each call
were called in each phase."""
SILENT = 5
"""Refusals in a row after which a peer no longer counts as another partner to prefer. Silence counts as so many at
once: it cost a whole deadline, so the first back-off is already two phases. A peer that calls, and waits until it hears
that we are busy, has time for us, so its refusals are forgotten: nodes that a crowd keeps busy refuse each other, and
if that made them absent, the crowd would have no share to keep to."""


@dataclass(slots=True)
class _Backoff:
    until: float = float("-inf")
    refusals: int = 0
    """In a row, since it was a partner or called last."""
    silent: bool = False
    """Whether it did not answer the last call."""
    since_swap: int = 0
    """Refusals since its last whole swap."""


_NONE = _Backoff()


class Backoffs:
    def __init__(self) -> None:
        self._backoffs: dict[str, _Backoff] = {}

    # ---- what happened ----
    def failed(self, peer: str, now: float, phase_s: float, *, silent: bool = False, at_least_s: float = 0.0) -> None:
        """A call in vain, or a swap that broke."""
        backoff, more = self._backoffs.setdefault(peer, _Backoff()), SILENT if silent else 1
        backoff.refusals += more
        backoff.since_swap += more
        backoff.silent = silent
        most_s = max(MAX_BACKOFF_S, MAX_BACKOFF_PHASES * phase_s)
        wait_s = min(most_s, FIRST_SHARE * phase_s * 2 ** min(backoff.refusals - 1, 16))
        backoff.until = now + max(wait_s, at_least_s)

    def swapped(self, peer: str) -> None:
        self._backoffs.pop(peer, None)

    def called(self, peer: str) -> None:
        """It called, and heard that we are busy. Who was silent proves nothing by that: it may call and answer none."""
        if (backoff := self._backoffs.get(peer)) and not backoff.silent:
            backoff.refusals = 0

    def keep(self, peers: Collection[str]) -> None:
        """The others are no candidates any more."""
        self._backoffs = {peer: backoff for peer, backoff in self._backoffs.items() if peer in peers}

    # ---- what follows ----
    def until(self, peer: str) -> float:
        return self._backoffs.get(peer, _NONE).until

    def since_swap(self, peer: str) -> int:
        """Refusals since its last whole swap."""
        return self._backoffs.get(peer, _NONE).since_swap

    def answers(self, peer: str) -> bool:
        return self._backoffs.get(peer, _NONE).refusals < SILENT

    def refuses_always(self, peer: str) -> bool:
        """Though it may call between its refusals."""
        return self.since_swap(peer) >= SILENT

    def is_silent(self, peer: str) -> bool:
        """Who refuses again and again is there: its swaps may be held, too."""
        return self._backoffs.get(peer, _NONE).silent
