"""Stages in one process: what they train is what a whole model would train."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from pydantic import ValidationError
from replicas import small_text
from stage_pairs import StageInTest, Wire, chain, staged_run, train_together
from stage_swarm import StageSwarm
from stage_swarm import staged_run as run_of_symbols
from torch import nn

from noloco_node.core.codecs.by_name import codec
from noloco_node.data.stream import TokenStream
from noloco_node.errors import UsageError
from noloco_node.run.schema import Manifest, ModelSpec, StagesSpec
from noloco_node.stages import passes
from noloco_node.stages.held import MOST_ROUNDS
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Lost, LostMicroBatch, Sent
from noloco_node.stages.part import Position, layers_of, part_of, whole_model
from noloco_node.stages.passes import DEADLINE_S, StageTask
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.inner.gradients import NotMeasured
from noloco_node.training.inner.schedule import learning_rate
from noloco_node.training.mailbox import Finished, PhaseEnded
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

T = TypeVar("T")


def whole(run: Manifest, nodes: list[StageInTest]) -> nn.Module:
    """With the first weights of the stages."""
    return whole_model(run, 256, [node.replica.module for node in nodes])


def plain_losses(run: Manifest, net: nn.Module, steps: int) -> list[float]:
    """As one would write it in plain PyTorch."""
    spec, length = run.inner, run.data.sequence_length
    groups = [
        {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=spec.betas)
    batches, losses = TokenStream(small_text().train, length, run.seed, "a"), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step / (run.rounds * spec.steps))
        (windows,) = batches.next(spec.batch_tokens // length)
        loss = model.next_token_loss(net, windows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stages", "steps"), [(2, 50), (4, 8)])
def test_the_losses_are_those_of_plain_training(stages: int, steps: int) -> None:
    run = staged_run(stages)
    nodes = chain(run)
    plain = whole(run, nodes)
    train_together(nodes, steps)
    expected = plain_losses(run, plain, steps)
    for node in nodes:
        assert node.losses[:steps] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.02 * steps, "and it learns"


def test_a_run_without_stages_is_the_run_that_it_was_before_there_were_any() -> None:
    run = Manifest(name="tiny")
    assert b"stages" not in run.canonical()
    assert run.model_copy(update={"stages": StagesSpec(count=2)}).run_id != run.run_id


def test_layers_are_cut_where_the_run_says_else_evenly() -> None:
    assert [layers_of(StagesSpec(count=3), stage, 7) for stage in range(3)] == [range(2), range(2, 4), range(4, 7)]
    assert layers_of(StagesSpec(count=2, cut=(3,)), 1, 4) == range(3, 4)
    for spec, layers in ((StagesSpec(count=3), 2), (StagesSpec(count=2, cut=(4,)), 4)):
        with pytest.raises(UsageError, match="cannot be cut"):
            layers_of(spec, 0, layers)
    for cut in ((2, 1), (0,), (1, 2, 3)):
        with pytest.raises(ValidationError, match="as cut"):
            StagesSpec(count=3, cut=cut)


def test_each_stage_has_a_layout_of_its_own_and_others_of_it_the_same() -> None:
    run = staged_run(4)
    first = [StageInTest(run, stage).replica for stage in range(4)]
    assert len({replica.layout for replica in first}) == 4, "also the two in the middle, whose parameters are alike"
    assert StageInTest(run, 1, peer="b").replica.layout == first[1].layout
    assert torch.equal(StageInTest(run, 1, peer="b").replica.theta, first[1].theta)


def test_a_model_that_does_more_than_its_layers_is_not_cut() -> None:
    run = staged_run(2)
    gpt2 = ModelSpec(architecture="GPT2Config", config={"n_embd": 16, "n_layer": 2, "n_head": 2})
    with pytest.raises(UsageError, match="cannot be cut into stages"):
        StageInTest(run.model_copy(update={"model": gpt2}), 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_model_with_dropout_is_not_cut(stage: int) -> None:
    """The gradient that comes back would be that of other activations."""
    run = staged_run(2)
    dropout = run.model.model_copy(update={"config": {**run.model.config, "attention_dropout": 0.01}})
    with pytest.raises(UsageError, match="has dropout"):
        StageInTest(run.model_copy(update={"model": dropout}), stage)


def test_a_lost_micro_batch_is_counted_and_not_waited_for() -> None:
    nodes = chain(staged_run(2))
    answers: list[Answer] = []
    nodes[0].wire.spoil = lambda answer: answers.append(answer) or (None if len(answers) % 5 == 1 else answer)
    train_together(nodes, 5)
    counts = nodes[0].task.counts
    assert nodes[1].task.counts.passed == sum(answer.learned for answer in answers)
    assert counts.lost >= 4 and counts.passed >= 20
    assert nodes[0].losses[-1] < nodes[0].losses[0]


def test_answers_that_came_in_time_count_however_late_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause, in which this thread reads no letters."""
    nodes = chain(staged_run(2), in_flight=3)
    first, last = nodes[0].replica, nodes[1].replica
    while nodes[1].letters.qsize() < 3:
        first.has_data(0.02)
    while nodes[0].letters.qsize() < 3:
        last.pass_on(0.02)
    began = time.monotonic()
    monkeypatch.setattr(passes.time, "monotonic", lambda: began + DEADLINE_S + 2)
    monkeypatch.setattr(nodes[0].wire, "ready", lambda: False)
    first.has_data(0)
    assert nodes[0].task.counts.passed == 1 and nodes[0].task.counts.lost == 0
    first.has_data(0)
    first.has_data(0)
    assert nodes[0].task.counts.passed == 3 and nodes[0].task.counts.lost == 0


