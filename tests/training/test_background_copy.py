"""Copies made in the background: of the moment they were asked for, whatever changes meanwhile and whoever reads."""

import errno
import math
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from replicas import CPU, HeldUp, assert_same, live_state, small_replica, small_run, small_text
from torch import Tensor

from noloco_node.core.state import State
from noloco_node.errors import DiskFull, OutOfMemory
from noloco_node.host import memory
from noloco_node.host.config import EIGHT_BIT, FULL
from noloco_node.training import background_copy, model
from noloco_node.training import replica as replica_module
from noloco_node.training.background_copy import HUGE_BYTES, Copies, FileMemory, Pair, host_memory
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

DEADLINE_S = 60.0
SMALL_PIECE = 400


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_copy, "PIECE_BYTES", SMALL_PIECE)
        yield


def pair(tensor: Tensor) -> Pair:
    return Pair(tensor, host_memory(tensor.shape, tensor.dtype))


def begun(copies: Copies, *tensors: Tensor, part: str = "all") -> "Future[list[Tensor]]":
    pairs = [pair(tensor) for tensor in tensors]
    return copies.begin({part: pairs}, [each.into for each in pairs])


# ---- of one moment ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [HeldUp, Copies])
def test_it_is_of_the_moment_it_began_whatever_changes_meanwhile(kind: type[Copies]) -> None:
    with small_pieces():
        copies, phi, delta = kind(CPU), torch.arange(1000.0), torch.full((1000,), 0.5)
        before, answer = [phi.clone(), delta.clone()], begun(copies, phi, delta)
        for start, end in ((700, 850), (0, 1), (999, 1000)):
            copies.secure("all", start, end)
            phi[start:end] += 1
        copies.secure("another part")
        copies.secure("all")
        phi.zero_(), delta.zero_()
        copies.complete()
        assert_same(answer.result(0), before)


def test_only_what_is_about_to_change_is_copied_first() -> None:
    with small_pieces():
        copies, phi = HeldUp(), torch.arange(1000.0)
        answer = begun(copies, phi)
        (copy,) = copies._under_way
        copies.secure("all", 150, 201)
        assert [piece.start for piece in copy.pieces["all"] if piece.read.done()] == [100, 200]
        assert not answer.done()
        copies.complete()
        assert torch.equal(answer.result(0)[0], phi)


def test_what_is_safe_meanwhile_is_read_last() -> None:
    with small_pieces():
        copies, phi = HeldUp(), torch.arange(1000.0)
        begun(copies, phi)
        (copy,) = copies._under_way
        for piece in copy.pieces["all"][:3]:
            piece.kept = True
        order: list[int] = []
        copy.read_all(lambda piece: order.append(piece.start))
        copies.complete()
    assert order == [*range(300, 1000, 100), 0, 100, 200]


