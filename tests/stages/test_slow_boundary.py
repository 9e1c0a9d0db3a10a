"""Two stages on a link of 200 Mbit/s and 30 ms there and back: how busy they are with so many micro-batches under way.

The real passes, service and codec over the in-memory network in real time; only the arithmetic is a sleep, so that the
figures are the link's and not this machine's.
"""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from memory_network.network import MemoryNetwork
from torch import Tensor, nn

from noloco_node.run.schema import InnerSpec, Manifest, StagesSpec
from noloco_node.stages.part import Position
from noloco_node.stages.passes import StageTask
from noloco_node.stages.service import StageService, StageTerms
from noloco_node.training.gradients import Gradients
from noloco_node.training.optimizer import Optimizer
from noloco_node.wire.stage_pb2_grpc import add_StageServicer_to_server

FORWARD_S = 0.05
"""Of a micro-batch through one stage; backward takes twice as long."""
LENGTH, HIDDEN, EXAMPLES = 256, 512, 4
BYTES_S, WAY_S = 200e6 / 8, 0.015
CODED = EXAMPLES * LENGTH * HIDDEN * 2
"""Bytes of a micro-batch's activations in bf16, and of the gradient at them."""
COMPUTE_S = (4 * FORWARD_S, 3 * FORWARD_S)
RUN = Manifest(name="slow", stages=StagesSpec(count=2), inner=InnerSpec(batch_tokens=8 * EXAMPLES * LENGTH))


class Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return values * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * FORWARD_S)
        return gradient, torch.zeros(())


class PacedPart:
    tokens_per_example = LENGTH
    micro_examples = EXAMPLES
    activations, targets, target_limit = (LENGTH, HIDDEN), (LENGTH,), 10

    def model(self) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(()))
        return module

    def stream(self, peer_id: str) -> "PacedPart":
        return self

    position = 0

    def next(self, examples: int) -> tuple[Tensor]:
        return (torch.zeros(examples, LENGTH, dtype=torch.long),)

    def held_out(self) -> tuple[Tensor]:
        return self.next(1)

    def split(self, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]

    def forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        return Paced.apply(inputs.float()[..., None].expand(*inputs.shape, HIDDEN), module.weight)

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return Paced.apply(inputs, module.weight).sum()


class Stage:
    def __init__(self, network: MemoryNetwork, stage: int, in_flight: int) -> None:
        self.transport = network.join("ab"[stage])
        self.service = StageService(self.transport, random.Random(1), lambda peer, why: pytest.fail(why))
        self.transport.serve(lambda server: add_StageServicer_to_server(self.service, server))
        part = PacedPart()
        self.service._loop = asyncio.get_running_loop()
        task = StageTask(part, part, Position(stage, 2), self.service, self.service.letters, in_flight)
        self.service._task = self.task = task
        self.service.begin(StageTerms(bytes.fromhex(RUN.run_id), "bf16"))
        module = part.model()
        self.stream = task.stream("peer")
        self.passes: Gradients = task.gradients(task, module, Optimizer(module, RUN.inner), RUN.inner, EXAMPLES, 1.0)
        self.passes.working = self.counted
        self.busy_s = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.busy_s += time.monotonic() - began

    def train(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if self.stream.ready(1, 0.02):
                self.passes.finish()


async def busy(in_flight: int, seconds: float) -> list[float]:
    network = MemoryNetwork(random.Random(1), WAY_S, BYTES_S)
    stages = [Stage(network, stage, in_flight) for stage in range(2)]
    for stage in stages:
        await stage.transport.start()
    stages[0].service.candidates(["b"])
    stop = threading.Event()
    threads = [threading.Thread(target=stage.train, args=(stop,)) for stage in stages]
    for thread in threads:
        thread.start()
    try:
        await asyncio.sleep(2.0)  # until all that may be under way are
        before = [stage.busy_s for stage in stages]
        began = time.monotonic()
        await asyncio.sleep(seconds)
        wall_s = time.monotonic() - began
        return [(stage.busy_s - was) / wall_s for stage, was in zip(stages, before, strict=True)]
    finally:
        stop.set()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        for stage in stages:
            await stage.service.close()
            await stage.transport.close()


def expected(in_flight: int) -> list[float]:
    """The lower of what comes back in time, and what the busier stage does."""
    alone_s = sum(COMPUTE_S) + 2 * (CODED / BYTES_S + WAY_S)
    rate = min(in_flight / alone_s, 1 / max(*COMPUTE_S, CODED / BYTES_S))
    return [rate * seconds for seconds in COMPUTE_S]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
async def test_busy_with_so_many_under_way(in_flight: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, model = await busy(in_flight, 15.0), expected(in_flight)
    with capsys.disabled():
        words = ", ".join(f"{one:.2f} (model {other:.2f})" for one, other in zip(found, model, strict=True))
        print(f"\n  {in_flight} under way: busy {words}")  # noqa: T201
    assert found == pytest.approx(model, rel=0.2)