def test_what_is_lost_because_nobody_is_there_leaves_the_window_as_it_was() -> None:
    node = chain(staged_run(2), in_flight=None)[0]
    size = node.task.window.size
    node.replica.has_data(1.0)
    node.wire.ready = lambda: False
    node.letters.put(Lost(1))
    node.replica.has_data(0)
    assert node.task.counts.lost == 1 and node.task.window.size == size
    node.wire.ready = lambda: True
    node.letters.put(Lost(2))
    while node.task.counts.lost < 2:
        node.replica.has_data(0.1)
    assert node.task.window.size == size - 1


def test_a_huge_gradient_counts_as_a_long_one() -> None:
    nodes = chain(staged_run(2, clip=1.0))
    answers = iter(range(10_000))

    def huge(answer: Answer) -> Answer:
        assert answer.gradient is not None
        return replace(answer, gradient=answer.gradient * 1e30) if next(answers) % 10 == 9 else answer

    nodes[0].wire.spoil = huge
    train_together(nodes, 10)
    assert nodes[0].losses[-1] < nodes[0].losses[0] - 0.2 and nodes[0].replica.skipped == 0


def test_a_middle_stage_says_whose_micro_batch_it_passes_on_and_passes_on_none_of_whom_it_does_not_believe() -> None:
    middle, sent = StageInTest(staged_run(3), 1), list[Sent]()
    middle.wire.send = sent.append  # type: ignore[method-assign]
    part = middle.task.part
    targets = torch.zeros(1, *part.targets, dtype=torch.long)
    asked = Asked(torch.randn(1, *part.activations), targets, False, time.monotonic() + 60, Future(), "a")
    middle.letters.put(asked)
    middle.replica.has_data(0.01)
    assert [each.asked for each in sent] == [asked]
    middle.letters.put(Lost(sent[0].ticket))
    middle.replica.has_data(0.01)
    assert isinstance(asked.answer.exception(0), LostMicroBatch) and middle.task.counts.under_way == 0
    for caller, loss in 4 * [("a", 4.0), ("b", 2.0), ("c", 2.0)]:
        middle.task._passes._callers.counts(caller, loss, 16, time.monotonic())
    asked = replace(asked, answer=Future())
    middle.letters.put(asked)
    middle.replica.has_data(0.01)
    assert isinstance(asked.answer.exception(0), LostMicroBatch) and len(sent) == 1, "a is not believed"


