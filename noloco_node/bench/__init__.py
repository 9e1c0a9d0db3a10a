"""Measure this machine: the codecs, the training loop, and what synchronising costs beside rivals."""

from collections.abc import Callable

Say = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and of how much."""
