"""torch's DistributedDataParallel over gloo: an all-reduce of the gradient in every step, behind the backward pass."""

import os
from typing import Any

from noloco_node.bench.rivals.local_steps import LocalSteps
from noloco_node.bench.workers import serve

PORT = 29_500


class Member(LocalSteps):
    def connect(self, count: int) -> None:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        os.environ["GLOO_SOCKET_IFNAME"] = "link0"
        where = f"tcp://{self._addresses['first']}:{PORT}"
        distributed.init_process_group("gloo", init_method=where, rank=self._number, world_size=count)
        self._module = DistributedDataParallel(self.module, gradient_as_bucket_view=True)

    def train(self, steps: int) -> dict[str, Any]:
        """It has no phases: `steps` means nothing."""
        return self.begin(self._train)

    def _train(self) -> None:
        optimizer = self.adamw()
        while True:
            self.gradient(self._module)
            self.descend(optimizer)
            self.rounds += 1
            self.task.leave_weights(self.module)


if __name__ == "__main__":
    serve(Member())
