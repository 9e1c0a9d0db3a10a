"""Which runs a node knows, and how a newcomer learns them from the one address it has.

A training node knows its own run; a rendezvous node keeps what training nodes announce to it. A manifest counts by its
hash and its author's signature, whoever hands it on. It does not know who trains: that is the DHT's affair.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from noloco_node import manifest
from noloco_node.errors import Incompatible, NolocoError, NotAdmitted
from noloco_node.manifest import Signed
from noloco_node.transport.base import peer_faults
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import RunsServicer, RunsStub

MAX_RUNS = 64
"""Announced runs that a rendezvous node keeps, the newest: 4 MiB at the most."""
CALL_S = 10.0

log = logging.getLogger(__name__)


class Runs(RunsServicer):
    """The run of this node, if it trains, and those that were announced to it, if it is a rendezvous."""

    def __init__(self, own: Signed | None = None, *, keeps_announced: bool = False) -> None:
        self._runs: OrderedDict[str, Signed] = OrderedDict()
        self._keeps_announced = keeps_announced
        if own:
            self.add(own)

    def add(self, signed: Signed) -> None:
        run_id = manifest.verify(signed).run_id
        self._runs[run_id] = signed
        self._runs.move_to_end(run_id)
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)

    @property
    def known(self) -> list[Signed]:
        return list(self._runs.values())

    async def List(self, request: pb.RunsRequest, context: Any) -> pb.RunsReply:  # noqa: N802
        return pb.RunsReply(runs=[_encode(signed) for signed in self._runs.values()])

    async def Announce(self, request: pb.SignedManifest, context: Any) -> pb.Announced:  # noqa: N802
        if not self._keeps_announced:
            return pb.Announced(kept=False)
        try:
            self.add(_decode(request))
        except NolocoError as error:
            log.debug("an announced run was refused: %s", error)
            return pb.Announced(kept=False)
        return pb.Announced(kept=True)


async def ask(channel: grpc.aio.Channel) -> list[Signed]:
    """The runs that a peer knows, each with a signature that holds; what does not verify is left out."""
    with peer_faults():
        reply = await RunsStub(channel).List(pb.RunsRequest(), timeout=CALL_S)
    runs = []
    for message in reply.runs[:MAX_RUNS]:
        try:
            signed = _decode(message)
            manifest.verify(signed)
            runs.append(signed)
        except NolocoError as error:
            log.debug("a run that a peer named was left out: %s", error)
    return runs


async def announce(channels: Iterable[grpc.aio.Channel], signed: Signed) -> None:
    """Tell rendezvous nodes of a run. Who does not answer is told again later."""
    calls = [RunsStub(channel).Announce(_encode(signed), timeout=CALL_S) for channel in channels]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            log.debug("a run could not be announced: %r", result)


def choose(known: Sequence[Signed], run_id: str | None, author: str | None) -> Signed:
    """The run to join: the one that is named, else the only one there is."""
    matching = {manifest.verify(s).run_id: s for s in known}
    if run_id is not None:
        matching = {k: s for k, s in matching.items() if k == run_id}
        if not matching:
            raise Incompatible(
                f"no run {run_id[:12]}… is known there: check --run, or ask the run's author for its line"
            )
    if author is not None:
        trusted = {k: s for k, s in matching.items() if s.author == author}
        if matching and not trusted:
            raise NotAdmitted(f"the run there is not signed by {author}: check --trust, or leave it out to trust anew")
        matching = trusted
    if not matching:
        raise Incompatible("no run is known there yet: start one with `noloco-node start run.toml --bootstrap <addr>`")
    if len(matching) > 1:
        names = ", ".join(f"{manifest.verify(s).label} (--run {k})" for k, s in matching.items())
        raise Incompatible(f"several runs are known there, name one: {names}")
    return next(iter(matching.values()))


def _encode(signed: Signed) -> pb.SignedManifest:
    return pb.SignedManifest(manifest=signed.manifest, author=signed.author, signature=signed.signature)


def _decode(message: pb.SignedManifest) -> Signed:
    return Signed(manifest=message.manifest, author=message.author, signature=message.signature)