def test_turns_are_by_examples_and_an_evaluation_is_a_third_of_the_work() -> None:
    last, order = StageInTest(staged_run(2), 1), list[str]()
    for caller, examples, evaluates in [
        *2 * [("large", 4, False)],
        *3 * [("small", 1, False)],
        ("evaluates", 4, True),
    ]:
        answer: Future[Answer] = Future()
        answer.add_done_callback(lambda _, caller=caller: order.append(caller))
        activations = torch.randn(examples, *last.task.part.activations)
        targets = torch.zeros(examples, *last.task.part.targets, dtype=torch.long)
        last.letters.put(Asked(activations, targets, evaluates, time.monotonic() + 60, answer, caller))
    while len(order) < 6:
        last.replica.pass_on(0.01)
    assert order == ["small", "evaluates", "small", "small", "large", "large"]


def test_what_overflows_is_lost_for_its_sender_and_costs_no_step() -> None:
    """Finite, but its square is not: the first activations and the first gradient that a stage gets."""
    run = staged_run(2)
    last = StageInTest(run, 1)
    ended = []
    for value in (3e38, 0.1, 0.2, 0.3, 0.4):
        activations = torch.full((1, *last.task.part.activations), value)
        targets = torch.zeros(1, *last.task.part.targets, dtype=torch.long)
        ended.append(Future[Answer]())
        last.letters.put(Asked(activations, targets, False, time.monotonic() + 60, ended[-1], "a"))
    assert last.replica.has_data(20)
    last.replica.step()
    assert last.replica.skipped == 0 and [bool(each.exception(0)) for each in ended] == [True] + 4 * [False]

    nodes = chain(run)
    answers = iter(range(10_000))

    def overflows(answer: Answer) -> Answer:
        assert answer.gradient is not None
        return replace(answer, gradient=torch.full_like(answer.gradient, 3e38)) if not next(answers) else answer

    nodes[0].wire.spoil = overflows
    train_together(nodes, 1)
    assert nodes[0].replica.skipped == 0 and nodes[0].task.counts.lost == 1


def test_who_evaluates_measures_with_what_the_first_stage_sent_last() -> None:
    run = staged_run(2)
    nodes = chain(run)
    with pytest.raises(NotMeasured):
        nodes[1].replica.evaluate()
    stop = threading.Event()
    serving = threading.Thread(target=nodes[1].train, args=(10**6, stop))
    serving.start()
    first = nodes[0].replica.evaluate()
    stop.set()
    serving.join()
    plain = build_replica(run.model_copy(update={"stages": None}), "a", device="cpu", corpus=small_text())
    plain.module.load_state_dict(whole(run, nodes).state_dict())
    assert first == pytest.approx(plain.evaluate(), abs=1e-5)
    assert nodes[1].replica.evaluate() == pytest.approx(first, abs=1e-6)
    nodes[1].replica.fetch()
    assert not nodes[1].replica.losses().own_counts, "its batch comes in parts, later: there are no examples of its own"
    assert [node.replica.state().measured_on for node in nodes] == [plain.state().measured_on, None], "whose data it is"


def served(node: StageInTest, work: Callable[[], T]) -> T:
    """What comes of it, while a node of the next stage answers."""
    stop = threading.Event()
    serving = threading.Thread(target=node.train, args=(0, stop))
    serving.start()
    try:
        return work()
    finally:
        stop.set()
        serving.join()


def test_weights_that_a_stage_only_tries_are_not_what_the_next_one_measures_with() -> None:
    """As those of a peer, and random ones, when a state is tried; those without a swap, when it is judged."""
    first, last = chain(staged_run(2))
    honest = served(last, first.replica.evaluate)
    state = torch.zeros(2 * first.replica.parameters).numpy().tobytes()
    trial = served(last, lambda: first.replica.try_state(state))
    first.replica.theta.mul_(3)
    served(last, first.replica.losses)
    assert abs(trial.theirs - honest) > 1e-3
    assert last.replica.evaluate() == pytest.approx(honest, abs=1e-6)


