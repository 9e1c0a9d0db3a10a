"""`top` asks a node again and again."""

from dataclasses import replace
from pathlib import Path

from fake_node import STATUS, FakeNode

from noloco_node.control import socket_server
from noloco_node.host.home import Home
from noloco_node.terminal.top.poller import Poller
from noloco_node.views.history import HistoryView, Rate
from noloco_node.views.status import Today


async def test_the_nodes_rates_go_on_with_all_that_it_sends_and_receives(tmp_path: Path) -> None:
    """As activations of stages and states for newcomers, which are in no swap."""
    home, rate = Home(tmp_path).create(), Rate(1.0, 5.0, 6.0)
    node = FakeNode(replace(STATUS, today=Today(100, 200)), history=HistoryView(rates=(rate,)))
    poller = Poller(home, 1.0, lambda: None)
    with home.lock():
        async with socket_server.serving(home, node):
            assert (await poller.first()).rates == (rate,)
            node.now = replace(node.now, today=Today(100_000, 200))
            known, latest = (await poller.first()).rates
            assert (known, latest.received_per_s) == (rate, 0.0) and latest.sent_per_s > 0
            node.now = replace(node.now, today=Today(5, 0))
            assert (await poller.first()).rates == (rate,), "a new day"
