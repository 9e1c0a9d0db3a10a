"""Numbers as people read them: sizes, rates, durations, shares. A dash for one that is not known yet."""

from itertools import pairwise

NOTHING = "-"


def size(count: float | None) -> str:
    """`12.6 MB`, in powers of ten as network people count."""
    if count is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if round(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def rate(per_s: float | None) -> str:
    """`18.4k`."""
    if per_s is None:
        return NOTHING
    for unit in ("", "k", "M"):
        if round(per_s) < 1000:
            return f"{per_s:.0f}{unit}" if not unit or per_s >= 99.95 else f"{per_s:.1f}{unit}"
        per_s /= 1000
    return f"{per_s:.1f}G"


def span(seconds: float | None) -> str:
    """`2 min 41 s`: the two largest units, without a second one that is 0."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for (large, large_s), (small, small_s) in _PAIRS:
        if whole >= large_s:
            rest = whole % large_s // small_s
            return f"{whole // large_s} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def share(fraction: float | None, digits: int = 0) -> str:
    return NOTHING if fraction is None else f"{fraction:.{digits}%}"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_PAIRS = tuple(pairwise(_UNITS))
