"""A hostile peer among honest real nodes, attack by attack: what it costs them, beside an unattacked run.

The hostile peer is a program of its own (tests/helpers/hostile_peer.py), which knows proto/ and no node. The task is
paced, so that a few nodes live well on two cores. Each honest node is a host of its own, in a network namespace; the
hostile identities share one, unless a test says otherwise. (Different loopback addresses are no different places: p2pd
dials from another port than the one it listens at, and the kernel gives such a connection 127.0.0.1.)
"""

import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hostile_peer import Aim, Lattice, Plain
from real_nodes import ROOT, Node, RealNodes, until

from noloco_node.base.identity import Identity
from noloco_node.bench import links
from noloco_node.bench.links import Host
from noloco_node.core.codecs import by_name
from noloco_node.run import toml
from noloco_node.training import tasks
from noloco_node.training.model import layout_digest

PEER = ROOT / "tests" / "helpers" / "hostile_peer.py"
HONEST = 3
ROUNDS, STEPS, STEP_S = 60, 10, 0.06
WAY, EXAMPLES = 0.2, 32
"""How far AdamW can take a weight, so that the loss is still falling at the end; and examples a step, so many that it
hardly matters whether 60% or 90% of the rounds have a partner."""
WARM_UP = 0.15
"""Of the rounds: those in which nodes find each other, or not, move them little."""
LOSS, WORST, TRAINING_LOSS = 1.05, 1.15, 1.15
"""Times the unattacked swarm's; the second is that of 80 examples."""
CALM_SWARMS, SWARMS = 2, 3
"""Unattacked swarms differ by chance: their means, of three nodes each, by 0.7%, and attacked ones by more. So an
attacked swarm that is over a limit is not the last one: the mean of so many counts."""
BLAMED = 0.01
SHARE = 0.8
GROWTH_MIB = 64
OUTPUTS = 384
"""Of the paced task: 257 parameters for each."""
JOINED_S = 60
MBIT = 1000.0
"""Of each host's link."""
LINGER_S = "900"
Report = Callable[[str], None]


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
    """On held-out data."""
    training_loss: float
    """Of the last phase: on data that no attacker knows beforehand."""
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
    hosts: Sequence[Host]
    """The last one is the hostile peer's."""
    nodes: list[Node] = field(default_factory=list)

    def start(self, honest: int = HONEST) -> "Swarm":
        """All are paused, so that they begin at the same time, and not before the attack does: `begin`."""
        self.nodes = [self._node("start", str(self.run), paused=True)]
        door = self.nodes[0].address()
        self.nodes += [self._node("join", "--bootstrap", door, paused=True) for _ in range(honest - 1)]
        return self

    def begin(self) -> float:
        """When it was. Each has seen all others by then, but as paused: up to 5 rounds are without a partner at first.

        Their phases begin at equal distances, as those of machines that were started at any time do on average: where
        three begin at once, two meet at each boundary, and the third is alone in a third of its rounds.
        """

        def sees(node: Node) -> int:
            return sum(row["state"] == "paused" for row in node.ask("peers").get("peers", []))

        for node in self.nodes:
            until(lambda node=node: sees(node) >= len(self.nodes) - 1, "all are there", 120)
        self.memory = [self._rss(node) for node in self.nodes]
        since = time.time()
        for number, node in enumerate(self.nodes):
            time.sleep(max(0.0, since + number * STEPS * STEP_S / len(self.nodes) - time.time()))
            node.tell("resume")
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
        host = self.hosts[number - 1]
        return self.group.node(f"n{number}", *words, "--linger", LINGER_S, within=host.inside, at=host.address)

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
        status = {"eval_loss": math.inf, "loss": math.inf} if dead else node.ask("status")
        grown = 0.0 if dead else (self._rss(node) - before) / (1 << 20)
        rounds = len(committed) + len(solo)
        return Seen(
            status["eval_loss"], status["loss"], rounds, friends, len(committed) - friends, Counter(solo), grown
        )

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
        host = self.hosts[-1]
        options = {
            "attack": attack,
            "run": public,
            "log": str(log),
            "home": str(log.with_suffix("")),
            "at": host.address,
        }
        with log.with_suffix(".err").open("wb") as err:
            # 20 identities take more of two cores than their victims, who have machines of their own elsewhere
            words = [*host.inside, "nice", sys.executable, str(PEER), json.dumps({**options, **told})]
            process = subprocess.Popen(
                words, env=self.group.environ, stdin=subprocess.PIPE, stdout=err, stderr=err, start_new_session=True
            )
        try:
            doors = [until(lambda node=node: node.ask("status").get("addresses"), "a door")[0] for node in self.nodes]
            hostile = Hostile(process, log)
            hostile.tell(json.dumps(doors))
            yield hostile
        finally:
            process.kill()
            process.communicate(timeout=10)


