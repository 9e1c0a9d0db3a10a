"""Two training threads on the device that swap by their offers, while they train: the same bits as one at a time.

`_one_at_a_time` does by hand what two training threads do, and waits for the device after every operation. Each thread
is held back behind one step of each phase until the swap's corrections are in its mailbox, so that they are added at
the same step: everything before races with the codec threads and their streams. Sleeps on the streams make each side
late in turn. Run once more with CUDA_LAUNCH_BLOCKING=1 ("swaps blocking").
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from checks.models import replica, require_same_vectors, same_each_time, small_run, vectors
from checks.place import Place, Seen, require_same
from checks.threads import DEADLINE_S, Posts, answer, arrive, correction, swap, talk
from replicas import train
from torch import Tensor

from noloco_node.core import gpu
from noloco_node.core.codecs.by_name import codec
from noloco_node.run.schema import Manifest
from noloco_node.training.mailbox import Command, Correct, Finished, Judged, PhaseEnded, Ready
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

STEPS, ROUNDS = 6, 4
ADDED_BEHIND = 3
"""The last phase's corrections are added behind so many steps of a phase."""
CODEC = "lattice:3"
SLEEP_S = 0.004

Vectors = dict[str, Tensor]


def threads_do_what_is_done_one_at_a_time(place: Place) -> Seen:
    with same_each_time():
        right = _one_at_a_time(place)
        seen = [_by_threads(place) for _ in range(1 if place.quick else 3)]
    for number, pair in enumerate(seen):
        _require_same_pair(f"time {number}", pair, right)
    return Seen(facts={"rounds": ROUNDS, "times": len(seen)})


def late_streams_change_no_bit(place: Place) -> None:
    """The codec late, the training late, the snapshot late."""
    with same_each_time():
        right = _one_at_a_time(place)
        for late in ("codec", "step", "snapshot"):
            with _late(place, late):
                _require_same_pair(f"{late} late", _by_threads(place), right)


def the_usual_algorithms_agree_with_nothing_late(place: Place) -> None:
    """Without deterministic algorithms memory is not set before it is used, and goes from stream to stream at once:
    corrections must still be exact opposites, and everything finite."""
    for precision in ("fp32", "bf16"):
        with _late(place, "codec"):
            for pair in _by_threads(place, precision=precision):
                assert all(torch.isfinite(vector).all() for vector in pair.values())


def slow_weights_on_the_host_swap_too(place: Place) -> None:
    """u, φ and δ in host memory, θ on the device."""
    place.require_gpu("a CPU has one memory only")
    from checks.replicas import _slow_on_the_host

    with same_each_time(), _slow_on_the_host():
        right = _one_at_a_time(place)
        _require_same_pair("on the host", _by_threads(place), right)
        with _late(place, "snapshot"):
            _require_same_pair("on the host, late", _by_threads(place), right)


def a_gpu_and_a_cpu_swap(place: Place) -> None:
    """Corrections that are exact opposites, and two replicas closer to each other than before."""
    cpu = Place(torch.device("cpu"), place.quick)
    run = small_run(place, steps=STEPS, rounds=2)
    with ExitStack() as stack:
        sides = [stack.enter_context(_running(p, run, name)) for p, name in ((place, "a"), (cpu, "b"))]
        for side in sides:
            side.thread.begin(1)
        offers = [side.offer() for side in sides]
        before = float((offers[0]._u.cpu() - offers[1]._u.cpu()).norm())
        for c, opposite in swap(*offers, bytes(16)):
            _require_opposite("a GPU and a CPU", c, opposite)
        after = float((offers[0]._u.cpu() - offers[1]._u.cpu()).norm())
        assert after < 0.6 * before, f"u' - u was {before:.3g} long and is {after:.3g}"


def a_swap_is_judged_and_training_goes_on(place: Place) -> Seen:
    run = small_run(place, steps=STEPS, rounds=3, precision="bf16")
    judged = []
    with ExitStack() as stack:
        sides = [stack.enter_context(_running(place, run, name, blocking=True)) for name in "ab"]
        for side in sides:
            side.thread.begin()
        for round_ in (1, 2):
            offers = [side.offer() for side in sides]
            for side in sides:
                side.thread.swapping(True)
            for _ in swap(*offers, bytes([round_] * 16)):
                pass
            for side in sides:
                side.thread.swapping(False)
                judged.append(side.until(Judged))
                side.thread.round_over(round_)
        for side in sides:
            side.until(Finished)
    assert all(0 < each.loss_with < 100 and 0 < each.loss_without < 100 for each in judged)
    assert all(each.loss_with != each.loss_without for each in judged), "it was added"
    return Seen(facts={"judged": [str(each.verdict) for each in judged]})


