"""A swarm of real nodes that die, leave and join: nobody is spared, and whoever joins does so by those alive then."""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from real_nodes import Node, RealNodes, until

SWARM_UNREACHABLE = 10


@dataclass
class ChangingSwarm:
    """The nodes that run, those that are off, and the addresses of those that are known."""

    real_nodes: RealNodes
    random: random.Random
    living: list[Node] = field(default_factory=list)
    off: list[Node] = field(default_factory=list)
    address: dict[Node, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    began: float = 0.0
    shut_doors: int = 0

    def begin(self, run: str, nodes: int) -> None:
        """Until each of them has committed a round."""
        self.start("n0", "start", run)
        self.learn_addresses()
        for number in range(1, nodes):
            self.start(f"n{number}", *self.door())
        until(lambda: all(node.committed() for node in self.living), "a round of each", 240)
        self.learn_addresses()
        self.began = time.time()

    def start(self, name: str, *words: str) -> Node:
        self.living.append(self.launch(name, *words))
        return self.living[-1]

    def launch(self, name: str, *words: str) -> Node:
        return self.real_nodes.node(name, *words)

    def door(self) -> list[str]:
        """The words to join by: two that live at this moment."""
        known = [self.address[node] for node in self.living if node in self.address]
        return ["join", *(word for at in self.random.sample(known, min(2, len(known))) for word in ("--bootstrap", at))]

    def learn_addresses(self) -> None:
        for node in [node for node in self.living if node not in self.address]:
            self.address[node] = until(lambda node=node: node.ask("status").get("addresses"), "an address", 90)[0]

    def look_after_newcomers(self) -> None:
        """Learn the addresses of those that have one by now. Who finds that both have died meanwhile tries others."""
        for node in [node for node in self.living if node.process.poll() == SWARM_UNREACHABLE]:
            self.living.remove(node)
            self.start(node.home.name, *self.door())
            self.shut_doors += 1
        for node in [node for node in self.living if node not in self.address]:
            self.assert_runs(node)
            if addresses := node.ask("status").get("addresses"):
                self.address[node] = addresses[0]

    def assert_runs(self, node: Node) -> None:
        """Or has just found nobody, which the next look sees to."""
        assert node.process.poll() in (None, SWARM_UNREACHABLE), (node.home.name, node.log.read_text()[-2000:])

    def kill(self, node: Node) -> None:
        self.living.remove(node)
        node.kill()
        self.off.append(node)

    def join(self) -> Node:
        """Who is off comes back with its home, or, in half of the cases, somebody new."""
        if self.off and self.random.random() < 0.5:
            name = self.off.pop(self.random.randrange(len(self.off))).home.name
        else:
            name = f"n{len({node.home for node in self.real_nodes.nodes})}"
        return self.start(name, *self.door())

    def note(self, what: str) -> None:
        self.events.append(f"{time.time() - self.began:5.0f} s: {what}")

    def committed_at(self) -> list[float]:
        """When rounds were committed, by all nodes that ever were."""
        homes = {node.home: node for node in self.real_nodes.nodes if list(node.home.glob("runs/*/events.jsonl"))}
        return [event["at"] for node in homes.values() for event in node.events("RoundCommitted")]


def longest_gap(committed: Iterable[float], began: float, ended: float) -> float:
    """A swarm that commits no more before the end has one up to there."""
    return max(later - earlier for earlier, later in pairwise(sorted((began, *committed, ended))))
