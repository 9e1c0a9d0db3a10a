"""Peers that lie for a whole run, among real nodes: one of six flips signs; one says of itself what cannot be.

Both are carried out by the hostile peer of test_strangers.py, with its unattacked swarms for comparison.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from records import NOW, RUN, record

sys.path.append(str(Path(__file__).parents[1]))
from real_nodes import RealNodes
from test_strangers import HONEST, LOSS, Calm, Seen, Swarm, seen_beside_swaps, swarm

from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.node.trainer import TrainingNode
from noloco_node.peers.record import MAX_REAL, MAX_WHOLE, accept
from noloco_node.run import toml
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.training.inner.schedule import learning_rate

SAID = {"loss": 1e-12, "eval_loss": 1e-12, "tokens_per_s": MAX_REAL}
FALSE = {**SAID, "round": MAX_WHOLE, "step": MAX_WHOLE}
"""As good as a record that is believed can be."""
MORE = 0.15
"""By how much the liar's share of the rounds may be above that of a peer that says the truth: of some 60 rounds."""


def language(group: RealNodes) -> Path:
    """A language model, so that the loss says what was learned, in the codec that the hostile peer speaks. The paced
    task's loss falls to nothing, by how far outer steps carry: there five honest nodes alone end 10% above six, and one
    swarm a tenth above the next."""
    return group.tables(rounds=40, inner={"steps": 40, "batch_tokens": 512}, outer={"codec": "lattice:4"})


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_of_six_flips_signs(figure: Callable[[str], None]) -> None:
    patient_s = 900.0
    with swarm(honest=6, make=language) as calm:
        since = calm.begin()
        calm.finish(patient_s)
        clean = fmean(each.loss for each in calm.seen(since))
    seen = seen_beside_swaps({"kind": "flip"}, patient_s, honest=5, make=language)
    loss = fmean(each.loss for each in seen)
    figure(
        f"held-out loss {loss:.4f} of five; {clean:.4f} of six without it ({loss / clean - 1:+.1%}); it had "
        f"{fmean(each.hostile / max(1, each.rounds) for each in seen):.0%} of their rounds"
    )
    assert any(each.hostile for each in seen), "its first swaps are believed"
    assert loss <= LOSS * clean


def test_whom_a_node_may_call_does_not_depend_on_what_they_say_of_themselves(tmp_path: Path) -> None:
    def called(**said: Any) -> tuple[dict[str, str], str]:
        author = Identity.load_or_create(tmp_path / "author.key")
        trainer = TrainingNode(
            NodeConfig(home=tmp_path / "home"), lambda _: None, sign(Manifest(name="tiny", rounds=5), author)
        )
        given: list[tuple[dict[str, str], str]] = []
        trainer._rounds = SimpleNamespace(candidates=lambda places, own: given.append((places, own)))
        shown = accept(author.peer_id, record(author, **said), RUN, NOW, 60.0)
        assert shown is not None, "it is believed so far"
        trainer._membership.seen = {author.peer_id: shown}
        trainer._update_candidates()
        return given[-1]

    said, found = called(**FALSE), called()
    assert said == found and found[0]


def beside_one(says: dict[str, Any]) -> tuple[Swarm, list[Seen]]:
    """Three honest nodes and a peer that always calls, swaps honestly, and says this of itself."""
    with swarm() as beside, beside.attacked("swaps", kind="honest", options={"says": says}) as other:
        other.ready()
        since = beside.begin()
        other.tell("go")
        beside.finish()
        seen = beside.seen(since)
        manifest = toml.load(beside.run)
        total = manifest.rounds * manifest.inner.steps
        for node in beside.nodes:
            assert not node.printed("(weights have diverged)"), "its own weights are as good"
            phases = node.events("PhaseDone")
            assert all(later["round"] == earlier["round"] + 1 for earlier, later in pairwise(phases))
            for phase in phases:
                rates = [learning_rate(manifest.inner, (phase["steps"] - back) / total) for back in (0, 1)]
                assert phase["learning_rate"] in [pytest.approx(rate, rel=1e-6, abs=1e-12) for rate in rates], phase
    return beside, seen


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_false_figures_of_a_peer_move_nobody(figure: Callable[[str], None]) -> None:
    calm = Calm.of(honest=HONEST)
    shares, losses = {}, {}
    for name, says in {"truth": {}, "lies": FALSE}.items():
        _, seen = beside_one(says)
        shares[name] = fmean(each.hostile / max(1, each.rounds) for each in seen)
        losses[name] = fmean(each.loss for each in seen)
    figure(
        f"its share of the others' rounds {shares['lies']:.0%} ({shares['truth']:.0%} where it tells the truth); "
        f"held-out loss {losses['lies']:.4f} ({losses['truth']:.4f}; {calm.loss:.4f} without it); each learning rate "
        "as the schedule has it"
    )
    assert shares["lies"] <= shares["truth"] + MORE
    assert losses["lies"] <= LOSS * max(losses["truth"], calm.loss)
