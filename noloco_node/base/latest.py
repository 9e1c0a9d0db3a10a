"""What strangers cause, bounded: dictionaries that remember the latest only, and lines of the log that are seldom."""

import time
from collections import deque
from collections.abc import Container
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], key: K, value: V, most: int, keep: Container[K] = ()) -> None:
    """Where there are more than `most`, the oldest is forgotten: one that is not in `keep`, as long as there is any."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next((each for each in known if each not in keep), next(iter(known)))]


class Seldom:
    """True so many times a minute at most."""

    def __init__(self, most: int = 20) -> None:
        self._lately = deque[float](maxlen=most)

    def __call__(self) -> bool:
        now = time.monotonic()
        if len(self._lately) == self._lately.maxlen and now - self._lately[0] < 60:
            return False
        self._lately.append(now)
        return True
