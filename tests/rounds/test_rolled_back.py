"""A node whose weights are rolled back in the middle of a swap: that swap breaks, the next ones are whole."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
import virtual_nodes
from virtual_clock import run_virtual
from virtual_nodes import FRAGMENTS, Node, Offer, VirtualSwarm

from noloco_node.base.events import WentSolo
from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.errors import NonFinite


class Broken(Node):
    """What it offered up to a round is void; its exchange goes on with the next phase, as node/trainer.py has it."""

    given_up = -1
    corrected = 0

    def end_phase(self) -> None:
        self.exchange.resume()

    def roll_back(self) -> None:
        self.given_up = self.steps
        self.exchange.pause("rolled_back")

    def correct(self, index: int, correction: float, offered_round: int) -> None:
        self.corrected += 1
        super().correct(index, correction, offered_round)


class Voidable(Offer):
    node: Broken

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        self._require_valid()
        return super().open(index, exchange_id)

    def receive(self, index: int, payload: Payload) -> "Future[Any]":
        self._require_valid()
        return super().receive(index, payload)

    def apply(self, index: int, scale: float) -> "Future[None]":
        self._require_valid()
        return super().apply(index, scale)

    def stats(self) -> "Future[CodecStats]":
        self._require_valid()
        return super().stats()

    def _require_valid(self) -> None:
        if self.round <= self.node.given_up:
            raise NonFinite("given up")


@pytest.mark.parametrize("leads", [True, False])
def test_a_roll_back_breaks_the_swap_for_both(monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    monkeypatch.setattr(virtual_nodes, "Offer", Voidable)
    swarm = VirtualSwarm([10.0, 10.0], bandwidth_bytes_s=1000.0, kind=Broken)  # three fragments in three seconds
    one = swarm.nodes[0 if leads else 1]
    assert isinstance(one, Broken)

    async def roll_back() -> None:
        while not one.corrected:  # noqa: ASYNC110 (in virtual time, where polling costs nothing)
            await asyncio.sleep(0.01)
        one.roll_back()

    run_virtual(swarm.run(20, roll_back()))
    (broken,) = [e for e in one.events if isinstance(e, WentSolo) and e.reason == "nonfinite"]
    assert broken.round == one.given_up and 0 < broken.applied < FRAGMENTS
    assert one.given_up not in {e.round for e in one.committed}
    assert all(n.exchange.tally.one_sided <= 1 for n in swarm.nodes), "each counts the one that it led last"
    assert all(len(n.committed) >= 10 for n in swarm.nodes), "they meet again"
