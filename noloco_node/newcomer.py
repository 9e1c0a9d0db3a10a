"""What a newcomer has to find out before it trains: which run there is, and how far the others have come.

It asks and waits, with deadlines, and says what it waits for. What it fetches is checked by runs.py and statesync.py.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import grpc

from noloco_node import names, runs, statesync
from noloco_node.errors import Incompatible, NolocoError, PeerFault, SwarmUnreachable
from noloco_node.manifest import Signed
from noloco_node.statesync import LiveState, Terms

FIND_RUN_S = 60.0
"""For a rendezvous to learn of a run: its first node may be starting at this moment."""
TAKE_STATE_S = 300.0
"""For some peer to give its state; one download of a small model takes a second, a queue may be long."""
RETRY_S = 1.0

Channel = Callable[[str], grpc.aio.Channel]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


async def find_run(
    channel: Channel, rendezvous: Sequence[str], choose: Callable[[list[Signed], str], Signed], waits_for: Say
) -> Signed:
    """Ask the rendezvous nodes which run there is. `choose` is given what one of them knows, and its peer id."""
    waits_for("a run to be announced")
    failure: NolocoError = SwarmUnreachable("no bootstrap node answers: check the addresses, or try again later")
    try:
        async with asyncio.timeout(FIND_RUN_S):
            while True:
                for peer in rendezvous:
                    try:
                        known = await runs.ask(channel(peer))
                    except PeerFault as fault:
                        log.debug("%s does not say what it runs: %s", peer, fault)
                        continue
                    if known:
                        return choose(known, peer)
                    failure = Incompatible("no run is announced there: start its first node with --bootstrap, too")
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise failure from None


async def take_state(
    channel: Channel,
    donors: Callable[[], Awaitable[Sequence[str]]],
    terms: Terms,
    total_bytes: int,
    waits_for: Say,
) -> LiveState | None:
    """The state of a peer that is under way, or None where nobody is: then there is nothing to catch up with."""
    waits_for("word of the others")
    failure: PeerFault | None = None
    try:
        async with asyncio.timeout(TAKE_STATE_S):
            while candidates := await donors():
                peer = random.choice(candidates)
                try:
                    return await _fetch(channel, peer, terms, total_bytes, waits_for)
                except PeerFault as fault:
                    failure = fault
                    log.info("%s does not give its state (%s)", names.name_of(peer), fault)
                    await asyncio.sleep(RETRY_S)
            return None
    except TimeoutError:
        why = f"no peer gave its state within {TAKE_STATE_S:g} s (the last one: {failure}): try again later"
        raise SwarmUnreachable(why) from None


async def _fetch(channel: Channel, peer: str, terms: Terms, total_bytes: int, waits_for: Say) -> LiveState:
    name, began = names.name_of(peer), asyncio.get_running_loop().time()

    def progress(done: int, total: int) -> None:
        left_s = (asyncio.get_running_loop().time() - began) * (total - done) / done
        waits_for(f"state from {name}, {done / total:.0%}, {left_s:.0f} s left")

    waits_for(f"state from {name}")
    state = await statesync.fetch(channel(peer), terms, total_bytes, progress)
    log.info("took the state of %s at round %d", name, state.round)
    return state
