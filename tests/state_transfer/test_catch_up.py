"""When a node catches up, and whose state it fetches: over the in-memory network, in virtual time."""

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import pytest
from donors import BUDGET, NUMBERS, TERMS, DonorNetwork, FaultyDonor, Owner, answer, chunks, header, numbers, record
from virtual_clock import in_virtual_time

from noloco_node.base.places import RELAYED
from noloco_node.core.verdict import Trial
from noloco_node.errors import SwarmUnreachable
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import catch_up, choose_donor
from noloco_node.state_transfer.catch_up import CATCH_UP_ROUNDS, FAILING_S, LOOKS, CatchUp, ahead, coding, has_diverged
from noloco_node.state_transfer.choose_donor import Wanted
from noloco_node.state_transfer.client import LiveState
from noloco_node.wire import messages as wire
from noloco_node.wire.state_format import Coding

DATA, FALSE, OWN = numbers(1), numbers(2), bytes(4 * NUMBERS)


def same(peer: str) -> str:
    """Each peer is at a place of its own."""
    return peer


class Node:
    """The node that catches up: it sees the test's records and notes the calls. Every state is better than its own."""

    def __init__(self, round: int, *sights: Sequence[PeerRecord] | Exception) -> None:
        self.round = round
        self.sights = list(sights)
        self.did: list[str] = []
        self.state: bytes | None = None
        self.own = OWN
        self.on = asyncio.Event()

    async def look(self) -> Collection[PeerRecord]:
        self.did.append("look")
        seen = self.sights[0] if len(self.sights) == 1 else self.sights.pop(0)
        if isinstance(seen, Exception):
            raise seen
        return seen

    def seen(self) -> Collection[PeerRecord]:
        return () if isinstance(self.sights[0], Exception) else self.sights[0]

    def waits_for(self, what: str | None) -> None:
        pass

    async def swap_is_over(self) -> bool:
        return True

    def sample(self, blocks: Sequence[int]) -> "Future[tuple[int, bytes]]":
        return Owner(self.own, self.round).sample(blocks)

    def try_state(self, _state: memoryview) -> "Future[Trial]":
        return answer(Trial(own=5.0, theirs=4.0, later=4.0, added=0.1, new=5.0))

    async def adopt(self, state: LiveState) -> None:
        self.round, self.state = state.round, bytes(state.data)
        self.did.append("adopts")

    def caught_up(self) -> None:
        self.did.append("on")
        self.on.set()


async def catch_up_of(node: Node, network: DonorNetwork, **options: bool) -> CatchUp:
    me = await network.joining_node("me")
    return CatchUp(node, node, me.channel, Wanted(TERMS, NUMBERS, BUDGET), place_of=me.place_of, **options)


async def looked(*sights: Sequence[PeerRecord] | Exception, round: int = 0, **options: bool) -> tuple[int, int]:
    """How often a node looks before it trains, and the round of its weights then."""
    network, node = DonorNetwork(), Node(round, *sights)
    await network.donor("donor", Owner(DATA))
    await (await catch_up_of(node, network, **options)).fetch_first_state()
    return node.did.count("look"), node.round


# ---- which state ---------------------------------------------------------------------------------------------------
def test_whose_state_is_asked_for() -> None:
    there = [record("a", 3), record("b", 40), record("c", 50, "paused"), record("d", 60, "joining")]
    assert ahead(there, 0, same) == ["a", "b"]
    assert ahead([record("b", 40), record("c", 50, "paused")], 30, same) == ["b"], (
        "of those at rest only where nobody trains"
    )
    assert ahead([record("c", 50, "paused")], 40, same) == ["c"]
    assert ahead([record("e", BUDGET, "finished")], 0, same) == ["e"]
    assert not ahead([record("d", 60, "joining"), record("f", 60, "leaving")], 0, same)


def test_one_record_that_claims_to_be_far_ahead_is_not_enough() -> None:
    level, high = [record(peer, 105) for peer in "abc"], record("faulty", BUDGET)
    assert ahead([*level, high], 100, same) == []
    assert ahead([level[0], high], 100, same) == [], "of two the lower one counts"
    assert ahead([*level, record("slow", 1)], 95, same) == ["a", "b", "c"]
    assert ahead([high], 100, same) == ["faulty"], "nobody contradicts it"


def test_many_records_of_one_place_are_one() -> None:
    there = [record(peer, 105) for peer in "abc"] + [record(f"x{n}", BUDGET) for n in range(20)]
    assert ahead(there, 100, same) == [f"x{n}" for n in range(20)]
    assert ahead(there, 100, lambda peer: peer[0]) == []


