"""A transformers Trainer as a node.

from noloco_node import loop
from noloco_node.loop.hugging_face import SwarmCallback

callback = SwarmCallback(lambda model, optimizer: loop.join("<invitation>", model, optimizer))
Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from noloco_node.loop.island import Follower
from noloco_node.loop.swarm import Swarm


class SwarmCallback(TrainerCallback):  # type: ignore[misc]
    """Trains alone where the run is over, unless `stops`: then the Trainer stops with it."""

    def __init__(
        self, enter: Callable[[nn.Module, torch.optim.Optimizer], Swarm | Follower], *, stops: bool = True
    ) -> None:
        """`enter` is called when the Trainer has model and optimizer where they stay."""
        self._enter, self._stops = enter, stops
        self.swarm: Swarm | Follower | None = None
        """While it trains."""
        self._losses: list[torch.Tensor] = []
        """Of the micro-batches since the last step."""
        self._are_shares = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        with suppress(Exception):  # one that was interrupted, as in a notebook, has said why
            self.on_train_end(args, state, control)
        model, optimizer = given["model"], given["optimizer"]
        self.swarm = self._enter(model, optimizer).__enter__()
        self._hook = model.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, _given: Any, named: dict[str, Any], found: Any) -> None:
        """A Trainer tells its callbacks no loss of a step: a micro-batch's is taken where the model computes it. It is
        a share of the step's where the model was told of how many tokens the step has."""
        loss = found.get("loss") if isinstance(found, dict) else None
        if model.training and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone().reshape(()))  # the Trainer may scale it in place
            self._are_shares = named.get("num_items_in_batch") is not None

    def _step_loss(self, args: Any) -> torch.Tensor | None:
        losses, self._losses = self._losses, []
        if not losses:
            return None
        losses = [loss.to(losses[0].device) for loss in losses]  # nn.DataParallel has a copy on each GPU
        if not self._are_shares:
            return torch.stack(losses).mean()
        return torch.stack(losses).sum() * (args.world_size if args.average_tokens_across_devices else 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.swarm:
            loss = self._step_loss(args)
            logged = next((line["loss"] for line in reversed(state.log_history) if "loss" in line), 0.0)
            self.swarm.step(logged if loss is None else loss)
            control.should_training_stop |= self._stops and self.swarm.over

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave after the last step. At on_train_end load_best_model_at_end has put older weights into the model, and
        the node would save them as its newest. Early stopping may be decided after the end of the epoch: then one of
        the calls below comes before that."""
        if control.should_training_stop:
            self.on_train_end(args, state, control)

    on_save = on_log = on_epoch_end

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        swarm, self.swarm = self.swarm, None
        if swarm:
            self._hook.remove()
            swarm.__exit__(None, None, None)
