"""The ledger of partners and the shares of a node's time."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.core.standing import BURST, FACTOR, LEAST_PLACE, MAX_PEERS, MOST_OWN_PLACE, Ledger, Shares, Standing
from noloco_node.core.verdict import Verdict

LIE = Verdict(1.0, harmful=True, a_lie=True)
PHASE_S = 60.0


def test_a_standing_counts_what_was_seen() -> None:
    ledger = Ledger()
    assert ledger.standing("b", 0.0, alone=False) == Standing()
    ledger.whole("b", 0.0)
    ledger.failed("b", 1.0, 1.0, PHASE_S)
    ledger.misbehaved("b", "bad_length", 2.0, PHASE_S)
    ledger.judged("b", "place", LIE, 3.0, PHASE_S)
    standing = ledger.standing("b", 3.0, alone=False)
    assert (standing.committed, standing.taken_back, standing.refused, standing.failed) == (1, 1, 1, 1)
    assert standing.why == "taken_back" and standing.quarantined_s > 8 * PHASE_S


def test_a_quarantine_doubles_with_each_strike_and_is_forgiven() -> None:
    ledger, now, lengths = Ledger(), 0.0, []
    for _ in range(4):
        ledger.misbehaved("b", "bad_length", now, PHASE_S)
        lengths.append(round(ledger.quarantined_until("b", alone=False) - now))
    assert lengths == [120, 240, 480, 960]
    now += 200 * PHASE_S
    assert ledger.standing("b", now, alone=False).why == ""
    ledger.misbehaved("b", "bad_length", now, PHASE_S)
    assert ledger.quarantined_until("b", alone=False) - now == 120, "from the beginning again"


def test_the_only_peer_is_not_starved_unless_it_did_harm() -> None:
    ledger = Ledger()
    for _ in range(8):
        ledger.misbehaved("b", "diverged", 0.0, PHASE_S)
        ledger.failed("b", PHASE_S, 0.0, PHASE_S)
    assert ledger.free_at("b", alone=True) == 2 * PHASE_S < 100 * PHASE_S < ledger.free_at("b", alone=False)
    ledger.judged("c", "place", LIE, 0.0, PHASE_S)
    assert ledger.free_at("c", alone=True) == ledger.free_at("c", alone=False) == 8 * PHASE_S


def test_a_swap_that_held_costs_many_times_what_it_held_until_one_is_whole() -> None:
    ledger = Ledger()
    ledger.failed("b", 5.0, 0.0, PHASE_S)
    assert ledger.free_at("b", alone=False) == PHASE_S / 8, "a link that broke soon"
    ledger.whole("b", 10.0)
    ledger.failed("b", 2 * PHASE_S, 10.0, PHASE_S)
    assert ledger.free_at("b", alone=False) == 10 + 7 * 2 * PHASE_S
    ledger.failed("b", 2 * PHASE_S, 1000.0, PHASE_S)
    assert ledger.free_at("b", alone=False) == 1000 + 63 * 2 * PHASE_S
    ledger.links_failed()
    assert ledger.free_at("b", alone=False) < 0


def test_the_tables_are_bounded_and_a_quarantine_is_kept() -> None:
    ledger, shares = Ledger(), Shares()
    ledger.judged("bad", "place", LIE, 0.0, PHASE_S)
    for k in range(2 * MAX_PEERS):
        ledger.failed(f"{k}", 1.0, 0.0, PHASE_S)
        shares.charge(f"{k}", f"place {k}", 1.0)
    assert len(ledger.peers) == MAX_PEERS and "bad" in ledger.peers
    assert len(shares._of_peers) <= MAX_PEERS and len(shares._of_places) <= MAX_PEERS


def test_a_crowd_in_quarantine_hides_no_partner_and_no_liar() -> None:
    """1024 identities that are struck again and again leave room for those that are met."""
    ledger = Ledger()
    for k in range(2 * MAX_PEERS):
        for _ in range(9):
            ledger.misbehaved(f"crowd {k}", "unexpected_frame", 0.0, PHASE_S)
    ledger.whole("partner", 1.0)
    ledger.judged("liar", "place", LIE, 2.0, PHASE_S)
    for k in range(2 * MAX_PEERS):
        ledger.misbehaved(f"later {k}", "unexpected_frame", 3.0, PHASE_S)
    assert ledger.standing("partner", 3.0, alone=False).committed == 1
    assert ledger.free_at("liar", alone=False) > 8 * PHASE_S
    assert len(ledger.peers) == MAX_PEERS


@pytest.mark.parametrize("peers", [2, 3, 4, 12, 500])
def test_a_greedy_peer_takes_at_most_its_share_on_one_host_and_on_many(peers: int) -> None:
    for places in ({f"{k}": "here" for k in range(peers)}, {f"{k}": f"{k}" for k in range(peers)}):
        shares, taken = Shares(), 0
        shares.present(places)
        for _ in range(300):
            shares.pay_off()
            if not shares.over_for("0", places["0"]):
                shares.charge("0", places["0"], 1.0)
                taken += 1
        assert taken <= min(300, BURST + 300 * FACTOR / peers)
        assert taken >= min(300 / peers, 300)


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 2**32))
def test_one_place_takes_at_most_a_fifth_or_a_little_more_than_its_share(others: int, crowd: int, seed: int) -> None:
    shares, taken, chance = Shares(), 0.0, random.Random(seed)
    shares.present({f"{k}": f"{k}" for k in range(others)} | {f"crowd {k}": "a host" for k in range(crowd)})
    for _ in range(200):
        shares.pay_off()
        caller = f"crowd {chance.randrange(crowd + 1000)}"
        if not shares.over_for(caller, "a host"):
            length = chance.choice([1.0, 1.0, 2.5])
            shares.charge(caller, "a host", length)
            taken += length
    places = others + 1
    assert taken <= BURST + 1.5 + 200 * (max(LEAST_PLACE, FACTOR / places) if places > 2 else 1)


@pytest.mark.parametrize(("inside", "share"), [(0, LEAST_PLACE), (4, FACTOR / 3), (20, MOST_OWN_PLACE)])
def test_the_own_place_has_the_share_of_its_peers_up_to_a_half(inside: int, share: float) -> None:
    places = {f"{k}": f"{k}" for k in range(8)} | {f"in {k}": "own" for k in range(inside)}
    shares, taken = Shares(), {"own": 0, "": 0}
    for own in taken:
        shares.present(places, own)
        for k in range(300):
            shares.pay_off()
            if not shares.over_for(f"{k}", "own"):
                shares.charge(f"{k}", "own", 1.0)
                taken[own] += 1
    assert taken["own"] == pytest.approx(300 * share, abs=BURST + 1)
    assert taken[""] == pytest.approx(300 * LEAST_PLACE, abs=BURST + 1), "where it is not known"


def test_honest_peers_of_a_small_place_are_not_counted_by_a_crowd_elsewhere() -> None:
    shares = Shares()
    shares.present({f"{k}": f"{k}" for k in range(10)} | {f"crowd {k}": "a host" for k in range(1000)})
    assert shares._rate("0") == pytest.approx(FACTOR / 11) and shares._rate("a host") == pytest.approx(FACTOR / 1010)


def test_small_harms_add_up_to_a_strike_and_good_swaps_make_up_for_them() -> None:
    ledger = Ledger()
    for swap in range(40):
        ledger.judged("mixed", "place", Verdict(0.03 if swap % 2 else -0.04), float(swap), PHASE_S)
        ledger.judged("steers", "place", Verdict(0.006), float(swap), PHASE_S)
    assert ledger.quarantined_until("mixed", alone=False) < 0
    assert ledger.standing("steers", 21.0, alone=False).why == "harmful"


def test_who_trains_more_slowly_is_taken_back_without_a_strike_until_it_costs_too_much() -> None:
    ledger, slower = Ledger(), Verdict(0.02, harmful=True, a_lie=False)
    for swap in range(5):
        ledger.judged("slow", "place", slower, float(swap), PHASE_S)
    assert ledger.standing("slow", 5.0, alone=False).taken_back == 5
    assert ledger.quarantined_until("slow", alone=False) < 0
    for swap in range(5, 8):
        ledger.judged("slow", "place", slower, float(swap), PHASE_S)
    assert ledger.quarantined_until("slow", alone=False) > 0


def test_a_crowd_at_one_place_pays_for_what_it_does_together() -> None:
    ledger, little = Ledger(), Verdict(0.0, own_excess=0.05)
    assert [ledger.judged(f"peer {n}", "its host", little, float(n), PHASE_S) for n in range(6)] == [0, 0, 4, 0, 0, 4]
    assert all(ledger.free_at(peer, alone=False) == -math.inf for peer in ledger.peers), "none of them did much"
    assert [ledger.judged("one", "elsewhere", little, float(n), PHASE_S) for n in range(3)] == [0, 0, 0]
    assert ledger.free_at("one", alone=False) > 3, "it is left out itself"
    for n in range(40):
        assert not ledger.judged(f"friend {n % 3}", "a campus", Verdict(0.0, own_excess=(-1) ** n * 0.05), 0.0, PHASE_S)


def test_chance_pays_back_in_each_kind_of_harm_what_it_took_there() -> None:
    ledger = Ledger()
    for n in range(40):
        ledger.judged("friend", "there", Verdict((-1) ** n * 0.05, own_excess=-((-1) ** n) * 0.05), 0.0, PHASE_S)
    assert ledger.free_at("friend", alone=False) == -math.inf
