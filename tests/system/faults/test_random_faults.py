"""Random faults from a seed, one after another, on real nodes: kills, freezes, cut links, bad peers, joins, leaves.

    RANDOM_FAULTS_S=3600 RANDOM_FAULTS_SEED=1 pytest --slow tests/system/faults/test_random_faults.py

The seed draws each fault: how long after the last one, what, which node, and at which point of the node's round. The
point is waited for, so a fault has a name such as `n2 at round 41, training, 63%`, and the list of them is in the home
of the test's nodes and in what is printed. One node, n0, is never killed and never leaves, though everything else
happens to it: its memory, file descriptors and objects are followed over the whole time. Where there may be network
namespaces, the nodes are in two halves and the link between them is cut, too.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil
import pytest
from bad_peer import BadPeer
from changing_swarm import SWARM_UNREACHABLE, ChangingSwarm, longest_gap
from fault_points import Phase, Point, at, daemon
from namespaces import HOSTS_OF_A_HALF, cut_link, half_address, inside, two_halves, why_not
from real_nodes import ROOT, Node, RealNodes, until

from noloco_node.errors import EXIT_INTERRUPTED

STORM_S = float(os.environ.get("RANDOM_FAULTS_S", "180"))
SEED = int(os.environ.get("RANDOM_FAULTS_SEED", "1"))
CALM_S = 40.0
"""After the last fault, in which everybody must be back."""
EVERY_S = 15.0
MOST, LEAST = 6, 4
STEP_S, STEPS, OUTPUTS = 0.2, 10, 1536
SWAP_BYTES = 257 * OUTPUTS * 53 // 100
UPLOAD = "200kB"
"""So that a swap takes a second and a state sixteen, and both can be seen."""
WARM_UP = 0.25
"""Of the time, in which memory may grow as it likes."""
PROGRESS_S = 300.0
SLOPE_MIB_H = 16.0
SAMPLE_EVERY_S = 5.0
REACHED_S = 10.0
"""Who does not come to its fault point in this time, because it is frozen or alone, is struck where it is."""
INSIDE_NODE = ROOT / "tests" / "helpers" / "inside_node"


class Kind(StrEnum):
    KILL = "kill -9"
    KILL_DAEMON = "kill -9 of p2pd"
    FREEZE = "freeze"
    FREEZE_DAEMON = "freeze of p2pd"
    LEAVE = "leave"
    JOIN = "join"
    CUT = "cut link"
    BAD_PEER = "bad peer"


LASTS_S = {Kind.FREEZE: (3, 40), Kind.FREEZE_DAEMON: (3, 20), Kind.CUT: (15, 60), Kind.BAD_PEER: (20, 60)}
ATTACKS: dict[str, dict[str, Any]] = {
    "-u": {"attack": "swaps", "kind": "flip"},
    "the largest number": {"attack": "swaps", "kind": "largest"},
    "holds in silence": {"attack": "swaps", "hold": "silent"},
    "holds with one byte a second": {"attack": "swaps", "hold": "trickle"},
    "100 presences": {"attack": "presences", "options": {"count": 100}},
    "4 identities with 4 connections each": {"attack": "connections", "options": {"identities": 4}},
}


@dataclass(frozen=True)
class Fault:
    after_s: float
    """Since the one before."""
    kind: Kind
    which: float
    """0 to 1, among the nodes that it may happen to."""
    phase: Phase
    share: float
    lasts_s: float
    attack: str


def plan(seed: int, seconds: float) -> list[Fault]:
    """The same for each run of a seed; a longer one begins like a shorter one."""
    chance, faults, passed = random.Random(seed), list[Fault](), 0.0
    while True:
        after = chance.expovariate(1 / EVERY_S)
        kind = chance.choice([*Kind])
        faults.append(
            Fault(
                after,
                kind,
                chance.random(),
                chance.choice([Phase.TRAINING, Phase.SWAPPING]),
                chance.uniform(0.05, 0.9),
                chance.uniform(*LASTS_S.get(kind, (0, 0))),
                chance.choice([*ATTACKS]),
            )
        )
        passed += after
        if passed >= seconds:
            return faults[:-1]


def test_a_plan_is_its_seed_s() -> None:
    longer, shorter = plan(1, 3600), plan(1, 600)
    assert shorter == longer[: len(shorter)] and shorter != plan(2, 600)
    assert {fault.kind for fault in longer} == set(Kind)
    assert sum(fault.after_s for fault in longer) < 3600
    assert {fault.attack for fault in longer if fault.kind is Kind.BAD_PEER} == set(ATTACKS)


@dataclass
class Sample:
    at: float
    nodes: int
    rss_mib: float
    descriptors: int
    daemon_descriptors: int
    objects: int | None


@dataclass
class Storm(ChangingSwarm):
    halves: bool = False
    ends: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)
    """What is to be undone, and when."""
    samples: list[Sample] = field(default_factory=list)
    counts: Counter[Kind] = field(default_factory=Counter)
    frozen: set[Node] = field(default_factory=set)
    cut: bool = False
    leaving: list[Node] = field(default_factory=list)

    def launch(self, name: str, *words: str) -> Node:
        number, words = int(name[1:]), (*words, "--max-upload", UPLOAD)
        half, host = number % 2 + 1, number // 2 % HOSTS_OF_A_HALF + 1
        if not self.halves:
            return self.real_nodes.node(name, *words, at=f"127.0.0.{number % 200 + 1}")
        return self.real_nodes.node(name, *words, within=inside(f"half{half}"), at=half_address(half, host))

    # ---- what happens ----
    def strike(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.JOIN if len(self.living) < MOST:
                self.tell(fault, f"{self.join().home.name}")
            case Kind.KILL | Kind.LEAVE if len(self.living) > LEAST:
                self._lose(fault, self.reach(fault, self.living[1:]))
            case Kind.KILL_DAEMON:
                node = self.reach(fault, self.living)
                if pid := daemon(node):
                    os.kill(pid, signal.SIGKILL)
            case Kind.FREEZE | Kind.FREEZE_DAEMON:
                self._freeze(fault, self.reach(fault, self.living))
            case Kind.CUT if self.halves and not self.cut:
                self._cut(fault)
            case Kind.BAD_PEER:
                self._bad_peer(fault)

    def reach(self, fault: Fault, among: list[Node]) -> Node:
        """The node, at the fault's point where it gets there."""
        free = [node for node in among if node not in self.frozen]
        node = free[int(fault.which * len(free))]
        point = Point(node.round() + 1, fault.phase, fault.share if fault.phase is Phase.TRAINING else 0.05)
        try:
            at(node, point, swap_bytes=SWAP_BYTES, within_s=REACHED_S)
            self.tell(fault, f"{node.home.name} at {point}")
        except AssertionError:
            self.tell(fault, f"{node.home.name}, which did not come to {point}")
        return node

    def tell(self, fault: Fault, where: str) -> None:
        self.counts[fault.kind] += 1
        lasting = f" for {fault.lasts_s:.0f} s" if fault.lasts_s else ""
        self.note(f"{fault.kind}{lasting}: {where}")

    def _lose(self, fault: Fault, node: Node) -> None:
        if fault.kind is Kind.KILL:
            self.kill(node)
        else:
            self.living.remove(node)
            node.process.terminate()
            self.leaving.append(node)

    def _freeze(self, fault: Fault, node: Node) -> None:
        pid = daemon(node) if fault.kind is Kind.FREEZE_DAEMON else node.process.pid
        if not pid:
            return
        os.kill(pid, signal.SIGSTOP)
        if fault.kind is Kind.FREEZE:
            self.frozen.add(node)

        def thaw() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self.frozen.discard(node)

        self.ends.append((time.time() + fault.lasts_s, f"{node.home.name} goes on", thaw))

    def _cut(self, fault: Fault) -> None:
        cut_link(cut=True)
        self.cut = True
        self.tell(fault, "between the halves")

        def heal() -> None:
            cut_link(cut=False)
            self.cut = False

        self.ends.append((time.time() + fault.lasts_s, "the link is whole again", heal))

    def _bad_peer(self, fault: Fault) -> None:
        doors = [self.address[node] for node in self.living if node in self.address]
        host = half_address(1, HOSTS_OF_A_HALF) if self.halves else "127.0.0.240"
        within = inside("half1") if self.halves else []
        peer = BadPeer(self.real_nodes, doors, ATTACKS[fault.attack], at=host, within=within)
        self.tell(fault, f"{fault.attack}, by {len(doors)} doors")
        self.ends.append((time.time() + fault.lasts_s, "the bad peer is gone", peer.end))

    # ---- what goes on meanwhile ----
    def look(self) -> None:
        for due in [end for end in self.ends if end[0] <= time.time()]:
            self.ends.remove(due)
            due[2]()
            self.note(due[1])
        for node in [node for node in self.leaving if node.process.poll() is not None]:
            code, log = node.process.returncode, node.log.read_text()
            not_begun = code == SWARM_UNREACHABLE or (code == EXIT_INTERRUPTED and not log)
            assert not_begun or code == 0, (node.home.name, code, log[-2000:])
            self.leaving.remove(node)
            self.off.append(node)
        self.look_after_newcomers()
        for node in self.living:
            self.assert_runs(node)
        if not self.samples or time.time() > self.samples[-1].at + SAMPLE_EVERY_S:
            self.sample()

    def sample(self) -> None:
        spared = self.real_nodes.nodes[0]
        process, counted = psutil.Process(spared.process.pid), counts(self.real_nodes) / str(spared.process.pid)
        network = 0
        with suppress(psutil.Error, OSError):
            network = psutil.Process(daemon(spared)).num_fds() if daemon(spared) else 0
        objects = int(counted.read_text()) if counted.exists() else None
        rss = process.memory_info().rss / (1 << 20)
        self.samples.append(Sample(time.time(), len(self.living), rss, process.num_fds(), network, objects))

    def wait(self, until_: float) -> None:
        while time.time() < until_:
            self.look()
            time.sleep(0.5)

    def end_all(self) -> None:
        """Undo everything that lasts."""
        while self.ends:
            _, what, undo = self.ends.pop()
            undo()
            self.note(what)


