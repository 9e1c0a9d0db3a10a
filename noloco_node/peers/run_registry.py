"""The runs that a node knows, and how a joining node learns them from its bootstrap peers.

A training node knows its own run; a rendezvous node keeps those that training nodes announce to it. A manifest is
checked by its hash and its author's signature, from any sender. Anybody may announce, so only a few runs are kept per
peer; a run in which nobody trains makes room for others, and a joining node prefers one in which somebody does. How
many train in a run is known from the DHT, and handed in. What a run's author changed later goes with its manifest.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import grpc

from noloco_node.errors import Incompatible, NolocoError, NotAdmitted
from noloco_node.run import amendment, manifest
from noloco_node.run.amendment import SignedAmendment
from noloco_node.run.manifest import Signed
from noloco_node.transport.base import peer_faults
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import RunsServicer, RunsStub

MAX_RUNS = 64
"""Announced runs that a rendezvous node keeps, the newest: 4 MiB at the most."""
MAX_OF_PEER = 2
"""Most of these per peer. A peer is in one run at a time, but its previous run may still be trained by others."""
CALL_S = 10.0

log = logging.getLogger(__name__)


class KnownRun(NamedTuple):
    """A run, as a peer reports it."""

    signed: Signed
    training: int
    """How many nodes the peer sees training in it; 0 also where it does not report any."""
    amendment: SignedAmendment | None = None
    """The newest that the peer knows. Its signature has not been checked."""


class RunRegistry(RunsServicer):
    """The run of this node, if it trains, and those that were announced to it, if it is a rendezvous."""

    def __init__(
        self, caller: Callable[[Any], str] | None = None, training: Callable[[str], int] = lambda _run_id: 0
    ) -> None:
        """`caller`: the peer id behind a call's context; without it, announced runs are refused. `training`: how many
        nodes are seen training in a run."""
        self._caller = caller
        self._training = training
        self._runs: OrderedDict[str, Signed] = OrderedDict()
        """In the order of their last announcement."""
        self._by: dict[str, str] = {}
        """Who announced each run first."""
        self._amendments: dict[str, tuple[int, SignedAmendment]] = {}
        """With their versions."""

    def add(self, signed: Signed, by: str = "", amended: SignedAmendment | None = None) -> bool:
        """Returns False where there is no room. An amendment that is older than the known one changes nothing."""
        run_id = manifest.verify(signed).run_id
        author = self._runs.get(run_id, signed).author
        version = amendment.verify(amended, run_id, author).version if amended else 0
        if run_id not in self._runs:  # else the author whose signature was there first keeps it
            if not self._make_room(by):
                return False
            self._runs[run_id], self._by[run_id] = signed, by
        self._runs.move_to_end(run_id)
        if amended and version > self.version(run_id):
            self._amendments[run_id] = version, amended
        return True

    @property
    def known(self) -> list[Signed]:
        return list(self._runs.values())

    async def List(self, request: pb.RunsRequest, context: Any) -> pb.RunsReply:  # noqa: N802
        runs = [_encode(signed, self._amendment(run_id)) for run_id, signed in self._runs.items()]
        return pb.RunsReply(runs=runs, training=[self._training(run_id) for run_id in self._runs])

    async def Announce(self, request: pb.SignedManifest, context: Any) -> pb.Announced:  # noqa: N802
        if self._caller is None:
            return pb.Announced(kept=False)
        try:
            return pb.Announced(kept=self.add(_decode(request), self._caller(context), _amendment(request)))
        except NolocoError as error:
            log.debug("an announced run was refused: %s", error)
            return pb.Announced(kept=False)

    def version(self, run_id: str) -> int:
        """Of the amendment that this node tells others; 0: none."""
        return self._amendments[run_id][0] if run_id in self._amendments else 0

    def _amendment(self, run_id: str) -> SignedAmendment | None:
        return self._amendments[run_id][1] if run_id in self._amendments else None

    def _make_room(self, by: str) -> bool:
        """If there is no room, drop the run announced longest ago of those in which nobody trains."""
        theirs = [run_id for run_id in self._runs if self._by[run_id] == by]
        full = theirs if len(theirs) >= MAX_OF_PEER else list(self._runs)
        if full is not theirs and len(full) < MAX_RUNS:
            return True
        idle = next((run_id for run_id in full if not self._training(run_id)), None)
        if idle is None:
            return False
        del self._runs[idle], self._by[idle]
        self._amendments.pop(idle, None)
        return True


async def ask(channel: grpc.aio.Channel) -> list[KnownRun]:
    """The runs that a peer knows; those whose signature does not verify are left out."""
    with peer_faults():
        reply = await RunsStub(channel).List(pb.RunsRequest(), timeout=CALL_S)
    runs = []
    training = [*reply.training, *repeat(0, len(reply.runs))]
    for message, there in zip(reply.runs[:MAX_RUNS], training, strict=False):
        try:
            signed = _decode(message)
            manifest.verify(signed)
            runs.append(KnownRun(signed, there, _amendment(message)))
        except NolocoError as error:
            log.debug("a run that a peer named was left out: %s", error)
    return runs


async def announce(
    channels: Iterable[grpc.aio.Channel], signed: Signed, amended: SignedAmendment | None = None
) -> None:
    """Announce a run to rendezvous nodes. The caller repeats it, so a failure is only logged."""
    calls = [RunsStub(channel).Announce(_encode(signed, amended), timeout=CALL_S) for channel in channels]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            log.debug("a run could not be announced: %r", result)


def choose(known: Sequence[KnownRun], run_id: str | None, author: str | None) -> Signed:
    """The run to join: the one that is named, else the only one in which somebody trains, else the only one. Of its id
    and of its author's, the first half is enough."""
    training = Counter[str]()
    for run in known:
        training[manifest.verify(run.signed).run_id] += run.training
    matching = {manifest.verify(run.signed).run_id: run.signed for run in known}
    if run_id is not None:
        matching = {k: s for k, s in matching.items() if k.startswith(run_id)}
        if not matching:
            raise Incompatible(
                f"no run {run_id[:12]}… is known there: check --run, or ask the run's author for its line"
            )
    if author is not None:
        trusted = {k: s for k, s in matching.items() if s.author.startswith(author)}
        if matching and not trusted:
            raise NotAdmitted(f"the run there is not signed by {author}: check --trust, or leave it out to trust anew")
        matching = trusted
    if not matching:
        raise Incompatible("no run is known there yet: start one with `noloco-node start run.toml --bootstrap <addr>`")
    matching = {k: s for k, s in matching.items() if training[k]} or matching
    if len(matching) > 1:
        names = ", ".join(f"{manifest.verify(s).label} (--run {k})" for k, s in matching.items())
        raise Incompatible(f"several runs are known there, name one: {names}")
    return next(iter(matching.values()))


def _encode(signed: Signed, amended: SignedAmendment | None) -> pb.SignedManifest:
    return pb.SignedManifest(
        manifest=signed.manifest,
        author=signed.author,
        signature=signed.signature,
        amendment=amended.document if amended else b"",
        amendment_signature=amended.signature if amended else b"",
    )


def _decode(message: pb.SignedManifest) -> Signed:
    return Signed(manifest=message.manifest, author=message.author, signature=message.signature)


def _amendment(message: pb.SignedManifest) -> SignedAmendment | None:
    return SignedAmendment(message.amendment, message.amendment_signature) if message.amendment else None
