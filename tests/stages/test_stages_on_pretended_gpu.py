"""Stages on a pretended GPU: the same losses as on a CPU, and a micro-batch is waited for once."""

import threading
from collections import Counter

import pytest
from pretended_device import pretended_gpu
from stage_pairs import StageInTest, chain, staged_run, train_together

STEPS = 4


@pytest.mark.parametrize("stages", [2, 3])
def test_a_chain_of_stages_computes_what_it_does_on_a_cpu(stages: int) -> None:
    run = staged_run(stages, precision="fp32")
    here = chain(run)
    train_together(here, STEPS)
    with pretended_gpu() as gpu:
        there = chain(run, device="cuda")
        with gpu.watching() as seen:
            train_together(there, STEPS)
        assert not gpu.races
        assert measured(there) == measured(here)
    passed = sum(node.task.counts.passed for node in there)
    assert [node.losses for node in there] == [node.losses for node in here]
    waits = Counter(wait.where for wait in seen.waits if "encode" not in wait.within)
    assert sum(waits.values()) <= passed + stages * STEPS, waits
    assert seen.pageable == 0, "page-locked memory alone crosses"


def measured(nodes: list[StageInTest]) -> float:
    stop = threading.Event()
    others = [threading.Thread(target=node.train, args=(0, stop)) for node in nodes[1:]]
    for thread in others:
        thread.start()
    try:
        return nodes[0].replica.evaluate()
    finally:
        stop.set()
        for thread in others:
            thread.join()
