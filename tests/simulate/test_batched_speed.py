"""What running the replicas as one saves beside a plain loop over them: the same model, batches and settings, in turn.

CPU time of one thread, so that other work on the machine matters little.
"""

import time
from collections.abc import Callable
from itertools import product
from statistics import median

import pytest
import torch

from noloco_node.bench import plain_loop
from noloco_node.run.schema import InnerSpec
from noloco_node.simulate.experiment import Workload, workload
from noloco_node.simulate.readers import Readers
from noloco_node.simulate.replicas import ReplicaBatch
from noloco_node.simulate.settings import Settings
from noloco_node.training.model import build

STEPS = 8


def spent_s(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def loop(work: Workload) -> Callable[[], None]:
    """One step of each replica, one after the other, as anybody would write it."""
    settings, readers = work.settings, Readers(work.corpus, work.settings)
    batches: list[torch.Tensor] = []
    spec = InnerSpec(steps=STEPS + 1)
    replicas = [
        plain_loop.train(
            build(settings.model, work.corpus.vocabulary, settings.seed, settings.data.sequence_length).train(),
            lambda row=row: batches[-1][row],
            spec,
            STEPS + 1,
            settings.batch,
        )
        for row in range(settings.replicas)
    ]

    def step() -> None:
        batches.append(readers.next(settings.batch))
        for replica in replicas:
            next(replica)

    return step


def batched(work: Workload, dtype: torch.dtype, compiled: bool, at_once: int) -> Callable[[], None]:
    """The simulator's own step, of so many replicas at once until all have had theirs."""
    spec, replicas = InnerSpec(steps=STEPS + 1), work.settings.replicas
    trainers = [ReplicaBatch(work.module, at_once, spec, dtype, compiled) for _ in range(replicas // at_once)]
    readers = Readers(work.corpus, work.settings)

    def step() -> None:
        batches = torch.split(readers.next(work.settings.batch), at_once)
        for trainer, batch in zip(trainers, batches, strict=True):
            trainer.backward(batch)
            trainer.step(0.5)

    return step


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # torch's compiler has its own
def test_eight_replicas_as_one_take_less_than_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    work = workload(Settings(device="cpu"))
    ways = {"a plain loop": loop(work)}
    for dtype, compiled, at_once in product(dict.fromkeys((torch.float32, work.dtype)), (False, True), (1, 8)):
        ways[f"{at_once} at once, {dtype}{', compiled' if compiled else ''}"] = batched(work, dtype, compiled, at_once)
    for step in ways.values():
        step()  # loads and compiles
    rounds = [{name: spent_s(step) for name, step in ways.items()} for _ in range(STEPS)]
    ratios = {name: median(each["a plain loop"] / each[name] for each in rounds) for name in ways}
    with capsys.disabled():
        for name, ratio in ratios.items():
            seconds = median(each[name] for each in rounds)
            print(f"\n  {name}: {seconds:.3f} s of CPU a step of all eight, {ratio:.2f} times as fast", end="")  # noqa: T201
    assert ratios[f"8 at once, {work.dtype}, compiled"] > 1
