"""A loop of somebody's own on the device, with its replica: what each changes the other sees, in order."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from checks.models import same_each_time
from checks.place import Place, require_same
from torch import Tensor, nn

from noloco_node.loop.task import Loop
from noloco_node.loop.turns import Turns
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

STEPS = 6
RUN = Manifest(name="loop", model=ModelSpec(task="mine"), inner=InnerSpec(steps=STEPS, batch_tokens=1))


class Mine:
    """A network, AdamW, and noise to learn: the same steps each time."""

    def __init__(self, place: Place) -> None:
        wide = 64 if place.quick else 2048
        torch.manual_seed(1)
        layers = nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64)
        self.device, self.model = place.device, nn.Sequential(*layers).to(place.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._noise = torch.Generator().manual_seed(2)

    def step(self) -> Tensor:
        given = torch.randn(256, 64, generator=self._noise).to(self.device)
        loss = nn.functional.mse_loss(self.model(given), given)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> Tensor:
        """As they are when the device is done; matrices first, as a replica's vectors have them."""
        parameters = sorted(self.model.parameters(), key=lambda p: p.dim() < 2)
        return torch.cat([p.detach().flatten() for p in parameters]).cpu()


@contextmanager
def driven(mine: Mine) -> Iterator[tuple[Replica, Callable[[], float]]]:
    """The loop on a thread of its own; the replica, and what makes one step of both."""
    turns = Turns()
    replica = build_replica(RUN, "peer", brought=Loop(mine.model, mine.optimizer, None, turns), device=str(mine.device))

    def loop() -> None:
        loss = 0.0
        while turns.wait(loss):
            loss = mine.step().item()

    def step() -> float:
        assert replica.has_data(60.0)
        replica.fetch()
        return replica.step()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield replica, step
    finally:
        turns.close()
        turns.end()
        thread.join(60)


def its_steps_are_those_of_the_loop_alone(place: Place) -> None:
    with same_each_time():
        alone, together = Mine(place), Mine(place)
        for _ in range(STEPS):
            alone.step()
        with driven(together) as (_, step):
            for _ in range(STEPS):
                step()
        require_same("six steps", together.weights(), alone.weights())


def what_the_replica_adds_is_what_the_loop_goes_on_with(place: Place) -> None:
    with same_each_time():
        mine = Mine(place)
        with driven(mine) as (replica, step):
            for _ in range(STEPS):
                step()
            before = mine.weights()
            u, _ = replica.snapshot()
            replica.boundary()
            c = torch.full_like(u, 1e-3).to(replica.theta.device)
            replica.slow.apply(0, c, replica.round)
            require_same("θ is φ after a boundary", replica.theta.cpu(), replica.phi.cpu())
            require_same("the loop's weights are θ", mine.weights(), replica.theta.cpu())
            assert not torch.equal(mine.weights(), before)
            step()


def a_checkpoint_is_of_the_moment_it_was_asked_for(place: Place) -> None:
    mine = Mine(place)
    with driven(mine) as (replica, step):
        for _ in range(STEPS):
            step()
            weights = mine.weights()
            moments = [each["exp_avg"].cpu().clone() for each in mine.optimizer.state.values()]
            copy = replica.copy_state()
            step()
            saved = copy.result(60)
            require_same("weights", torch.cat([w.flatten() for w in saved.weights.values()]), weights)
            found = sorted(each["exp_avg"].flatten()[0].item() for each in saved.inner["optimizer"].values())
            assert found == sorted(each.flatten()[0].item() for each in moments)


CHECKS = (
    its_steps_are_those_of_the_loop_alone,
    what_the_replica_adds_is_what_the_loop_goes_on_with,
    a_checkpoint_is_of_the_moment_it_was_asked_for,
)
