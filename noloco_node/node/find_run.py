"""Which run a node joins: what the rendezvous nodes announce, else the unfinished run that it was in before.

After a power cut that stopped every node, or a restart of the rendezvous while all were away, nobody announces the run
any more, and nobody would train it before its author is back. So a node that was in it announces it again. That holds
only for the rendezvous nodes by which it came to that run: an old run is not announced to a new rendezvous. Peers seen
earlier, by which it joins where these are gone, say neither which run there is nor who its author is: anybody may be
one of them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

import grpc

from noloco_node.checkpoints import listing
from noloco_node.errors import Incompatible, NolocoError, PeerFault, SwarmUnreachable, UsageError
from noloco_node.host import paths
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.peers import run_registry
from noloco_node.peers.directory import SILENT
from noloco_node.peers.record import REFRESH_S
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors
from noloco_node.state_transfer import choose_donor

FIND_RUN_S = 90.0
"""How long a rendezvous may take to learn of a run: its first node may be starting at this moment, or the rendezvous
may have been started again, and nodes announce their run once a minute."""
UNANNOUNCED_S = 10.0
"""How long to wait for another node's announcement before this one continues its unfinished run."""
NOBODY_S = REFRESH_S + 5.0
"""How long nobody may be seen in a run until it counts as one that nobody is in: where a rendezvous was started again,
a node that announces the run there may write its record so much later, and its address has to answer. A node publishes
its presence before it reads data and builds the model."""
UNANSWERED_S = 120.0
"""How long it looks for others where nobody says who is there: a rendezvous that is started again is back in a minute,
and where many nodes of one place start at once, all are answered by then."""
RETRY_S = 1.0

Channel = Callable[[str], grpc.aio.Channel]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


async def find(config: NodeConfig, rendezvous: Sequence[str], channel: Channel, report: Say, waits_for: Say) -> Signed:
    """`rendezvous`: their peer ids; `report`: what the user should read. Raises SwarmUnreachable, NotAdmitted."""
    home = Home(config.home)
    authors = TrustedAuthors(home.root / "authors.json")
    if config.seen and not config.trust:
        left = unfinished(home, authors, [address.peer for address in config.bootstrap], config.run)
        if left is None:
            raise SwarmUnreachable(
                "no bootstrap node says which run there is, and peers seen earlier, whom nobody chose, are not asked: "
                "try again later, or join with the run's invitation, which names the run and its author"
            )
        report(f"going on with {verify(left).label}, as before")
        return left
    left = unfinished(home, authors, rendezvous, config.run)
    if left and not left.author.startswith(config.trust or ""):
        left = None
    if left and config.run:
        return left  # its id is its hash, so no answer could change it

    def choose(known: list[run_registry.KnownRun], answered: str) -> Signed:
        signed = run_registry.choose(known, config.run, config.trust, left)
        name = verify(signed).name
        if authors.check([*dict.fromkeys([*rendezvous, answered])], name, signed.author, config.trust):
            report(f"trusting {signed.author} as the author of {name} from now on: met here for the first time")
        return signed

    signed = await ask(channel, rendezvous, choose, waits_for, left, run_id=config.run, author=config.trust)
    if signed is left:
        report(f"nobody has announced a run there: going on with {verify(signed).label}, as before")
    return signed


def unfinished(home: Home, authors: TrustedAuthors, rendezvous: Sequence[str], run_id: str | None) -> Signed | None:
    """The one named, else the one that this node was in last."""
    for folder in paths.runs(home):
        with suppress(UsageError):  # no valid manifest there
            file = signed_file.read(folder)
            is_meant = file.run.run_id.startswith(run_id or "") and folder.name == file.run.run_id
            is_over = file.is_over(listing.last_round(folder / "checkpoints"))
            if is_meant and not is_over and authors.know(rendezvous, file.run.name, file.signed.author):
                return file.signed
    return None


