"""Three replicas of each of two stages, of which one is hostile to the other stage: what the honest ones learn.

The real services and passes; tests/stages/test_agreement.py and test_callers.py have the decisions, in milliseconds.
Run by --slow: some ten seconds of a core each.
"""

from collections.abc import Callable
from functools import cache

import pytest
from stage_swarm import StageSwarm, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 160
LOSS = 1.05
"""Times an unattacked run's."""
ATTACKS = {
    "turned gradients": ("1a", "negated"),
    "turned gradients, 2 in 5": ("1a", "negated:0.4"),
    "turned and 12 times as long, 1 in 5": ("1a", "long:0.2"),
    "gradients with a bias that is longer": ("1a", "bent"),
    "gradients with a bias half as long": ("1a", "leaning"),
    "noise for gradients": ("1a", "noise"),
    "gradients of the micro-batch before": ("1a", "another"),
    "random targets, as many as it can": ("0a", "flood wrong targets"),
    "targets of another micro-batch, as many as it can": ("0a", "flood shuffled targets"),
    "targets turned by a rule, as many as it can": ("0a", "flood turned"),
    "targets turned by a rule": ("0a", "turned"),
    "noise for activations, as many as it can": ("0a", "flood noise"),
    "the same micro-batch, as many as it can": ("0a", "flood the same"),
}


@cache
def unattacked() -> StageSwarm:
    return trained({}, STEPS)


@pytest.mark.parametrize("name", ATTACKS)
def test_honest_replicas_learn_beside_one_that_is_hostile(name: str, figure: Callable[[str], None]) -> None:
    who, attack = ATTACKS[name]
    calm, attacked = unattacked(), trained({who: attack}, STEPS)
    loss, best = attacked.loss(), calm.loss()
    figure(f"{name}: held-out loss {loss:.4f}, {loss / best - 1:+.1%} (unattacked {best:.4f})")
    assert loss <= LOSS * best
    honest = {member.name for member in attacked.members if not member.hostile}
    assert not honest & {peer for member in attacked.members if not member.hostile for peer, _ in member.blamed}


def test_what_comparing_costs_among_honest_replicas(figure: Callable[[str], None]) -> None:
    calm = unattacked()
    compared = sum(member.service.totals.compared for member in calm.of(0))
    passed = sum(member.service.answered_by[peer] for member in calm.of(0) for peer in member.service.answered_by)
    counts = [member.service._task.counts for member in calm.of(1) if member.service._task]
    left = sum(each.not_counted for each in counts)
    figure(f"{compared} of {passed} micro-batches were compared, {compared / passed:.1%}; {left} were not learned from")
    assert compared / passed < 0.1 and left / passed < 0.02
    assert not any(member.blamed for member in calm.members)