def paced(group: RealNodes, *, rounds: int = ROUNDS, codec: str = "lattice:4", steps: int = STEPS) -> Path:
    inner = {"steps": steps, "batch_tokens": EXAMPLES, "warmup": WARM_UP, "learning_rate": WAY / (rounds * steps)}
    model = {"task": "paced", "options": {"step_s": STEP_S, "outputs": OUTPUTS}}
    return group.tables(rounds=rounds, model=model, inner=inner, outer={"codec": codec})


@contextmanager
def swarm(*, honest: int = HONEST, make: Callable[..., Path] = paced, **run: Any) -> Iterator[Swarm]:
    """`make`: writes the run.toml, of `run`."""
    if why := links.why_not("tc"):
        pytest.skip(why)
    with links.star(honest + 2, MBIT) as hosts, RealNodes() as group:  # one for a newcomer
        yield Swarm(group, make(group, **run), hosts).start(honest)


def seen_beside_swaps(told: dict[str, Any], within_s: float = 300, **run: Any) -> list[Seen]:
    """What honest nodes go through in a whole run beside a hostile peer that swaps as it is told."""
    with swarm(**run) as attacked, attacked.attacked("swaps", **told) as hostile:
        hostile.ready()
        since = attacked.begin()
        hostile.tell("go")
        attacked.finish(within_s)
        return attacked.seen(since)


@dataclass
class Calm:
    """What unattacked swarms came to, on average."""

    loss: float
    training_loss: float
    share: float
    """Of a node's rounds, with a partner."""
    blamed: float
    """The share of swaps that were taken back, though everybody was honest."""

    @classmethod
    def of(cls, **run: Any) -> "Calm":
        seen, blamed, swaps = [], 0, 0
        for _ in range(CALM_SWARMS):
            with swarm(**run) as calm:
                since = calm.begin()
                calm.finish()
                seen += calm.seen(since)
                blamed += sum(node.ask("status").get("taken_back", 0) for node in calm.nodes)
                swaps += sum(len(node.events("RoundCommitted")) for node in calm.nodes)
        losses = fmean(each.loss for each in seen), fmean(each.training_loss for each in seen)
        return cls(*losses, fmean(each.share for each in seen), blamed / swaps)

    def told(self, name: str, seen: list[Seen], uniform: float) -> str:
        """`uniform`: the share of its rounds that a node would have with honest partners if all were drawn alike."""
        share, loss = fmean(each.share for each in seen), fmean(each.loss for each in seen)
        return (
            f"{name}: held-out loss {loss:.4f}, {loss / self.loss - 1:+.1%}, worst node "
            f"{max(each.loss for each in seen):.4f} (unattacked {self.loss:.4f}), training loss "
            f"{max(each.training_loss for each in seen):.4f} (unattacked {self.training_loss:.4f}), rounds with "
            f"honest partners {share:.0%} (unattacked {self.share:.0%}, uniform {uniform * self.share:.0%}), with "
            f"hostile ones {fmean(each.hostile / max(1, each.rounds) for each in seen):.0%}, memory "
            f"+{max(each.grown_mib for each in seen):.0f} MiB, solo {dict(sum((s.reasons for s in seen), Counter()))}"
        )

    def beyond(self, seen: list[Seen], uniform: float) -> list[str]:
        """What an attack did beyond its limit."""
        limits = {
            "unattacked swarms took back": (self.blamed, BLAMED),
            "mean held-out loss": (fmean(each.loss for each in seen), LOSS * self.loss),
            "held-out loss of one node": (max(each.loss for each in seen), WORST * self.loss),
            "training loss": (max(each.training_loss for each in seen), TRAINING_LOSS * self.training_loss),
            "rounds without honest partners": (-fmean(each.share for each in seen), -SHARE * uniform * self.share),
            "memory": (max(each.grown_mib for each in seen), GROWTH_MIB),
        }
        return [f"{name}: {seen} > {most}" for name, (seen, most) in limits.items() if seen > most]


