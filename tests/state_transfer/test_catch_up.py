"""When a node catches up, and whose state it fetches: over the in-memory network, in virtual time."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

import pytest
from donors import BUDGET, NUMBERS, TERMS, DonorNetwork, FaultyDonor, Owner, chunks, header, numbers
from virtual_clock import run_virtual

from noloco_node.errors import SwarmUnreachable
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import catch_up
from noloco_node.state_transfer.catch_up import (
    ALONE_ROUNDS,
    CATCH_UP_ROUNDS,
    DIVERGED_ROUNDS,
    LOOKS,
    CatchUp,
    ahead,
    coding,
    has_diverged,
)
from noloco_node.state_transfer.choose_donor import Wanted
from noloco_node.state_transfer.client import LiveState
from noloco_node.wire import messages as wire
from noloco_node.wire.state_format import Coding

DATA, FALSE = numbers(1), numbers(2)


def record(peer: str, round: int, state: str = "training") -> PeerRecord:
    figures = {"step": 0, "progress": 0.0, "loss": 0.0, "tokens_per_s": 0.0, "tokens": 0, "eval_loss": 0.0}
    told = {
        "partner": "",
        "committed": 0,
        "boot": b"",
        "addresses": (),
        "started": 0.0,
        "time": 0.0,
        "version": "0",
        "peers": 0,
        "expires": 1e12,
    }
    return PeerRecord(peer_id=peer, state=state, round=round, **figures, **told)


class Node:
    """The node that catches up: it sees the test's records and notes the calls."""

    def __init__(self, round: int, *sights: Sequence[PeerRecord] | Exception) -> None:
        self.round = round
        self.sights = list(sights)
        self.did: list[str] = []
        self.state: bytes | None = None
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

    async def adopt(self, state: LiveState) -> None:
        self.round, self.state = state.round, bytes(state.data)
        self.did.append("adopts")

    def caught_up(self) -> None:
        self.did.append("on")
        self.on.set()


def play(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(asyncio.wait_for(story, 20_000))


async def catch_up_of(node: Node, network: DonorNetwork, **options: bool) -> CatchUp:
    return CatchUp(node, "me", (await network.joining_node("me")).channel, Wanted(TERMS, NUMBERS, BUDGET), **options)


# ---- which state ---------------------------------------------------------------------------------------------------
def test_whose_state_is_asked_for() -> None:
    there = [record("a", 3), record("b", 40), record("c", 50, "paused"), record("d", 60, "joining")]
    assert ahead(there, 0) == ["a", "b"]
    assert ahead([record("b", 40), record("c", 50, "paused")], 30) == ["b"], "of those at rest only where nobody trains"
    assert ahead([record("c", 50, "paused")], 40) == ["c"]
    assert ahead([record("e", BUDGET, "finished")], 0) == ["e"]
    assert not ahead([record("d", 60, "joining"), record("f", 60, "leaving")], 0)


def test_one_record_that_claims_to_be_far_ahead_is_not_enough() -> None:
    level, high = [record(peer, 105) for peer in "abc"], record("faulty", BUDGET)
    assert ahead([*level, high], 100) == []
    assert ahead([level[0], high], 100) == [], "of two the lower one counts"
    assert ahead([*level, record("slow", 1)], 95) == ["a", "b", "c"]
    assert ahead([high], 100) == ["faulty"], "nobody contradicts it"


def test_of_two_nodes_that_diverged_the_higher_peer_id_fetches_the_others_state() -> None:
    apart = DIVERGED_ROUNDS * ["b"]
    assert has_diverged(apart, DIVERGED_ROUNDS, ["b"], "a")
    assert not has_diverged(apart[1:], DIVERGED_ROUNDS, ["b"], "a")
    assert not has_diverged(DIVERGED_ROUNDS * ["a"], 10 * ALONE_ROUNDS, ["a"], "b"), "it is the other's turn"


def test_among_more_nodes_two_partners_or_many_rounds_without_one_decide() -> None:
    assert not has_diverged([], 10 * ALONE_ROUNDS, ["b", "c"], "a")
    assert not has_diverged(5 * ["b"], ALONE_ROUNDS - 1, ["b", "c"], "a"), "it may be the other"
    assert has_diverged(["b"], ALONE_ROUNDS, ["b", "c"], "z")
    assert has_diverged(["b", "c"], 2, ["b", "c"], "z")
    assert has_diverged(["b", "gone"], 2, ["b", "c"], "z")


def test_a_slow_download_is_in_bf16() -> None:
    assert coding(8_000_000_000, None) is Coding.FP32
    assert coding(8_000_000_000, 5e6) is Coding.FP32
    assert coding(8_000_000_000, 4e6) is Coding.BF16


# ---- at the start --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["training", "solo", "paused", "finished"])
def test_a_joining_node_fetches_the_state_of_any_node_that_has_weights(state: str) -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(0, [record("donor", 12, state)])
        await network.donor("donor", Owner(DATA))
        await (await catch_up_of(node, network)).fetch_first_state()
        assert (node.round, node.state) == (12, DATA)
        await network.close()

    play(story())


def test_a_node_that_finds_no_peer_looks_again_before_it_begins_with_new_weights() -> None:
    async def story(*sights: Sequence[PeerRecord] | Exception, first: bool = False) -> None:
        network, node = DonorNetwork(), Node(0, *sights)
        await network.donor("donor", Owner(DATA))
        await (await catch_up_of(node, network, first=first)).fetch_first_state()
        looked.append((node.did.count("look"), node.round))
        await network.close()

    looked: list[tuple[int, int]] = []
    play(story([], first=True))
    play(story([]))
    play(story([], [record("donor", 12)]))
    play(story(SwarmUnreachable("p2pd has died"), TimeoutError(), [record("donor", 12)]))
    assert looked == [(1, 0), (LOOKS, 0), (2, 12), (3, 12)]


def faulty_at(round: int) -> FaultyDonor:
    return FaultyDonor([header(FALSE, round=round), *chunks(FALSE)], round)


@pytest.mark.parametrize("honest", [["one"], ["one", "two", "three"]], ids=["one other", "three others"])
@pytest.mark.parametrize(("own", "there"), [(0, 105), (100, 105), (50, 105)], ids=["new", "restarted", "far behind"])
def test_a_donor_that_claims_to_be_at_the_runs_end_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, honest: list[str], own: int, there: int
) -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(own, [record(peer, round) for peer, round in claims.items()])
        faulty = faulty_at(BUDGET)
        await network.faulty_donor("faulty", faulty)
        for peer in honest:
            await network.donor(peer, Owner(DATA, there))
        await (await catch_up_of(node, network)).fetch_first_state()
        assert (node.round, node.state) == ((own, None) if own == 100 else (there, DATA))
        await network.close()

    claims = {"faulty": BUDGET, **dict.fromkeys(honest, there)}
    monkeypatch.setattr(catch_up.choose_donor.random, "choice", lambda found: found[0])
    play(story())


