"""A correction that did harm is taken back: θ, φ and δ become what they would be without it."""

import pytest
import torch
from replicas import small_replica, small_run

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, Packed
from noloco_node.run.schema import Manifest, OuterSpec
from noloco_node.training import model
from noloco_node.training.replica import Replica

CPU = torch.device("cpu")

VECTORS = "theta", "phi", "delta"


def momentum(keep_norm: bool) -> Manifest:
    outer = OuterSpec(alpha=0.5, beta=0.7, gamma=0.7, keep_norm=keep_norm)
    return small_run(rounds=20).model_copy(update={"outer": outer})


def with_length(run: Manifest) -> Replica:
    replica = small_replica(run=run)
    if replica.slow.scales:
        replica.slow.load_scales([1.4] * len(replica.slow.scales))
    return replica


def trained(run: Manifest, correction: Packed | None, boundaries: int) -> Replica:
    """Movements that do not depend on θ, so that two replicas can be compared; offers at every boundary."""
    replica, chance = with_length(run), torch.Generator().manual_seed(1)
    for boundary in range(3 + boundaries):
        replica.theta += 0.1 * torch.randn(replica.parameters, generator=chance)
        replica.snapshot()
        replica.boundary()
        if boundary == 2 and correction:
            replica.slow.apply(7, correction.applied(CPU), 3, correction)
    return replica


@pytest.mark.parametrize("boundaries", [0, 1, 3])
@pytest.mark.parametrize("keep_norm", [False, True])
def test_three_boundaries_later_it_is_as_if_it_had_never_come(keep_norm: bool, boundaries: int) -> None:
    """With momentum, and with the length that the correction brought with it."""
    c = Packed(5 * torch.randn(1000), None, 0.5)
    never, taken = (trained(momentum(keep_norm), each, boundaries) for each in (None, c))
    assert float((taken.phi - never.phi).norm()) > 50
    taken.slow.take_back()
    for vector in VECTORS:
        assert torch.allclose(getattr(taken, vector), getattr(never, vector), rtol=0, atol=1e-5), vector
    assert never.slow.scales == taken.slow.scales


def test_of_two_partners_in_a_round_the_first_one_brought_the_length() -> None:
    first, second = (Packed(5 * torch.randn(1000)) for _ in range(2))
    one, both = (trained(momentum(True), first, 0) for _ in range(2))
    both.slow.let_stay()
    both.slow.apply(7, second.applied(CPU), 3, second)
    both.slow.take_back()
    for vector in VECTORS:
        assert torch.allclose(getattr(both, vector), getattr(one, vector), rtol=0, atol=1e-5), vector


def test_the_loss_without_it_changes_nothing() -> None:
    c = Packed(0.5 * torch.randn(1000))
    never, taken = (trained(momentum(True), each, 0) for each in (None, c))
    before = taken.theta.clone()
    assert taken.losses().held_out > never.losses().held_out + 0.01
    # what is left is the length that came with the correction, which is the replica's own
    assert taken.losses_without().held_out == pytest.approx(never.losses().held_out, rel=0.01)
    assert torch.equal(taken.theta, before)


def test_other_weights_lie_where_the_gradients_are_and_theta_stays() -> None:
    """To the bit what θ would be in place, with corrections that begin and end within tensors."""
    taken = small_replica()
    taken.step()
    gradients = {p.grad.data_ptr() for p in taken.module.parameters() if p.grad is not None}
    for start in (7, 1007):
        taken.slow.apply(start, torch.randn(1000), taken.round)
    theta, expected = taken.theta.clone(), taken.theta.clone()
    for start, added in zip((7, 1007), taken.slow._added, strict=True):
        expected[start : start + 1000].add_(added.correction.unscaled(CPU), alpha=-1.0)
    with taken.trying_others():
        assert torch.isfinite(torch.tensor(taken.losses().held_out)), "an evaluation, which frees gradients"
        with taken._elsewhere() as others:
            taken.slow.write_without_swap(others)
            there = [p.detach() for _, p in model.parameters(taken.module)]
            assert torch.equal(torch.cat([part.flatten() for part in there]), expected)
            assert gradients == {part.data_ptr() for part in there}
            assert torch.equal(taken.theta, theta)
    model.require_in_place(taken.module, taken._pointers)


def test_a_gradient_that_is_held_is_not_given_up() -> None:
    taken = small_replica()
    taken.step()
    taken._optimizer.held = 5
    before = [p.grad.clone() for p in taken.module.parameters() if p.grad is not None]
    taken.losses_without()
    for mine, p in zip(before, taken.module.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, mine)


@pytest.mark.parametrize("name", ["lattice:4", "lattice:8", "bf16", "int8", "fp32"])
def test_what_is_kept_is_to_the_bit_what_was_applied(name: str) -> None:
    u = torch.randn(5 * BLOCK + 9)
    pair = u, u + 1e-3 * torch.randn(len(u))
    pair[1][3] += 0.5  # is sent again
    moved = torch.full((6,), 3e-3)
    one, other = (codec(name).converse(each, 0, bytes(16), moved) for each in pair)
    said, theirs = one.open(), other.open()
    while (received := one.receive(theirs)).reply is not None:
        said, theirs = received.reply, other.receive(said).reply or b""
    assert received.correction is not None
    kept = Packed(received.correction.clone(), received.unit, 0.25)
    assert torch.equal(kept.unscaled(CPU), received.correction)
    assert torch.equal(kept.applied(CPU), received.correction * 0.25)