def test_a_stage_that_has_done_its_work_answers_without_learning() -> None:
    nodes = chain(staged_run(2))
    answers: list[Answer] = []
    nodes[0].wire.spoil = lambda answer: answers.append(answer) or answer
    before = nodes[1].replica.theta.clone()
    stop = threading.Event()
    passing = threading.Thread(target=nodes[1].train, args=(0, stop))
    passing.start()
    while len(nodes[0].losses) < 3:
        if nodes[0].replica.has_data(0.05):
            nodes[0].losses.append(nodes[0].replica.step())
    stop.set()
    passing.join()
    assert torch.equal(nodes[1].replica.theta, before) and nodes[0].replica.skipped == 0
    assert answers and not any(answer.learned for answer in answers)


def test_a_stage_ends_with_the_phase_under_way_when_nothing_comes_any_more() -> None:
    run, posts = staged_run(2), queue.SimpleQueue()
    letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
    at = Position(1, 2)

    def build() -> Replica:
        part = lambda whole: StageTask(part_of(whole, run, at), whole, at, Wire(letters), letters)  # noqa: E731
        return build_replica(run, "a", device="cpu", threads=1, corpus=small_text(), part=part)

    thread = TrainingThread(build, codec("fp32"), posts.put, rounds=run.rounds)
    thread.start()
    thread.begin()
    with pytest.raises(queue.Empty):
        while not isinstance(posts.get(timeout=1), PhaseEnded):
            pass
    thread.amend(run.rounds, ended=True)
    found = []
    while not isinstance(found[-1:] and found[-1], Finished):
        found.append(posts.get(timeout=60))
    thread.stop()
    assert [message.done.loss for message in found if isinstance(message, PhaseEnded)] == [None], "it had no step"


def test_held_out_data_that_are_larger_than_what_fits_go_through_in_parts() -> None:
    """As large as a step, where a large vocabulary's numbers fit for one example only."""
    first, last = chain(staged_run(2))
    sizes: list[int] = []
    for node in (first, last):
        node.task._passes._micro.size = 1
        node.replica.module.base_model.register_forward_hook(
            lambda _module, _given, found: sizes.append(len(found.last_hidden_state))
        )
    theirs, own = served(last, first.replica.evaluate), last.replica.evaluate()
    assert set(sizes) == {1} and own == pytest.approx(theirs, abs=1e-6)


def test_one_callers_held_out_data_do_not_decide_what_a_stage_measures() -> None:
    """Three callers, of which one sends targets that are wrong."""
    run = staged_run(2)
    nodes = chain(run)
    last, examples = nodes[1], []
    windows = nodes[0].task.part.held_out()[0]
    inputs, targets = nodes[0].task.part.split((windows,))
    with torch.no_grad():
        activations = nodes[0].task.part.forward(nodes[0].replica.module, inputs).float()
    for caller in ("a", "b", "liar") * 3:
        wrong = (targets + 1) % 256 if caller == "liar" else targets
        asked = Asked(activations, wrong, True, time.monotonic() + 60, Future(), caller)
        last.letters.put(asked)
        while not asked.answer.done():
            last.replica.pass_on(0.01)
        examples.append(asked.answer.result().loss)
    honest, lie = examples[0] / targets.numel(), examples[2] / targets.numel()
    assert last.replica.evaluate() == pytest.approx(honest, abs=1e-6) and abs(lie - honest) > 1e-4


def test_what_a_caller_that_has_left_sent_is_forgotten_at_a_boundary_and_not_within_a_verdict() -> None:
    """With and without a swap are measured on the same data, however often: here neither weights nor swap change."""
    last = StageInTest(staged_run(2), 1)
    targets = torch.zeros(1, *last.task.part.targets, dtype=torch.long)

    def sends(caller: str, value: float) -> None:
        activations = torch.linspace(-value, 1, 16).expand(1, *last.task.part.activations)
        last.letters.put(Asked(activations, targets, True, time.monotonic() + 60, Future(), caller))
        last.replica.pass_on(0.01)

    sends("left", 10.0)
    last.replica.evaluate()
    both, found = last.task._passes.evaluate(tries=True), list[float]()
    for _ in range(2 * MOST_ROUNDS):
        sends("stays", 1.0)
        last.replica.evaluate()
        found.append(last.replica.losses().held_out)
        assert all(last.replica.losses().held_out == found[-1] for _ in range(4))
    assert len(set(found)) == 2 and both not in found
    assert found.count(found[0]) == MOST_ROUNDS - 1