def test_a_single_witness_cannot_call_the_only_honest_donor_stale() -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(0, [record("honest", 12), record("faulty", BUDGET)])
        await network.donor("honest", Owner(DATA))
        await network.faulty_donor("faulty", FaultyDonor([wire.Refusal(wire.Code.BUSY)], BUDGET))
        await (await catch_up_of(node, network)).fetch_first_state()
        assert (node.round, node.state) == (12, DATA)
        await network.close()

    play(story())


# ---- on the way ----------------------------------------------------------------------------------------------------
def test_a_node_whose_swaps_diverge_again_and_again_fetches_a_peers_state() -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(12, [record("donor", 13)])
        await network.donor("donor", Owner(DATA, 13))
        catching = await catch_up_of(node, network)
        for solo in ["diverged"] * (DIVERGED_ROUNDS - 1) + [None] + ["diverged", "busy"] * (DIVERGED_ROUNDS - 1):
            assert not catching.round_over(solo, "donor"), "another reason is no sign of it"
        assert catching.round_over("diverged", "another")
        assert catching.round_over("diverged", "donor"), "until it is acted upon"
        catching.start(diverged=True)
        assert not catching.round_over("diverged", "donor"), "then the count begins anew"
        await node.on.wait()
        assert node.did == ["look", "adopts", "on"]
        assert (node.round, node.state) == (13, DATA)
        await network.close()

    play(story())


def test_a_diverged_node_goes_back_to_an_earlier_round() -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(100, [record("one", 90), record("two", 91)])
        owners = {"one": Owner(DATA, 90), "two": Owner(DATA, 91)}
        for peer, owner in owners.items():
            await network.donor(peer, owner)
        catching = await catch_up_of(node, network)
        assert [catching.round_over("diverged", peer) for peer in ("one", "two")] == [False, True]
        catching.start(diverged=True)
        await node.on.wait()
        assert node.round in (90, 91) and node.state == DATA
        assert sum(len(owner.asked) for owner in owners.values()) == 1
        await network.close()

    play(story())


@pytest.mark.parametrize("seen", [[], [record("a", 13)]], ids=["nobody there", "the other one's turn"])
def test_alone_or_with_the_lower_peer_id_a_node_has_not_diverged(seen: list[PeerRecord]) -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(12, seen)
        catching = await catch_up_of(node, network)
        partner = seen[0].peer_id if seen else "gone"
        assert not any(catching.round_over("diverged", partner) for _ in range(2 * DIVERGED_ROUNDS))
        await network.close()

    play(story())


def test_after_a_pause_only_a_node_far_behind_fetches_a_state() -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(12, [record("donor", 12 + CATCH_UP_ROUNDS - 1)])
        await network.donor("donor", Owner(DATA, 12 + CATCH_UP_ROUNDS))
        catching = await catch_up_of(node, network)
        assert not catching.is_behind()
        node.sights = [[record("donor", 12 + CATCH_UP_ROUNDS)]]
        assert catching.is_behind()
        catching.start(diverged=False)
        await node.on.wait()
        assert node.state == DATA and node.did == ["look", "adopts", "on"]
        await network.close()

    play(story())


def test_where_no_donor_sends_its_state_it_goes_on_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(12, [record("gone", 50)])
        catching = await catch_up_of(node, network)
        assert catching.is_behind()
        catching.start(diverged=False)
        await node.on.wait()
        assert node.round == 12 and node.state is None
        await network.close()

    monkeypatch.setattr(catch_up.choose_donor, "TAKE_STATE_S", 20.0)
    play(story())


def test_an_error_while_adopting_is_logged_and_it_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Node):
        async def adopt(self, state: LiveState) -> None:
            raise RuntimeError("out of something")

    async def story() -> None:
        network, node = DonorNetwork(), Broken(12, [record("donor", 50)])
        await network.donor("donor", Owner(DATA, 50))
        catching = await catch_up_of(node, network)
        for _ in range(2):
            assert catching.is_behind()
            catching.start(diverged=False)
            await node.on.wait()
            node.on.clear()
        await network.close()

    play(story())
    assert "out of something" in caplog.text


def test_catching_up_that_is_stopped_does_not_report_its_end() -> None:
    async def story() -> None:
        network, node = DonorNetwork(), Node(12, [record("gone", 50)])
        catching = await catch_up_of(node, network)
        assert catching.is_behind()
        catching.start(diverged=False)
        await asyncio.sleep(1)
        catching.stop()
        await asyncio.sleep(100)
        assert "on" not in node.did
        await network.close()

    play(story())
