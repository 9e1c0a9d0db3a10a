"""A row of a bench beside its rivals: one system under one setting, its runs brought together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from noloco_node.base.plots import Line


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a system."""

    seconds: float
    """Until the last of its processes was done."""
    bytes_per_node: float
    """Sent over its link by each, all headers included."""
    cpu_seconds: float
    """Of each process with all that it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    bench: str
    system: str
    n: int
    """Processes that take part."""
    params: int
    mbit: float | None
    """Of each link; None: loopback."""
    seconds: float
    """The median run's."""
    bytes_per_node: float
    cpu_seconds: float
    fastest_s: float
    slowest_s: float
    runs: int
    more: dict[str, Any] = field(default_factory=dict)
    """Figures of this bench alone."""

    @classmethod
    def of(cls, runs: Sequence[Run], **what: Any) -> "Row":
        taken = [run.seconds for run in runs]
        return cls(
            **what,
            seconds=median(taken),
            fastest_s=min(taken),
            slowest_s=max(taken),
            bytes_per_node=fmean(run.bytes_per_node for run in runs),
            cpu_seconds=fmean(run.cpu_seconds for run in runs),
            runs=len(runs),
        )

    def document(self) -> dict[str, Any]:
        """Flat, as --json prints it."""
        fields = asdict(self)
        return {**{name: value for name, value in fields.items() if name != "more"}, **self.more}


def lines(rows: Sequence[Row], x: str, y: str) -> list[Line]:
    """One line for each system."""
    systems = dict.fromkeys(row.system for row in rows)
    points = {s: sorted((d[x], d[y]) for row in rows if row.system == s for d in [row.document()]) for s in systems}
    return [Line(system, [p[0] for p in of], [p[1] for p in of]) for system, of in points.items()]