@pytest.fixture(scope="module")
def calm() -> Callable[[str], Calm]:
    """Unattacked swarms with a codec. Each has its own loss: int8's is 22% below lattice:4's here, bf16's 1% above."""
    return cache(lambda codec: Calm.of(codec=codec))


@pytest.fixture(scope="module")
def calm_pair() -> Calm:
    return Calm.of(honest=2)


ELEMENTS = 257 * OUTPUTS
U = np.random.default_rng(1).normal(0, 0.06, ELEMENTS).astype(np.float32)
MOVED = 0.002
"""The largest movement of each block."""


def told(codec: str, aim: Aim, wider: int = 0) -> float:
    """‖c‖ / ‖u‖, of what a node's codec makes of the hostile peer's payloads."""
    blocks = torch.full((-(-ELEMENTS // 256),), MOVED)
    conversation = by_name.codec(codec).converse(torch.from_numpy(U), 0, bytes(16), blocks)
    lie = Lattice(aim, 0, ELEMENTS, wider) if codec == "lattice:4" else Plain(codec, aim, 0)
    payload: bytes | None = conversation.open()
    while payload is not None:
        received = conversation.receive(lie.answer(payload))
        payload = received.reply
    assert received.correction is not None
    return float(np.linalg.norm(received.correction.double().numpy()) / np.linalg.norm(U))


@pytest.mark.parametrize(
    ("codec", "kind", "size", "share"),
    [
        ("lattice:4", "honest", 1.0, 0.0),
        ("lattice:4", "tiny", 1.0, 0.0),
        ("lattice:4", "flip", 1.0, 1.0),
        ("lattice:4", "times", 10.0, 4.5),
        ("bf16", "flip", 1.0, 1.0),
        ("int8", "noise", 1.0, 0.5**0.5),
        ("fp32", "times", 2.0, 0.5),
    ],
)
def test_a_codec_alone_takes_whatever_is_well_formed(codec: str, kind: str, size: float, share: float) -> None:
    """So what bounds a step must lie behind it; and the payloads made by hand are what a partner's would be."""
    assert told(codec, Aim(kind, size, known=U)) == pytest.approx(share, abs=0.02)


def test_what_is_sent_again_has_room_for_more_than_any_model_holds() -> None:
    assert told("lattice:4", Aim("largest", known=U)) > 1000


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_largest_numbers_do_no_harm() -> None:
    # 9 s: nodes that were paused may see each other only after five
    with swarm(honest=2, rounds=30, steps=5) as pair, pair.attacked("swaps", kind="largest") as hostile:
        hostile.ready()
        since = pair.begin()
        hostile.tell("go")
        pair.finish(60)
        seen, first = pair.seen(since), pair.nodes[0].ask("status")["eval_loss_first"]
        assert hostile.told("swap"), "it had its chance"
    assert not any(node.hostile for node in seen), "nothing of it was added"
    assert all(node.loss < 0.9 * first for node in seen), "they learned"
    assert sum(node.honest for node in seen), "from each other too"


SWAPS: dict[str, dict[str, Any]] = {
    "zeros with tiny ranges": {"kind": "tiny", "most": 3},
    "-u": {"kind": "flip"},
    "2 u": {"kind": "times", "size": 2.0},
    "10 u": {"kind": "times", "size": 10.0},
    "noise": {"kind": "noise"},
    "as far as a range goes": {"kind": "far", "wider": 24, "size": 0.5},
    "the largest number": {"kind": "largest"},
    "20 identities with -u": {"kind": "flip", "options": {"identities": 20}},
    "always calls again": {"kind": "honest"},
    "20 identities": {"kind": "honest", "options": {"identities": 20}},
    "holds in silence": {"hold": "silent"},
    "holds with Alive": {"hold": "alive"},
    "holds with one byte a second": {"hold": "trickle"},
    "promises and does not come": {"hold": "promise"},
    "creeps": {"kind": "creep", "size": 2.0},
    "draws back to the first weights": {"kind": "undo", "size": 2.0},
    "harms a little each time": {"kind": "steer", "size": 1.008, "paced": OUTPUTS},
    "harms where nobody looks": {"kind": "blind", "size": 3.0, "wider": 8, "paced": OUTPUTS},
    "harms less where nobody looks": {"kind": "blind", "size": 1.0, "wider": 8, "paced": OUTPUTS},
    "20 identities that harm where nobody looks": {
        "kind": "blind",
        "size": 3.0,
        "wider": 8,
        "paced": OUTPUTS,
        "options": {"identities": 20},
    },
}
"""What the hostile peer of a swarm does whenever it is called and as often as it can call."""
CODECS = {
    "-u": ("lattice:3", "bf16", "int8", "fp32"),
    "2 u": ("lattice:3", "bf16"),
    "10 u": ("int8",),
    "noise": ("fp32",),
    "as far as a range goes": ("lattice:3", "bf16", "int8", "fp32"),
    "the largest number": ("bf16", "int8", "fp32"),
    "draws back to the first weights": ("lattice:3",),
}
"""... and in which codecs beside lattice:4."""
BEFORE_OTHERS = "until three swaps with others show what is usual, and until its harms add up, what it did stays"
NOT_YET = {
    "creeps": "what costs no more than half of what a phase gains is not counted, swap after swap",
    "harms a little each time": "what costs no more than half of what a phase gains is not counted, swap after swap",
    "harms where nobody looks": BEFORE_OTHERS,
    "harms less where nobody looks": BEFORE_OTHERS,
    "20 identities that harm where nobody looks": BEFORE_OTHERS,
}
"""What is known not to hold: these losses rise, and by at most so much."""
KNOWN = {"mean held-out loss", "held-out loss of one node", "training loss"}
MOST_KNOWN, MOST_TRAINING = 1.3, 2.0


def each_attack() -> Iterator[tuple[str, str]]:
    for name in SWAPS:
        for codec in ("lattice:4", *CODECS.get(name, ())):
            yield name, codec


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["lattice:3", "lattice:4", "bf16", "int8", "fp32"])
def test_honest_nodes_take_hardly_anything_back(codec: str, calm: Callable[[str], Calm], figure: Report) -> None:
    seen = calm(codec)
    figure(f"unattacked, {codec}: held-out loss {seen.loss:.4f}, rounds with a partner {seen.share:.0%}")
    assert seen.blamed <= BLAMED
    assert seen.share >= 0.8


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "codec"), list(each_attack()))
def test_one_hostile_peer_beside_three_honest_nodes(
    name: str, codec: str, calm: Callable[[str], Calm], figure: Report
) -> None:
    unattacked, uniform, seen = calm(codec), (HONEST - 1) / HONEST, list[Seen]()
    for _ in range(SWARMS):
        seen += seen_beside_swaps(SWAPS[name], codec=codec)
        figure(unattacked.told(f"{name}, {codec}", seen, uniform))
        if not unattacked.beyond(seen, uniform):
            break
    beyond = unattacked.beyond(seen, uniform)
    if beyond and name in NOT_YET:
        assert {each.partition(":")[0] for each in beyond} <= KNOWN
        assert fmean(each.loss for each in seen) <= MOST_KNOWN * unattacked.loss
        assert max(each.training_loss for each in seen) <= MOST_TRAINING * unattacked.training_loss
        pytest.xfail(NOT_YET[name])
    assert not beyond


