"""What being watched costs a node: `top` in a terminal, a page that listens and a scrape every second, all at once.

The task is paced, so that what is lost is the watching's doing and not the cores'. Windows with and without it take
turns in one run, and each is compared with its neighbour.
"""

import os
import pty
import signal
import statistics
import subprocess
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import psutil
import pytest
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

SPAN = 9
"""Phases of a window."""
PAIRS = 6


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes(NOLOCO_WEB="127.0.0.1:0", TERM="xterm-256color") as real_nodes:
        yield real_nodes


@pytest.fixture
def watching(real_nodes: RealNodes) -> Iterator[ExitStack]:
    """Gone before the nodes are."""
    with ExitStack() as watching:
        yield watching


class Watchers:
    """Of one node. They exist all the time, and look only between `begin` and `end`."""

    def __init__(self, node: Node) -> None:
        self.scrapes = self.events = self.drawn = 0
        self._page = until(lambda: node.said(r"web page: (\S+)"), "the address of its page")
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._screen, far = pty.openpty()
        termios.tcsetwinsize(far, (40, 120))
        words = [*node.group.command, "top", "--home", str(node.home)]
        environ = node.group.environ
        self._top = subprocess.Popen(words, stdin=far, stdout=far, stderr=far, env=environ, start_new_session=True)
        os.close(far)
        threading.Thread(target=self._read_screen, daemon=True).start()
        until(lambda: self.drawn, "a first screen")
        self._top.send_signal(signal.SIGSTOP)

    def begin(self) -> None:
        self._ended.clear()
        self._threads = [threading.Thread(target=duty) for duty in (self._scrape, self._listen)]
        for thread in self._threads:
            thread.start()
        self._top.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._top.send_signal(signal.SIGSTOP)
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self._top.kill()
        self._top.wait(10)
        os.close(self._screen)

    def _scrape(self) -> None:
        while not self._ended.wait(1.0):
            with urllib.request.urlopen(f"{self._page}metrics", timeout=10) as reply:
                self.scrapes += b"noloco_round " in reply.read()

    def _listen(self) -> None:
        with urllib.request.urlopen(f"{self._page}api/live", timeout=30) as events:
            for line in events:
                self.events += line.startswith(b"data: ")
                if self._ended.is_set():
                    return

    def _read_screen(self) -> None:
        with suppress(OSError):  # it is closed, here or there
            while read := os.read(self._screen, 1 << 16):
                self.drawn += len(read)


@dataclass
class Window:
    steps_s: float
    cpu_s: float
    """CPU seconds a second, of the process and its network daemon."""


def window(nodes: list[Node]) -> list[Window]:
    """The next phases of each, from the end of one to the end of another."""
    before = [len(node.events("PhaseDone")) for node in nodes]
    began, spent = time.monotonic(), [cpu_s(node) for node in nodes]

    def whole() -> list[list[dict]] | None:
        done = [node.events("PhaseDone")[since:] for node, since in zip(nodes, before, strict=True)]
        return done if all(len(phases) > SPAN for phases in done) else None

    done = until(whole, f"{SPAN} phases")
    passed = time.monotonic() - began
    return [
        Window(
            (phases[SPAN]["steps"] - phases[0]["steps"]) / (phases[SPAN]["at"] - phases[0]["at"]),
            (cpu_s(node) - cpu) / passed,
        )
        for node, phases, cpu in zip(nodes, done, spent, strict=True)
    ]


def cpu_s(node: Node) -> float:
    me = psutil.Process(node.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def test_being_watched_costs_next_to_nothing(
    real_nodes: RealNodes, watching: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(seconds=1.0)))
    nodes = [author, real_nodes.node("other", "join", "--bootstrap", author.address())]
    until(lambda: all(node.said(r"(round \d+ with)") for node in nodes), "both have met")
    watchers = [watching.enter_context(closing(Watchers(node))) for node in nodes]
    lost, cpu, usual = [], [], []
    for _ in range(PAIRS):
        alone = window(nodes)
        drawn, events, scrapes = ([getattr(w, what) for w in watchers] for what in ("drawn", "events", "scrapes"))
        for each in watchers:
            each.begin()
        watched = window(nodes)
        for each in watchers:
            each.end()
        for each, *before in zip(watchers, drawn, events, scrapes, strict=True):
            seen = each.drawn - before[0], each.events - before[1], each.scrapes - before[2]
            assert seen[0] > 1000, "top drew"
            assert min(seen[1:]) >= SPAN - 3, "the page heard of each phase, and the scrapes went on"
        usual += [one.cpu_s for one in alone]
        lost += [1 - with_it.steps_s / without.steps_s for with_it, without in zip(watched, alone, strict=True)]
        cpu += [with_it.cpu_s - without.cpu_s for with_it, without in zip(watched, alone, strict=True)]
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  watched by top, a page and a scrape a second: {statistics.median(lost):+.2%} of the steps "
            f"({min(lost):+.2%} to {max(lost):+.2%}), {statistics.median(cpu):+.2%} of a core "
            f"({min(cpu):+.2%} to {max(cpu):+.2%}) beyond {statistics.median(usual):.1%}"
        )
    assert statistics.median(lost) < 0.01
    assert statistics.median(cpu) < 0.02
