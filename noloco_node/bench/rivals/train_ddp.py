"""torch's DistributedDataParallel over gloo: an all-reduce of the gradient in every step, behind the backward pass."""

import os
from typing import Any

from noloco_node.bench.rivals.local_steps import LocalSteps
from noloco_node.bench.workers import serve

PORT = 29_500


class Member:
    def build(self, setting: dict[str, Any], number: int, weights: str | None, address: str, first: str) -> None:
        self._steps = LocalSteps(setting, number, weights)
        self._rank, self._first = number, first

    def connect(self, count: int) -> None:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        os.environ["GLOO_SOCKET_IFNAME"] = "link0"
        where = f"tcp://{self._first}:{PORT}"
        distributed.init_process_group("gloo", init_method=where, rank=self._rank, world_size=count)
        self._module = DistributedDataParallel(self._steps.module, gradient_as_bucket_view=True)

    def train(self, steps: int) -> dict[str, Any]:
        """It has no phases: `steps` means nothing."""
        return self._steps.begin(self._train)

    def _train(self) -> None:
        optimizer = self._steps.adamw(self._steps.parameters)
        while True:
            self._steps.gradient(self._module)
            self._steps.descend(optimizer)
            self._steps.rounds += 1
            self._steps.task.leave_weights(self._steps.module)

    def report(self) -> dict[str, Any]:
        return self._steps.report()


if __name__ == "__main__":
    serve(Member())
