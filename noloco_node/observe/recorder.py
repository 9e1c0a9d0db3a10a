"""Passes each event of a training node to all that keep events: stats, curves, files, exporters and the log."""

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from noloco_node.base.events import Event, PeerFaulted, RolledBack, RoundCommitted, TakenBack, WentSolo, as_json
from noloco_node.base.latest import Seldom
from noloco_node.base.peer_names import name_of
from noloco_node.base.units import loss
from noloco_node.observe import exporters
from noloco_node.observe.curves import Curves
from noloco_node.observe.jsonl import JsonLines, figures
from noloco_node.observe.stats import NodeStats
from noloco_node.views.round_line import round_line
from noloco_node.views.status import StatusView

FAULTS_A_MINUTE = 20
"""Of peers that are written down; `stats` counts all. At the calls that a stranger may make, its faults would replace
the run's whole history in an hour, and the log with it."""

log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, peer_id: str) -> None:
        self.stats = NodeStats()
        self.curves = Curves(peer_id)
        self._node = name_of(peer_id)
        self._events: JsonLines | None = None
        self._metrics: JsonLines | None = None
        self._exporters: exporters.Exporters | None = None
        self._writes_fault = Seldom(FAULTS_A_MINUTE)

    def open(self, folder: Path, run: str, into: Collection[str]) -> None:
        """`folder`: the run's; `run`: its label; `into`: the exporters (--sinks) by name."""
        path = folder / "events.jsonl"
        self.curves.replay(path)
        self._events = JsonLines(path)
        self._metrics = JsonLines(folder / "metrics.jsonl")
        self._exporters = exporters.Exporters(exporters.chosen(into, folder, run, self._node))

    def observe(self, event: Event) -> None:
        self.stats.observe(event)
        if isinstance(event, PeerFaulted) and not self._writes_fault():
            log.debug("%s broke the protocol: %s", name_of(event.peer), event.reason)
            return
        self.curves.observe(event, time.time())
        if self._events:
            self._events.write(as_json(event, time.time()))
        if self._exporters:
            self._exporters.write(event, self.stats.step)
        match event:
            case RoundCommitted() | WentSolo():
                piece, phase = self.curves.ended()
                log.info("%s", round_line(piece, phase, self.stats.steps_target, self.stats.left_s))
            case RolledBack():
                log.warning("%s", rollback_sentence(event))
            case TakenBack(round, partner, loss_with, loss_without):
                log.warning(
                    "the correction of %s in round %d is taken back: eval loss %s with it, %s without",
                    name_of(partner),
                    round,
                    loss(loss_with),
                    loss(loss_without),
                )
            case PeerFaulted(peer, reason):
                log.warning("%s broke the protocol: %s", name_of(peer), reason)

    def note(self, status: StatusView) -> None:
        if self._metrics:
            self._metrics.write(figures(status, time.time()))

    async def close(self) -> None:
        for lines in (self._events, self._metrics):
            if lines:
                lines.close()
        if self._exporters:
            await asyncio.to_thread(self._exporters.close)


def rollback_sentence(back: RolledBack) -> str:
    whose = (
        f"of the checkpoint of round {back.weights_of}" if back.weights_of is not None else "of this round's beginning"
    )
    return f"{back.reason}: the weights are those {whose} again"
