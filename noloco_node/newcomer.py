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
from noloco_node.traffic import Pace

FIND_RUN_S = 60.0
"""For a rendezvous to learn of a run: its first node may be starting at this moment."""
TAKE_STATE_S = 300.0
"""For some peer to begin to give its state, and from one sign of progress to the next; a queue may be long."""
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


async def take_state(  # noqa: PLR0913
    channel: Channel,
    donors: Callable[[], Awaitable[Sequence[str]]],
    terms: Terms,
    total_bytes: int,
    waits_for: Say,
    *,
    pace: Pace | None = None,
) -> LiveState | None:
    """The state of a peer that is under way, or None where nobody is: then there is nothing to catch up with."""
    waits_for("word of the others")
    failure: PeerFault | None = None
    try:
        async with asyncio.timeout(TAKE_STATE_S) as patience:
            while candidates := await donors():
                peer = random.choice(candidates)
                heard = _Download(names.name_of(peer), patience, waits_for)
                try:
                    state = await statesync.fetch(channel(peer), terms, total_bytes, heard, pace)
                except PeerFault as fault:
                    failure = fault
                    log.info("%s does not give its state (%s)", heard.name, fault)
                    await asyncio.sleep(RETRY_S)
                else:
                    log.info("took the state of %s at round %d", heard.name, state.round)
                    return state
            return None
    except TimeoutError:
        why = f"no peer gave its state within {TAKE_STATE_S:g} s (the last one: {failure}): try again later"
        raise SwarmUnreachable(why) from None


class _Download:
    """Says how far one is, and renews the patience: a large state over a slow link takes hours."""

    def __init__(self, name: str, patience: asyncio.Timeout, waits_for: Say) -> None:
        self.name = name
        self._patience, self._waits_for = patience, waits_for
        self._began = asyncio.get_running_loop().time()
        waits_for(f"state from {name}")

    def __call__(self, done: int, total: int) -> None:
        now = asyncio.get_running_loop().time()
        self._patience.reschedule(now + TAKE_STATE_S)
        left_s = (now - self._began) * (total - done) / done
        self._waits_for(f"state from {self.name}, {done / total:.0%}, {left_s:.0f} s left")