def test_all_of_an_evaluation_has_the_same_time_whoever_its_data_came_from() -> None:
    middle, sent = StageInTest(staged_run(3), 1), list[Sent]()
    middle.wire.send = lambda micro: None  # type: ignore[method-assign]
    targets = torch.zeros(1, *middle.task.part.targets, dtype=torch.long)
    losses = {"a": 1.0, "b": 2.0, "c": 40.0}
    for caller in losses:
        activations = torch.randn(1, *middle.task.part.activations)
        middle.letters.put(Asked(activations, targets, True, time.monotonic() + 60, Future(), caller))
        middle.replica.has_data(0.01)

    def send(micro: Sent) -> None:
        sent.append(micro)
        if len(sent) == len(losses):  # else they are sent one after the other
            for each, loss in zip(sent, losses.values(), strict=True):
                middle.letters.put(Answered(each.ticket, Answer(loss * targets.numel(), None)))

    middle.wire.send = send  # type: ignore[method-assign]
    assert middle.replica.evaluate() == losses["b"]
    assert len({each.until for each in sent}) == 1


async def test_each_stage_of_an_installed_task_can_be_tried_out() -> None:
    """Its inputs are two symbols and its target is one."""
    for member in StageSwarm(run_of_symbols(1), ["0a", "1a"], {}, 1).members:
        member.replica.try_out()


@pytest.mark.parametrize("stages", [2, 3])
def test_a_micro_batch_that_is_larger_than_what_fits_goes_through_in_parts(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the stages behind the first one may compute one example at once, and it sends two."""
    run = staged_run(stages, clip=1.0)
    whole_ones, nodes = chain(run), chain(run)
    for node in (*whole_ones, *nodes):
        node.task._passes._micro.size = 2
    kept: list[int] = []
    for node in nodes[1:]:
        node.task._passes._micro.size = 1
    for node in (*whole_ones, *nodes):
        node.replica.module.register_forward_hook(
            lambda module, _given, named, _found: (
                module.training and kept.append(len(named["inputs_embeds"]))
                if "inputs_embeds" in named and torch.is_grad_enabled()
                else None
            ),
            with_kwargs=True,
        )
    train_together(whole_ones, 4)
    assert set(kept) == {2}
    kept.clear()
    train_together(nodes, 4)
    assert set(kept) == {1}
    for one, other in zip(whole_ones, nodes, strict=True):
        assert other.losses[:4] == pytest.approx(one.losses[:4], abs=1e-5)


def test_a_stage_that_finds_no_memory_loses_micro_batches_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = chain(staged_run(2))
    first, evaluates = nodes[0].task.part, nodes[0].replica.evaluate
    forward, fails = first.forward, [True, True]

    def short(*given: object) -> torch.Tensor:
        if fails and fails.pop():
            raise torch.OutOfMemoryError
        return forward(*given)

    monkeypatch.setattr(first, "forward", short)
    train_together(nodes, 3)
    assert nodes[0].task.counts.lost == 2 and nodes[0].replica.skipped == 0
    fails.append(True)
    with pytest.raises(NotMeasured, match="no memory"):
        evaluates()


def test_a_backward_pass_that_finds_no_memory_leaves_nothing_in_the_step() -> None:
    """The gradients of the layers behind are there already; those of the micro-batch before are given up with them."""
    nodes = chain(staged_run(2))
    own = nodes[1].task._passes
    assert own
    counts, calls = nodes[1].task.counts, []

    def fails(_: torch.Tensor) -> None:
        calls.append(counts.passed)
        if len(calls) == 2:
            raise torch.OutOfMemoryError

    next(nodes[1].replica.module.parameters()).register_hook(fails)
    while counts.passed < 2:
        for node in nodes:
            node.replica.has_data(0.02)
    assert calls == [0, 1, 1] and counts.lost == 1
    assert own._optimizer.held == own._wanted // 4, "of the last micro-batch alone"
