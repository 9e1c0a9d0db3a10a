"""Whose state a node takes to come level with the others, and when: over the in-memory network, in virtual time."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

import pytest
from donors import BUDGET, NUMBERS, TERMS, Giver, Liar, Place, chunks, header, numbers
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
    """A node as far as it comes level: what it sees is the test's, and what it is told to do is kept."""

    def __init__(self, round: int, *sights: Sequence[PeerRecord] | Exception) -> None:
        self.round = round
        self.sights = list(sights)
        self.did: list[str] = []
        self.state: bytes | None = None
        self.on = asyncio.Event()

    async def look(self) -> Collection[PeerRecord]:
        self.did.append("look")
        sight = self.sights[0] if len(self.sights) == 1 else self.sights.pop(0)
        if isinstance(sight, Exception):
            raise sight
        return sight

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


async def home_of(node: Node, place: Place, **options: bool) -> CatchUp:
    return CatchUp(node, "me", (await place.newcomer("me")).channel, Wanted(TERMS, NUMBERS, BUDGET), **options)


# ---- whose ---------------------------------------------------------------------------------------------------------
def test_whose_state_is_worth_taking() -> None:
    there = [record("a", 3), record("b", 40), record("c", 50, "paused"), record("d", 60, "joining")]
    assert ahead(there, 0) == ["a", "b"]
    assert ahead([record("b", 40), record("c", 50, "paused")], 30) == ["b"], "of those at rest only where nobody trains"
    assert ahead([record("c", 50, "paused")], 40) == ["c"]
    assert ahead([record("e", BUDGET, "finished")], 0) == ["e"]
    assert not ahead([record("d", 60, "joining"), record("f", 60, "leaving")], 0)


def test_one_claim_to_be_far_ahead_makes_nobody_far_behind() -> None:
    level, lie = [record(peer, 105) for peer in "abc"], record("liar", BUDGET)
    assert ahead([*level, lie], 100) == []
    assert ahead([level[0], lie], 100) == [], "of two the lower one counts"
    assert ahead([*level, record("slow", 1)], 95) == ["a", "b", "c"]
    assert ahead([lie], 100) == ["liar"], "nobody contradicts it"


def test_of_two_that_stand_apart_one_turns_to_the_other() -> None:
    apart = DIVERGED_ROUNDS * ["b"]
    assert has_diverged(apart, DIVERGED_ROUNDS, ["b"], "a")
    assert not has_diverged(apart[1:], DIVERGED_ROUNDS, ["b"], "a")
    assert not has_diverged(DIVERGED_ROUNDS * ["a"], 10 * ALONE_ROUNDS, ["a"], "b"), "it is the other's turn"


def test_among_more_it_is_the_one_whom_two_do_not_know_or_who_finds_nobody() -> None:
    assert not has_diverged([], 10 * ALONE_ROUNDS, ["b", "c"], "a")
    assert not has_diverged(5 * ["b"], ALONE_ROUNDS - 1, ["b", "c"], "a"), "it may be the other"
    assert has_diverged(["b"], ALONE_ROUNDS, ["b", "c"], "z")
    assert has_diverged(["b", "c"], 2, ["b", "c"], "z")
    assert has_diverged(["b", "gone"], 2, ["b", "c"], "z")


def test_a_slow_download_is_of_half_the_bytes() -> None:
    assert coding(8_000_000_000, None) is Coding.FP32
    assert coding(8_000_000_000, 5e6) is Coding.FP32
    assert coding(8_000_000_000, 4e6) is Coding.BF16


# ---- at the start --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["training", "solo", "paused", "finished"])
def test_a_newcomer_takes_the_state_of_whoever_has_one(state: str) -> None:
    async def story() -> None:
        place, node = Place(), Node(0, [record("donor", 12, state)])
        await place.donor("donor", Giver(DATA))
        await (await home_of(node, place)).arrive()
        assert (node.round, node.state) == (12, DATA)
        await place.close()

    play(story())


def test_who_sees_nobody_at_first_looks_again_before_it_begins_from_nothing() -> None:
    async def story(*sights: Sequence[PeerRecord] | Exception, first: bool = False) -> None:
        place, node = Place(), Node(0, *sights)
        await place.donor("donor", Giver(DATA))
        await (await home_of(node, place, first=first)).arrive()
        looked.append((node.did.count("look"), node.round))
        await place.close()

    looked: list[tuple[int, int]] = []
    play(story([], first=True))
    play(story([]))
    play(story([], [record("donor", 12)]))
    play(story(SwarmUnreachable("p2pd has died"), TimeoutError(), [record("donor", 12)]))
    assert looked == [(1, 0), (LOOKS, 0), (2, 12), (3, 12)]


def liar_at(round: int) -> Liar:
    return Liar([header(FALSE, round=round), *chunks(FALSE)], round)


