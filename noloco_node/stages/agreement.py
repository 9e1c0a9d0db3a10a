"""Which peers of the next stage do not answer what the others do: found by asking several for the same micro-batch.

A wrong gradient of the usual length looks like any other, and this stage knows no loss of its own. But honest replicas
of a stage are close to each other, so for the same activations their gradients point the same way, are as long and come
with the same loss. A share of the micro-batches goes to a second peer; where the two are not alike, to a third one, and
who is alone is wrong. A peer cannot tell these micro-batches from others. Of two peers that differ it cannot be told
which one is wrong.

Losses of held-out data are told apart in the same way, but for each of them: what counts is the middle of three.
Pure: time is an argument.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles

NEAR, APART = 0.15, 0.5
"""1 - cosine of two gradients that are always alike, at most, and that are never, at least. *(Honest replicas that
average after 10 steps: 0.064, and less later; random gradients, and those of other micro-batches, are near 1, turned
ones at 2. Tried with 0.02 for the first one: an honest replica was left out.)*"""
SPREAD = 8.0
"""In between, so many times what a quarter of all pairs do not reach. *(Honest ones: 4.)* Where one of three is
hostile, a third of all pairs are honest."""
PAIRS, LEAST = 64, 8
"""From how many pairs that is known."""
LONGER = 2.0
"""Times as long. *(Honest ones: 1.2.)*"""
FURTHER = 0.5
"""Of the smaller loss. *(Honest ones: 0.09 apart.)*"""
PROVEN = 4
"""Answers that were alike to others', after which a peer's next ones are believed before they are compared."""
WRONG = 2.0
"""Answers that were alone, after which a peer is not asked any more. One may be an accident."""
FADES = 1 / 32
"""Of a wrong answer, taken off by each one that was alike: who lies once in 30 answers and more often is found."""
LEFT_OUT_S = 3600.0
"""How long it is not asked. Then it has to prove itself again, and one more wrong answer is enough."""
CLOSE = 0.01
"""Of a held-out loss: the mean of two that are as close is believed. What a swap may cost is about as much."""
MOST_PEERS = 1024
"""Remembered. Those without a wrong answer are forgotten first."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of two answers to the same micro-batch."""

    apart: float
    """1 - cosine of the gradients."""
    ratio: float
    """Of their lengths."""
    losses: tuple[float, float]


@dataclass(slots=True)
class _Record:
    alike: int = 0
    wrong: float = 0.0
    left_out_until: float = float("-inf")


class Agreement:
    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._apart: deque[float] = deque(maxlen=PAIRS)

    def are_alike(self, found: Likeness) -> bool:
        """It counts for what is usual from then on."""
        self._apart.append(found.apart)
        one, other = sorted(map(abs, found.losses))
        long = max(found.ratio, 1 / found.ratio) if found.ratio > 0 else float("inf")
        return found.apart <= self._furthest and long <= LONGER and other - one <= FURTHER * one

    @property
    def _furthest(self) -> float:
        usual = quantiles(self._apart, n=4)[0] if len(self._apart) >= LEAST else APART
        return min(APART, max(NEAR, SPREAD * usual))

    def is_proven(self, peer: str) -> bool:
        found = self._records.get(peer)
        return found is not None and found.alike >= PROVEN

    def alike(self, *peers: str) -> None:
        """They answered the same."""
        for peer in peers:
            record = self._record(peer)
            record.alike += 1
            record.wrong = max(0.0, record.wrong - FADES)

    def alone(self, peer: str, now: float) -> bool:
        """It answered what two others did not. Whether it is left out from now on."""
        record = self._record(peer)
        if record.left_out_until > now:
            return False  # an answer that was under way
        record.alike, record.wrong = 0, record.wrong + 1
        if record.wrong <= WRONG - 1:
            return False
        record.wrong, record.left_out_until = WRONG - 1, now + LEFT_OUT_S
        return True

    def left_out(self, now: float) -> list[str]:
        return sorted(peer for peer, record in self._records.items() if record.left_out_until > now)

    def _record(self, peer: str) -> _Record:
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MOST_PEERS:
            calm = (each for each, found in self._records.items() if not found.wrong)
            del self._records[next(calm, next(iter(self._records)))]
        return record


def believed(losses: Collection[float], close: float = CLOSE) -> float | None:
    """What held-out data's loss is, by what several peers say; None: not known yet."""
    some = sorted(losses)
    for one, other in pairwise(some):
        if abs(other - one) <= close * abs(one):
            return fmean((one, other))
    return median(some) if len(some) > 2 else None


def lying(losses: Mapping[str, float], believed: float) -> list[str]:
    """Who said something else than the others."""
    return [peer for peer, loss in losses.items() if abs(loss - believed) > FURTHER * abs(believed)]
