"""Exporters for TensorBoard and Weights & Biases; both optional, and both on this machine alone.

Events (base/events.py) are written in a thread of its own, so that these libraries cannot delay or break the node.
An exporter that fails is given up with one line in the log; events that come faster than they are written are dropped.
Weights & Biases writes a folder to upload later (`wandb sync`), as only the node itself may use the network.
"""

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from noloco_node.base.events import (
    Evaluated,
    Event,
    PhaseDone,
    RolledBack,
    RoundCommitted,
    Sampled,
    TakenBack,
    WentSolo,
)
from noloco_node.base.extras import pip_install
from noloco_node.errors import UsageError
from noloco_node.host.config import TENSORBOARD, WANDB

log = logging.getLogger(__name__)

WAITING = 1000
"""Events that wait to be written: hours of rounds."""
CLOSE_S = 3.0
"""How long an exporter may write what it still has, when the node leaves."""


class Exporter(Protocol):
    def write(self, figures: Mapping[str, float | str], step: int) -> None: ...

    def close(self) -> None: ...


def check(names: Collection[str]) -> None:
    """Whether the packages they need are installed. Raises UsageError."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name in the working directory is no package
            raise UsageError(f"--sinks {name} needs a package that is not installed: {pip_install(name)}")


def chosen(names: Iterable[str], folder: Path, run: str, node: str) -> dict[str, Callable[[], Exporter]]:
    """How each is opened. `folder`: the run's, in which each has its own; `run` and `node`: their labels."""
    return {name: partial(_OPENERS[name], folder / name, run, node) for name in names}


class Exporters:
    def __init__(self, openers: Mapping[str, Callable[[], Exporter]]) -> None:
        self._openers = openers
        self._events: queue.Queue[tuple[Event, int] | None] = queue.Queue(WAITING)
        """Each with its step; None ends it."""
        self._thread = threading.Thread(target=self._live, name="exporters", daemon=True)
        if self._openers:
            self._thread.start()

    def write(self, event: Event, step: int) -> None:
        """Returns at once. `step`: at the last boundary."""
        if self._thread.is_alive() and not self._events.full():
            self._events.put_nowait((event, step))

    def close(self) -> None:
        """Waits up to CLOSE_S for what is not written yet."""
        if self._thread.is_alive() and not self._events.full():
            self._events.put_nowait(None)
            self._thread.join(CLOSE_S)

    def _live(self) -> None:
        exporters = {}
        for name, opener in self._openers.items():
            with _given_up_if_it_fails(name):
                exporters[name] = opener()
        figures = Figures()
        while exporters and (given := self._events.get()) is not None:
            event, step = given
            found = figures.of(event)
            for name in list(exporters) if found else ():
                exporter = exporters.pop(name)
                with _given_up_if_it_fails(name):
                    exporter.write(found, step)
                    exporters[name] = exporter
        for name, exporter in exporters.items():
            with _given_up_if_it_fails(name):
                exporter.close()


@dataclass(slots=True)
class Figures:
    """Events as named numbers and texts, for curves over the steps."""

    committed: int = 0
    solo: int = 0

    def of(self, event: Event) -> dict[str, float | str]:  # noqa: PLR0911 - one for each kind
        match event:
            case PhaseDone():
                figures = {
                    "train/loss": event.loss,
                    "train/learning_rate": event.learning_rate,
                    "train/gradient_norm": event.gradient_norm,
                    "train/tokens": event.tokens_total,
                    "train/tokens_per_s": event.tokens_per_s,
                    "train/mfu": event.mfu,
                    "train/stall_ms": event.stall_ms,
                    "memory/device_bytes": event.device_bytes,
                    "memory/host_bytes": event.host_bytes,
                    "round": event.round,
                }
                return {name: value for name, value in figures.items() if value is not None}
            case Evaluated(_, eval_loss):
                return {"eval/loss": eval_loss}
            case Sampled(_, prompt, text):
                return {"sample": prompt + text}
            case RoundCommitted():
                self.committed += event.swap == 1
                return {
                    "rounds/committed": self.committed,
                    "swap/seconds": event.seconds,
                    "swap/sent_bytes": event.sent_bytes,
                    "swap/received_bytes": event.received_bytes,
                    "swap/resent_blocks": event.resent_blocks,
                    "swap/relative_error": event.relative_error,
                }
            case WentSolo():
                self.solo += 1
                return {"rounds/solo": self.solo}
            case RolledBack() | TakenBack():
                return {"train/rolled_back" if isinstance(event, RolledBack) else "train/taken_back": 1.0}
            case _:
                return {}


class _TensorBoard:
    def __init__(self, folder: Path, _run: str, _node: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), flush_secs=10)

    def write(self, figures: Mapping[str, float | str], step: int) -> None:
        for name, value in figures.items():
            if isinstance(value, str):  # shown as Markdown, where an indented line is shown as it is
                self._writer.add_text(name, "    " + value.replace("\n", "\n    "), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, folder: Path, run: str, node: str) -> None:
        import wandb

        about_us = {"disable_git": True, "disable_code": True, "x_disable_stats": True, "x_disable_meta": True}
        quiet = wandb.Settings(console="off", silent=True, x_save_requirements=False, **about_us)
        self._run: Any = wandb.init(
            project="noloco", group=run, name=node, dir=str(folder.parent), mode="offline", settings=quiet
        )

    def write(self, figures: Mapping[str, float | str], step: int) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


_OPENERS: Mapping[str, Callable[[Path, str, str], Exporter]] = {TENSORBOARD: _TensorBoard, WANDB: _WeightsAndBiases}


@contextmanager
def _given_up_if_it_fails(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 (libraries that training must not depend on)
        log.warning("%s is given up: %s: %s", name, type(error).__name__, error)
