"""Fault points: in which round and in which phase of it something happens to a real node.

A test names a point or draws it from a seed, waits until the node is there, and then kills, stops or freezes something.
What a node does is read from its status ten times a second, and how much of a phase is done changes there once a
second. So a phase must last for about a second, or it may be missed: then the next one like it counts, and what `at`
returns says which round it was. Phases of a third of a second were missed for up to 24 s.
"""

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil
from real_nodes import Node, until

QUIET_LOOKS = 30
"""After so many looks without a byte, three seconds, no swap is under way."""


class Phase(StrEnum):
    TRAINING = "training"
    """Its inner steps; the share is that of the phase's steps or seconds."""
    SWAPPING = "swapping"
    """The share is that of the bytes that come in."""
    FETCHING = "fetching a state"
    """The share is that of the bytes, as `status` shows it."""


@dataclass(frozen=True)
class Point:
    """`share` of this phase is over, in this round or the first one after it in which there is such a phase."""

    round: int
    phase: Phase
    share: float

    def __str__(self) -> str:
        return f"round {self.round}, {self.phase}, {self.share:.0%}"

    @classmethod
    def drawn(cls, chance: random.Random, round: int, *phases: Phase) -> "Point":
        return cls(round, chance.choice(phases), chance.uniform(0.05, 0.9))


class _Swap:
    """How much of the swap under way a node has received."""

    def __init__(self, whole_bytes: int) -> None:
        self._whole_bytes = whole_bytes
        self._base: int | None = None
        """The bytes received before it; None where we began to look in the middle of one, perhaps."""
        self._last, self._quiet = -1, 0
        self._ended: tuple[int, int] | None = None

    def share(self, status: dict[str, Any]) -> float:
        """0 while none is under way."""
        now, rounds = status["bytes"]["received"], status["rounds"]
        ended = rounds["committed"], rounds["solo"]
        self._quiet = self._quiet + 1 if now == self._last else 0
        if (self._ended is not None and ended != self._ended) or self._quiet >= QUIET_LOOKS:
            self._base = now
        self._last, self._ended = now, ended
        return (now - self._base) / self._whole_bytes if self._base is not None else 0.0


def at(node: Node, point: Point, *, swap_bytes: int = 1, within_s: float = 90) -> dict[str, Any]:
    """Wait until the node is there, and return its status. `swap_bytes`: of a whole swap, one direction."""
    swap = _Swap(swap_bytes)

    def there() -> dict[str, Any] | None:
        if not (status := node.ask("status")):
            return None
        done = swap.share(status)
        match point.phase:
            case Phase.TRAINING:
                share = (status.get("phase") or {}).get("part") or 0.0
            case Phase.SWAPPING:
                share = done
            case Phase.FETCHING:
                found = re.search(r"(\d+)%", status["waiting_for"] or "")
                share = int(found[1]) / 100 if found else 0.0
        return status if status["round"] >= point.round and point.share <= share < 1 else None

    return until(there, f"{node.home.name} at {point}", within_s)


def daemon(node: Node) -> int:
    """The process id of its p2pd, 0 while there is none."""
    try:
        children = psutil.Process(node.process.pid).children()
        return next((child.pid for child in children if child.name() == "p2pd"), 0)
    except psutil.NoSuchProcess:
        return 0


def freeze(node: Node, seconds: float) -> None:
    """The whole node, as when its machine is suspended: its p2pd too."""
    stopped = [pid for pid in (node.process.pid, daemon(node)) if pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for pid in stopped:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
