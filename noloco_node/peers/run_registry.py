"""The runs that a node knows, and how a joining node learns them from its bootstrap peers.

A training node knows its own run; a rendezvous node keeps those that training nodes announce to it. A manifest is
checked by its hash and its author's signature, from any sender. Anybody may announce, so only a few runs are kept per
peer, and where there is no room the place that has most gives one up in which nobody trains; a joining node prefers one
in which somebody does. How many train in a run is known from the DHT, and handed in. A manifest is public, so anybody
can sign it, too: each author's copy is kept, and who names no author gets the one that was announced first. What a
run's author changed later goes with its manifest.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import grpc

from noloco_node.errors import Incompatible, NolocoError, NotAdmitted, PeerLost
from noloco_node.host.traffic import Traffic
from noloco_node.run import amendment, manifest
from noloco_node.run.amendment import SignedAmendment
from noloco_node.run.manifest import Signed
from noloco_node.transport.base import TOO_MANY, peer_faults
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import RunsServicer, RunsStub

MAX_RUNS = 64
"""Announced runs that a rendezvous node keeps, the newest: 4 MiB at the most."""
MAX_OF_PEER = 2
"""Most of these per peer. A peer is in one run at a time, but its previous run may still be trained by others."""
MAX_REPLY_BYTES = 200_000
"""Of manifests and amendments: two of the largest, so that a newcomer who names no run still learns that there are
several, or each of MAX_RUNS where they are as short as most."""
CALL_S = 10.0

log = logging.getLogger(__name__)


class KnownRun(NamedTuple):
    """A run, as a peer reports it."""

    signed: Signed
    training: int
    """How many nodes the peer sees training in it."""
    amendment: SignedAmendment | None = None
    """The newest that the peer knows. Its signature has not been checked."""

    @property
    def run_id(self) -> str:
        return _run_id(self.signed.manifest)


class RunRegistry(RunsServicer):
    """The run of this node, if it trains, and those that were announced to it, if it is a rendezvous."""

    def __init__(
        self,
        caller: Callable[[Any], str] | None = None,
        training: Callable[[str], int] = lambda _run_id: 0,
        place: Callable[[Any], str] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`caller`: the peer id behind a call's context; without it, announced runs are refused. `training`: how many
        nodes are seen training in a run. `place`: where the caller is (base/places.py). `traffic`: how much others may
        fetch here."""
        self._caller, self._place = caller, place or caller
        self._traffic = traffic or Traffic()
        self._training = training
        self._runs: dict[tuple[str, str], _Kept] = {}
        """By run id and author, in the order of their first announcement."""
        self._announced = count()

    def add(self, signed: Signed, by: str = "", amended: SignedAmendment | None = None, place: str = "") -> bool:
        """Returns False where there is no room. An amendment that is older than the known one changes nothing."""
        run_id = manifest.verify(signed).run_id
        key = run_id, signed.author
        try:
            version = amendment.verify(amended, *key).version if amended else 0
        except Incompatible as error:  # of a newer version of the program: the run itself is known all the same
            log.debug("%s", error)
            version = 0
        if key not in self._runs:
            if not self._make_room(by, place):
                return False
            self._runs[key] = _Kept(signed, by, place)
        kept = self._runs[key]
        kept.last = next(self._announced)
        if amended and version > kept.version:
            kept.version, kept.amended = version, amended
        return True

    @property
    def known(self) -> list[Signed]:
        return [kept.signed for kept in self._runs.values()]

    @property
    def places(self) -> dict[str, str]:
        """Where each run is from, by its id: of several that signed it, the one at whose place fewest are from."""
        found, sizes = dict[str, str](), Counter(kept.place for kept in self._runs.values())
        for (run_id, _), kept in self._runs.items():
            found[run_id] = min(found.get(run_id, kept.place), kept.place, key=sizes.__getitem__)
        return found

    async def List(self, request: pb.RunsRequest, context: Any) -> pb.RunsReply:  # noqa: N802
        """Where there is not room for all, of each run the first one's copy comes before others, one in which somebody
        trains before others, and a short one before a long one."""
        runs = {key: kept for key, kept in self._runs.items() if key[0].startswith(request.run)}
        runs = {key: kept for key, kept in runs.items() if key[1].startswith(request.author)} or runs
        training = {key: self._training(key[0]) for key in runs}
        first, left, told = self._firsts(), MAX_REPLY_BYTES, set[tuple[str, str]]()
        for key in sorted(runs, key=lambda key: (first[key[0]] != key, not training[key], runs[key].size)):
            if runs[key].size <= left:
                left -= runs[key].size
                told.add(key)
        reply = pb.RunsReply(
            runs=[_encode(kept.signed, kept.amended) for key, kept in runs.items() if key in told],
            training=[training[key] for key in runs if key in told],
        )
        if not self._traffic.may_answer(reply.ByteSize(), self._place(context) if self._place else ""):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        return reply

    async def Announce(self, request: pb.SignedManifest, context: Any) -> pb.Announced:  # noqa: N802
        if self._caller is None or self._place is None:
            return pb.Announced(kept=False)
        by, place = self._caller(context), self._place(context)
        try:
            return pb.Announced(kept=self.add(_decode(request), by, _amendment(request), place))
        except NolocoError as error:
            log.debug("an announced run was refused: %s", error)
            return pb.Announced(kept=False)

    def version(self, run_id: str) -> int:
        """Of the newest amendment that this node tells others; 0: none."""
        return max((kept.version for (run, _), kept in self._runs.items() if run == run_id), default=0)

    def _firsts(self) -> dict[str, tuple[str, str]]:
        """By run id, which copy was announced first."""
        return {run_id: (run_id, author) for run_id, author in reversed(self._runs)}

    def _make_room(self, by: str, place: str) -> bool:
        """If there is no room, drop a run in which nobody trains, the one announced longest ago: of this peer's, else
        of the place that has most, and of none that has far fewer than this one: in a new run nobody was seen to train
        yet. Of a run that several have signed, only the first one's copy counts as trained. Where somebody trains in
        each, as a crowd may say, a place that has more than this one loses its latest."""
        theirs = [key for key, kept in self._runs.items() if kept.by == by]
        if len(theirs) < MAX_OF_PEER and len(self._runs) < MAX_RUNS:
            return True
        first = self._firsts()
        places = Counter({place: 1})
        places.update(kept.place for kept in self._runs.values())
        droppable = [
            (-places[self._runs[key].place], self._runs[key].last, key)
            for key in (theirs if len(theirs) >= MAX_OF_PEER else self._runs)
            if (first[key[0]] != key or not self._training(key[0]))
            and (key in theirs or 2 * places[self._runs[key].place] >= places[place])
        ]
        if droppable:
            del self._runs[min(droppable)[2]]
            return True
        crowded, most = places.most_common(1)[0]
        if len(theirs) >= MAX_OF_PEER or most <= places[place]:
            return False
        del self._runs[next(key for key in reversed(self._runs) if self._runs[key].place == crowded)]
        return True


