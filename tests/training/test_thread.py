"""The training thread with real small replicas and a list for a poster: what it posts, when, and how it ends."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from patience import PATIENCE
from replicas import (
    FRAGMENT,
    HeldUp,
    assert_same,
    correct,
    exchange,
    live_state,
    small_replica,
    small_run,
    timed_run,
    train,
)

from noloco_node.base.events import Evaluated, RolledBack, Sampled
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import scaled
from noloco_node.core.state import State
from noloco_node.core.verdict import SOMEBODY, Course, Losses, Verdict
from noloco_node.data import stream
from noloco_node.errors import Diverged, NolocoError, NonFinite, OutOfMemory, PeerMisbehaved, UsageError
from noloco_node.host import memory
from noloco_node.run.schema import SampleSpec
from noloco_node.training import mailbox
from noloco_node.training.inner.gradients import Gradients, ShortOfMemory
from noloco_node.training.mailbox import Failed, Finished, Judged, PhaseEnded, Ready
from noloco_node.training.offer import Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread
from noloco_node.training.time_accounts import ACCOUNTS

DEADLINE_S = 90.0 * PATIENCE

T = TypeVar("T")


class Watched:
    """A thread, and what it posts."""

    def __init__(self, build: Callable[[], Replica], **options: Any) -> None:
        self.posts: queue.SimpleQueue[object] = queue.SimpleQueue()
        options = {"rounds": 4, "fragment_elements": FRAGMENT, "codec": codec("fp32"), **options}
        self.thread = TrainingThread(build, post=self.posts.put, **options)

    def next(self, kind: type[T]) -> T:
        """The next post, which must be of this kind."""
        post = self.posts.get(timeout=DEADLINE_S)
        assert isinstance(post, kind), post
        return post

    def until(self, kind: type[T]) -> T:
        while not isinstance(post := self.posts.get(timeout=DEADLINE_S), kind):
            pass
        return post

    def offer(self) -> Offer:
        offer = self.until(PhaseEnded).offer
        assert offer is not None
        return offer


@contextmanager
def running(build: Callable[[], Replica] = small_replica, **options: Any) -> Iterator[Watched]:
    watched = Watched(build, **options)
    watched.thread.start()
    try:
        yield watched
    finally:
        watched.thread.stop()
        assert not watched.thread._thread.is_alive()


@contextmanager
def begun(build: Callable[[], Replica] = small_replica, **options: Any) -> Iterator[Watched]:
    with running(build, **options) as watched:
        watched.thread.begin()
        yield watched


def around_steps(
    replica: Replica, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> Replica:
    """Something else happens around each of its steps."""
    step = replica.step

    def stepping() -> float:
        before()
        loss = step()
        after()
        return loss

    replica.step = stepping  # type: ignore[method-assign]
    return replica


def resumed(before: Replica) -> Replica:
    replica = small_replica()
    replica.load(before.state())
    return replica


def answer(future: "Future[T]") -> T:
    return future.result(timeout=DEADLINE_S)


def swapping(watched: Watched, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
    watched.thread.swapping(under_way, source)
    watched.thread._codec_thread._executor.submit(bool).result(DEADLINE_S)  # so that nothing overtakes it


def swap(one: Offer, other: Offer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All fragments, as the event loop does it: bytes in, bytes out. Returns the corrections."""
    corrections, added = [], []
    for index in range(one.fragments):
        said = answer(one.open(index, bytes(16))), answer(other.open(index, bytes(16)))
        while isinstance(said[0], bytes):
            said = answer(one.receive(index, said[1])), answer(other.receive(index, said[0]))
        scale = min(said)
        corrections.append(tuple(scaled(side._corrections[index].here.cpu(), scale) for side in (one, other)))
        added += [one.apply(index, scale), other.apply(index, scale)]
    for each in added:
        answer(each)
    return corrections


