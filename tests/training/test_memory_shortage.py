"""Another program takes memory of the GPU: any allocation may fail, for a moment or for long. Nothing is lost by it."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from replicas import correct, small_replica
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.base.events import Evaluated
from noloco_node.core.bounds import Movement
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.verdict import Losses
from noloco_node.errors import OutOfMemory
from noloco_node.training import language, model, thread
from noloco_node.training.inner.gradients import ShortOfMemory
from noloco_node.training.mailbox import Failed, Finished, Judged, Message, PhaseEnded
from noloco_node.training.memory_budget import CALM_STEPS
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

DEADLINE_S = 90.0 * PATIENCE


class Shortage(TorchDispatchMode):
    """On this thread, some operations that allocate fail: `faults` is how many succeed, how many fail, and so on."""

    def __init__(self, faults: Sequence[int] = ()) -> None:
        super().__init__()
        self._ends = list(accumulate(faults))
        self.allocations = 0
        self.failed = 0
        self.lasts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if (
            func.namespace == "aten"
            and not schema.is_mutable
            and not any(returned.alias_info for returned in schema.returns)
        ):
            over = sum(self.allocations >= end for end in self._ends)
            self.allocations += 1
            if self.lasts or (over % 2 == 1 and over < len(self._ends)):
                self.failed += 1
                raise torch.OutOfMemoryError(f"{func} in a test")
        return func(*args, **(kwargs or {}))


def on_a_full_card(shortage: Shortage) -> Replica:
    """Only what would allocate on a GPU may fail: not the reading of data, nor what is copied to the host."""

    def wrapped(work: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with shortage:
                return work(*args, **kwargs)

        return within

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(language, "EVAL_TOKENS", 64)  # an evaluation is as large as a step
        replica = small_replica()
    gradients: Any = replica._gradients
    for owner, names in (
        (gradients, ("begin", "finish", "step")),
        (replica, ("evaluate", "snapshot", "losses", "losses_without")),
        (replica.slow, ("apply", "take_back")),
    ):
        for name in names:
            setattr(owner, name, wrapped(getattr(owner, name)))
    return replica


def trained(shortage: Shortage) -> list[Message]:
    """All that a thread posts that trains two rounds of three steps, with a correction in the first."""
    posts: list[Message] = []
    made = TrainingThread(
        lambda: on_a_full_card(shortage), codec("fp32"), posts.append, rounds=2, fragment_elements=1000
    )
    made.start()
    made.begin()
    until(lambda: over(posts))
    made.stop()
    return posts


def over(posts: Sequence[Message]) -> bool:
    return any(isinstance(post, Failed | Finished) for post in posts)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def losses(posts: Sequence[Message]) -> list[float]:
    return [
        post.done.loss if isinstance(post, PhaseEnded) else post.eval_loss
        for post in posts
        if isinstance(post, PhaseEnded | Evaluated)
    ]


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(thread, "MEMORY_S", 0.003)
        patched.setattr(thread, "LOOK_S", 0.001)
        yield


@cache
def undisturbed() -> tuple[int, list[float]]:
    """How often it allocates, and its losses."""
    calm = Shortage()
    found = losses(trained(calm))
    return calm.allocations, found


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 400) | st.integers(1, 1500), max_size=8))
def test_whatever_fails_the_losses_are_the_same_and_the_node_stays(faults: list[int]) -> None:
    shortage = Shortage(faults)
    posts = trained(shortage)
    assert not [post for post in posts if isinstance(post, Failed)]
    assert losses(posts) == pytest.approx(undisturbed()[1], rel=1e-5)
    if not shortage.failed:
        assert losses(posts) == undisturbed()[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_single_allocation() -> None:
    for at in range(undisturbed()[0]):
        posts = trained(shortage := Shortage([at, 3]))
        assert shortage.failed and losses(posts) == pytest.approx(undisturbed()[1], rel=1e-5), at


class Watched:
    """A thread whose card is full when the test says so."""

    def __init__(self, rounds: int = 3) -> None:
        self.posts: list[Message] = []
        self.shortage = Shortage()
        self.replica = on_a_full_card(self.shortage)
        self.thread = TrainingThread(
            lambda: self.replica, codec("fp32"), self.posts.append, rounds=rounds, fragment_elements=1000
        )
        self.thread.start()

    def short(self) -> str | None:
        return self.thread.so_far().result(DEADLINE_S)[0].short_of_memory


@pytest.fixture
def watched() -> Any:
    made = Watched()
    yield made
    made.thread.stop()


def test_it_waits_says_so_and_answers(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watched.shortage.lasts = True
    watched.thread.begin()
    until(watched.short)
    assert watched.short() == "not even one example fits beside the model"
    assert watched.thread.sample([0]).result(DEADLINE_S)[0] == 0
    state = watched.thread.state().result(DEADLINE_S)
    assert (state.step, state.inner["taken"]) == (0, 0)
    watched.shortage.lasts = False
    until(lambda: over(watched.posts))
    assert losses(watched.posts)[:4] == pytest.approx(undisturbed()[1][:4], rel=1e-5)
    assert watched.short() is None and watched.replica.micro_batch < 4
    said = [record.message for record in caplog.records if "memory" in record.message]
    assert said[2].startswith("waiting for memory of the GPU: not even one") and said[3].startswith(
        "the GPU has memory"
    )
    assert said[0] == "the device is short of memory: 2 examples at once from now on"


def test_a_checkpoint_of_that_time_loses_no_batch(watched: Watched) -> None:
    watched.thread.begin()
    until(lambda: any(isinstance(post, PhaseEnded) for post in watched.posts))
    watched.shortage.lasts = True
    until(lambda: watched.short() or over(watched.posts))
    state = watched.thread.state().result(DEADLINE_S)
    resumed, straight = small_replica(), small_replica()
    resumed.load(state)
    for _ in range(resumed.position.taken):
        straight.step()
        if straight.position.phase_over:
            straight.boundary()
    assert resumed.stream.position == straight.stream.position
    watched.shortage.lasts = False


def test_it_does_not_wait_for_ever(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "SHORTAGE_S", 0.05)
    watched.shortage.lasts = True
    watched.thread.begin()
    until(lambda: over(watched.posts))
    (failed,) = [post for post in watched.posts if isinstance(post, Failed)]
    assert isinstance(failed.error, OutOfMemory) and "end other programs on the GPU" in str(failed.error)


def test_it_leaves_while_it_waits(watched: Watched) -> None:
    watched.shortage.lasts = True
    watched.thread.begin()
    until(watched.short)
    watched.thread.stop()
    assert not watched.thread._thread.is_alive()


def test_a_correction_that_finds_no_memory_at_first_is_added_all_the_same() -> None:
    one, other = on_a_full_card(shortage := Shortage()), small_replica()
    for each in (one, other):
        each.snapshot()
        each.boundary()
    c = torch.ones(10)
    allocations = 0
    while True:  # a fault at each allocation in turn
        shortage._ends = [shortage.allocations + allocations, shortage.allocations + allocations + 1]
        try:
            one.slow.apply(5, c, one.round)
        except torch.OutOfMemoryError:
            assert torch.equal(one.theta, one.phi) and not one.slow.has_swapped
            allocations += 1
        else:
            break
    other.slow.apply(5, c, other.round)
    assert allocations and torch.equal(one.theta, other.theta) and torch.equal(one.delta, other.delta)
    assert one.slow._lengths and other.slow._lengths
    assert [t.elements for t in one.slow._lengths._tensors] == [t.elements for t in other.slow._lengths._tensors]


def test_a_swap_is_judged_when_there_is_memory_for_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def losses_without(partner: float = 0.0, *, own: bool = True) -> Losses:
        tried.append(partner)
        if len(tried) == 1:
            raise ShortOfMemory("full")
        return Losses(0.0, 0.0)

    monkeypatch.setattr(watched.replica, "losses_without", losses_without)
    watched.thread.begin(1)
    until(lambda: any(isinstance(post, PhaseEnded) for post in watched.posts))
    until(lambda: over(watched.posts))
    (ended,) = [post for post in watched.posts if isinstance(post, PhaseEnded)]
    correct(watched.thread, ended.done.round, 0, torch.zeros(10)).result(DEADLINE_S)
    watched.thread.swapping(False)
    until(lambda: tried)
    watched.thread.round_over(1)
    until(lambda: watched.short() or any(isinstance(post, Judged) for post in watched.posts))
    assert len(tried) >= 2


def test_without_the_swap_the_weights_are_what_they_were_even_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    replica.step()
    replica.snapshot()
    replica.boundary()
    replica.slow.apply(0, torch.ones(10), replica.round)
    before = replica.theta.clone()

    def short(*, own: bool) -> Losses:
        assert own
        assert torch.equal(replica.theta, before)
        assert not torch.equal(torch.cat([p.flatten() for _, p in model.parameters(replica.module)]), before)
        raise ShortOfMemory("full")

    monkeypatch.setattr(replica, "losses", short)
    with pytest.raises(ShortOfMemory):
        replica.losses_without()
    assert torch.equal(replica.theta, before)
    assert torch.equal(torch.cat([p.flatten() for _, p in model.parameters(replica.module)]), before)


def test_a_smaller_micro_batch_grows_back() -> None:
    replica = on_a_full_card(shortage := Shortage([1, 2]))
    whole = replica.micro_batch
    replica.step()
    assert shortage.failed == 2 and replica.micro_batch == whole // 2
    for _ in range(CALM_STEPS):
        replica.step()
    assert replica.micro_batch == whole


def test_an_offer_that_could_not_begin_makes_no_swap_and_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = CodecThread(codec("fp32"), lambda _: None, 1024)
    moved = torch.ones(4), torch.ones(4)

    def full(*_: Any) -> Movement:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Movement, "of", full)
        first = Offer(coder, 1, torch.ones(1024), moved)
        with pytest.raises(OutOfMemory, match="this offer"):
            first.open(0, bytes(16)).result(DEADLINE_S)
    later = Offer(coder, 2, torch.ones(1024), moved)
    assert later.open(0, bytes(16)).result(DEADLINE_S)
    coder.close()
