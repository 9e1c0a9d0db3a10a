"""`metrics.jsonl`: what `status` shows as a line a minute, for people who ask later how it was."""

from dataclasses import asdict
from pathlib import Path

from noloco_node.observe.jsonl import JsonLines
from noloco_node.views.views import StatusView

EVERY_S = 60.0
FIGURES = """
state round step tokens tokens_per_s loss eval_loss busy_fraction busy_fraction_minute stall_ms resent_block_fraction
calls peers_seen reachable uptime_s
""".split()  # noqa: SIM905 (fifteen quoted words on fifteen lines read worse)


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, view: StatusView, at: float) -> None:
        """`at` is wall-clock, for people only."""
        figures = {name: getattr(view, name) for name in FIGURES}
        rounds, bytes_ = asdict(view.rounds), {"sent": view.bytes.sent, "received": view.bytes.received}
        troubles = [finding.text for finding in view.health]
        self._lines.write({"at": round(at, 3), **figures, "rounds": rounds, "bytes": bytes_, "health": troubles})

    def close(self) -> None:
        self._lines.close()