# ---- a whole life ----------------------------------------------------------------------------------------------------
def test_from_ready_to_finished() -> None:
    with running(rounds=2) as watched:
        ready = watched.next(Ready)
        alone = small_replica()
        assert (ready.parameters, ready.layout, ready.round) == (alone.parameters, alone.layout, 0)
        assert ready.fragments == -(-alone.parameters // FRAGMENT) > 1 and ready.device == "cpu"
        assert watched.posts.empty(), "nothing is trained before begin"
        watched.thread.begin()
        assert watched.next(Evaluated) == Evaluated(0, alone.evaluate())
        first = watched.next(PhaseEnded)
        losses = train(alone, 3)
        assert (first.done.round, first.done.steps, first.done.tokens) == (1, 3, 3 * 64)
        assert first.done.loss == pytest.approx(sum(losses) / 3) and first.done.seconds > 0
        assert first.closed is None and first.offer is not None and first.offer.round == 1
        assert watched.next(Evaluated) == Evaluated(1, alone.evaluate())
        last = watched.next(PhaseEnded)
        assert last.done.round == 2
        assert {"step", "boundary", "evaluate", "other"} <= {account for account, s in last.spent.accounts.items() if s}
        watched.next(Finished)
        assert watched.posts.empty(), "the last evaluation waits for the last swap"
        watched.thread.round_over(2)
        train(alone, 3)
        assert watched.next(Evaluated) == Evaluated(2, alone.evaluate())
        assert answer(watched.thread.state()).step == 6, "it still answers"


def test_subnormal_numbers_count_as_zeros() -> None:
    """A peer's matrices of them took 30 times as long to try as others, and its activations as long to train on."""
    found = list[bool]()

    def look() -> None:
        found.append(bool((torch.full((1 << 16,), 2.0**-130) * 2.0**10).any()))

    with begun(lambda: around_steps(small_replica(), look)) as watched:
        watched.until(Finished)
    assert found and not any(found)


def test_a_resumed_phase_goes_on_in_its_middle() -> None:
    replica = small_replica()
    train(replica, 3)
    published = replica.evaluate()
    train(replica, 1)
    with running(lambda: resumed(replica)) as watched:
        ready = watched.next(Ready)
        assert (ready.round, ready.step) == (1, 3), "of the boundary, as the loss that comes first is"
        watched.thread.begin()
        assert watched.next(Evaluated) == Evaluated(1, published), "of the weights that `eval` measures"
        ended = watched.until(PhaseEnded).done
        assert (ended.round, ended.steps, ended.tokens) == (2, 6, 2 * 64)


def test_what_a_phase_says_of_its_steps() -> None:
    """Learning rate, norm and memory, without a GPU to take a share of; tokens with those of earlier processes."""
    alone, norms = small_replica(run=small_run(warmup=0.0)), []
    for _ in range(3):
        alone.step()
        norms.append(alone.last_norm)
    with running(lambda: small_replica(run=small_run(warmup=0.0))) as watched:
        ready = watched.next(Ready)
        assert (ready.tokens, ready.device_limit_bytes) == (0, None)
        assert ready.host_limit_bytes and ready.host_limit_bytes > 1 << 26
        watched.thread.begin()
        done = watched.until(PhaseEnded).done
        answer(watched.thread.state())
    assert done.gradient_norm == pytest.approx(sum(norms) / 3)
    assert done.learning_rate == alone.last_rate
    assert done.learning_rate and 0 < done.learning_rate < small_run().inner.learning_rate
    assert (done.tokens_total, done.mfu, done.device_bytes) == (3 * 64, None, None)
    assert done.host_bytes and 1 << 26 < done.host_bytes < ready.host_limit_bytes


def test_tokens_count_on_after_a_restart() -> None:
    before = small_replica()
    train(before, 4)
    with running(lambda: resumed(before)) as watched:
        assert watched.next(Ready).tokens == 4 * 64
        watched.thread.begin()
        done = watched.until(PhaseEnded).done
    assert (done.tokens, done.tokens_total) == (2 * 64, 6 * 64)


def test_who_took_a_peers_weights_and_made_no_step_has_weights_when_it_is_back() -> None:
    """As one that was paused from the beginning."""
    before = small_replica()
    before.adopt(3, live_state(small_replica()))
    with running(lambda: resumed(before)) as watched:
        ready = watched.next(Ready)
    assert (ready.round, ready.tokens, ready.resumed) == (3, 0, True)
    with running() as watched:
        assert not watched.next(Ready).resumed


def test_a_step_without_a_finite_gradient_does_not_spoil_the_norm() -> None:
    replica, norms = small_replica(), iter([math.inf, 2.0, 4.0])
    around_steps(replica, after=lambda: setattr(replica, "last_norm", next(norms)))
    with running(lambda: replica) as watched:
        watched.thread.begin(1)
        assert watched.until(PhaseEnded).done.gradient_norm == 3.0


def test_a_node_that_has_done_all_rounds_is_finished_at_once() -> None:
    with begun(rounds=0) as watched:
        watched.until(Finished)


# ---- swaps -----------------------------------------------------------------------------------------------------------
def test_an_end_that_the_author_takes_back_is_none_and_an_own_limit_stays_one() -> None:
    thread = TrainingThread(small_replica, codec("fp32"), lambda _: None, rounds=200)
    replica: Any = SimpleNamespace(round=150, position=SimpleNamespace(budget=200))
    thread._do(mailbox.Amend(200, True), replica)
    assert thread._rounds == 150
    thread._do(mailbox.Amend(400, False), replica)
    assert thread._rounds == 400 == replica.position.budget
    thread._do(mailbox.Begin(100), replica)
    assert thread._rounds == 250
    thread._do(mailbox.Amend(500, False), replica)
    assert thread._rounds == 250, "the volunteer's own"
    thread.stop()


def test_a_run_that_its_author_makes_longer_goes_on_and_one_that_is_ended_stops_after_the_phase() -> None:
    built: list[Replica] = []
    with running(lambda: built.append(small_replica()) or built[0], rounds=2) as watched:
        watched.next(Ready)
        watched.thread.amend(4, ended=False)
        watched.thread.begin()
        for _ in range(4):
            watched.until(PhaseEnded)
        watched.next(Finished)
        assert built[0].position.budget == 4, "the learning rate falls over all its rounds"
    with running(rounds=2) as watched:
        watched.thread.begin(1)
        watched.thread.amend(4, ended=False)
        assert watched.until(PhaseEnded).done.round == 1
        watched.next(Finished)
    with begun(rounds=1_000_000) as watched:
        watched.until(PhaseEnded)
        watched.thread.amend(1_000_000, ended=True)
        watched.until(Finished)
    with running(rounds=3) as watched:
        watched.next(Ready)
        watched.thread.amend(3, ended=True)
        watched.thread.begin()
        assert isinstance(watched.posts.get(timeout=DEADLINE_S), Evaluated)
        watched.next(Finished)


def test_two_threads_do_what_two_replicas_do() -> None:
    ones, others = small_replica("a"), small_replica("b")
    for _ in range(2):
        for replica in (ones, others):
            while not replica.position.phase_over:
                replica.step()
        exchange(ones, others, (codec("fp32"), codec("fp32")))
    fresh = small_replica("a"), small_replica("b")
    with begun(lambda: fresh[0], blocking=True) as one, begun(lambda: fresh[1], blocking=True) as other:
        for round_ in (1, 2):
            corrections = swap(one.offer(), other.offer())
            assert all(torch.equal(mine, -theirs) and mine.any() for mine, theirs in corrections)
            given = [answer(watched.thread.live_state()) for watched in (one, other)]
            states = [(round_, bytes(state)) for round_, state in given]
            for watched in (one, other):
                watched.thread.round_over(round_)
    assert states == [(2, live_state(ones)), (2, live_state(others))]


def test_eager_goes_on_at_once_and_blocking_when_the_round_is_over() -> None:
    with begun(blocking=False) as eager:
        assert [eager.until(PhaseEnded).done.round for _ in range(4)] == [1, 2, 3, 4]
    with begun(blocking=True) as blocking:
        for round_ in (1, 2, 3):
            assert blocking.until(PhaseEnded).done.round == round_
            for _ in range(5):
                assert answer(blocking.thread.state()).step == 3 * round_, "not a step while the round is open"
            assert blocking.posts.empty(), "what is evaluated is what the swap made"
            blocking.thread.round_over(round_)
            assert blocking.next(Evaluated).round == round_


def test_a_blocking_round_that_is_over_before_it_is_waited_for() -> None:
    with running(blocking=True) as watched:
        for round_ in (1, 2, 3, 4):
            watched.thread.round_over(round_)
        watched.thread.begin()
        watched.until(Finished)


def test_a_late_correction_lands_in_the_replica_that_went_on() -> None:
    alone = small_replica()
    train(alone, 9)
    c = torch.full((FRAGMENT,), 1e-3)
    with begun(rounds=3) as watched:
        offer = watched.offer()
        assert offer.round == 1
        watched.until(Finished)
        answer(correct(watched.thread, 1, FRAGMENT, c))
        alone.slow.apply(FRAGMENT, c, offered_round=1)
        state = answer(watched.thread.state())
    assert torch.equal(state.outer["phi"], alone.phi) and torch.equal(state.outer["delta"], alone.delta)


def test_while_a_swap_is_under_way_no_offer_is_made() -> None:
    with running() as watched:
        swapping(watched, True)
        watched.thread.begin()
        for _ in range(2):
            ended = watched.until(PhaseEnded)
            assert (ended.offer, ended.closed) == (None, "swapping")
    with running(rounds=1) as watched:
        swapping(watched, True)
        swapping(watched, False)
        watched.thread.begin()
        assert watched.until(PhaseEnded).offer is not None


def test_the_last_evaluation_waits_for_a_swap_that_is_still_under_way() -> None:
    with begun(rounds=1) as watched:
        watched.until(Finished)
        swapping(watched, True)
        watched.thread.round_over(1)
        answer(watched.thread.live_state())
        assert watched.posts.empty()
        swapping(watched, False)
        assert watched.next(Evaluated).round == 1


def test_an_offer_keeps_its_vector_while_training_goes_on() -> None:
    alone = small_replica()
    for _ in range(3):
        alone.step()
    u, _ = alone.snapshot()
    with begun() as watched:
        offer = watched.offer()
        watched.until(Finished)
        said = b"".join(answer(offer.open(index, bytes(16))) for index in range(offer.fragments))
    assert said == u.numpy().tobytes()


def test_a_payload_out_of_turn_is_misbehaviour() -> None:
    with begun() as watched:
        offer = watched.offer()
        with pytest.raises(PeerMisbehaved, match="out_of_turn"):
            answer(offer.receive(0, b""))
        said = answer(offer.open(0, bytes(16)))
        assert answer(offer.receive(0, said)) == 1.0
        with pytest.raises(PeerMisbehaved, match="out_of_turn"):
            answer(offer.receive(0, said))
        with pytest.raises(PeerMisbehaved, match="bad_length"):
            answer(offer.open(1, bytes(16))) and answer(offer.receive(1, said[1:]))


def test_a_further_partner_swaps_what_the_first_one_made() -> None:
    """Two pairs, then across: all four offered vectors are their mean, and every correction has its opposite."""
    replicas = [small_replica(peer) for peer in "abcd"]
    with ExitStack() as stack:
        four = [stack.enter_context(begun(lambda it=it: it, rounds=1)) for it in replicas]
        offers = [watched.offer() for watched in four]
        us = [offer._u.clone() for offer in offers]
        for one, other in ((0, 1), (2, 3), (0, 2), (1, 3)):
            corrections = swap(offers[one], offers[other])
            assert all(torch.equal(mine, -theirs) and mine.any() for mine, theirs in corrections)
        for offer in offers:
            answer(offer.stats())  # behind the last correction
        mean = sum(us) / 4
        assert all(torch.allclose(offer._u, mean, atol=1e-6) for offer in offers)
        states = [answer(watched.thread.state()).outer["phi"] for watched in four]
    alone = [small_replica(peer) for peer in "abcd"]
    for replica, u, state in zip(alone, us, states, strict=True):
        train(replica, 3)
        assert torch.allclose(state, replica.phi + (mean - u), atol=1e-6)


def test_phases_by_time() -> None:
    run = timed_run(0.05, rounds=5)
    with begun(lambda: small_replica(run=run), rounds=5) as watched:
        done = [watched.until(PhaseEnded).done for _ in range(5)]
        steps = answer(watched.thread.state()).step
    assert [d.round for d in done] == [1, 2, 3, 4, 5]
    assert steps == done[-1].steps == sum(d.tokens for d in done) // 64
    assert all(earlier.steps < later.steps for earlier, later in pairwise(done))


def test_a_phase_is_told_as_long_as_it_was() -> None:
    """From boundary to boundary, with the evaluation between them. Where a step takes nearly a phase, what the last one
    was too long counts for the next one, which is no shorter for it."""
    with begun(lambda: small_replica(run=timed_run(0.01, rounds=12)), rounds=12) as watched:
        before = dict.fromkeys(ACCOUNTS, 0.0)
        for _ in range(12):
            ended = watched.until(PhaseEnded)
            spent = {account: seconds - before[account] for account, seconds in ended.spent.accounts.items()}
            before = ended.spent.accounts
            between_s = ended.seconds - ended.done.seconds
            least_s = spent["evaluate"] if ended.done.round > 1 else 0.0
            # a busy machine may take the core away at either end
            assert least_s - 1e-3 <= between_s <= least_s + spent["other"] + 1e-3


def test_a_state_that_is_adopted_in_the_middle_begins_the_phase_anew() -> None:
    """Also where it is of this node's own round."""
    donor = small_replica("a")
    with begun(lambda: small_replica(run=small_run(steps=40)), rounds=1) as watched:
        until = time.monotonic() + DEADLINE_S
        while answer(watched.thread.so_far())[0].steps < 5:
            assert time.monotonic() < until
        answer(watched.thread.adopt(0, live_state(donor)))
        done = watched.until(PhaseEnded).done
        assert (done.steps, done.tokens) == (40, 40 * 64)


def test_a_state_that_is_adopted_at_the_very_end_of_a_phase_is_trained_on_too() -> None:
    """It comes in the last step, which may take as long as to fetch a small state."""
    donor, asked = small_replica("a"), []

    def build() -> Replica:
        replica = small_replica(run=small_run(steps=4))

        def in_the_last_step() -> None:
            if replica.steps == 3 and not asked:
                asked.append(watched.thread.adopt(2, live_state(donor)))

        return around_steps(replica, in_the_last_step)

    with begun(build, rounds=3) as watched:
        done = watched.until(PhaseEnded).done
        answer(asked[0])
        assert (done.round, done.tokens, done.tokens_total) == (3, 4 * 64, 8 * 64)


def test_an_offer_may_be_opened_again_for_somebody_else() -> None:
    with begun() as watched:
        offer = watched.offer()
        assert answer(offer.open(0, bytes(16))) == answer(offer.open(0, bytes([1] * 16)))


# ---- the sample text -------------------------------------------------------------------------------------------------
def sampling(every: int = 2, tokens: int = 8, rounds: int = 5) -> Replica:
    spec = SampleSpec(prompt="the", every=every, tokens=tokens)
    return small_replica(run=small_run(rounds=rounds).model_copy(update={"sample": spec}))


def posts_of(build: Callable[[], Replica], rounds: int = 5) -> list[Any]:
    with running(build, rounds=rounds, blocking=True) as watched:
        for round_ in range(rounds + 1):
            watched.thread.round_over(round_)
        watched.thread.begin()
        posts = [watched.posts.get(timeout=DEADLINE_S)]
        while not (isinstance(posts[-1], Evaluated) and posts[-1].round == rounds):
            posts.append(watched.posts.get(timeout=DEADLINE_S))
        return posts


def test_the_model_continues_the_prompt_every_few_rounds_and_at_the_end() -> None:
    posts = posts_of(sampling)
    texts = [post for post in posts if isinstance(post, Sampled)]
    assert [(text.round, text.prompt) for text in texts] == [(2, "the"), (4, "the"), (5, "the")]
    assert isinstance(posts[-2], Sampled) and isinstance(posts[-1], Evaluated), "the evaluation is the last word"
    alone = sampling()
    for text in texts:
        train(alone, 3 * text.round - alone.steps)
        assert text.text == alone.sample_text(lambda: True) != ""
    last = [post for post in posts if isinstance(post, PhaseEnded)][-1]
    assert last.spent.accounts["sample"] > 0


def test_a_sample_text_changes_nothing_that_is_trained() -> None:
    losses = [
        [
            (post.done.loss if isinstance(post, PhaseEnded) else post.eval_loss)
            for post in posts_of(build)
            if isinstance(post, PhaseEnded | Evaluated)
        ]
        for build in (sampling, lambda: small_replica(run=small_run(rounds=5)))
    ]
    assert losses[0] == losses[1]


def test_a_sample_text_that_takes_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_node.training.thread.SAMPLE_S", 0.0)
    (text,) = (post for post in posts_of(lambda: sampling(5, 500)) if isinstance(post, Sampled))
    assert len(text.text) <= 1, "a token, which may be a part of a character"


def test_a_model_that_cannot_write_trains_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Replica:
        replica = sampling()
        forward = replica.module.forward
        replica.module.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
        return replica

    posts = posts_of(build)
    assert not [post for post in posts if isinstance(post, Sampled)]
    warned = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in warned] == [f"no sample text after round {n}" for n in (2, 4, 5)]


