"""Which peers are shown, and in which order."""

import pytest

from noloco_node.terminal.filter import COLUMNS, PeerFilter
from noloco_node.views.peers import PeerRow, PeersView


def row(name: str, **changes) -> PeerRow:
    return PeerRow(**{"peer_id": f"12D3{name}", "name": name, "state": "training", "round": 1, "lag": 0, **changes})


VIEW = PeersView(
    (
        row("calm-otter", loss=2.0, exchanges=1, sent=5),
        row("able-ant", loss=None, exchanges=1, state="paused"),
        row("wise-owl", loss=1.0, exchanges=3, round=9),
    )
)


def order(choice: PeerFilter) -> list[str]:
    return [peer.name for peer in choice.of(VIEW).peers]


def test_most_rounds_together_come_first_and_equals_are_sorted_by_name():
    assert order(PeerFilter()) == ["wise-owl", "able-ant", "calm-otter"]


def test_unknown_values_come_last():
    assert order(PeerFilter("loss")) == ["wise-owl", "calm-otter", "able-ant"]
    assert order(PeerFilter("via")) == ["able-ant", "calm-otter", "wise-owl"]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_sorts_everybody(column):
    assert sorted(order(PeerFilter(column))) == ["able-ant", "calm-otter", "wise-owl"]


def test_some_only():
    assert order(PeerFilter(state="paused")) == ["able-ant"]
    assert order(PeerFilter(name="OTTER")) == ["calm-otter"]
    assert order(PeerFilter(name="12D3wise")) == ["wise-owl"]
    assert order(PeerFilter(state="paused", name="otter")) == []
