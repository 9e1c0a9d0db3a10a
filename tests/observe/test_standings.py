"""A partner's standing in the rows of `peers`, and the warning when peers are in quarantine."""

import pytest

from noloco_node.base.peer_names import name_of
from noloco_node.core.standing import Standing
from noloco_node.observe import standings
from noloco_node.observe.standings import GONE_ROWS
from noloco_node.views.peers import GONE, PeerRow

CALM, DRY = "12D3KooWCALM", "12D3KooWDRY"


def row(peer: str) -> PeerRow:
    return PeerRow(peer_id=peer, name=name_of(peer), state="training", round=7, lag=0, exchanges=3)


def quarantined(seconds: float, why: str = "diverged") -> Standing:
    return Standing(quarantined_s=seconds, why=why)


def test_a_row_says_what_this_node_has_seen_of_the_peer() -> None:
    seen_of = {CALM: Standing(9, 2, 1, 4, 90.0, "taken_back")}
    calm, dry = standings.fill([row(CALM), row(DRY)], seen_of)
    assert (calm.taken_back, calm.refused, calm.failed) == (2, 1, 4)
    assert (calm.quarantined_s, calm.quarantined_why) == (90.0, "taken_back")
    assert (calm.state, calm.round, calm.exchanges) == ("training", 7, 3), "the rest stays"
    assert dry == row(DRY), "nothing is known of it"


def test_a_quarantine_that_is_over_has_no_reason() -> None:
    (calm,) = standings.fill([row(CALM)], {CALM: Standing(failed=1, why="diverged")})
    assert (calm.failed, calm.quarantined_s, calm.quarantined_why) == (1, 0.0, "")


def test_a_peer_that_has_gone_is_listed_while_its_quarantine_lasts() -> None:
    here, gone = standings.fill([row(CALM)], {DRY: quarantined(5.0), "12D3KooWOTHER": Standing(refused=8)})
    assert here == row(CALM)
    assert (gone.peer_id, gone.name, gone.state, gone.quarantined_s) == (DRY, name_of(DRY), GONE, 5.0)
    assert list(standings.fill([row(CALM)], {DRY: quarantined(0.0)})) == [row(CALM)]


def test_a_crowd_of_identities_does_not_fill_the_table() -> None:
    crowd = {f"12D3KooW{number}": quarantined(float(number)) for number in range(1, 500)}
    here, *gone = standings.fill([row(CALM)], crowd)
    assert here == row(CALM)
    assert [each.quarantined_s for each in gone] == [float(number) for number in range(499, 499 - GONE_ROWS, -1)]


@pytest.mark.parametrize(
    ("bad", "seen", "warns"),
    [
        (0, 0, False),
        (0, 1, False),
        (1, 1, True),
        (1, 2, True),
        (1, 3, False),
        (2, 4, True),
        (2, 9, False),
        (3, 99, True),
    ],
)
def test_it_warns_of_half_the_peers_or_of_several(bad: int, seen: int, warns: bool) -> None:
    seen_of = {f"12D3KooW{number}": quarantined(9.0) for number in range(bad)}
    assert bool(standings.health(seen_of, seen)) == warns


def test_the_warning_names_who_and_why() -> None:
    seen_of = {CALM: quarantined(5.0, "taken_back"), DRY: quarantined(60.0), "12D3KooWHERE": Standing(9)}
    (finding,) = standings.health(seen_of, 2)
    assert finding.level == "warning"
    assert finding.text == f"2 peers in quarantine, {name_of(DRY)} (diverged), {name_of(CALM)} (taken back)"
    assert "neither calls nor accepts" in finding.remedy
    crowd = {f"12D3KooW{number}": quarantined(9.0) for number in range(500)}
    (finding,) = standings.health(crowd, 500)
    assert finding.text.endswith("(diverged), 497 others"), "a short line, however many there are"