def a_checkpoint_while_it_trains_is_one_moment(place: Place) -> Seen:
    """Its θ, φ, δ and moments are those of the step that it says, though training goes on behind."""
    steps = 6 * STEPS
    with same_each_time():
        run = small_run(place, steps=STEPS, rounds=8)
        states = []
        with _running(place, run, "a") as side:
            side.thread.begin(6)
            for _ in range(3):
                states.append(answer(side.thread.state()))
                side.until(PhaseEnded)
            side.until(Finished)
        for state in states:
            right = replica(place, run)
            train(right, state.step)
            meant = right.state()
            assert state.round == meant.round
            for name, weight in meant.weights.items():
                require_same(f"{name} at step {state.step}", state.weights[name], weight)
            for name, vector in meant.outer.items():
                require_same(f"{name} at step {state.step}", state.outer[name], vector)
            for place_, moments in meant.inner["optimizer"].items():
                for name, value in moments.items():
                    if isinstance(value, Tensor):
                        require_same(f"{name} of parameter {place_}", state.inner["optimizer"][place_][name], value)
    return Seen(facts={"at_steps": [state.step for state in states], "of": steps})


def a_joining_node_gets_one_moment(place: Place) -> None:
    """The copy for a joining node is taken between steps, piece by piece."""
    with same_each_time():
        run = small_run(place, steps=STEPS, rounds=8)
        with _running(place, run, "a") as side:
            side.thread.begin(4)
            round_, data = answer(side.thread.live_state())
            both = torch.frombuffer(bytearray(data), dtype=torch.float32)
            side.until(Finished)
        right = replica(place, run)
        train(right, STEPS * round_)
        require_same("φ", both[: right.parameters], right.phi.cpu())
        require_same("δ", both[right.parameters :], right.delta.cpu())


# ---- by threads ------------------------------------------------------------------------------------------------------
class _Side(Posts):
    """A training thread, and what it posts."""

    def __init__(self, place: Place, run: Manifest, peer: str, held: bool, blocking: bool) -> None:
        super().__init__()
        self.held = held
        self.waits, self.goes_on = threading.Event(), threading.Event()
        """Whether it waits for the corrections of the last phase, and whether they are in its mailbox."""
        self.replica: Replica | None = None

        def build() -> Replica:
            inner = self.replica = replica(place, run, peer)
            step = inner.step

            def held_back() -> float:
                loss = step()
                if self.held and inner.round and inner.position.phase_step == ADDED_BEHIND:
                    place.sleep_on_stream(SLEEP_S)  # the corrections are ready before it is
                    self.waits.set()
                    assert self.goes_on.wait(DEADLINE_S), "no corrections came"
                    self.goes_on.clear()
                return loss

            inner.step = held_back  # type: ignore[method-assign]
            return inner

        self.thread = TrainingThread(
            build,
            codec(CODEC),
            self.put,
            rounds=run.rounds,
            blocking=blocking,
            fragment_elements=_fragment(place),
        )


@contextmanager
def _running(place: Place, run: Manifest, peer: str, held: bool = False, blocking: bool = False) -> Iterator[_Side]:
    side = _Side(place, run, peer, held, blocking)
    side.thread.start()
    try:
        side.until(Ready)  # models are made with torch's one generator, so one after the other
        yield side
    finally:
        side.held = False
        side.goes_on.set()
        side.thread.stop(DEADLINE_S)
        place.synchronize()