TWO_FRAGMENTS = (1 << 20) // 257 + 1
"""Outputs, of which the second fragment has a few elements."""


def at_its_noise(group: RealNodes) -> Path:
    """A run whose loss soon falls no more, with steps that take twice as long."""
    inner = {"steps": STEPS, "batch_tokens": 8, "warmup": 0.05, "learning_rate": 0.003, "final_learning_rate": 1.0}
    model = {"task": "paced", "options": {"step_s": 2 * STEP_S, "outputs": TWO_FRAGMENTS}}
    return group.tables(rounds=ROUNDS, model=model, inner=inner, outer={"codec": "lattice:4"})


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_swap_whose_end_is_held_is_taken_back_before_training_hides_its_harm(figure: Report) -> None:
    told = {"kind": "uphill", "size": 2.0, "wider": 8, "paced": TWO_FRAGMENTS, "end_s": 7 * STEPS * STEP_S}
    with swarm(make=at_its_noise) as attacked, attacked.attacked("swaps", **told) as hostile:
        hostile.ready()
        since = attacked.begin()
        hostile.tell("go")
        attacked.finish()
        seen, honest = attacked.seen(since), attacked.peer_ids()

        def rounds(kind: str) -> set[tuple[str, int]]:
            """Those with the hostile one."""
            found = ((node.home.name, e) for node in attacked.nodes for e in node.events(kind))
            return {(name, e["round"]) for name, e in found if e["partner"] not in honest}

        whole, back = rounds("RoundCommitted"), rounds("TakenBack")
    figure(
        f"holds the end of each swap: {len(back)} taken back, {len(whole - back)} whole ones stayed; "
        f"held-out loss {fmean(each.loss for each in seen):.4f}"
    )
    assert back and not whole - back


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_honest_nodes_do_not_believe_a_crowd_that_they_diverged(calm_pair: Calm, figure: Report) -> None:
    crowd = {"made_up": 3, "says": {"round": ROUNDS // 2}}
    with swarm(honest=2) as pair, pair.attacked("swaps", kind="tiny", most=4, options=crowd) as hostile:
        hostile.ready()
        since = pair.begin()
        hostile.tell("go")
        pair.finish()
        seen = pair.seen(since)
        fetched = [node.printed(r"(weights have diverged)") for node in pair.nodes]
    assert not any(fetched), "each keeps its own weights"
    figure(calm_pair.told("zeros with tiny ranges, and a crowd", seen, 0.5))
    assert not calm_pair.beyond(seen, 0.5)


LONG = 600
CROWDS: dict[str, tuple[str, dict[str, Any]]] = {
    "500 presences of one caller": ("presences", {}),
    "500 presences of four callers": ("presences", {"options": {"each": 4}}),
    "three made-up donors near the end": ("donors", {"options": {"round": LONG - 20}}),
    "three donors of an honest state with noise": ("donors", {"options": {"honest": True, "size": 0.5}}),
    "33 identities with 4 connections each": ("connections", {}),
}


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CROWDS)
def test_a_newcomer_gets_an_honest_state(name: str, figure: Report) -> None:
    attack, told = CROWDS[name]
    with swarm(honest=2, rounds=LONG) as attacked, attacked.attacked(attack, **told) as hostile:
        hostile.ready(200)
        since = attacked.begin()
        hostile.tell("go")
        time.sleep(15)  # the attack has its time
        there = attacked.seen(since)
        began = time.time()
        newcomer = attacked.join()
        until(newcomer.committed, "its first round with somebody", JOINED_S)
        joined_s = time.time() - began
        status, author = newcomer.ask("status"), attacked.nodes[0].ask("status")
        seen = attacked.seen(since)
    figure(
        f"{name}: a newcomer has swapped after {joined_s:.0f} s; it began at a held-out loss of "
        f"{status['eval_loss_first']:.3f} and is in round {status['round']}, where an honest node is at "
        f"{author['eval_loss']:.3f} in round {author['round']}; "
        f"memory +{max(each.grown_mib for each in seen):.0f} MiB; "
        f"rounds with honest partners {fmean(each.share for each in there):.0%}"
    )
    assert status["eval_loss_first"] <= LOSS * max(each.loss for each in there)
    assert abs(status["round"] - author["round"]) < 20
    assert max(each.grown_mib for each in seen) <= GROWTH_MIB