# ---- data that is late -----------------------------------------------------------------------------------------------
class Late:
    """A stream whose batches come when `there` says so."""

    def __init__(self, replica: Replica, there: threading.Event, batches: int = 0) -> None:
        """`batches`: how many are there beforehand."""
        self._stream, self._there, self._batches = replica.stream, there, batches
        self.asked = threading.Event()

    @property
    def position(self) -> Any:
        return self._stream.position

    def seek(self, position: Any) -> None:
        self._stream.seek(position)

    def ready(self, _: int, within_s: float) -> bool:
        self._batches -= 1
        if self._batches < 0:
            self.asked.set()
            return self._there.wait(within_s)
        return True

    def next(self, examples: int) -> Any:
        return self._stream.next(examples)


def test_while_data_is_waited_for_everything_else_is_served_and_it_is_no_training() -> None:
    there, replica = threading.Event(), small_replica()
    late = replica.stream = Late(replica, there, batches=1)
    with begun(lambda: replica, rounds=2) as watched:
        assert late.asked.wait(DEADLINE_S)
        assert answer(watched.thread.state()).step == 1
        answer(correct(watched.thread, 0, 0, torch.ones(10)))
        assert answer(watched.thread.state()).outer["delta"][:10].tolist() == [1.0] * 10
        assert answer(watched.thread.live_state())[0] == 0, "for a joining node"
        watched.thread.pause()
        watched.thread.resume()
        now, before = answer(watched.thread.so_far())
        assert (now.steps, now.part) == (1, 1 / 3)
        assert now.left_s == pytest.approx(2 * replica.tokens_per_step / now.tokens_per_s)
        assert now.loss == replica.last_loss
        late.asked.clear()
        assert late.asked.wait(DEADLINE_S)
        _, after = answer(watched.thread.so_far())
        assert after.accounts["data"] > before.accounts["data"]
        assert after.trained_s == before.trained_s == before.accounts["step"] > 0, "on a CPU"
        there.set()
        assert watched.until(PhaseEnded).done.steps == 3
        watched.until(Finished)


