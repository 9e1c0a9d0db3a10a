"""Real nodes that are killed, or told to leave, in the middle of a swap: the partner goes on, and nothing is left.

Swaps take two seconds of a phase of four, because uploads are limited, so that their middle can be seen. Who is killed,
in which round and after which share of its swap comes from a seed. FAULT_KILLS=5 makes a short test of it.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import psutil
import pytest
from fault_points import Phase, Point, at
from real_nodes import Node, RealNodes, until

from noloco_node.base.identity import Identity
from noloco_node.errors import EXIT_INTERRUPTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("FAULT_KILLS", "20"))
SEED = 20
NODES = 4
OUTPUTS, FRAGMENTS = 4088, 2
VECTOR_BYTES = 2 * 257 * OUTPUTS
UPLOAD_BYTES_S = 1_000_000
SILENCE_S = 20.0
"""After which an exchange ends in which nothing comes any more."""
GONE_S = 5.0


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        yield real_nodes


def start(group: RealNodes, name: str, *words: str) -> Node:
    return group.node(name, *words, "--max-upload", str(UPLOAD_BYTES_S))


def begin(group: RealNodes, nodes: int) -> list[Node]:
    run = group.paced(step_s=0.4, outputs=OUTPUTS, steps=10, outer={"codec": "bf16"}, learning_rate=0.0001)
    first = start(group, "n0", "start", str(run))
    line = first.invitation()
    swarm = [first, *(start(group, f"n{number}", *line) for number in range(1, nodes))]
    for node in swarm:
        until(node.committed, "a round with somebody", 240)
    return swarm


def alive(pids: set[int]) -> set[int]:
    # with their status, so that one that is just going is passed over
    living = {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE}
    return pids & living


def ends(node: Node, since: float) -> list[dict[str, object]]:
    """Of its rounds, in their order."""
    found = [*node.events("RoundCommitted"), *node.events("WentSolo")]
    return sorted((event for event in found if event["at"] > since), key=lambda event: event["at"])


def peer_id(node: Node) -> str:
    return Identity.load_or_create(node.home / "identity.key").peer_id


@dataclass
class Killed:
    next_round_s: float
    """Until the partner's next round."""
    gone_s: float
    """Until no process and no socket of the node was left."""
    one_sided: int


def strike(swarm: list[Node], victim: Node, point: Point) -> Killed:
    """Kill it there, and look at everybody else."""
    by_id, family = {peer_id(node): node for node in swarm}, victim.processes()
    status = at(victim, point, swap_bytes=VECTOR_BYTES, within_s=180)
    killed, partner = time.time(), by_id[status["partner"]]
    victim.kill()
    until(lambda: not alive(family), "its children are gone", GONE_S)
    until(lambda: not [path for path in victim.home.iterdir() if path.is_socket()], "its socket is gone", GONE_S)
    gone_s = time.time() - killed
    others = [node for node in swarm if node is not victim]
    for node in others:
        until(lambda node=node: ends(node, killed), f"{node.home.name}'s next round", SILENCE_S)
    until(
        lambda: any(e["event"] == "RoundCommitted" for e in ends(partner, killed)), "one with a partner", 2 * SILENCE_S
    )
    after = ends(partner, killed)
    for event in after:
        if event["event"] == "WentSolo":
            assert 0 <= event["applied"] <= FRAGMENTS and event["one_sided"] <= 1, event
    return Killed(float(str(after[0]["at"])) - killed, gone_s, sum(int(str(e.get("one_sided", 0))) for e in after))


def test_twenty_kills_in_the_middle_of_swaps(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    chance, swarm, seen = random.Random(SEED), begin(real_nodes, NODES), list[Killed]()
    for number in range(KILLS):
        victim = chance.choice(swarm)
        point = Point.drawn(chance, victim.round() + 1, Phase.SWAPPING)
        seen.append(strike(swarm, victim, point))
        swarm.remove(victim)
        door = chance.choice(swarm).ask("status")["addresses"][0]
        swarm.append(start(real_nodes, victim.home.name, "join", "--bootstrap", door))
        until(swarm[-1].committed, f"a round of who was killed as number {number + 1}", 240)
    figure(
        f"{KILLS} kills (seed {SEED}): the partner's next round after {median(k.next_round_s for k in seen):.1f} s "
        f"(at most {max(k.next_round_s for k in seen):.1f}), processes and sockets gone after at most "
        f"{max(k.gone_s for k in seen):.1f} s, {sum(k.one_sided for k in seen)} one-sided fragments"
    )
    assert max(k.next_round_s for k in seen) < SILENCE_S
    assert all(k.one_sided <= 1 for k in seen)
    for node in swarm:
        node.process.terminate()
    assert [node.process.wait(30) for node in swarm] == [0] * len(swarm)
    until(lambda: not real_nodes.left_over(), lambda: f"nothing left: {real_nodes.left_over()}", GONE_S)
    logs = "".join((home / "node.log").read_text() for home in {node.home for node in real_nodes.nodes})
    assert "Traceback" not in logs


def test_sigterm_in_the_middle_of_a_swap(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    chance, swarm = random.Random(SEED), begin(real_nodes, 3)
    once, twice, stays = swarm
    at(once, Point.drawn(chance, once.round() + 1, Phase.SWAPPING), swap_bytes=VECTOR_BYTES)
    once.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert once.process.wait(10) == 0
    first_s = time.monotonic() - began

    at(twice, Point.drawn(chance, twice.round() + 1, Phase.SWAPPING), swap_bytes=VECTOR_BYTES)
    twice.process.send_signal(signal.SIGTERM)
    twice.process.send_signal(signal.SIGINT)  # a second SIGTERM might reach it together with the first, as one
    began = time.monotonic()
    assert twice.process.wait(1) == EXIT_INTERRUPTED
    figure(f"exit 0 after {first_s:.1f} s; after the second one 130 after {time.monotonic() - began:.2f} s")
    before = len(stays.events("PhaseDone"))
    until(lambda: len(stays.events("PhaseDone")) > before + 1, "the other trains on", 30)
