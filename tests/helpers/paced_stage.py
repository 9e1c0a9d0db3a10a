"""One of two stages, as a worker of bench/workers.py: the passes, the service, the codec and the transport of a node.
Only the arithmetic of the model is a sleep, so that how busy it is tells of the link and not of this machine."""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import Identity
from noloco_node.bench.workers import Answer, serve
from noloco_node.run.schema import InnerSpec, Manifest, StagesSpec
from noloco_node.stages.next_stage import StageTerms
from noloco_node.stages.part import Position
from noloco_node.stages.passes import StageTask
from noloco_node.stages.service import StageService
from noloco_node.training.inner.gradients import Gradients
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.wire.stage_pb2_grpc import add_StageServicer_to_server

FORWARD_S = 0.05
"""Of a micro-batch through one stage; backward takes twice as long."""
LENGTH, HIDDEN, EXAMPLES = 256, 512, 4
CODED = EXAMPLES * LENGTH * HIDDEN * 2
"""Bytes of a micro-batch's activations in bf16, and of the gradient at them."""
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


class PacedStage:
    async def start(self, host: str, stage: int, in_flight: int) -> Answer:
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-noloco-")
        identity = Identity.load_or_create(Path(self._folder.name, "identity.key"))
        self._transport = Libp2pTransport(identity, Address("ip4", host, 0))
        self._service = StageService(self._transport, random.Random(1), self._misbehaved)
        self._transport.serve(lambda server: add_StageServicer_to_server(self._service, server))
        part = PacedPart()
        self._service.part(RUN, Position(stage, 2))
        task = StageTask(part, part, Position(stage, 2), self._service._next, self._service.letters, in_flight)
        self._service._task = self._service._next.task = task
        self._service.begin(StageTerms(bytes.fromhex(RUN.run_id), "bf16"))
        module = part.model()
        self._stream = task.stream("peer")
        self._passes: Gradients = task.gradients(task, module, Optimizer(module, RUN.inner), RUN.inner, EXAMPLES, 1.0)
        self._passes.working = self._counted
        self._busy_s = 0.0
        await self._transport.start()
        return {"address": str(self._transport.addresses()[0])}

    async def connect(self, next_stage: Sequence[str]) -> None:
        addresses = [parse(address) for address in next_stage]
        self._transport.introduce({address.peer: [address] for address in addresses})
        self._service.candidates([address.peer for address in addresses])
        threading.Thread(target=self._train, daemon=True).start()

    def busy(self) -> Answer:
        return {"busy_s": self._busy_s, "at": time.monotonic()}

    def _train(self) -> None:
        while True:
            if self._stream.ready(1, 0.02):
                self._passes.finish()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._busy_s += time.monotonic() - began

    def _misbehaved(self, peer: str, why: str) -> None:
        sys.exit(f"{peer} did {why}")


if __name__ == "__main__":
    serve(PacedStage())