def test_a_node_has_diverged_when_several_say_so_that_it_has_committed_with() -> None:
    assert not has_diverged([], ["b", "c"], ["b", "c"], same)
    assert not has_diverged(["b"], ["b", "c"], ["b", "c"], same), "it may be the other"
    assert has_diverged(["b", "c"], ["b", "c"], ["b", "c"], same)
    assert has_diverged(["b", "gone"], ["b", "gone"], ["b", "c"], same)
    assert not has_diverged(["b", *"xyz"], ["b", "c"], ["b", "c", *"xyz"], same), "strangers"


def test_a_node_that_has_committed_with_nobody_counts_places() -> None:
    def by_letter(peer: str) -> str:
        return peer[0]

    assert has_diverged(["a1", "b1"], [], ["a1", "b1", "c1"], by_letter)
    assert not has_diverged(["a1", "a2", "a3"], [], ["a1", "a2", "a3", "b1"], by_letter)
    assert has_diverged(["a1", "a2"], [], ["a1", "a2", "a3"], by_letter), "all of them are on one machine"
    assert not has_diverged(["a1"], [], ["a1"], by_letter)


def test_a_host_with_a_relay_of_its_own_is_one_place() -> None:
    def at(peer: str) -> str:
        return RELAYED if peer[0] == "r" else peer[0]

    assert not has_diverged(["a1", "r1", "r2"], [], ["a1", "b1", "r1", "r2"], at)
    assert has_diverged(["a1", "b1"], [], ["a1", "b1", "r1"], at)
    assert has_diverged(["r1", "r2"], [], ["r1", "r2"], at), "nobody is called without a relay"


def test_a_slow_download_is_in_bf16() -> None:
    assert coding(8_000_000_000, None) is Coding.FP32
    assert coding(8_000_000_000, 5e6) is Coding.FP32
    assert coding(8_000_000_000, 4e6) is Coding.BF16


# ---- at the start --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["training", "solo", "paused", "finished"])
@in_virtual_time
async def test_a_joining_node_fetches_the_state_of_any_node_that_has_weights(state: str) -> None:
    network, node = DonorNetwork(), Node(0, [record("donor", 12, state)])
    await network.donor("donor", Owner(DATA))
    await (await catch_up_of(node, network)).fetch_first_state()
    assert (node.round, node.state) == (12, DATA)


@in_virtual_time
async def test_a_node_that_finds_no_peer_looks_again_before_it_begins_with_new_weights() -> None:
    assert await looked([], first=True) == (1, 0)
    assert await looked([]) == (LOOKS, 0)
    assert await looked([], [record("donor", 12)]) == (2, 12)
    assert await looked(SwarmUnreachable("p2pd has died"), TimeoutError(), [record("donor", 12)]) == (3, 12)


@in_virtual_time
async def test_what_nobody_answers_is_no_sign_that_the_run_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that brings the run would begin it again beside those that train; one with a checkpoint goes on with that,
    and says so."""
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    unanswered = [SwarmUnreachable("no other node answers look-ups")] * 40
    assert await looked(*unanswered, [record("donor", 12)]) == (41, 12)
    assert not caplog.messages
    assert await looked(*unanswered, [record("donor", 12)], round=1) == (pytest.approx(FAILING_S, abs=3.0), 1)
    assert [line.split(",")[0] for line in caplog.messages] == ["going on with this node's own weights"]
    with pytest.raises(SwarmUnreachable, match="or cannot be found"):
        await looked(*unanswered)


@pytest.mark.parametrize("state", ["starting", "joining"])
@in_virtual_time
async def test_who_has_nothing_to_begin_with_waits_while_another_one_starts(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first node may read data and build the model for long, where several nodes start at once."""
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    starting = [[record("donor", 0, state)]] * 20
    assert await looked(*starting, [record("donor", 12)], begins=False) == (21, 12)
    assert await looked(*starting, begins=True) == (LOOKS, 0), "two such nodes do not wait for each other"
    assert await looked(*starting, [], begins=False) == (20 + LOOKS, 0), "it has left"
    with pytest.raises(SwarmUnreachable, match="still starting after 50 s"):
        await looked(*starting, begins=False)


@pytest.mark.parametrize("busy", [0, LOOKS])
@in_virtual_time
async def test_looks_that_found_a_donor_do_not_count_as_those_that_found_nobody(busy: int) -> None:
    """It refuses, is started again, or is not found for a moment."""
    for meanwhile, begins in (([[record("busy", 12, "starting")]] * 20, False), ([[]] * (LOOKS - 1), True)):
        network = DonorNetwork()
        await network.faulty_donor("busy", FaultyDonor([wire.Refusal(wire.Code.BUSY)], 12))
        await network.donor("later", Owner(DATA))
        node = Node(0, *[[record("busy", 12)]] * busy, *meanwhile, [record("later", 12)])
        assert await (await catch_up_of(node, network, begins=begins)).fetch_first_state()
        assert node.state == DATA


