"""Dictionaries that remember the latest only."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """The oldest is forgotten where there are more than `most`."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