def test_a_thread_that_waits_for_data_stops_at_once() -> None:
    replica = small_replica()
    late = replica.stream = Late(replica, threading.Event())
    with begun(lambda: replica):
        assert late.asked.wait(DEADLINE_S)


def test_a_phase_by_time_ends_while_data_is_waited_for() -> None:
    replica = small_replica(run=timed_run(0.2))
    replica.stream = Late(replica, threading.Event(), batches=1)
    with begun(lambda: replica) as watched:
        ended = watched.until(PhaseEnded)
        assert (ended.done.round, ended.done.steps) == (1, 1) and ended.offer is not None


# ---- joining, pauses -------------------------------------------------------------------------------------------------
def test_a_joining_node_adopts_before_it_begins() -> None:
    donor = small_replica("a")
    train(donor, 7)
    with running(lambda: small_replica("b")) as watched:
        with pytest.raises(PeerMisbehaved):
            answer(watched.thread.adopt(2, b"short"))
        answer(watched.thread.adopt(2, live_state(donor)))
        assert answer(watched.thread.live_state()) == (2, live_state(donor))
        watched.thread.begin()
        assert watched.until(Evaluated).round == 2
        assert watched.until(PhaseEnded).done.round == 3


def test_a_peers_state_is_tried_and_blocks_are_given_while_it_waits() -> None:
    donor = small_replica("a")
    train(donor, 7)
    with running(lambda: small_replica("b")) as watched:
        trial = answer(watched.thread.try_state(live_state(donor)))
        assert trial.own == trial.new == small_replica("b").evaluate() and trial.theirs < trial.own
        assert answer(watched.thread.sample([0]))[1] == small_replica("b").sample([0]), "nothing has changed"
        with pytest.raises(PeerMisbehaved):
            answer(watched.thread.try_state(b"short"))
        with pytest.raises(PeerMisbehaved):
            answer(watched.thread.sample([10**6]))
        answer(watched.thread.adopt(2, live_state(donor)))
        assert answer(watched.thread.sample([0])) == (2, donor.sample([0]))


def test_where_memory_is_short_no_state_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = small_replica("a")
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    with running() as watched, pytest.raises(OutOfMemory, match="trying a peer's state"):
        answer(watched.thread.try_state(live_state(donor)))