@dataclass(slots=True)
class _Kept:
    signed: Signed
    by: str
    """Who announced it first, and where that peer was."""
    place: str
    last: int = 0
    """The number of its last announcement."""
    version: int = 0
    amended: SignedAmendment | None = None

    @property
    def size(self) -> int:
        return len(self.signed.manifest) + (len(self.amended.document) if self.amended else 0)


async def ask(
    channel: grpc.aio.Channel, only: Signed | None = None, *, meant: str | None = None, author: str = ""
) -> list[KnownRun]:
    """The runs that a peer knows, or this one alone; those whose signature does not verify are left out. `meant`,
    `author`: the first digits of the one that is looked for, and of its author's id; the peer may name others, too.
    Raises Incompatible where this version cannot read the run that is `meant`, or none of those there."""
    run, author = (_run_id(only.manifest), only.author) if only else (meant or "", author)
    with peer_faults():
        reply = await RunsStub(channel).List(pb.RunsRequest(run=run, author=author), timeout=CALL_S)
    runs, unreadable = [], None
    for message, there in zip(reply.runs[:MAX_RUNS], reply.training, strict=False):
        try:
            signed = _decode(message)
            if only and (signed.manifest, signed.author) != (only.manifest, only.author):
                continue
            await asyncio.sleep(0)  # to verify costs a millisecond or two, and there may be MAX_RUNS
            manifest.verify(signed)
            runs.append(KnownRun(signed, there, _amendment(message)))
        except NolocoError as error:
            log.debug("a run that a peer named was left out: %s", error)
            if isinstance(error, Incompatible) and meant is not None and _run_id(message.manifest).startswith(meant):
                unreadable = unreadable or error
    if unreadable and (meant or not runs):
        raise unreadable
    return runs


def _run_id(document: bytes) -> str:
    """Of a manifest, whether this version can read it or not."""
    return hashlib.sha256(document).hexdigest()


async def announce(
    channels: Sequence[grpc.aio.Channel], signed: Signed, amended: SignedAmendment | None = None
) -> list[bool | None]:
    """Announce a run to rendezvous nodes; which of them answer that they do not know it, and None for those that do not
    answer. The caller repeats it, so a failure is only logged."""

    async def refused(channel: grpc.aio.Channel) -> bool:
        try:
            with peer_faults():
                answer = await RunsStub(channel).Announce(_encode(signed, amended), timeout=CALL_S)
            return not (answer.kept or await ask(channel, signed))  # a node that trains keeps its own run alone
        except PeerLost as fault:
            if fault.reason == TOO_MANY:
                return False  # it is there, and does not say that it does not know the run
            raise

    results = await asyncio.gather(*map(refused, channels), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            log.debug("a run could not be announced: %r", result)
    return [None if isinstance(result, BaseException) else result for result in results]


def first_copies(copies: Iterable[Signed]) -> list[Signed]:
    """Of several that signed one run, the first."""
    found: dict[bytes, Signed] = {}
    for signed in copies:
        found.setdefault(signed.manifest, signed)
    return list(found.values())


def choose(known: Sequence[KnownRun], run_id: str | None, author: str | None, left: Signed | None = None) -> Signed:
    """The run to join: the one that is named, else the only one in which somebody trains, else the only one; of several
    the one that this node has `left`. Of its id and of its author's, the first half is enough."""
    there = [run for run in known if run.run_id.startswith(run_id or "")]
    if run_id and not there:
        raise Incompatible(f"no run {run_id[:12]}… is known there: check --run, or ask the run's author for its line")
    trusted = [run.signed for run in there if run.signed.author.startswith(author or "")]
    if there and not trusted:
        raise NotAdmitted(f"the run there is not signed by {author}: check --trust, or leave it out to trust anew")
    if not trusted:
        raise Incompatible("no run is known there yet: start one with `noloco-node start run.toml --bootstrap <addr>`")
    trained = {run.signed.manifest for run in known if run.training}
    matching = first_copies(trusted)
    matching = [signed for signed in matching if signed.manifest in trained] or matching
    matching = [signed for signed in matching if signed == left] or matching
    if len(matching) > 1:
        runs = map(manifest.verify, matching)
        names = ", ".join(f"{run.label} (--run {run.run_id})" for run in runs)
        raise Incompatible(f"several runs are known there, name one: {names}")
    return matching[0]


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
