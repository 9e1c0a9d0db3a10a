"""Train with one algorithm on one workload, from the same start to the same number of tokens. The result is a Curve.

Every algorithm of a comparison gets replicas of its own from the same module, the same batches by step, the same
learning rate by step, and is evaluated on the same held-out tokens at the same steps, whatever its own H. Progress
goes to a callable; the caller prints it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.core.device import choose_device
from noloco_node.data.corpus import Corpus, standard_library
from noloco_node.data.stream import spread
from noloco_node.simulate.baselines import Algorithm, Outer
from noloco_node.simulate.noloco import algorithm
from noloco_node.simulate.readers import Readers
from noloco_node.simulate.replicas import ReplicaBatch
from noloco_node.simulate.settings import Choice, Curve, Settings
from noloco_node.simulate.stages import PerStage, Routes
from noloco_node.training.language import EVAL_TOKENS
from noloco_node.training.model import build

Progress = Callable[[int, float], None]
"""Called with the steps that this algorithm has done, and its last mean training loss."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What all algorithms of one comparison share."""

    settings: Settings
    module: nn.Module
    """The initial weights; it is never trained."""
    corpus: Corpus
    held_out: Tensor
    """(sequences, length + 1)."""


def workload(settings: Settings) -> Workload:
    corpus = standard_library()
    windows = spread(corpus.held_out, settings.data.sequence_length, settings.held_out_sequences)
    device = choose_device(settings.device)
    module: Any = build(settings.model, corpus.tokenizer.vocabulary, settings.seed, settings.data.sequence_length)
    return Workload(settings, module.to(device), corpus, windows.to(device))


def run(work: Workload, choice: Choice, progress: Progress) -> Curve:
    settings, started = work.settings, time.perf_counter()
    replicas = ReplicaBatch(work.module, settings)
    few = work.held_out[: max(1, EVAL_TOKENS // settings.data.sequence_length)]  # as many as a node evaluates on

    def evaluate(theta: Tensor) -> float:
        return float(replicas.evaluate(theta[None], few))

    stages = range(settings.stages)
    rules = [algorithm(choice, settings, replicas.layout(stage), evaluate, stage) for stage in stages]
    rule = PerStage([(replicas.columns(stage), rule) for stage, rule in enumerate(rules)])
    outer = Outer.start(replicas.theta)
    readers = Readers(work.corpus, settings)
    routes = Routes(settings)
    curve = Curve(choice.label, settings.seed)
    _measure(curve, 0, work, replicas, rule)
    since = 0  # steps since the last boundary
    for step in range(settings.steps):
        losses = replicas.backward(readers.next(settings.batch).to(replicas.theta.device), routes.next())
        rule.gradients(replicas.gradients)
        replicas.step((step + 1) / settings.steps)
        since += 1
        rule.between(outer, since)
        if since == (choice.inner_steps or settings.inner_steps) or step + 1 == settings.steps:
            rule.boundary(outer)
            since = 0
        if step + 1 == settings.steps:
            rule.finish(outer)
        if (step + 1) % settings.inner_steps == 0:
            _measure(curve, step + 1, work, replicas, rule)
        progress(step + 1, float(losses.mean()))
    curve.bytes_per_param, curve.failed_swaps = rule.sent, rule.failed
    curve.bytes_per_token = replicas.bytes_per_token
    curve.scaled_swaps = rule.scaled
    curve.taken_back, curve.taken_back_from_honest = rule.taken_back, rule.taken_back_from_honest
    curve.wall_s = time.perf_counter() - started
    return curve


def _measure(curve: Curve, step: int, work: Workload, replicas: ReplicaBatch, rule: Algorithm) -> None:
    theta = replicas.theta[: work.settings.honest]
    average = theta.mean(dim=0, keepdim=True)
    curve.steps.append(step)
    curve.tokens.append(step * len(theta) * work.settings.batch * work.settings.data.sequence_length)
    curve.averaged_model_loss.append(float(replicas.evaluate(average, work.held_out)))
    curve.replica_mean_loss.append(float(replicas.evaluate(theta, work.held_out).mean()))
    squares = [(one - average).square().mean() for one in theta]  # in a tenth of the time that var(dim=0) takes
    curve.replica_std.append(float(torch.stack(squares).mean().sqrt()))
    curve.resent_block_fraction.append(rule.stats.missed_share)
    curve.relative_error.append(rule.stats.relative_error)
    curve.bytes_sent_per_param.append(rule.sent)
