"""A hostile peer among honest real nodes, attack by attack: what it costs them, beside an unattacked run.

The hostile peer is a program of its own (tests/helpers/hostile_peer.py), which knows proto/ and no node. The task is
paced, so that a few nodes live well on two cores. Honest nodes listen at addresses of their own, as if each were on
another machine; the hostile identities share one, unless a test says otherwise.
"""

import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
from real_nodes import ROOT, Node, RealNodes, until

from noloco_node.base.identity import Identity
from noloco_node.run import toml
from noloco_node.training import tasks
from noloco_node.training.model import layout_digest

PEER = ROOT / "tests" / "helpers" / "hostile_peer.py"
HONEST = 3
ROUNDS, PHASE_S, STEP_S = 60, 0.6, 0.06
WAY = 0.2
"""How far AdamW can take a weight: the loss is still falling at the end."""
LOSS = 1.05
SHARE = 0.8
GROWTH_MIB = 64
HOSTILE_AT = "127.0.0.66"
LINGER_S = "900"


@dataclass
class Hostile:
    process: subprocess.Popen[bytes]
    log: Path

    def told(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [said for line in lines if (said := json.loads(line))["event"] == event]

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def ready(self, within_s: float = 120) -> None:
        """Wait until it could begin; `tell` it something, and it does."""
        dead = lambda: self.process.poll() is not None  # noqa: E731
        until(lambda: self.told("ready") or dead(), "the hostile peer", within_s)
        assert not dead(), self.log.with_suffix(".err").read_text()[-2000:]


@dataclass
class Seen:
    """What one honest node went through since the attack began."""

    loss: float
    rounds: int
    honest: int
    """Rounds committed with honest partners."""
    hostile: int
    reasons: Counter[str]
    grown_mib: float

    @property
    def share(self) -> float:
        return self.honest / max(1, self.rounds)


@dataclass
class Swarm:
    group: RealNodes
    run: Path
    nodes: list[Node] = field(default_factory=list)

    def start(self, honest: int = HONEST) -> "Swarm":
        """All are paused, so that they begin at the same time, and not before the attack does: `begin`."""
        self.nodes = [self._node("start", str(self.run), paused=True)]
        self.nodes += [self._node("join", "--bootstrap", self.nodes[0].address(), paused=True) for _ in range(honest - 1)]
        return self

    def begin(self) -> float:
        """When it was."""
        until(lambda: all(node.ask("status").get("state") == "paused" for node in self.nodes), "all are there", 120)
        since = time.time()
        for node in self.nodes:
            node.tell("resume")
        self.memory = [self._rss(node) for node in self.nodes]
        return since

    def join(self) -> Node:
        """A newcomer, by the door of an honest node."""
        self.nodes.append(self._node("join", "--bootstrap", self.nodes[0].address()))
        return self.nodes[-1]

    def _node(self, *words: str, paused: bool = False) -> Node:
        number = len(self.group.nodes) + 1
        home = self.group.root / f"n{number}"
        home.mkdir(mode=0o700)
        if paused:
            (home / "paused").touch()
        return self.group.node(f"n{number}", *words, "--linger", LINGER_S, at=f"127.0.0.{number}")

    def peer_ids(self) -> set[str]:
        return {Identity.load_or_create(node.home / "identity.key").peer_id for node in self.nodes}

    def finish(self, within_s: float = 300) -> None:
        """Every node has done its rounds, or has given up."""

        def over(node: Node) -> bool:
            return node.process.poll() is not None or node.ask("status").get("state") == "finished"

        until(lambda: all(map(over, self.nodes)), "the end of the run", within_s)

    def seen(self, since: float) -> list[Seen]:
        honest = self.peer_ids()
        return [self._seen(node, since, honest, before) for node, before in zip(self.nodes, self.memory, strict=False)]

    def _seen(self, node: Node, since: float, honest: set[str], before: int) -> Seen:
        committed = [e["partner"] for e in node.events("RoundCommitted") if e["at"] > since]
        solo = [e["reason"] for e in node.events("WentSolo") if e["at"] > since]
        friends = sum(partner in honest for partner in committed)
        dead = node.process.poll() is not None
        loss = math.inf if dead else node.ask("status")["eval_loss"]
        grown = 0.0 if dead else (self._rss(node) - before) / (1 << 20)
        rounds = len(committed) + len(solo)
        return Seen(loss, rounds, friends, len(committed) - friends, Counter(solo), grown)

    @staticmethod
    def _rss(node: Node) -> int:
        return int(psutil.Process(node.process.pid).memory_info().rss)

    @contextmanager
    def attacked(self, attack: str, **told: Any) -> Iterator[Hostile]:
        manifest = toml.load(self.run)
        module = tasks.load(manifest).model()
        public = {
            "run_id": manifest.run_id,
            "layout": layout_digest(module).hex(),
            "parameters": sum(p.numel() for p in module.parameters()),
            "codec": manifest.outer.codec,
        }
        log = self.group.root / "hostile.jsonl"
        options = {"attack": attack, "run": public, "log": str(log), "home": str(log.with_suffix("")), "at": HOSTILE_AT}
        with log.with_suffix(".err").open("wb") as err:
            words = [sys.executable, str(PEER), json.dumps({**options, **told})]
            process = subprocess.Popen(
                words, env=self.group.environ, stdin=subprocess.PIPE, stdout=err, stderr=err, start_new_session=True
            )
        try:
            doors = [until(lambda node=node: node.ask("status").get("addresses"), "an address")[0] for node in self.nodes]
            hostile = Hostile(process, log)
            hostile.tell(json.dumps(doors))
            yield hostile
        finally:
            process.kill()
            process.wait(10)


def paced(group: RealNodes, *, rounds: int = ROUNDS, codec: str = "lattice:4", outputs: int = 384) -> Path:
    """257 parameters for each of the `outputs`."""
    way = WAY / (rounds * PHASE_S / STEP_S)
    inner = {"seconds": PHASE_S, "batch_tokens": 8, "warmup": 0.0, "learning_rate": way}
    model = {"task": "paced", "options": {"step_s": STEP_S, "outputs": outputs}}
    return group.tables(rounds=rounds, model=model, inner=inner, outer={"codec": codec})


@contextmanager
def swarm(*, honest: int = HONEST, **run: Any) -> Iterator[Swarm]:
    with RealNodes() as group:
        yield Swarm(group, paced(group, **run)).start(honest)


def unattacked(**run: Any) -> list[Seen]:
    with swarm(**run) as calm:
        since = calm.begin()
        calm.finish()
        return calm.seen(since)