@pytest.mark.parametrize("round", [0, 12])
@in_virtual_time
async def test_only_a_node_without_weights_ends_where_no_donor_sends_its_state(
    round: int, caplog: pytest.LogCaptureFixture
) -> None:
    network, node = DonorNetwork(), Node(round, [record("donor", 50)])
    await network.donor("donor", Owner(DATA, 50), daily_upload=1_000_000)
    assert not await (await catch_up_of(node, network, resumed=True)).fetch_first_state()
    assert caplog.messages[-1].startswith("going on with this node's own weights: no peer sent its state")
    with pytest.raises(SwarmUnreachable, match="the last one: paused"):
        await (await catch_up_of(Node(0, [record("donor", 50)]), network, begins=False)).fetch_first_state()


@in_virtual_time
async def test_the_state_of_a_run_that_gets_more_rounds_meanwhile_may_be_of_a_later_one() -> None:
    network, node = DonorNetwork(), Node(0, [], [record("donor", BUDGET + 1)])
    await network.donor("donor", Owner(DATA, BUDGET + 1))
    catching = await catch_up_of(node, network)
    coming = asyncio.create_task(catching.fetch_first_state())
    await asyncio.sleep(choose_donor.RETRY_S / 2)
    assert node.did == ["look"], "it looks again later"
    catching.wanted.budget = BUDGET + 100
    assert await coming
    assert (node.round, node.state) == (BUDGET + 1, DATA)


def faulty_at(round: int) -> FaultyDonor:
    return FaultyDonor([header(FALSE, round=round), *chunks(FALSE)], round)


@pytest.mark.parametrize("honest", [["one"], ["one", "two", "three"]], ids=["one other", "three others"])
@pytest.mark.parametrize(("own", "there"), [(0, 105), (100, 105), (50, 105)], ids=["new", "restarted", "far behind"])
@in_virtual_time
async def test_a_donor_that_claims_to_be_at_the_runs_end_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, honest: list[str], own: int, there: int
) -> None:
    claims = {"faulty": BUDGET, **dict.fromkeys(honest, there)}
    monkeypatch.setattr(catch_up.choose_donor.random, "choice", lambda found: found[0])
    network, node = DonorNetwork(), Node(own, [record(peer, round) for peer, round in claims.items()])
    faulty = faulty_at(BUDGET)
    await network.faulty_donor("faulty", faulty)
    for peer in honest:
        await network.donor(peer, Owner(DATA, there))
    await (await catch_up_of(node, network)).fetch_first_state()
    assert (node.round, node.state) == ((own, None) if own == 100 else (there, DATA))


@in_virtual_time
async def test_a_single_witness_cannot_call_the_only_honest_donor_stale() -> None:
    network, node = DonorNetwork(), Node(0, [record("honest", 12), record("faulty", BUDGET)])
    await network.donor("honest", Owner(DATA))
    await network.faulty_donor("faulty", FaultyDonor([wire.Refusal(wire.Code.BUSY)], BUDGET))
    await (await catch_up_of(node, network)).fetch_first_state()
    assert (node.round, node.state) == (12, DATA)


# ---- on the way ----------------------------------------------------------------------------------------------------
def committed(catching: CatchUp, *partners: str) -> None:
    for partner in partners:
        assert not catching.round_over(None, partner)


def diverged(catching: CatchUp, *partners: str) -> list[bool]:
    return [catching.round_over("diverged", partner) for partner in partners]


@in_virtual_time
async def test_a_node_whose_swaps_diverge_fetches_the_state_of_another() -> None:
    network, node = DonorNetwork(), Node(12, [record(peer, 13) for peer in ("one", "two", "third")])
    for peer in ("one", "two", "third"):
        await network.donor(peer, Owner(DATA if peer == "third" else FALSE, 13))
    catching = await catch_up_of(node, network)
    committed(catching, "one", "two", "third")
    assert diverged(catching, "one", "one", "one") == [False, False, False], "it may be the other"
    committed(catching, "third")
    assert diverged(catching, "one") == [False], "it is no sign of it any more"
    assert not catching.round_over("partner_diverged", "two"), "a partner's word is none"
    assert not catching.round_over("busy", "two"), "another reason is none"
    assert diverged(catching, "two", "one") == [True, True], "until it is acted upon"
    catching.start(diverged=True)
    assert diverged(catching, "one", "two") == [False, False], "what ends meanwhile does not count"
    await node.on.wait()
    assert node.did == ["look", "adopts", "on"]
    assert (node.round, node.state) == (13, DATA), "not of those that it diverged from"
    assert diverged(catching, "one") == [False], "the count begins anew"