def _by_threads(place: Place, precision: str = "fp32") -> list[Vectors]:
    run = small_run(place, steps=STEPS, rounds=ROUNDS, precision=precision)
    with ExitStack() as stack:
        sides = [stack.enter_context(_running(place, run, name, held=True)) for name in "ab"]
        for side in sides:
            side.thread.begin()
        for round_ in range(1, ROUNDS):
            offers = [side.offer() for side in sides]
            exchange, fragments = bytes([round_] * 16), range(offers[0].fragments)
            scales = [talk(*offers, index, exchange) for index in fragments]
            for side in sides:
                assert side.waits.wait(DEADLINE_S), "it never came to that step"
                side.waits.clear()
            for index, scale in zip(fragments, scales, strict=True):
                _require_opposite(f"round {round_}", *(correction(offer, index) for offer in offers))
                for offer in offers:
                    offer.apply(index, scale)
            arrive(*offers)
            for side in sides:
                side.goes_on.set()
        for side in sides:
            side.until(Finished)
        place.synchronize()
        return [vectors(side.replica) for side in sides if side.replica is not None]


def _fragment(place: Place) -> int:
    return 1024 if place.quick else 1 << 19


# ---- late ------------------------------------------------------------------------------------------------------------
@contextmanager
def _late(place: Place, what: str) -> Iterator[None]:
    """Work of one kind begins later on its stream, at no other time for the thread that queues it."""
    owner, name = {"codec": (CodecThread, "do"), "step": (Replica, "step"), "snapshot": (Replica, "snapshot")}[what]
    usual = getattr(owner, name)

    def late_work(self: CodecThread, round: int, work: Callable[[], Any]) -> Any:
        def late() -> Any:
            place.sleep_on_stream(SLEEP_S)
            return work()

        return usual(self, round, late)

    def late_call(self: Replica) -> Any:
        place.sleep_on_stream(5 * SLEEP_S)
        return usual(self)

    with patch.object(owner, name, late_work if what == "codec" else late_call):
        yield


# ---- one at a time ---------------------------------------------------------------------------------------------------
class _Alone:
    """A replica that does by hand what its training thread would."""

    def __init__(self, place: Place, run: Manifest, peer: str) -> None:
        self._place = place
        self.replica = replica(place, run, peer)
        self._corrections: list[Correct] = []
        self._codec_thread = CodecThread(codec(CODEC), self._take, _fragment(place))

    def _take(self, command: Command) -> None:
        assert isinstance(command, Correct)
        self._place.synchronize()
        self._corrections.append(command)
        command.added.set_result(None)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.replica.step()
            self._place.synchronize()

    def offer(self) -> Offer:
        inner = self.replica
        offered = inner.snapshot()
        self._place.synchronize()
        inner.boundary()
        self._place.synchronize()
        made = Offer(self._codec_thread, inner.round, *offered, inner.theta.device)
        self._place.synchronize()
        return made

    def add(self) -> None:
        for command in self._corrections:
            gpu.wait(command.ready, command.correction.device)
            self.replica.slow.apply(command.start, command.correction, command.offered_round, command.kept)
            self._place.synchronize()
        self._corrections.clear()

    def close(self) -> None:
        self._codec_thread.close()


def _one_at_a_time(place: Place) -> list[Vectors]:
    run = small_run(place, steps=STEPS, rounds=ROUNDS)
    sides = [_Alone(place, run, name) for name in "ab"]
    try:
        for round_ in range(1, ROUNDS + 1):
            for side in sides:
                side.train(STEPS if round_ == 1 else STEPS - ADDED_BEHIND)
            if round_ == ROUNDS:
                for side in sides:
                    side.offer()
                break
            for _ in swap(*[side.offer() for side in sides], bytes([round_] * 16)):
                pass
            for side in sides:
                side.train(ADDED_BEHIND)
                side.add()
        return [vectors(side.replica) for side in sides]
    finally:
        for side in sides:
            side.close()


def _require_opposite(what: str, c: Tensor, opposite: Tensor) -> None:
    require_same(f"{what}: opposite corrections", c.cpu(), -opposite.cpu() + 0.0)  # without -0


def _require_same_pair(what: str, seen: list[Vectors], right: list[Vectors]) -> None:
    for name, one, other in zip("ab", seen, right, strict=True):
        require_same_vectors(f"{what}, replica {name}", one, other)


CHECKS = (
    threads_do_what_is_done_one_at_a_time,
    late_streams_change_no_bit,
    the_usual_algorithms_agree_with_nothing_late,
    slow_weights_on_the_host_swap_too,
    a_gpu_and_a_cpu_swap,
    a_swap_is_judged_and_training_goes_on,
    a_checkpoint_while_it_trains_is_one_moment,
    a_joining_node_gets_one_moment,
)