def test_after_a_roll_back_offers_of_an_earlier_round_that_was_adopted_count() -> None:
    donor = small_replica("a")
    train(donor, 4)
    saved, replica = donor.state(), small_replica()
    broken: list[int] = []

    def break_in_round_four() -> None:
        if replica.steps == 12 and not broken:
            broken.append(replica.round)
            replica.theta.fill_(torch.nan)

    around_steps(replica, before=break_in_round_four)
    with begun(lambda: replica, rounds=8, last_good=lambda _: saved, blocking=True) as watched:
        for round_ in (1, 2, 3, 4):
            assert watched.until(PhaseEnded).done.round == round_
            watched.thread.round_over(round_)
        assert watched.until(RolledBack).round == 4
        watched.thread.pause()
        answer(watched.thread.adopt(1, live_state(donor)))
        watched.thread.resume()
        while (offer := (ended := watched.until(PhaseEnded)).offer) is None or ended.done.round > 4:
            watched.thread.round_over(ended.done.round)
        assert offer.round in (3, 4), "AdamW was warming up in round 2"
        before = bytes(answer(watched.thread.live_state())[1][:40])
        assert answer(offer.open(0, bytes(16))), "it is not void"
        answer(correct(watched.thread, offer.round, 0, torch.ones(10)))
        assert bytes(answer(watched.thread.live_state())[1][:40]) != before


def test_where_memory_is_short_no_copy_is_made_for_a_joining_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    with running() as watched:
        with pytest.raises(OutOfMemory, match=r"1\.0 kB are free"):
            answer(watched.thread.live_state())
        watched.thread.begin()
        watched.until(Finished)


def test_a_pause_stops_steps_and_nothing_else() -> None:
    with running() as watched:
        watched.thread.pause()
        watched.thread.begin()
        watched.until(Evaluated)
        assert [answer(watched.thread.state()).step for _ in range(5)] == [0] * 5
        correct(watched.thread, 0, 0, torch.ones(10))
        assert answer(watched.thread.state()).outer["delta"][:10].tolist() == [1.0] * 10
        watched.thread.resume()
        watched.until(Finished)


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_a_phase_that_ends_in_nan_is_thrown_away_and_the_next_one_is_whole() -> None:
    replica = small_replica()

    def poison_third_step() -> None:
        if replica.steps == 3:
            replica.theta[0] = torch.nan

    around_steps(replica, after=poison_third_step)
    with begun(lambda: replica, rounds=3) as watched:
        first = watched.until(PhaseEnded)
        assert (first.offer, first.closed, first.done.round) == (None, "nonfinite", 1)
        assert watched.until(PhaseEnded).closed == "warming_up", "AdamW began afresh"
        third = watched.until(PhaseEnded)
        assert third.offer is not None and third.closed is None


def test_where_older_weights_do_not_help_it_has_diverged() -> None:
    replica = small_replica()
    loss = replica._gradients._loss
    replica._gradients._loss = lambda micro: loss(micro) * torch.nan  # type: ignore[method-assign]
    with begun(lambda: replica) as watched:
        rolled = watched.until(RolledBack)
        assert (rolled.round, rolled.weights_of) == (0, None) and "10 steps in a row" in rolled.reason
        assert isinstance(watched.until(Failed).error, Diverged)


def test_weights_that_are_broken_are_those_of_the_last_checkpoint_again() -> None:
    good, replica = small_replica(), small_replica()
    train(good, 4)
    saved = good.state()
    seen = []

    def last_good(_: Replica) -> State:
        seen.append(1)
        return saved

    def break_after_two_phases() -> None:
        if replica.steps == 6 and not seen:
            replica.theta.fill_(torch.nan)

    around_steps(replica, before=break_after_two_phases)
    with begun(lambda: replica, rounds=5, last_good=last_good) as watched:
        watched.until(PhaseEnded)
        offer = watched.offer()
        rolled = watched.until(RolledBack)
        for broken in (lambda: answer(offer.open(0, bytes(16))), lambda: answer(offer.receive(0, b""))):
            with pytest.raises(NonFinite, match="given up"):
                broken()
        assert answer(offer.apply(0, 1.0)) is None, "it will never be added"
        with pytest.raises(NonFinite, match="given up"):
            answer(offer.stats())
        assert (rolled.round, rolled.weights_of) == (2, 1), "the round stays, the weights are of round 1"
        ended = watched.until(PhaseEnded)
        assert ended.done.round == 3 and ended.done.steps == 9 and ended.offer is not None
        assert answer(ended.offer.open(0, bytes(16)))
        assert ended.done.tokens == 11 * 64, "ten that failed and one that did not"
        assert watched.until(PhaseEnded).done.round == 4
        watched.until(Finished)
    assert len(seen) == 1


def test_a_checkpoint_at_the_very_end_of_a_phase_goes_on_with_its_boundary() -> None:
    replica = small_replica()
    losses = [replica.step() for _ in range(3)]
    assert replica.position.phase_over
    with begun(lambda: resumed(replica)) as watched:
        ended = watched.until(PhaseEnded).done
        assert (ended.round, ended.steps, ended.tokens, ended.loss) == (1, 3, 0, losses[-1])
        assert ended.tokens_per_s is ended.learning_rate is None, "not known without a step"


@pytest.mark.parametrize(
    ("raised", "posted"),
    [
        (UsageError("no"), UsageError),
        (ZeroDivisionError(), ZeroDivisionError),
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (SystemExit(), NolocoError),
        (StopIteration(), NolocoError),
    ],
)
def test_what_ends_the_thread_is_posted(raised: BaseException, posted: type[Exception]) -> None:
    def fail() -> Any:
        raise raised

    with running(fail) as watched:
        assert type(watched.next(Failed).error) is posted
    with begun(lambda: around_steps(small_replica(), before=fail)) as watched:
        assert type(watched.until(Failed).error) is posted


def test_models_are_made_one_at_a_time_and_none_that_nobody_wants() -> None:
    """As where a node is given up while its model is made: another one takes its place in this process."""
    inside, go_on = threading.Event(), threading.Event()
    made: list[Replica] = []

    def slow() -> Replica:
        inside.set()
        assert go_on.wait(DEADLINE_S) and not made
        return small_replica()

    def quick() -> Replica:
        made.append(small_replica())
        return made[-1]

    with running(slow) as first:
        assert inside.wait(DEADLINE_S)
        with running(quick) as given_up, running(quick) as second:
            given_up.thread.stop(0.0)
            go_on.set()
            first.next(Ready)
            second.next(Ready)
        assert len(made) == 1 and given_up.posts.empty()


