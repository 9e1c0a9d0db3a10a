"""Dictionaries that remember the latest only."""

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
