"""In a run by invitation, nothing is swapped with who may not take part, and both ends learn why."""

import asyncio
import random
from concurrent.futures import Future

import pytest
from admissions import AT, AUTHOR, GUEST, RUN, STRANGER, TOKEN
from memory_network.network import MemoryNetwork
from virtual_clock import run_virtual
from virtual_nodes import FRAGMENTS, Node, Offer

from noloco_node.base.events import WentSolo
from noloco_node.core import round_events
from noloco_node.rounds.service import RoundTerms
from noloco_node.run import admission

OLD = admission.sign(RUN.run_id, GUEST.peer_id, AT - 10, AUTHOR)
CASES = {
    "invited": (GUEST.peer_id, TOKEN, None),
    "uninvited": (STRANGER.peer_id, b"", "not_admitted"),
    "replayed": (STRANGER.peer_id, TOKEN, "not_admitted"),
    "expired": (GUEST.peer_id, OLD, "expired"),
    "revoked": (GUEST.peer_id, TOKEN, "revoked"),
}


class Counted(Offer):
    """Counts the payloads that it gives."""

    opened = 0

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        self.opened += 1
        return super().open(index, exchange_id)


def meet(peer: str, token: bytes, *, revoked: bool, calls: bool) -> tuple[list[Node], list[Counted]]:
    """A round of the author's node with another one, which refuses nobody. `calls`: whether the other calls."""
    rule = admission.rule(RUN, AUTHOR.peer_id, [GUEST.peer_id] if revoked else [])
    network = MemoryNetwork(random.Random(1), delay_s=0.05)
    nodes = [Node(network, name, 10.0, seed, None) for seed, name in enumerate((AUTHOR.peer_id, peer))]
    offers = [Counted(node, 1) for node in nodes]

    async def story() -> None:
        rules = [lambda who, shown: rule.refusal(who, shown, AT - 1), lambda _who, _shown: None]
        for node, shown, refuses in zip(nodes, (b"", token), rules, strict=True):
            await node.transport.start()
            node.exchange.begin(RoundTerms(b"r" * 32, b"l" * 32, FRAGMENTS, shown), refuses=refuses)
        caller, called = reversed(nodes) if calls else nodes
        caller.exchange.candidates({called.name: "192.0.2.1"})
        for node, offer in zip(nodes, offers, strict=True):
            node.exchange.boundary(1, 10.0, offer, None)
        await asyncio.sleep(8)
        for node in nodes:
            node.exchange.boundary(2, 10.0, None, "not_finite")
        for node in nodes:
            await node.exchange.close()
            await node.transport.close()

    run_virtual(story())
    return nodes, offers


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "is called"])
@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_payload_with_the_reason_on_both_sides(case: str, calls: bool) -> None:
    peer, token, why = CASES[case]
    (own, other), (ours, theirs) = meet(peer, token, revoked=case == "revoked", calls=calls)
    if why is None:
        assert len(own.committed) == len(other.committed) == 1 and ours.opened == FRAGMENTS
        return
    assert ours.opened == 0 and not own.committed
    caller = other if calls else own
    told = [event for _, event in caller.exchange._machine.log if isinstance(event, round_events.Refused)]
    assert {event.reason for event in told} == {why}
    if calls:
        assert theirs.opened == 0
    else:  # it had accepted the call
        assert why in [event.reason for event in other.events if isinstance(event, WentSolo)]
    assert own.exchange._machine.partners.standing(peer, 0.0).refused == 0, "it is no breach of the protocol"
