"""In a run by invitation, a donor gives nothing to who may not take part, and says why."""

from typing import Any

import pytest
from admissions import AT, AUTHOR, GUEST, RUN, STRANGER, TOKEN
from donors import NUMBERS, DonorNetwork, Owner, numbers
from test_state_transfer import Watcher
from virtual_clock import in_virtual_time

from noloco_node.errors import PeerFault, PeerRefused
from noloco_node.run import admission
from noloco_node.state_transfer import client
from noloco_node.state_transfer.client import Download, StateTerms

DATA = numbers(1)
CASES = {
    "uninvited": (STRANGER.peer_id, b"", "not_admitted"),
    "replayed": (STRANGER.peer_id, TOKEN, "not_admitted"),
    "expired": (GUEST.peer_id, admission.sign(RUN.run_id, GUEST.peer_id, AT - 10, AUTHOR), "expired"),
    "revoked": (GUEST.peer_id, TOKEN, "revoked"),
}


async def met(peer: str, token: bytes, *, revoked: bool = False) -> tuple[Owner, Any, StateTerms]:
    """A donor, a channel to it, and the terms of who joins."""
    owner, terms = Owner(DATA), StateTerms(b"r" * 32, b"l" * 32, token)
    rule = admission.rule(RUN, AUTHOR.peer_id, [GUEST.peer_id] if revoked else [])
    network = DonorNetwork()
    service = await network.donor("donor", owner)
    service.begin(terms, owner, len(DATA), lambda who, shown: rule.refusal(who, shown, AT - 1))
    return owner, (await network.joining_node(peer)).channel("donor"), terms


@pytest.mark.parametrize("case", CASES)
@in_virtual_time
async def test_refused_before_the_donor_copies_anything(case: str) -> None:
    peer, token, why = CASES[case]
    owner, channel, terms = await met(peer, token, revoked=case == "revoked")
    with pytest.raises(PeerRefused) as refused:
        await client.fetch(channel, terms, Download(NUMBERS), Watcher())
    assert refused.value.reason == why
    with pytest.raises(PeerFault):
        await client.sample(channel, terms, [0], 4 * 256)
    with pytest.raises(PeerFault):
        await client.progress(channel, terms)
    assert not owner.asked


@in_virtual_time
async def test_who_was_invited_gets_all_of_it() -> None:
    _, channel, terms = await met(GUEST.peer_id, TOKEN)
    state = await client.fetch(channel, terms, Download(NUMBERS), Watcher())
    assert bytes(state.data) == DATA
    assert (await client.sample(channel, terms, [0], 4 * 256)).round == 12
    assert await client.progress(channel, terms) == 12
