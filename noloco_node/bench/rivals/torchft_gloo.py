"""torchft's all-reduce on gloo: what its Manager calls once its lighthouse has said who takes part.

The lighthouse's quorum, some messages before each step, is left out: in torchft it goes on beside the training.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo

from noloco_node.bench.rivals import gloo
from noloco_node.bench.workers import serve


class Member(gloo.Member):
    def connect(self, addresses: Sequence[str]) -> None:
        within = timedelta(seconds=gloo.STEP_S)
        gloo.use_link(addresses[0])
        self._store = gloo.store(addresses, self._worker)
        self._group = ProcessGroupGloo(timeout=within)
        self._group.configure(f"{addresses[0]}:{gloo.PORT}/bench", "bench", self._worker, len(addresses))
        self._world = len(addresses)

    def all_reduce(self, vector: torch.Tensor) -> None:
        self._group.allreduce([vector], dist.AllreduceOptions()).wait()


if __name__ == "__main__":
    serve(Member())
