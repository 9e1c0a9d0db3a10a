"""Which run a node joins: what the rendezvous nodes announce, else the unfinished run that it was in before.

After a power cut that stopped every node, or a restart of the rendezvous while all were away, nobody announces the run
any more, and nobody would train it before its author is back. So a node that was in it announces it again. That holds
only for the rendezvous nodes by which it came to that run: an old run is not announced to a new rendezvous.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from noloco_node.checkpoints.last_round import last_round
from noloco_node.errors import NolocoError, PeerFault, SwarmUnreachable, UsageError
from noloco_node.host import paths
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.peers import run_registry
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.trusted_authors import TrustedAuthors

FIND_RUN_S = 60.0
"""How long a rendezvous may take to learn of a run: its first node may be starting at this moment."""
UNANNOUNCED_S = 10.0
"""How long to wait for another node's announcement before this one continues its unfinished run."""
RETRY_S = 1.0

Channel = Callable[[str], grpc.aio.Channel]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


async def find(config: NodeConfig, rendezvous: Sequence[str], channel: Channel, report: Say, waits_for: Say) -> Signed:
    """`rendezvous`: their peer ids; `report`: what the user should read. Raises SwarmUnreachable, NotAdmitted."""
    home = Home(config.home)
    authors = TrustedAuthors(home.root / "authors.json")
    left = unfinished(home, authors, rendezvous, config.run)
    if left and config.run and left.author.startswith(config.trust or ""):
        return left  # its id is its hash, so no answer could change it

    def choose(known: list[run_registry.KnownRun], answered: str) -> Signed:
        signed = run_registry.choose(known, config.run, config.trust)
        name = verify(signed).name
        if authors.check([*dict.fromkeys([*rendezvous, answered])], name, signed.author, config.trust):
            report(f"trusting {signed.author} as the author of {name} from now on: met here for the first time")
        return signed

    signed = await ask(channel, rendezvous, choose, waits_for, left)
    if signed is left:
        report(f"nobody has announced a run there: going on with {verify(signed).label}, as before")
    return signed


def unfinished(home: Home, authors: TrustedAuthors, rendezvous: Sequence[str], run_id: str | None) -> Signed | None:
    """The one named, else the one that this node was in last."""
    for folder in paths.runs(home):
        with suppress(UsageError):  # no valid manifest there
            file = signed_file.read(folder)
            is_meant = file.run.run_id.startswith(run_id or "") and folder.name == file.run.run_id
            is_over = last_round(folder / "checkpoints") >= file.run.rounds
            if is_meant and not is_over and authors.know(rendezvous, file.run.name, file.signed.author):
                return file.signed
    return None


async def ask(
    channel: Channel,
    rendezvous: Sequence[str],
    choose: Callable[[list[run_registry.KnownRun], str], Signed],
    waits_for: Say,
    left: Signed | None = None,
) -> Signed:
    """Ask the rendezvous nodes which run there is. `choose` gets what one of them knows, and its peer id; `left` is
    returned where they know none."""
    waits_for("a run to be announced")
    loop = asyncio.get_running_loop()
    goes_on_at = loop.time() + UNANNOUNCED_S
    failure: NolocoError = SwarmUnreachable("no bootstrap node answers: check the addresses, or try again later")
    try:
        async with asyncio.timeout(FIND_RUN_S):
            while True:
                for peer in rendezvous:
                    try:
                        known = await run_registry.ask(channel(peer))
                    except PeerFault as fault:
                        log.debug("%s does not say what it runs: %s", peer, fault)
                        continue
                    if known:
                        return choose(known, peer)
                    failure = SwarmUnreachable("no run is announced there: start its first node with --bootstrap, too")
                    if left and loop.time() >= goes_on_at:
                        return left
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise failure from None
