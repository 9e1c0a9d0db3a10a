"""Several replicas of each of two stages in one process, on the real service over the in-memory network.

Each node works at one micro-batch and gives the next one its turn, on one thread; what is coded is coded on others, as
in a node. Honest nodes of a stage average in pairs as they reach their boundaries; a hostile one does not take part,
as that is another test's.
"""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from memory_network.network import MemoryNetwork
from stage_attacks import HostileService
from torch import Tensor

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import carry
from noloco_node.data import corpus
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec, OuterSpec, StagesSpec
from noloco_node.stages.next_stage import StageTerms
from noloco_node.stages.part import Position
from noloco_node.stages.service import StageService
from noloco_node.training import tasks
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica
from noloco_node.wire.stage_pb2_grpc import add_StageServicer_to_server


def staged_run(rounds: int, steps: int = 10, **inner: float) -> Manifest:
    return Manifest(
        name="small",
        rounds=rounds,
        model=ModelSpec(task="symbols"),
        inner=InnerSpec(**{"steps": steps, "batch_tokens": 256, "learning_rate": 0.005, **inner}),
        outer=OuterSpec(codec="fp32"),
        stages=StagesSpec(count=2, activations="fp32"),
    )


class Inline(ThreadPoolExecutor):
    """Does at once what a node gives to a thread."""

    def submit(self, work: Any, /, *given: Any, **named: Any) -> "Future[Any]":  # type: ignore[override]
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)
        return done


@dataclass(eq=False)
class Member:
    name: str
    stage: int
    service: StageService
    replica: Replica
    hostile: bool
    offer: tuple[Tensor, int] | None = None
    losses: list[float] = field(default_factory=list)
    blamed: list[tuple[str, str]] = field(default_factory=list)


class StageSwarm:
    def __init__(self, run: Manifest, names: Sequence[str], attacks: dict[str, str], seed: int) -> None:
        """`names`: `0a` is a node of the first stage, `1a` one of the second."""
        self.run = run
        network = MemoryNetwork(random.Random(seed))
        self.transports = {name: network.join(name) for name in names}
        self.members: list[Member] = []
        for name in names:
            self.members.append(self._member(name, attacks.get(name, ""), seed))
        self.stop = False

    def _member(self, name: str, attack: str, seed: int) -> Member:
        transport, blamed = self.transports[name], list[tuple[str, str]]()
        rng = random.Random(f"{seed}/{name}")
        kind = HostileService.with_attack(attack) if attack else StageService
        service = kind(transport, rng, lambda peer, why: blamed.append((peer, why)))
        transport.serve(lambda server: add_StageServicer_to_server(service, server))
        at = Position(int(name[0]), 2)
        part = service.part(self.run, at, 3)
        replica = build_replica(self.run, f"{name}/{seed}", device="cpu", threads=1, part=part)
        member = Member(name, at.stage, service, replica, bool(attack))
        member.blamed = blamed
        return member

    def of(self, stage: int, *, honest: bool = True) -> list[Member]:
        return [each for each in self.members if each.stage == stage and not (honest and each.hostile)]

    async def train(self, steps: int) -> None:
        """Until the honest nodes of the first stage have done so many steps each."""
        for transport in self.transports.values():
            await transport.start()
        for member in self.members:
            member.service.begin(StageTerms(bytes.fromhex(self.run.run_id), "fp32"))
            nexts = [each.name for each in self.of(1, honest=False)] if member.stage == 0 else []
            beside = [each.name for each in self.of(member.stage, honest=False) if each is not member]
            member.service.candidates(nexts, beside)
        works = [asyncio.create_task(self._drive(member)) for member in self.members]
        try:
            while any(len(member.losses) < steps for member in self.of(0)):
                for work in works:
                    if work.done():
                        work.result()
                await asyncio.sleep(0.02)
        finally:
            self.stop = True
            await asyncio.gather(*works)
            for member in self.members:
                await member.service.close()
            for transport in self.transports.values():
                await transport.close()

    async def _drive(self, member: Member) -> None:
        while not self.stop:
            if member.replica.has_data(0):
                member.losses.append(member.replica.step())
                if member.replica.position.phase_over:
                    self._boundary(member)
            await asyncio.sleep(0 if not member.service.letters.empty() else 0.0005)

    def _boundary(self, member: Member) -> None:
        u, _ = member.replica.snapshot()
        member.replica.boundary()
        member.offer = (u, member.replica.round)
        if member.hostile:
            return
        waiting = [each for each in self.of(member.stage) if each is not member and each.offer]
        if waiting:
            self._swap(member, min(waiting, key=lambda each: each.replica.round))

    @staticmethod
    def _swap(one: Member, other: Member) -> None:
        assert one.offer and other.offer
        talks = [codec("fp32").converse(each.offer[0], 0, bytes(16)) for each in (one, other)]
        for each, c in zip((one, other), carry(*talks), strict=True):
            assert each.offer
            each.replica.slow.apply(0, c, each.offer[1])
            each.replica.slow.let_stay()
            each.offer = None

    def loss(self) -> float:
        """Held out, of the model that the means of the honest nodes' slow weights are."""
        for stage in range(2):
            honest = self.of(stage)
            honest[0].replica.theta.copy_(torch.stack([each.replica.phi for each in honest]).mean(0))
        task: Any = tasks.load(self.run, corpus.NOTHING, None)
        whole = torch.nn.Sequential(*(self.of(stage)[0].replica.module for stage in range(2)))
        with torch.no_grad():
            return float(task.loss(whole, task.examples("measured", 0, 20_000)))


def trained(
    attacks: dict[str, str],
    steps: int = 300,
    seed: int = 1,
    names: Sequence[str] = ("0a", "0b", "0c", "1a", "1b", "1c"),
) -> StageSwarm:
    async def run() -> StageSwarm:
        asyncio.get_running_loop().set_default_executor(Inline())
        swarm = StageSwarm(staged_run(steps // 10), names, attacks, seed)
        await swarm.train(steps)
        return swarm

    return asyncio.run(run())