async def require_somebody(
    look: Callable[[], Awaitable[Collection[object]]], run: Manifest, waits_for: Say, *, lost: bool = False
) -> None:
    """For a node without weights of the run; `lost`: as for `nobody`. `look` gives the other nodes in it; where it
    fails, nobody knows whether there are any. Raises SwarmUnreachable."""
    waits_for(choose_donor.RECORDS)
    loop = asyncio.get_running_loop()
    began, nobody_s = loop.time(), 0.0
    while nobody_s < NOBODY_S:
        turn = loop.time()
        try:
            if await look():
                return
        except (NolocoError, OSError) as error:
            waits_for(choose_donor.records(error))
            if turn > began + UNANSWERED_S:
                why = str(error) or SILENT
                raise SwarmUnreachable(f"nobody says who is in {run.label}: {why}. Try again later") from None
            await asyncio.sleep(RETRY_S)
        else:
            await asyncio.sleep(RETRY_S)
            nobody_s += loop.time() - turn
    raise nobody(run, run.label, lost=lost)


def nobody(run: Manifest, where: str, *, lost: bool = False) -> SwarmUnreachable:
    """`lost`: this node has checkpoints, and can use none of them."""
    own = "none of this node's checkpoints can be used, as its log says" if lost else "this node has no weights of it"
    theirs = " and --weights, their folder, which the run's author has" if run.model.weights else ""
    return SwarmUnreachable(
        f"nobody is in {where} at this moment, and {own}: it is over, or its nodes are off. "
        f"Join again when one is back, or train it again from its first weights with --start-over{theirs}"
    )


async def ask(  # noqa: PLR0913
    channel: Channel,
    rendezvous: Sequence[str],
    choose: Callable[[list[run_registry.KnownRun], str], Signed],
    waits_for: Say,
    left: Signed | None = None,
    *,
    run_id: str | None = None,
    author: str | None = None,
) -> Signed:
    """Ask the rendezvous nodes which run there is. `choose` gets what they know, and the peer id of one that knows it;
    `left` is returned where they know none; `run_id`, `author`: of the run that is meant."""
    waits_for("a run to be announced")
    loop = asyncio.get_running_loop()
    goes_on_at = loop.time() + UNANNOUNCED_S
    failure = SwarmUnreachable("no bootstrap node answers: check the addresses, or try again later")
    known: dict[str, list[run_registry.KnownRun]] = {}

    def runs() -> list[run_registry.KnownRun]:
        return [run for peer in rendezvous for run in known.get(peer, ())]

    try:
        async with asyncio.timeout(FIND_RUN_S):
            while True:
                known = await _known(channel, rendezvous, run_id, author or "")
                if any(run.run_id.startswith(run_id or "") for run in runs()):
                    return choose(runs(), next(peer for peer in known if known[peer]))
                if known:
                    failure = SwarmUnreachable(
                        f"no run {run_id[:12]}… is announced there: its nodes are off, or --run is wrong. Try again "
                        "later, or ask the run's author for its line"
                        if run_id
                        else "no run is announced there: start its first node with --bootstrap, too"
                    )
                    if left and loop.time() >= goes_on_at:
                        return left
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise failure from None


async def _known(
    channel: Channel, rendezvous: Sequence[str], run_id: str | None, author: str
) -> dict[str, list[run_registry.KnownRun]]:
    """What each says; not waiting for the others once one knows the run that is meant, or one that somebody trains.
    Raises Incompatible where this version cannot read it."""

    def enough(run: run_registry.KnownRun) -> bool:
        meant = run.run_id.startswith(run_id) if run_id else bool(run.training)
        return meant and run.signed.author.startswith(author)

    found: dict[str, list[run_registry.KnownRun]] = {}
    newer: Incompatible | None = None
    asked = {
        asyncio.create_task(run_registry.ask(channel(peer), meant=run_id or "", author=author)): peer
        for peer in rendezvous
    }
    try:
        while asked and not any(enough(run) for known in found.values() for run in known):
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                peer = asked.pop(task)
                try:
                    found[peer] = task.result()
                except PeerFault as fault:
                    log.debug("%s does not say what it runs: %s", peer, fault)
                except Incompatible as error:
                    newer = newer or error
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # a call may fail as it is cancelled
    if newer and (run_id or not any(found.values())):
        raise newer
    return found