@in_virtual_time
async def test_a_diverged_node_goes_back_to_an_earlier_round() -> None:
    there = [record(peer, 90) for peer in ("one", "two", "three", "four")]
    network, node = DonorNetwork(), Node(100, there)
    owners = {peer.peer_id: Owner(DATA, 90 + n) for n, peer in enumerate(there)}
    for peer, owner in owners.items():
        await network.donor(peer, owner)
    catching = await catch_up_of(node, network)
    committed(catching, "one", "two")
    assert diverged(catching, "one", "two") == [False, True]
    catching.start(diverged=True)
    await node.on.wait()
    assert node.round in (92, 93) and node.state == DATA
    assert sum(len(owner.asked) for owner in owners.values()) == 1


@in_virtual_time
async def test_two_nodes_alone_that_diverged_both_keep_what_they_have() -> None:
    for me, other in (("a", "b"), ("b", "a")):
        network, node = DonorNetwork(), Node(12, [record(other, 13)])
        catching = await catch_up_of(node, network)
        committed(catching, other)
        assert not any(diverged(catching, *[other] * 10)), me
        assert "too far apart" in catching.health()[0].text and "join again" in catching.health()[0].remedy
        committed(catching, other)
        assert not catching.health()


@in_virtual_time
async def test_where_nobody_is_left_but_those_it_diverged_from_it_keeps_what_it_has() -> None:
    network, node = DonorNetwork(), Node(12, [record(peer, 13) for peer in ("one", "two")])
    for peer in ("one", "two"):
        await network.donor(peer, Owner(DATA, 13))
    catching = await catch_up_of(node, network)
    committed(catching, "one", "two")
    for _ in range(3):
        assert diverged(catching, "one", "two") == [False, True]
        catching.start(diverged=True)
        await node.on.wait()
        node.on.clear()
    assert node.state is None and "adopts" not in node.did
    assert catching.health()


@in_virtual_time
async def test_alone_a_node_has_not_diverged() -> None:
    network, node = DonorNetwork(), Node(12, [])
    catching = await catch_up_of(node, network)
    committed(catching, "gone", "too")
    assert not any(diverged(catching, "gone", "too"))


@in_virtual_time
async def test_after_a_pause_only_a_node_far_behind_fetches_a_state() -> None:
    network, node = DonorNetwork(), Node(12, [record("donor", 12 + CATCH_UP_ROUNDS - 1)])
    await network.donor("donor", Owner(DATA, 12 + CATCH_UP_ROUNDS))
    catching = await catch_up_of(node, network)
    assert not catching.is_behind()
    node.sights = [[record("donor", 12 + CATCH_UP_ROUNDS)]]
    assert catching.is_behind()
    catching.start(diverged=False)
    await node.on.wait()
    assert node.state == DATA and node.did == ["look", "adopts", "on"]


@in_virtual_time
async def test_where_no_donor_sends_its_state_it_goes_on_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up.choose_donor, "TAKE_STATE_S", 20.0)
    network, node = DonorNetwork(), Node(12, [record("gone", 50)])
    catching = await catch_up_of(node, network)
    assert catching.is_behind()
    catching.start(diverged=False)
    await node.on.wait()
    assert node.round == 12 and node.state is None


@in_virtual_time
async def test_an_error_while_adopting_is_logged_and_it_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Node):
        async def adopt(self, state: LiveState) -> None:
            raise RuntimeError("out of something")

    network, node = DonorNetwork(), Broken(12, [record("donor", 50)])
    await network.donor("donor", Owner(DATA, 50))
    catching = await catch_up_of(node, network)
    for _ in range(2):
        assert catching.is_behind()
        catching.start(diverged=False)
        await node.on.wait()
        node.on.clear()
    assert "out of something" in caplog.text


@in_virtual_time
async def test_catching_up_that_is_stopped_does_not_report_its_end() -> None:
    network, node = DonorNetwork(), Node(12, [record("gone", 50)])
    catching = await catch_up_of(node, network)
    assert catching.is_behind()
    catching.start(diverged=False)
    await asyncio.sleep(1)
    catching.stop()
    await asyncio.sleep(100)
    assert "on" not in node.did
