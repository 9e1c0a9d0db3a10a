"""Numbers as people read them: sizes, rates, durations, shares. A dash for one that is not known yet."""

from collections.abc import Sequence
from itertools import pairwise

NOTHING = "-"


def size(count: float | None) -> str:
    """`12.6 MB`, in powers of ten as network people count."""
    return NOTHING if count is None else _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def rate(per_s: float | None) -> str:
    """`18.4k`."""
    return NOTHING if per_s is None else _scaled(per_s, ("", "k", "M", "G"))


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if round(number) < 1000:
            return f"{number:.0f}{unit}" if unit == units[0] or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}{units[-1]}"


def span(seconds: float | None) -> str:
    """`2 min 41 s`: the two largest units, without a second one that is 0; below a second `40 ms`."""
    if seconds is None:
        return NOTHING
    if (thousandths := round(1000 * max(0.0, seconds))) < 1000:
        return f"{thousandths} ms" if thousandths else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for (large, large_s), (small, small_s) in _PAIRS:
        if whole >= large_s:
            rest = whole % large_s // small_s
            return f"{whole // large_s} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def small(value: float | None) -> str:
    """`3.00e-4`, as learning rates are written."""
    if not value:
        return NOTHING if value is None else "0"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits}e{int(power)}"


def share(fraction: float | None, digits: int = 0) -> str:
    return NOTHING if fraction is None else f"{fraction:.{digits}%}"


def of(number: int, target: int | None) -> str:
    """`41 of 100`."""
    return f"{number} of {target}" if target else f"{number}"


def count(number: int, one: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {one if number == 1 else one + 's'}"


_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_PAIRS = tuple(pairwise(_UNITS))