@pytest.mark.parametrize("honest", [["one"], ["one", "two", "three"]], ids=["one other", "three others"])
@pytest.mark.parametrize(("own", "there"), [(0, 105), (100, 105), (50, 105)], ids=["new", "restarted", "far behind"])
def test_who_claims_to_be_at_the_runs_end_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, honest: list[str], own: int, there: int
) -> None:
    async def story() -> None:
        place, node = Place(), Node(own, [record(peer, round) for peer, round in claims.items()])
        liar = liar_at(BUDGET)
        await place.liar("liar", liar)
        for peer in honest:
            await place.donor(peer, Giver(DATA, there))
        await (await home_of(node, place)).arrive()
        assert (node.round, node.state) == ((own, None) if own == 100 else (there, DATA))
        await place.close()

    claims = {"liar": BUDGET, **dict.fromkeys(honest, there)}
    monkeypatch.setattr(catch_up.choose_donor.random, "choice", lambda found: found[0])
    play(story())


def test_a_single_witness_cannot_call_the_only_honest_donor_stale() -> None:
    async def story() -> None:
        place, node = Place(), Node(0, [record("honest", 12), record("liar", BUDGET)])
        await place.donor("honest", Giver(DATA))
        await place.liar("liar", Liar([wire.Refusal(wire.Code.BUSY)], BUDGET))
        await (await home_of(node, place)).arrive()
        assert (node.round, node.state) == (12, DATA)
        await place.close()

    play(story())


# ---- on the way ----------------------------------------------------------------------------------------------------
def test_who_stands_apart_round_after_round_takes_the_state_of_a_peer() -> None:
    async def story() -> None:
        place, node = Place(), Node(12, [record("donor", 13)])
        await place.donor("donor", Giver(DATA, 13))
        home = await home_of(node, place)
        for solo in ["diverged"] * (DIVERGED_ROUNDS - 1) + [None] + ["diverged", "busy"] * (DIVERGED_ROUNDS - 1):
            assert not home.round_over(solo, "donor"), "a committed round between, or another reason, is no sign of it"
        assert home.round_over("diverged", "another")
        assert home.round_over("diverged", "donor"), "until it is acted upon"
        home.start(diverged=True)
        assert not home.round_over("diverged", "donor"), "then the count begins anew"
        await node.on.wait()
        assert node.did == ["look", "adopts", "on"]
        assert (node.round, node.state) == (13, DATA)
        await place.close()

    play(story())


def test_who_stands_apart_goes_back_where_the_others_are_behind_it() -> None:
    async def story() -> None:
        place, node = Place(), Node(100, [record("one", 90), record("two", 91)])
        givers = {"one": Giver(DATA, 90), "two": Giver(DATA, 91)}
        for peer, giver in givers.items():
            await place.donor(peer, giver)
        home = await home_of(node, place)
        assert [home.round_over("diverged", peer) for peer in ("one", "two")] == [False, True]
        home.start(diverged=True)
        await node.on.wait()
        assert node.round in (90, 91) and node.state == DATA
        assert sum(len(giver.asked) for giver in givers.values()) == 1
        await place.close()

    play(story())


@pytest.mark.parametrize("sight", [[], [record("a", 13)]], ids=["nobody there", "the other one's turn"])
def test_a_node_that_is_not_to_act_has_not_diverged(sight: list[PeerRecord]) -> None:
    async def story() -> None:
        place, node = Place(), Node(12, sight)
        home = await home_of(node, place)
        partner = sight[0].peer_id if sight else "gone"
        assert not any(home.round_over("diverged", partner) for _ in range(2 * DIVERGED_ROUNDS))
        await place.close()

    play(story())


def test_after_a_pause_only_who_is_far_behind_takes_a_state() -> None:
    async def story() -> None:
        place, node = Place(), Node(12, [record("donor", 12 + CATCH_UP_ROUNDS - 1)])
        await place.donor("donor", Giver(DATA, 12 + CATCH_UP_ROUNDS))
        home = await home_of(node, place)
        assert not home.is_behind()
        node.sights = [[record("donor", 12 + CATCH_UP_ROUNDS)]]
        assert home.is_behind()
        home.start(diverged=False)
        await node.on.wait()
        assert node.state == DATA and node.did == ["look", "adopts", "on"]
        await place.close()

    play(story())


def test_where_no_donor_gives_its_state_it_goes_on_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        place, node = Place(), Node(12, [record("gone", 50)])
        home = await home_of(node, place)
        assert home.is_behind()
        home.start(diverged=False)
        await node.on.wait()
        assert node.round == 12 and node.state is None
        await place.close()

    monkeypatch.setattr(catch_up.choose_donor, "TAKE_STATE_S", 20.0)
    play(story())


def test_what_goes_wrong_in_adopting_is_logged_and_it_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Node):
        async def adopt(self, state: LiveState) -> None:
            raise RuntimeError("out of something")

    async def story() -> None:
        place, node = Place(), Broken(12, [record("donor", 50)])
        await place.donor("donor", Giver(DATA, 50))
        home = await home_of(node, place)
        for _ in range(2):
            assert home.is_behind()
            home.start(diverged=False)
            await node.on.wait()
            node.on.clear()
        await place.close()

    play(story())
    assert "out of something" in caplog.text


def test_catching_up_that_is_stopped_does_not_tell_that_it_ended() -> None:
    async def story() -> None:
        place, node = Place(), Node(12, [record("gone", 50)])
        home = await home_of(node, place)
        assert home.is_behind()
        home.start(diverged=False)
        await asyncio.sleep(1)
        home.stop()
        await asyncio.sleep(100)
        assert "on" not in node.did
        await place.close()

    play(story())
