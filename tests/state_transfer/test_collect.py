"""Several nodes' weights for one mean: over a network in memory, with donors that are faulty, fall silent or are
gone."""

from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import donors
import numpy as np
import pytest
from donors import BUDGET, NUMBERS, TERMS, DonorNetwork, FaultyDonor, Owner, chunks, header, policy
from virtual_clock import in_virtual_time

from noloco_node.base.peer_names import name_of
from noloco_node.core.verdict import Trial
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import collect
from noloco_node.state_transfer.client import StateTerms
from noloco_node.state_transfer.collect import Collector, OtherStage, OwnState
from noloco_node.views.gather import GatherView

OWN = OwnState("joining", TERMS, NUMBERS // 2, 12, 600, 50, BUDGET)
NAN = b"\x00\x00\xc0\x7f"


def numbers(seed: int) -> bytes:
    """Of replicas that are close to each other."""
    return bytes(np.frombuffer(donors.numbers(0), np.float32) * np.float32(1 + seed / 100))


def record(name: str, state: str = "training", round: int = 12) -> PeerRecord:
    return donors.record(name, round, state)


async def views(
    collector: Collector,
    there: list[PeerRecord],
    peers: int,
    own: bytes = numbers(0),
    at: OwnState = OWN,
    *,
    trials: dict[bytes, float] | None = None,
    **stages: Any,
) -> list[GatherView]:
    owner = Owner(own)
    owner.trials |= trials or {}
    async with aclosing(collector.gather(at, owner, there, peers, **stages)) as coming:
        return [view async for view in coming]


async def gather(network: DonorNetwork, home: Path, there: list[PeerRecord], peers: int, **options: Any) -> GatherView:
    node = await network.joining_node()
    what = {name: options.pop(name) for name in ("at", "stages", "trials") if name in options}
    place_of = options.pop("place_of", str)
    collector = Collector(home, node.channel, policy(**options), place_of)
    return (await views(collector, there, peers, **what))[-1]


@in_virtual_time
async def test_a_crowd_on_one_host_keeps_no_average_waiting(tmp_path: Path) -> None:
    """Each of its donors begins and then says nothing."""
    network = DonorNetwork()
    await network.donor("honest", Owner(numbers(1)))
    crowd = [f"crowd {n}" for n in range(100)]
    for name in crowd:
        await network.faulty_donor(name, FaultyDonor([header(numbers(2))], silent=True))
    there = [record(name) for name in ("honest", *crowd)]
    done = await gather(network, tmp_path, there, 1, place_of=lambda peer: peer.partition(" ")[0])
    assert [state.peer_id for state in done.states] == ["joining", "honest"]
    assert len(done.skipped) <= 1, "of two places"


async def test_each_donors_weights_are_in_a_file_and_others_are_skipped_by_name(tmp_path: Path) -> None:
    network = DonorNetwork()
    await network.donor("honest", Owner(numbers(1), round=14))
    await network.donor("paused", Owner(numbers(2), round=9))
    faulty = {
        "nan": [header(NAN + numbers(3)[4:]), *chunks(NAN + numbers(3)[4:])],
        "beyond": [header(numbers(3), round=BUDGET + 1)],
        "behind": [header(numbers(3), round=1)],
        "damaged": [header(numbers(3)), *chunks(numbers(4))],
    }
    for name, frames in faulty.items():
        await network.faulty_donor(name, FaultyDonor(frames))
    there = [record(name) for name in ("honest", "gone", *faulty)]
    there += [record("paused", "paused", 9), record("joining", "joining"), record("old", round=1)]
    done = await gather(network, tmp_path, there, 5)
    assert done.done and done.failure is None
    assert [(s.peer_id, s.round, s.step) for s in done.states] == [
        ("joining", 12, 600),
        ("honest", 14, 700),
        ("paused", 9, 450),
    ]
    for state, seed in zip(done.states, range(3), strict=True):
        there = np.fromfile(state.path, "<f4")
        assert np.array_equal(there, np.frombuffer(numbers(seed), "<f4")[: NUMBERS // 2])
    why = dict(line.split(": ") for line in done.skipped)
    assert why == {
        name_of("nan"): "nonfinite",
        name_of("beyond"): "bad round",
        name_of("behind"): "old state",
        name_of("damaged"): "bad digest",
        name_of("gone"): why[name_of("gone")],
        name_of("old"): why[name_of("old")],
    }


async def test_weights_that_are_worse_or_far_away_are_in_no_mean(tmp_path: Path) -> None:
    """One stranger that sent any finite numbers spoiled an exported model."""
    worse, apart = numbers(2), donors.numbers(3)
    network = DonorNetwork()
    for name, data in (("honest", numbers(1)), ("worse", worse), ("apart", apart)):
        await network.donor(name, Owner(data))
    there = [record(name) for name in ("honest", "worse", "apart")]
    done = await gather(network, tmp_path, there, 3, trials={worse: 2.4})
    assert {state.peer_id for state in done.states} == {"joining", "honest"}
    assert set(done.skipped) == {f"{name_of('worse')}: worse than own", f"{name_of('apart')}: diverged"}


async def test_what_takes_long_is_shown(tmp_path: Path) -> None:
    """The node measures the loss of each state between two steps of its own."""
    shown = list[str]()
    network = DonorNetwork()
    await network.donor("honest", Owner(numbers(1)))
    collector = Collector(tmp_path, (await network.joining_node()).channel, policy())

    class Measuring(Owner):
        def try_state(self, state: memoryview) -> "Future[Trial]":
            shown.append(collector.view.doing)
            return super().try_state(state)

    async with aclosing(collector.gather(OWN, Measuring(numbers(0)), [record("honest")], 1)) as coming:
        assert [len(view.states) async for view in coming][-1] == 2
    assert shown == [f"state from {name_of('honest')}, whose loss is measured"]


async def test_a_donor_is_judged_by_the_round_that_it_answers_and_not_by_its_record(tmp_path: Path) -> None:
    """In a run with rounds of a second, records are more than ten rounds old."""
    network = DonorNetwork()
    for seed, round in ((1, 13), (2, 1)):
        await network.donor(f"at {round}", Owner(numbers(seed), round=round))
    done = await gather(network, tmp_path, [record("at 13", round=1), record("at 1", round=1)], 2)
    assert [state.peer_id for state in done.states] == ["joining", "at 13"]
    assert done.skipped == (f"{name_of('at 1')}: old state",)
    assert done.failure is None
    nobody = await gather(network, tmp_path, [], 2)
    assert "as none with weights of the run is seen" in (nobody.failure or "")
    late = await gather(network, tmp_path, [record("at 1", round=1)], 2)
    assert late.skipped and "no other node sent its state: see" in (late.failure or "")


async def test_donors_whose_records_are_far_behind_are_asked_last(tmp_path: Path) -> None:
    network = DonorNetwork()
    there = [record("behind", round=1), record("near"), record("paused", "paused")]
    for seed, each in enumerate(there):
        await network.donor(each.peer_id, Owner(numbers(seed)))
    done = await gather(network, tmp_path, there, 3)
    assert [state.peer_id for state in done.states] == ["joining", "near", "behind", "paused"]


async def test_with_phases_by_time_a_states_step_is_known_where_the_record_is_of_its_round(tmp_path: Path) -> None:
    network = DonorNetwork()
    for seed, (name, round) in enumerate((("same", 12), ("later", 13))):
        await network.donor(name, Owner(numbers(seed), round=round))
    there = [record("same"), record("later")]
    done = await gather(network, tmp_path, there, 2, at=replace(OWN, steps_a_round=None))
    steps = {state.peer_id: state.step for state in done.states}
    assert steps == {"joining": 600, "same": 600, "later": None}


async def test_another_stage_may_be_many_rounds_behind_but_none_of_its_nodes_behind_the_others_there(
    tmp_path: Path,
) -> None:
    """The stages' nodes differ in speed. Whoever claims a late round shuts nobody out."""
    other = StateTerms(TERMS.run_id, b"2" * 32)
    network = DonorNetwork()
    await network.donor("mate", Owner(numbers(1), round=40))
    for name, round in (("slow", 20), ("slower", 18), ("left behind", 5), ("liar", 20)):
        await network.donor(name, Owner(numbers(2), round=round), other)
    said = {"slow": 20, "slower": 18, "left behind": 20, "liar": BUDGET}
    stage = OtherStage(other, NUMBERS // 2, [record(name, round=round) for name, round in said.items()], "2 of 2")
    at = replace(OWN, round=40)
    done = await gather(network, tmp_path, [record("mate", round=40)], 4, at=at, stages=[stage])
    assert done.failure is None
    assert {state.peer_id for state in done.states if state.layout} == {"slow", "slower", "liar"}
    assert done.skipped == (f"{name_of('left behind')}: old state",)


@pytest.mark.parametrize("there", [[], [record("joins", "joining")], [record("gone")]])
async def test_a_stage_that_nobody_sends_ends_the_export_at_once(tmp_path: Path, there: list[PeerRecord]) -> None:
    """Without it there is no whole model, however much else has come."""
    of_others = [
        OtherStage(StateTerms(TERMS.run_id, bytes([at]) * 32), NUMBERS // 2, those, f"{at} of 3")
        for at, those in ((2, there), (3, [record("third")]))
    ]
    network = DonorNetwork()
    mate, third = Owner(numbers(1)), Owner(numbers(3))
    await network.donor("mate", mate)
    await network.donor("third", third, of_others[1].terms)
    done = await gather(network, tmp_path, [record("mate")], 1, stages=of_others)
    copies = len(mate.asked) + 2 * len(third.asked)
    assert done.exit_code == 10 and "no node of stage 2 of 3 sent its state" in (done.failure or "")
    assert copies == (there == [record("gone")]), "nothing is fetched in vain where it is known before"


async def test_the_disk_must_have_room_for_the_states_of_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [record(f"o{i}") for i in range(3)]
    of_other = OtherStage(StateTerms(TERMS.run_id, b"2" * 32), 10 * OWN.parameters, there, "2 of 2")
    needed = collect._PLACE_BYTES * (OWN.parameters + 2 * OWN.parameters + 2 * 10 * OWN.parameters)
    monkeypatch.setattr(collect.atomic_files, "free_bytes", lambda _: needed - 1)
    mates = [record("one"), record("two"), record("three")]
    done = await gather(DonorNetwork(), tmp_path, mates, 2, stages=[of_other])
    assert "the disk is full: 5 states need" in (done.failure or "")


async def test_what_a_killed_export_left_makes_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / collect.FOLDER / "abc"
    monkeypatch.setattr(collect.atomic_files, "free_bytes", lambda _: 0 if left.exists() else 1 << 40)
    network = DonorNetwork()
    await network.donor("honest", Owner(numbers(1)))
    collector = Collector(tmp_path, (await network.joining_node()).channel, policy())
    left.mkdir(parents=True)
    assert len((await views(collector, [record("honest")], 1))[-1].states) == 2


def test_what_an_export_left_that_ended_with_its_node_goes_when_that_is_back(tmp_path: Path) -> None:
    (tmp_path / collect.FOLDER / "abc").mkdir(parents=True)
    Collector(tmp_path, lambda _: pytest.fail("it calls nobody"), policy())
    assert not (tmp_path / collect.FOLDER).exists()


async def test_a_node_whose_own_weights_are_not_finite_says_so(tmp_path: Path) -> None:
    collector = Collector(tmp_path, (await DonorNetwork().joining_node()).channel, policy())
    said = await views(collector, [], 1, own=NAN + numbers(0)[4:])
    assert "own weights hold NaN" in (said[-1].failure or "")


async def test_no_more_states_than_were_asked_for(tmp_path: Path) -> None:
    network = DonorNetwork()
    for seed, name in enumerate(("one", "two", "three")):
        await network.donor(name, Owner(numbers(seed)))
    done = await gather(network, tmp_path, [record(name) for name in ("one", "two", "three")], 2)
    assert len(done.states) == 3


async def test_the_days_quota_is_kept(tmp_path: Path) -> None:
    network, there = DonorNetwork(), [record("one"), record("two")]
    for seed, each in enumerate(there):
        await network.donor(each.peer_id, Owner(numbers(seed)))
    some = await gather(network, tmp_path, there, 2, daily_download=int(1.5 * 4 * NUMBERS))
    assert len(some.states) == 2 and "--daily-download" in some.skipped[0] and some.failure is None
    none = await gather(network, tmp_path, there, 2, daily_download=int(0.5 * 4 * NUMBERS))
    assert none.exit_code == 10 and "no other node sent its state" in (none.failure or "")
    assert not (tmp_path / collect.FOLDER).exists()


async def test_a_donor_that_falls_silent_is_skipped_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "BEGIN_S", 0.2)
    monkeypatch.setattr(collect, "SLOWEST_BYTES_S", 1 << 40)
    network = DonorNetwork()
    await network.faulty_donor("silent", FaultyDonor([header(numbers(1))], silent=True))
    done = await gather(network, tmp_path, [record("silent")], 1)
    assert done.skipped == (f"{name_of('silent')}: too slow",)


async def test_one_at_a_time_and_a_caller_that_goes_leaves_no_files(tmp_path: Path) -> None:
    network = DonorNetwork()
    await network.faulty_donor("silent", FaultyDonor([header(numbers(1))], silent=True))
    await network.donor("honest", Owner(numbers(1)))
    node = await network.joining_node()
    collector = Collector(tmp_path, node.channel, policy())
    async with aclosing(collector.gather(OWN, Owner(numbers(0)), [record("silent")], 1)) as first:
        await anext(first)
        second = await views(collector, [record("honest")], 1)
    assert "wait for it" in (second[-1].failure or "")
    assert not (tmp_path / collect.FOLDER).exists()
    third = await views(collector, [record("honest")], 1)
    assert len(third[-1].states) == 2