def test_tensors_of_any_type_and_size() -> None:
    some = [
        torch.tensor(3.0),
        torch.arange(12.0).view(3, 4),
        torch.arange(999, dtype=torch.uint8),
        torch.arange(50).to(torch.bfloat16),
        torch.empty(0),
        torch.arange(HUGE_BYTES // 4 + 5.0),
    ]
    copies = Copies(CPU)
    assert_same(begun(copies, *some).result(DEADLINE_S), some)


def test_what_is_dropped_meanwhile_is_copied_too() -> None:
    """As AdamW's moments are where the phase is thrown away."""
    copies, moments = HeldUp(), torch.ones(100)
    answer = begun(copies, moments)
    del moments
    copies.complete()
    assert torch.equal(answer.result(0)[0], torch.ones(100))


# ---- of a whole replica ----------------------------------------------------------------------------------------------
ACTS = ("step", "skip", "boundary", "correct", "take back", "let stay", "losses", "restart", "restore", "adopt", "try")


class Life:
    """Of a replica that is copied again and again."""

    def __init__(self, copies: Copies) -> None:
        self.replica = small_replica(run=small_run(steps=10, rounds=10, warmup=0.0))
        self.replica.copies = self.replica.slow._copies = copies
        self._evaluate, self.replica._gradients.evaluate = self.replica._gradients.evaluate, self._evaluated  # type: ignore[method-assign]
        donor = small_replica("b")
        donor.step()
        self._donated, self._saved = live_state(donor), donor.state()
        self._before = self.replica.theta.clone()
        self.asked: list[tuple[Future[Any], Any]] = []
        """The answers, and what they must be."""

    def _evaluated(self, tries: bool = False) -> float:
        """θ may be another for so long: the copies' threads get a turn just then."""
        if isinstance(self.replica.copies, HeldUp) and not torch.equal(self.replica.theta, self._before):
            self.replica.copies.go_on()
        return self._evaluate(tries)

    def act(self, what: str, at: int) -> None:  # noqa: PLR0912 - one for each kind
        replica, self._before = self.replica, self.replica.theta.clone()
        match what:
            case "state":
                now = present(self.replica)
                self.asked.append((self.replica.copy_state(), now))
            case "slow":
                if not replica.copies.under_way("slow"):
                    now = replica.round, live_state(replica)
                    self.asked.append((self.replica.copy_slow(), now))
            case "step":
                replica.step()
            case "skip":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(replica._gradients, "finish", lambda: (math.nan, math.nan))
                    patch.setattr(replica, "_skipped_in_row", 0)
                    replica.step()
            case "boundary":
                replica.snapshot()
                replica.boundary()
            case "correct":
                start = at % replica.parameters
                replica.slow.apply(start, torch.full((min(500, replica.parameters - start),), 1e-3), replica.round)
            case "take back":
                replica.slow.take_back()
            case "let stay":
                replica.slow.let_stay()
            case "losses":
                replica.losses_without(partner=1)
            case "restart":
                replica.restart()
            case "restore":
                replica.restore(deepcopy(self._saved))
            case "adopt":
                replica.adopt(replica.round + 1, self._donated)
            case "try":
                replica.try_state(self._donated)


def present(replica: Replica) -> dict[str, Any]:
    """What its state must be, from the tensors themselves."""
    return deepcopy({
        "round": replica.round,
        "step": replica.steps,
        "weights": {name: p.detach() for name, p in model.parameters(replica.module)},
        "outer": {"phi": replica.phi, "delta": replica.delta},
        "optimizer": replica._optimizer.state(),
        "position": replica.stream.position,
        "taken": replica.tokens // replica.tokens_per_step,
        "skipped": replica.skipped,
        "rng": torch.get_rng_state(),
    })  # fmt: skip


def assert_what_was_asked(life: Life) -> None:
    life.replica.copies.complete()
    for answer, due in life.asked:
        got = answer.result(DEADLINE_S)  # the thread of one that was whole before may be about to say so
        if isinstance(got, State):
            assert_same({name: {**asdict(got), **got.inner}[name] for name in due}, due)
        else:
            assert got == due


@pytest.mark.parametrize("act", ACTS)
def test_whatever_changes_is_copied_first(act: str) -> None:
    """Where nobody else copies before: what an act forgot to secure would be copied with its change."""
    with small_pieces():
        life = Life(HeldUp())
        for what in ("step", "boundary", "correct", "step", "state", "slow", act):
            life.act(what, 1000)
        assert_what_was_asked(life)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a step is slow
@given(st.lists(st.tuples(st.sampled_from((*ACTS, *("state", "slow") * 4)), st.integers(0, 4000)), max_size=30))
def test_any_life_gives_copies_of_the_moments_they_were_asked_for(acts: list[tuple[str, int]]) -> None:
    with small_pieces():
        life = Life(Copies(CPU))
        for what, at in acts:
            life.act(what, at)
        assert_what_was_asked(life)


# ---- who asks, and who is held up ------------------------------------------------------------------------------------
def test_one_copy_for_a_joining_node_serves_all_who_ask_while_it_is_made() -> None:
    replica = small_replica()
    replica.copies = replica.slow._copies = HeldUp()
    one, of_all = replica.copy_slow(), replica.copy_state()
    assert replica.copy_slow() is one
    replica.copies.complete()
    assert one.done() and of_all.done()
    assert replica.copy_slow() is not one


def test_what_is_raised_reaches_the_asker_alone() -> None:
    copies, phi = Copies(CPU), torch.ones(10)
    answer = copies.begin({"all": [Pair(phi, torch.empty(5))]}, None)
    copies.secure("all")
    with pytest.raises(ValueError, match="broadcast"):
        answer.result(DEADLINE_S)
    copies.complete()


@pytest.mark.parametrize("moments", [FULL, EIGHT_BIT])
def test_where_memory_has_no_room_a_copy_goes_to_a_file_and_is_the_same(
    moments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moments == EIGHT_BIT:
        pytest.importorskip("bitsandbytes")
    replica = build_replica(small_run(), "a", device="cpu", threads=1, corpus=small_text(), moments=moments)
    replica.step()
    replica.spill_folder = lambda: tmp_path
    in_memory = replica.state()
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    monkeypatch.setattr(replica_module, "host_memory", pytest.fail)
    asked = replica.copy_state()
    replica.step()  # what it changes has been copied before
    assert_same(asdict(asked.result(DEADLINE_S)), asdict(in_memory))
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_of_a_file_only_the_parts_that_are_saved_are_written(tmp_path: Path) -> None:
    """Of several types: moments of 8 bits have scales of 32."""
    sizes = 400_000, 100_000, 4_000_000, 0
    file = FileMemory(tmp_path, FileMemory.size(sizes))
    there = {"scales": file.take((1000, 100)), "moments": file.take((100_000,), torch.uint8)}
    for part, number in zip(there.values(), (7, 9), strict=True):
        file.put(part, torch.full_like(part, number))
    weights, there["none"] = file.take((1_000_000,)), file.take((0, 3))
    torch.save(there, tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size < sum(sizes[:2]) + 10_000 < weights.nbytes
    assert_same(torch.load(tmp_path / "saved", weights_only=True), there)
    assert there["moments"].unique().tolist() == [9]


def test_a_full_disk_is_said_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    replica = small_replica()
    replica.spill_folder = lambda: tmp_path
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    monkeypatch.setattr(os, "pwrite", full)
    asked = replica.copy_state()
    replica.step()
    with pytest.raises(DiskFull, match="a copy of the state into"):
        asked.result(DEADLINE_S)


def test_where_there_is_no_memory_it_says_how_much_is_needed() -> None:
    with pytest.raises(OutOfMemory, match="TB that are not free"):
        host_memory((1 << 46,))


def test_the_time_for_which_it_holds_training_up_can_be_measured() -> None:
    held: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        held.append("began")
        yield
        held.append("ended")

    copies, phi = HeldUp(), torch.ones(10)
    copies.waiting = waiting
    begun(copies, phi)
    copies.secure("another part")
    assert not held
    copies.secure("all")
    copies.secure("all")
    assert held == ["began", "ended"]
    copies.complete()


def test_the_asker_alone_holds_what_was_copied() -> None:
    """Also while nothing changes: a node that has finished keeps no 20 bytes a parameter."""
    copies, into = Copies(CPU), torch.empty(10)
    gone = weakref.ref(into)
    copies.begin({"all": [Pair(torch.ones(10), into)]}, [into]).result(DEADLINE_S)
    for thread in copies._under_way[0].threads:
        thread.join(DEADLINE_S)
    del into
    assert gone() is None


def test_a_copy_for_which_there_is_no_thread_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine short of memory has none at times: each checkpoint in vain would keep 20 bytes a parameter."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copies, phi, into = Copies(CPU), torch.ones(10), torch.empty(10)
    gone = weakref.ref(into)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", full)
        copies.begin({"all": [Pair(phi, into)]}, None)
    del into
    assert gone() is None
    assert begun(copies, phi).result(DEADLINE_S)[0].equal(phi)