def counts(real_nodes: RealNodes) -> Path:
    return real_nodes.root / "objects"


@pytest.fixture
def storm() -> Iterator[Storm]:
    with ExitStack() as stack:
        halves = why_not("tc") is None
        if halves:
            stack.enter_context(two_halves())
        group = stack.enter_context(RealNodes())
        counts(group).mkdir()
        group.environ["COUNT_OBJECTS"] = str(counts(group))
        group.environ["PYTHONPATH"] = f"{INSIDE_NODE}:{group.environ['PYTHONPATH']}"
        storm = Storm(group, random.Random(SEED), halves=halves)
        stack.callback(storm.end_all)
        yield storm


@dataclass
class Grown:
    """What became of n0 after the warm-up."""

    slope_mib_h: float
    mib: float
    descriptors: tuple[float, float]
    """The fewest that are open in the first and in the last third, both with as many nodes: each node that is there
    takes some, three more while a channel to it is in use, and 100 presences at once take 80 for a moment."""
    nodes: int
    daemon_descriptors: tuple[float, float]
    objects: tuple[float, float]

    @classmethod
    def of(cls, samples: list[Sample]) -> "Grown":
        began, ended = samples[0].at, samples[-1].at
        warm = [sample for sample in samples if sample.at > began + WARM_UP * (ended - began)]
        slope = linear_regression([s.at / 3600 for s in warm], [s.rss_mib for s in warm]).slope
        thirds = warm[: len(warm) // 3], warm[-(len(warm) // 3) :]

        def medians(of: Callable[[Sample], float | None]) -> tuple[float, float]:
            first, last = ([v for s in part if (v := of(s))] for part in thirds)
            return median(first), median(last)

        def fewest(part: list[Sample], nodes: int) -> float:
            return min(s.descriptors for s in part if s.nodes == nodes)

        counts = [Counter(s.nodes for s in part) for part in thirds]
        nodes = max(counts[0], key=lambda nodes: min(count[nodes] for count in counts))
        hours = (warm[-1].at - warm[0].at) / 3600
        return cls(
            slope,
            slope * hours,
            (fewest(thirds[0], nodes), fewest(thirds[1], nodes)),
            nodes,
            medians(lambda s: s.daemon_descriptors),
            medians(lambda s: s.objects),
        )


def endure(storm: Storm) -> None:
    """All faults, and a calm time after them, in which each living node commits a round."""
    strikes_at = storm.began
    for fault in plan(SEED, STORM_S):
        strikes_at = max(strikes_at + fault.after_s, time.time())
        if strikes_at > storm.began + STORM_S:
            break
        storm.wait(strikes_at)
        storm.strike(fault)
    storm.wait(storm.began + STORM_S)
    storm.end_all()
    calm = time.time()
    storm.wait(calm + CALM_S)
    for node in storm.living:
        fresh = lambda node=node: any(e["at"] > calm for e in node.events("RoundCommitted"))  # noqa: E731
        until(fresh, f"a round of {node.home.name} after it all", 120)


def figures(storm: Storm, ended: float, gap: float, grown: Grown) -> str:
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(storm.counts.items()))
    rounds = sum(at > storm.began for at in storm.committed_at())
    return (
        f"{ended - storm.began:.0f} s, seed {SEED}, {'two halves' if storm.halves else 'no link to cut'}: {what}; "
        f"at most {gap:.1f} s without a committed round, {rounds / 2:.0f} swaps; n0's memory "
        f"{grown.slope_mib_h:+.1f} MiB an hour after the warm-up ({grown.mib:+.1f} MiB), descriptors "
        f"with {grown.nodes} nodes {grown.descriptors[0]:.0f} to {grown.descriptors[1]:.0f}, of its p2pd "
        f"{grown.daemon_descriptors[0]:.0f} to {grown.daemon_descriptors[1]:.0f}, objects {grown.objects[0]:.0f} to "
        f"{grown.objects[1]:.0f}"
    )


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(STORM_S + 1800)
def test_random_faults(storm: Storm, figure: Callable[[str], None]) -> None:
    group = storm.real_nodes
    run = group.paced(step_s=STEP_S, steps=STEPS, outputs=OUTPUTS, learning_rate=0.0001)
    storm.begin(str(run), MOST - 1)
    try:
        endure(storm)
    finally:  # of one that fails, too
        ended = time.time()
        storm.sample()
        gap, grown = longest_gap(storm.committed_at(), storm.began, ended), Grown.of(storm.samples)
        figure(figures(storm, ended, gap, grown))
    for node in storm.living:
        node.process.terminate()
    codes = {node.home.name: node.process.wait(30) for node in storm.living}
    (group.root / "faults").write_text("\n".join(storm.events))
    print("\n".join(storm.events))  # noqa: T201 - pytest shows it where the test fails
    logs = {path for node in group.nodes if (path := node.home / "node.log").exists()}  # not of who was killed early
    texts = {path.parent.name: path.read_text() for path in logs}
    found = {name: text.index("Traceback") for name, text in texts.items() if "Traceback" in text}
    faults = {name: texts[name][max(0, at - 500) : at + 4000] for name, at in found.items()}
    assert gap < PROGRESS_S
    assert set(codes.values()) == {0}, codes
    assert not faults, "\n".join(f"{name}: {text}" for name, text in faults.items())
    until(lambda: not group.left_over(), lambda: f"nothing left: {group.left_over()}", 10)
    if STORM_S >= 3600:
        assert grown.slope_mib_h < SLOPE_MIB_H
    assert grown.mib < SLOPE_MIB_H, "of a shorter time all growth"
    assert grown.descriptors[1] <= grown.descriptors[0] + 10
    assert grown.objects[1] <= 1.05 * grown.objects[0]
