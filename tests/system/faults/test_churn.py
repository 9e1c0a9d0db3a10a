"""Six real nodes, of which one is killed or joins every 20 s on average: the swarm learns as well as without that.

Nobody is spared: there is no rendezvous, so whoever joins does so by two of those who live at that moment, and tries
again where both die meanwhile. Half of those who join were killed before and come back with their home, the others are
new. The task is paced, so that six nodes and those that are just starting live well on two cores.

The calm run is not made of processes: as many replicas as were alive in the mean train here on the same number of
tokens, in step, each with another partner in every round, and no correction is late. That is more than a calm swarm of
real nodes could do. The order of
events is a seed's; when they fall relative to rounds is not. CHURN_S=120 makes a short storm of it.
"""

import os
import random
import time
import tomllib
from collections.abc import Callable
from statistics import fmean

import pytest
from changing_swarm import ChangingSwarm, longest_gap
from real_nodes import Node, RealNodes, until
from replicas import exchange

from noloco_node.core.codecs.by_name import codec
from noloco_node.run.schema import Manifest
from noloco_node.training.build import build_replica

STORM_S = float(os.environ.get("CHURN_S", "600"))
EVERY_S = 20.0
MOST, LEAST = 6, 3
SEED = 7
STEP_S, STEPS, EXAMPLES = 0.2, 10, 8
CALM_S = 30.0
"""Between the last event and the end of the run: long enough for the last joining node."""
ROUNDS = int((STORM_S + CALM_S) / (STEP_S * STEPS))
LINGER_S = 900
"""Long enough to ask a finished node for its last status; then it is told to leave."""
WAY = 0.2
"""How far AdamW can take a weight. The loss falls to two fifths and is still falling: 1% less of training would show as
1.2% more loss."""
RUN = f"""\
name = "churn"
rounds = {ROUNDS}
[model]
task = "paced"
options = {{ step_s = {STEP_S} }}
[inner]
steps = {STEPS}
batch_tokens = {EXAMPLES}
learning_rate = {WAY / (ROUNDS * STEPS):.2g}
"""


class Swarm(ChangingSwarm):
    def strike(self) -> None:
        """Kill a node or let one join."""
        kill = len(self.living) == MOST or (len(self.living) > LEAST and self.random.random() < 0.5)
        if kill:
            node = self.random.choice(self.living)
            self.kill(node)
        else:
            node = self.join()
        self.note(f"{'kill' if kill else 'join'} {node.home.name}")

    def launch(self, name: str, *words: str) -> Node:
        return super().launch(name, *words, "--linger", str(LINGER_S))


def storm(swarm: Swarm) -> None:
    """Ends with the run."""
    strikes_at = swarm.began
    while (strikes_at := strikes_at + swarm.random.expovariate(1 / EVERY_S)) < swarm.began + STORM_S:
        while time.time() < strikes_at:
            swarm.look_after_newcomers()
            time.sleep(0.5)
        swarm.strike()

    def over() -> bool:
        swarm.look_after_newcomers()
        return all(node.ask("status").get("state") == "finished" for node in swarm.living)

    until(over, "the end", 180)


def calm(replicas: int, rounds: int) -> float:
    """The mean held-out loss of replicas that are never interrupted."""
    table = {**tomllib.loads(RUN), "rounds": rounds, "model": {"task": "paced", "options": {"step_s": 0.0}}}
    run = Manifest.model_validate(table)
    all_ = [build_replica(run, f"calm-{index}", device="cpu", threads=1) for index in range(replicas)]
    exact = codec("fp32")
    rng = random.Random(SEED)
    for _ in range(rounds):
        for inner in all_:
            while not inner.position.phase_over:
                inner.step()
        order = rng.sample(range(replicas), replicas)
        for one, other in zip(order[::2], order[1::2], strict=False):
            exchange(all_[one], all_[other], (exact, exact))
        if replicas % 2:
            all_[order[-1]].boundary()
    return fmean(inner.evaluate() for inner in all_)


def test_a_swarm_that_stops_for_good_has_a_gap() -> None:
    assert longest_gap([1.0, 2.0, 4.0], 0.0, 5.0) == 2.0
    assert longest_gap([1.0, 2.0, 4.0], 0.0, 600.0) == 596.0
    assert longest_gap([601.0, 602.0], 0.0, 600.0) == 600.0
    assert longest_gap([], 0.0, 600.0) == 600.0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(STORM_S + 600)
def test_a_storm_of_kills_and_joins(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    swarm = Swarm(real_nodes, random.Random(SEED))
    (real_nodes.root / "run.toml").write_text(RUN)
    swarm.begin(str(real_nodes.root / "run.toml"), MOST)
    storm(swarm)
    views = [node.ask("status") for node in swarm.living]
    homes = {node.home: node for node in real_nodes.nodes if list(node.home.glob("runs/*/events.jsonl"))}.values()
    committed = swarm.committed_at()
    tokens = sum(event["tokens"] for node in homes for event in node.events("PhaseDone"))
    gap = longest_gap(committed, swarm.began, swarm.began + STORM_S)
    losses = [view["eval_loss"] for view in views]
    stormy = fmean(losses)
    for node in swarm.living:
        assert real_nodes.run("leave", "--home", str(node.home)).returncode == 0
    assert [node.process.wait(15) for node in swarm.living] == [0] * len(swarm.living)
    until(lambda: not real_nodes.left_over(), lambda: f"nothing left: {real_nodes.left_over()}", 5)

    replicas = round(tokens / (ROUNDS * STEPS * EXAMPLES))
    rounds = round(tokens / (replicas * STEPS * EXAMPLES))
    still = calm(replicas, rounds)
    kills = sum("kill" in event for event in swarm.events)
    figure(
        f"{kills} kills and {len(swarm.events) - kills} joins in {STORM_S:.0f} s (seed {SEED}), {swarm.shut_doors} "
        f"times by shut doors: at most {gap:.1f} s without a committed round; held-out loss {stormy:.4f} "
        f"({min(losses):.4f} to {max(losses):.4f}) after {tokens / 1e3:.0f} k tokens; of {replicas} calm replicas "
        f"after {replicas * rounds * STEPS * EXAMPLES / 1e3:.0f} k {still:.4f}"
    )
    assert gap < 60
    assert stormy <= 1.05 * still