@pytest.mark.parametrize("fails", ["ready", "next"])
def test_where_the_data_fail_what_was_trained_can_be_asked_for(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    read = replica.fetch if fails == "next" else replica.has_data

    def failing(*of: Any) -> Any:
        if replica.steps == 4:
            raise OSError("a disk is broken")
        return read(*of)

    monkeypatch.setattr(replica, "fetch" if fails == "next" else "has_data", failing)
    with begun(lambda: replica) as watched:
        watched.until(PhaseEnded)
        failed = watched.until(Failed)
        assert isinstance(failed.error, OSError) and failed.whole
        assert answer(watched.thread.state()).step == 4


@pytest.mark.parametrize("of", ["a boundary", "a verdict"])
def test_where_an_evaluation_fails_what_was_trained_can_be_asked_for(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    theta = replica.theta.clone()

    def fail(**_: Any) -> Any:
        if of == "a boundary" and not replica.steps:
            return evaluate()
        theta.copy_(replica.theta)
        raise OSError("a disk is broken")

    evaluate = replica.evaluate
    monkeypatch.setattr(replica, "evaluate" if of == "a boundary" else "losses_without", fail)
    with begun(lambda: replica) as watched:
        watched.until(PhaseEnded)
        if of == "a verdict":
            swapping(watched, True)
            answer(correct(watched.thread, 1, 0, torch.zeros(FRAGMENT)))
            swapping(watched, False)
        failed = watched.until(Failed)
        assert isinstance(failed.error, OSError) and failed.whole
        state = answer(watched.thread.state())
        assert state.step >= 3 and torch.equal(torch.cat([w.flatten() for w in state.weights.values()]), theta)


@pytest.mark.parametrize(("error", "at"), [(ValueError("the loss is NaN"), 3), (OSError("a disk is broken"), 0)])
def test_no_state_is_given_out_that_may_be_bad_or_is_not_new(
    error: Exception, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint would push out an older one, at each start again."""
    replica = small_replica()
    evaluate = replica.evaluate

    def fail() -> float:
        if replica.steps < at:
            return evaluate()
        raise error

    monkeypatch.setattr(replica, "evaluate", fail)
    with begun(lambda: replica) as watched:
        failed = watched.until(Failed)
        assert failed.error is error and not failed.whole


def test_a_batch_that_cannot_be_read_is_the_next_one_in_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, read = small_replica(), stream.rows

    def failing(*of: Any) -> Any:
        if replica.steps == 4:
            raise OSError("a disk is broken")
        return read(*of)

    monkeypatch.setattr(stream, "rows", failing)
    with begun(lambda: replica) as watched:
        watched.until(Failed)
        assert answer(watched.thread.state()).inner["position"] == (0, 16), "four steps of four examples"


def test_a_correction_that_does_not_fit_is_a_failure_of_the_thread() -> None:
    with running() as watched:
        correct(watched.thread, 0, 10**6, torch.ones(1))
        assert isinstance(watched.until(Failed).error, ValueError)


def test_a_question_to_a_thread_that_has_ended_fails() -> None:
    building = threading.Event()

    def fail() -> Replica:
        building.wait(DEADLINE_S)
        raise UsageError("no")

    with running(fail) as watched:
        before = watched.thread.state()
        building.set()
        watched.until(Failed)
        for future in (before, watched.thread.state(), watched.thread.live_state()):
            with pytest.raises(NolocoError, match="ended"):
                answer(future)


def test_stopping_answers_what_was_asked_before() -> None:
    watched = Watched(small_replica)
    watched.thread.start()
    watched.thread.begin()
    watched.until(PhaseEnded)
    asked = watched.thread.state()
    watched.thread.stop()
    assert asked.result(timeout=0).step >= 3
    with pytest.raises(NolocoError):
        answer(watched.thread.state())
    watched.thread.stop()


@pytest.mark.parametrize("blocking", [True, False])
def test_stopping_at_any_time_is_prompt(blocking: bool) -> None:
    for wait_for in (Ready, Evaluated, PhaseEnded, Finished):
        if blocking and wait_for is Finished:
            continue
        with begun(blocking=blocking) as watched:
            watched.until(wait_for)


def test_its_patience_follows_the_longest_step() -> None:
    going, step_s = threading.Event(), 0.3

    def slowly() -> None:
        going.set()
        time.sleep(step_s)

    with running(lambda: around_steps(small_replica(), before=slowly), rounds=1) as watched:
        watched.until(Ready)
        before = watched.thread.patience_s
        step_s += before / 2  # a machine that stood still for a moment made it longer already
        watched.thread.begin()
        assert going.wait(DEADLINE_S)
        watched.until(Finished)
        assert before < 2 * step_s <= watched.thread.patience_s


def test_a_boundary_without_an_offer_measures_nothing_for_one() -> None:
    replica = small_replica()
    replica.snapshot = None  # type: ignore[assignment, method-assign]
    with running(lambda: replica, rounds=1) as watched:
        swapping(watched, True)
        watched.thread.begin()
        assert watched.until(PhaseEnded).closed == "swapping"


def test_a_thread_that_never_started_can_be_stopped() -> None:
    Watched(small_replica).thread.stop()


# ---- copies of its state ---------------------------------------------------------------------------------------------
def test_training_goes_on_while_its_state_is_copied() -> None:
    """The copy gets no turn before the end; the step secures what it changes, and that is no time of a step."""
    replica, alone = small_replica(), small_replica()
    replica.copies = replica.slow._copies = HeldUp()
    read, slept = replica.copies._read, 0.05

    def slowly(*of: Any) -> Any:
        time.sleep(slept)
        return read(*of)

    replica.copies._read = slowly
    with running(lambda: replica) as watched:
        states, copy = [watched.thread.state(), watched.thread.state()], watched.thread.live_state()
        assert answer(watched.thread.so_far())[0].steps == 0
        assert all(asked.running() for asked in (*states, copy)), "its moment is over, and it is not whole"
        watched.thread.begin()
        spent = watched.until(PhaseEnded).spent.accounts
        assert not any(asked.done() for asked in (*states, copy))
        assert spent["checkpoint"] >= slept
    for asked in states:
        assert_same(asdict(asked.result(0)), asdict(alone.state()))
    assert copy.result(0) == (0, live_state(alone)), "a thread that ends completes what was asked"


def test_a_copy_becomes_whole_whatever_the_thread_does() -> None:
    """In a step, and in a pause."""
    replica, stepping, go_on = small_replica(), threading.Event(), threading.Event()
    read = replica.copies._read

    def slowly() -> None:
        stepping.set()
        assert go_on.wait(DEADLINE_S)

    def read_in_a_step(*args: Any) -> None:
        assert stepping.wait(DEADLINE_S)
        read(*args)

    replica.copies._read = read_in_a_step  # type: ignore[method-assign]
    with running(lambda: around_steps(replica, before=slowly)) as watched:
        asked = watched.thread.state()
        watched.thread.begin()
        assert answer(asked).step == 0
        watched.thread.pause()
        go_on.set()
        assert answer(watched.thread.live_state())[0] == 0
        assert answer(watched.thread.state()).step == 1


# ---- what did harm ---------------------------------------------------------------------------------------------------
def swapped(watched: Watched, c: torch.Tensor) -> tuple[State, State]:
    """The states before and after a swap of the first offer with this correction."""
    watched.thread.begin()
    watched.offer()
    watched.thread.pause()
    before = answer(watched.thread.state())
    swapping(watched, True)
    for start in range(0, len(c), FRAGMENT):
        answer(correct(watched.thread, 1, start, c[start : start + FRAGMENT]))
    swapping(watched, False)
    return before, answer(watched.thread.state())


@pytest.mark.parametrize("blocking", [False, True])
def test_a_swap_that_made_the_model_worse_is_taken_back(blocking: bool) -> None:
    c = 3 * torch.randn(small_replica().parameters)
    with running(lambda: small_replica(run=small_run(steps=300)), blocking=blocking) as watched:
        before, after = swapped(watched, c)
        judged = watched.until(Judged)
        assert judged.verdict.harmful and judged.loss_with > 1.01 * judged.loss_without
        for name in ("phi", "delta"):
            assert torch.allclose(after.outer[name], before.outer[name], atol=1e-5), name


def test_a_swap_is_judged_beside_those_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[frozenset[str]] = []
    judge = Course.judge

    def noted(course: Course, *args: Any, **kinds: Any) -> Verdict:
        told.append(args[4])
        return judge(course, *args, **kinds)

    monkeypatch.setattr(Course, "judge", noted)
    with begun(lambda: small_replica(run=small_run(steps=300))) as watched:
        watched.offer()
        for source in ("a peer", "another one"):
            swapping(watched, True, frozenset({source}))
            answer(correct(watched.thread, 1, 0, torch.zeros(FRAGMENT), source.encode()))
            swapping(watched, False)
            watched.until(Judged)
    assert told == [{"a peer"}, {"another one"}]


def test_a_swap_is_judged_by_the_batch_that_is_trained_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last one too, a replica that has just fitted it would find fault with anybody."""
    trained: list[torch.Tensor] = []
    judged_at: list[tuple[int, torch.Tensor]] = []
    begin, losses = Gradients.begin, Replica.losses

    def noted(gradients: Gradients, batch: Any) -> None:
        trained.append(batch[0].clone())
        begin(gradients, batch)

    def looked(replica: Replica, *, own: bool = True) -> Losses:
        assert replica._own_examples is not None
        judged_at.append((len(trained), replica._own_examples[0].clone()))
        return losses(replica, own=own)

    monkeypatch.setattr(Gradients, "begin", noted)
    monkeypatch.setattr(Replica, "losses", looked)
    run = small_run(steps=300)
    run = run.model_copy(update={"inner": run.inner.model_copy(update={"batch_tokens": 16 * 8})})
    c = 1e-4 * torch.randn(small_replica().parameters)
    with running(lambda: small_replica(run=run)) as watched:
        swapped(watched, c)
        watched.until(Judged)
        watched.thread.resume()
        watched.until(PhaseEnded)
    assert len(judged_at) == 2, "with and without it"
    for steps, examples in judged_at:
        assert 0 < steps < len(trained)
        assert torch.equal(trained[steps][: len(examples)], examples)


@pytest.mark.parametrize("harm", [True, False])
def test_a_swap_that_holds_its_end_is_judged_at_the_boundary(harm: bool) -> None:
    """Before training has adapted to what landed; what comes of it later is taken back too."""
    replica = small_replica(run=small_run(steps=3, rounds=100_000))
    c = (3 if harm else 1e-4) * torch.randn(replica.parameters)
    end = len(c) - FRAGMENT
    with begun(lambda: replica) as watched:
        watched.offer()
        watched.thread.pause()
        swapping(watched, True)
        for start in range(0, end, FRAGMENT):
            answer(correct(watched.thread, 1, start, c[start : min(end, start + FRAGMENT)], b"holds"))
        watched.thread.resume()
        for _ in range(2):
            assert watched.until(PhaseEnded).closed == "swapping"
        watched.thread.pause()
        before = answer(watched.thread.state())
        assert replica.slow.has_swapped != harm
        answer(correct(watched.thread, 1, end, c[end:], b"holds"))
        swapping(watched, False)
        after = answer(watched.thread.state())
        posts = [watched.posts.get() for _ in range(watched.posts.qsize())]
    stayed = not torch.allclose(after.outer["phi"][end:], before.outer["phi"][end:], atol=1e-6)
    assert stayed != harm
    assert not replica.slow.has_swapped
    assert sum(isinstance(post, Judged) for post in posts) == (0 if harm else 1), "counted once"


def test_a_swap_that_breaks_is_judged_alone_though_the_next_one_ends_within_the_same_step() -> None:
    """Else the next partner is blamed, and what it sent is taken back, too."""
    size = small_replica().parameters
    harm, good = 3 * torch.randn(size), 1e-4 * torch.randn(size)
    replica = small_replica(run=small_run(steps=300))
    at, go_on = threading.Event(), threading.Event()
    fetch = replica.fetch

    def held() -> None:
        at.set()
        assert go_on.wait(DEADLINE_S)
        fetch()

    replica.fetch = held  # type: ignore[method-assign]
    with begun(lambda: replica) as watched:
        assert at.wait(DEADLINE_S)
        for exchange_id, c in ((b"hostile", harm), (b"honest", good)):
            swapping(watched, True)
            correct(watched.thread, 0, 0, c, exchange_id)
            swapping(watched, False)
        go_on.set()
        first, second = watched.until(Judged), watched.until(Judged)
    assert (first.exchange, first.verdict.harmful) == (b"hostile", True)
    assert (second.exchange, second.verdict.harmful) == (b"honest", False)


@contextmanager
def harmed(steps: int) -> Iterator[tuple[Watched, Offer, Offer]]:
    """A thread that finds harm in what it swapped, and an offer of it and of another one."""
    run = small_run(steps=steps)
    replica = small_replica(run=run)
    replica.losses_without = lambda partner=0.0, own=True: Losses(9.0 if partner else 0.1)  # type: ignore[method-assign, misc]
    with begun(lambda: replica) as one, begun(lambda: small_replica("b", run)) as other:
        yield one, one.offer(), other.offer()


@pytest.mark.parametrize("opened", [False, True], ids=["after the verdict", "before the verdict"])
def test_the_next_partner_of_an_offer_gets_nothing_of_what_was_taken_back(opened: bool) -> None:
    with harmed(steps=300) as (one, ours, theirs):
        before = ours._u.clone()
        swapping(one, True)
        swap(ours, theirs)
        assert not torch.allclose(ours._u, before, atol=1e-6)
        settled = ours.settled()
        if opened:  # by a partner that did not wait for it: what is being coded stays as it is
            answer(ours.open(0, b"the next partner"))
        assert not settled.done()
        swapping(one, False)
        assert one.until(Judged).verdict.harmful
        answer(settled)
        for index in range(ours.fragments):
            answer(ours.open(index, b"one later"))
        assert torch.allclose(ours._u, before, atol=1e-6)


def test_the_verdict_goes_to_the_offer_that_was_swapped_though_a_later_one_is_open() -> None:
    with harmed(steps=3) as (one, ours, theirs):
        one.offer()
        swapping(one, True)
        swap(ours, theirs)
        settled = ours.settled()
        swapping(one, False)
        assert one.until(Judged).verdict.harmful
        answer(settled)


@pytest.mark.parametrize("kind", [ShortOfMemory, OutOfMemory])
def test_a_swap_that_there_was_no_memory_to_judge_is_judged_before_the_next_one(kind: type[OutOfMemory]) -> None:
    replica = small_replica(run=small_run(steps=300))
    losses, at, go_on, fetch = replica.losses, threading.Event(), threading.Event(), replica.fetch
    short = [True]

    def measured(*, own: bool = True) -> Losses:
        if short.pop() if short else False:
            raise kind("for a moment")
        return losses(own=own)

    def held() -> None:
        at.set()
        assert go_on.wait(DEADLINE_S)
        fetch()

    replica.losses, replica.fetch = measured, held  # type: ignore[method-assign]
    with begun(lambda: replica) as watched:
        assert at.wait(DEADLINE_S)
        swapping(watched, True)
        correct(watched.thread, 0, 0, 3 * torch.randn(replica.parameters), b"first")
        swapping(watched, False)
        at.clear()
        replica.fetch = fetch  # type: ignore[method-assign]

        def begin_the_next() -> None:
            if not short and not at.is_set():
                at.set()
                swapping(watched, True)  # comes while the step that has memory again is under way

        around_steps(replica, after=begin_the_next)
        go_on.set()
        assert watched.until(Judged).exchange == b"first"


def test_a_swap_that_there_is_no_memory_to_judge_stays_once_the_next_one_begins() -> None:
    asked = threading.Event()

    def measured() -> Losses:
        asked.set()
        raise ShortOfMemory("for long")

    run = small_run(steps=300)
    replica = small_replica(run=run)
    with begun(lambda: replica) as one, begun(lambda: small_replica("b", run)) as other:
        ours, theirs = one.offer(), other.offer()
        replica.losses = measured  # type: ignore[method-assign]
        swapping(one, True)
        swap(ours, theirs)
        swapping(one, False)
        settled = ours.settled()
        assert asked.wait(DEADLINE_S)
        assert not settled.done()
        swapping(one, True)
        answer(settled)
        assert not replica.slow.has_swapped, "nothing of it is left to be taken back with the next partner's"


def test_who_waits_for_a_verdict_is_told_when_the_weights_are_given_up() -> None:
    with begun() as one, begun(lambda: small_replica("b")) as other:
        ours, theirs = one.offer(), other.offer()
        swapping(one, True)
        swap(ours, theirs)
        settled = ours.settled()
        one.thread._codec_thread.give_up(ours.round)
        answer(settled)
        with pytest.raises(NonFinite):
            answer(ours.open(0, b"later"))


def test_a_swap_that_made_it_a_little_better_or_worse_stays() -> None:
    c = 1e-4 * torch.randn(small_replica().parameters)
    with running(lambda: small_replica(run=small_run(steps=300))) as watched:
        before, after = swapped(watched, c)
        assert torch.allclose(after.outer["phi"] - before.outer["phi"], c, atol=1e-6)


def test_where_the_partner_is_as_good_the_way_between_may_be_worse() -> None:
    """Two halves of a swarm that trained apart for long."""
    c = 3 * torch.randn(small_replica().parameters)
    replica = small_replica(run=small_run(steps=300))
    replica.losses_without = lambda partner=0.0, own=True: Losses(1.0)  # type: ignore[method-assign, misc]
    with running(lambda: replica) as watched:
        before, after = swapped(watched, c)
        assert torch.allclose(after.outer["phi"] - before.outer["phi"], c, atol=1e-5)


def test_weights_whose_steps_are_skipped_are_not_offered() -> None:
    replica = small_replica(run=small_run(steps=4))

    def skip() -> None:
        replica._skipped_in_row = int(replica.position.phase_step == 4)

    with begun(lambda: around_steps(replica, after=skip)) as watched:
        ended = watched.until(PhaseEnded)
        assert (ended.offer, ended.closed) == (None, "nonfinite")


@pytest.mark.parametrize("saved", [True, False])
def test_slow_weights_that_are_not_finite_at_a_boundary(saved: bool) -> None:
    """They become those of the last checkpoint; without one the training ends."""
    replica, good = small_replica(), small_replica().state()

    def spoil() -> None:
        if replica.round == 1 and replica.position.phase_over:
            replica.phi[5] = float("inf")
            replica.theta[5] = float("inf")

    around_steps(replica, after=spoil)
    with begun(lambda: replica, last_good=lambda _: good if saved else None) as watched:
        if not saved:
            assert isinstance(watched.until(Failed).error, Diverged)
            return
        assert watched.until(RolledBack).weights_of == 0
        assert watched.until(PhaseEnded).closed == "nonfinite"
        watched.until(Finished)
        assert replica.round == 4
