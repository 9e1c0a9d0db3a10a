"""What a run's author changed later, as a running node follows it: learned from its home and from peers, and told on.

peers/run_rules.py checks and keeps it; `amended` does what it changes in this node.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from noloco_node.base import periodic, places
from noloco_node.base.states import NodeState
from noloco_node.base.units import span
from noloco_node.errors import NolocoError
from noloco_node.peers import run_registry
from noloco_node.peers.membership import Membership
from noloco_node.peers.record import PeerRecord
from noloco_node.peers.run_rules import RunRules
from noloco_node.run.admission import EXPIRED
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.views.status import Health

ANNOUNCE_S = 60.0
"""How often the run is announced: a rendezvous that was restarted has forgotten it."""
AWAY_S = 600.0
"""How long no rendezvous may answer until `health` says so: one that restarts is back in a minute, and one that was
away for long the network daemon tries every five minutes."""
LOOK_S = 1.0
"""How often it is checked whether the run was amended, and whether this node may still take part."""
EXPIRED_LOOKS = 60
"""So many in a row end a node whose token has expired: a wall clock may be hours ahead until it is set right, as where
a machine has just woken."""
ASKED = 8
"""Peers that are asked for an amendment at the same time."""
TELL_SECONDS = 60
"""How long a node stays where its author has ended the run and others do not know it: a few presence records long."""

log = logging.getLogger(__name__)


class FollowAuthor:
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        rules: RunRules,
        token: bytes,
        transport: Libp2pTransport,
        membership: Membership,
        rendezvous: Sequence[str],
        misbehaved: Callable[[str, str], None],
        amended: Callable[[RunRules], Awaitable[None]],
    ) -> None:
        """`token`: this node's; `rendezvous`: the peers by which it joined."""
        self.rules = rules
        self._own = transport.peer_id, token
        self._transport, self._membership = transport, membership
        self._rendezvous, self._misbehaved, self._amended = rendezvous, misbehaved, amended
        self._refusing: set[str] = set()
        """Rendezvous nodes that do not keep the run, as the log says."""
        self._away_since: float | None = None
        """When none of them answered for the first time, by the monotonic clock; None: one did."""
        self._expired_looks = 0
        """In a row, that this node's token had expired."""

    def duties(self) -> list[Coroutine[Any, Any, None]]:
        return [
            periodic.every(lambda: ANNOUNCE_S, self.announce, (NolocoError, OSError)),
            periodic.every(lambda: LOOK_S, self._look, (NolocoError, OSError)),
            periodic.every(lambda: LOOK_S, self._stay_admitted, ()),
        ]

    async def announce(self) -> None:
        channels = [self._transport.channel(peer) for peer in self._rendezvous]
        refused = await run_registry.announce(channels, self.rules.signed, self.rules.amended)
        away = bool(refused) and all(no is None for no in refused)
        self._away_since = (self._away_since or time.monotonic()) if away else None
        for peer in {peer for peer, no in zip(self._rendezvous, refused, strict=True) if no} - self._refusing:
            self._refusing.add(peer)
            log.warning("the rendezvous %s does not keep this run: it has no room, or is of an older version", peer)

    def health(self, now: float) -> tuple[Health, ...]:
        """`now`: by the monotonic clock."""
        if self._away_since is None or (for_s := now - self._away_since) < AWAY_S:
            return ()
        text = f"network: no bootstrap node has answered for {span(for_s)}, so nobody new finds this run"
        remedy = (
            "start it again, with its home and its address. If that cannot be, join again with --bootstrap and the "
            "address of another node, and hand out the line that is printed then"
        )
        return (Health("warning", text, remedy),)

    def require(self) -> None:
        """Raises NotAdmitted where this node may not take part."""
        self.rules.require(*self._own)

    async def learn_first(self) -> None:
        """What became of the run while this node was away, before it trains. Raises NotAdmitted."""
        with suppress(NolocoError, OSError):
            await self._membership.look()
        stated = {record.peer_id: record.amendment for record in self._seen()}
        await self._learn(dict.fromkeys(self._rendezvous, 0) | stated)
        self.require()

    async def tell_others(self) -> None:
        """Stay until the others know that the run was ended: who goes at once could be the only one that knows."""
        for _ in range(TELL_SECONDS):
            if not (self.rules.ended and any(self._lacks(record) for record in self._seen())):
                return
            await asyncio.sleep(1)

    async def _stay_admitted(self) -> None:
        why = self.rules.refuses(*self._own)
        self._expired_looks = self._expired_looks + 1 if why == EXPIRED else 0
        if why != EXPIRED or self._expired_looks > EXPIRED_LOOKS:
            self.require()

    async def _look(self) -> None:
        if self.rules.reread():
            await self._obey()
        await self._learn({r.peer_id: r.amendment for r in self._seen() if r.amendment > self.rules.version})

    async def _learn(self, stated: Mapping[str, int]) -> None:
        def some(peers: Collection[str]) -> Collection[str]:
            return places.several(random.Random(), {p: self._transport.place_of(p) for p in peers}, ASKED)

        before = self.rules.words
        if await self.rules.learn(self._transport.channel, stated, some, self._misbehaved):
            if before and self._own[0] == self.rules.signed.author:  # this home is a copy, or was restored
                log.warning("%s here is replaced by a newer one, from another home: type again what is new", before)
            await self._obey()

    async def _obey(self) -> None:
        await self._amended(self.rules)
        await self.announce()

    def _seen(self) -> Collection[PeerRecord]:
        return self._membership.seen.values()

    def _lacks(self, record: PeerRecord) -> bool:
        known = record.amendment >= self.rules.version
        return not known and record.state != NodeState.LEAVING and record.expires > time.time()
