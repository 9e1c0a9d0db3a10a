"""torch.distributed on gloo: an all-reduce in fp32 or bf16, and the paper's form, two fp32 vectors to one partner.

The latter is how NoLoCo's reference implementation averages: φ and Δ go to a partner of the round as they are.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from noloco_node.bench.rivals import vectors
from noloco_node.bench.workers import Answer, serve

PORT = 29500
STEP_S = 1200


def use_link(address: str) -> None:
    if address != "127.0.0.1":
        os.environ["GLOO_SOCKET_IFNAME"] = "link0"


def store(addresses: Sequence[str], worker: int) -> Any:
    """Where the members find each other."""
    within = timedelta(seconds=STEP_S)
    return dist.TCPStore(addresses[0], PORT, len(addresses), worker == 0, within)  # type: ignore[attr-defined]


class Member:
    def start(self, host: str, params: int, worker: int, variant: str) -> Answer:
        """`variant`: fp32, bf16 or two-fp32."""
        torch.set_num_threads(1)
        self._worker, self._variant = worker, variant
        self._vector = torch.empty(params)
        self._second = torch.zeros(params) if variant == "two-fp32" else None
        return {"address": host}

    def connect(self, addresses: Sequence[str]) -> None:
        use_link(addresses[0])
        shared, within = store(addresses, self._worker), timedelta(seconds=STEP_S)
        dist.init_process_group("gloo", store=shared, rank=self._worker, world_size=len(addresses), timeout=within)
        self._world = len(addresses)

    def prepare(self, step: int, partners: Sequence[int]) -> Answer:
        vectors.weights(self._vector, self._worker, step)
        self._partners = partners
        return {"probe": vectors.probe(self._vector)}

    def step(self) -> None:
        if self._second is not None:
            self._swap(self._partners[0], self._second)
        elif self._variant == "bf16":
            coded = self._vector.bfloat16()
            self.all_reduce(coded)
            self._vector.copy_(coded).div_(self._world)
        else:
            self.all_reduce(self._vector)
            self._vector.div_(self._world)

    def all_reduce(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector)

    def _swap(self, partner: int, second: torch.Tensor) -> None:
        mine = (self._vector, second)
        theirs = [torch.empty_like(vector) for vector in mine]
        sending = [dist.isend(vector, partner) for vector in mine]
        receiving = [dist.irecv(vector, partner) for vector in theirs]
        for work in (*sending, *receiving):
            if work:
                work.wait()
        for ours, other in zip(mine, theirs, strict=True):
            ours.add_(other).div_(2)

    def result(self) -> Answer:
        return {"probe": vectors.probe(self._vector)}


if __name__ == "__main__":
    serve(Member())
