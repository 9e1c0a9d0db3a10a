"""Downloads the slow weights of this node and of some others into files of the home, for `export --average`.

A donor is asked as a joining node would (state_transfer/client.py): layout, digests and root hash are checked, the
volunteer's rates and the day's quota are kept. A donor that does not send its state in time is skipped, which is
reported, and one whose weights are worse than this node's, or far from them: anybody may be a donor, and replicas that
have diverged have no mean. Of another stage neither can be told. Only φ is kept, as plain fp32. The caller uses and
removes the files; what is left of an export that was killed goes with the next one, and at the node's next start.
"""

import asyncio
import logging
import math
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np

from noloco_node.base import atomic_files, peer_names, places
from noloco_node.base.atomic_files import cannot_write
from noloco_node.base.states import HAS_WEIGHTS, NodeState
from noloco_node.base.units import size
from noloco_node.errors import DiskFull, NolocoError, NonFinite, PeerFault, PeerMisbehaved, SwarmUnreachable
from noloco_node.host.policy import Policy
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import client
from noloco_node.state_transfer.choose_donor import STALE_ROUNDS
from noloco_node.state_transfer.client import Download, LiveState, StateTerms
from noloco_node.state_transfer.copies import StateOwner
from noloco_node.state_transfer.cross_check import CLOSE, Weights, distance, doubt, middle_round
from noloco_node.views.gather import GatheredState, GatherView

FOLDER = "gathered"
BEGIN_S = 60.0
"""How long a donor may take to make its copy; others may come first."""
SLOWEST_BYTES_S = 256 << 10
"""A donor that is slower is skipped."""
MOST_SKIPPED = 32
"""So many more donors of a stage are asked than are wanted. Each may take BEGIN_S and more."""
SAY_S = 0.5
COMPARED = 1 << 16
"""Parameters, drawn anew for each export, by which a donor's weights are compared with this node's."""
_PLACE_BYTES = 4  # of a parameter's φ

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnState:
    """This node's own state, which a donor's must match."""

    peer_id: str
    terms: StateTerms
    parameters: int
    round: int
    step: int
    steps_a_round: int | None
    """None where phases last so many seconds."""
    budget: int
    """Rounds of the run."""


@dataclass(frozen=True, slots=True)
class OtherStage:
    """Another part of the model than this node's, and who holds it."""

    terms: StateTerms
    parameters: int
    there: Collection[PeerRecord]
    name: str
    """As in `stage 2 of 3`."""

    def missing(self) -> SwarmUnreachable:
        return SwarmUnreachable(
            f"no node of stage {self.name} sent its state, and without it no model is whole: see `noloco-node peers`"
        )


class Collector:
    """One collection at a time."""

    def __init__(
        self,
        home: Path,
        channel: Callable[[str], grpc.aio.Channel],
        policy: Policy,
        place_of: Callable[[str], str] = str,
    ) -> None:
        self._home = home / FOLDER
        shutil.rmtree(self._home, ignore_errors=True)  # of an export that ended with this machine or its node
        self._channel, self._policy, self._place_of = channel, policy, place_of
        self._slowest = min(SLOWEST_BYTES_S, (policy.max_download or math.inf) / 2)
        self._busy = False
        self._own: OwnState  # from here on: of the collection under way
        self._owner: StateOwner
        self._compared: np.ndarray[tuple[int], np.dtype[np.int64]]
        self._mine: Weights
        self.view = GatherView()
        """What has arrived so far."""

    async def gather(
        self,
        own: OwnState,
        owner: StateOwner,
        there: Collection[PeerRecord],
        peers: int,
        stages: Sequence[OtherStage] = (),
    ) -> AsyncGenerator[GatherView, None]:
        """Progress every SAY_S; at last what came, or why nothing did. If the caller stops reading before that,
        no files are left. `there`: nodes with the same part of the model; of each of the other `stages` as many come as
        of this one."""
        if self._busy:
            yield GatherView(failure="another export is fetching states through this node: wait for it")
            return
        self._busy = True
        self._own, self._owner = own, owner
        self.view = GatherView(run_id=own.terms.run_id.hex(), layout=own.terms.layout.hex(), doing="this node's state")
        collecting = asyncio.create_task(self._gather(there, peers, stages))
        try:
            while not (await asyncio.wait({collecting}, timeout=SAY_S))[0]:
                yield self.view
            try:
                collecting.result()
            except NolocoError as error:
                self.view = replace(self.view, failure=str(error), exit_code=error.exit_code)
            yield replace(self.view, done=True)
        finally:
            try:
                if not collecting.done() or self.view.failure:
                    collecting.cancel()
                    await asyncio.wait({collecting})
                    shutil.rmtree(self._home, ignore_errors=True)
            finally:
                self._busy = False

    async def _gather(self, there: Collection[PeerRecord], peers: int, stages: Sequence[OtherStage]) -> None:
        me = self._own
        oldest = me.round - STALE_ROUNDS
        donors = self._in_turn(there, peers, oldest)
        turns = [self._in_turn(stage.there, peers, self._oldest(stage)) for stage in stages]
        for stage, turn in zip(stages, turns, strict=True):
            if not turn:
                raise stage.missing()
        sizes = [me.parameters] * (1 + min(peers, len(donors)))
        for stage in stages:
            sizes += [stage.parameters] * min(peers, len(stage.there))
        folder = self._fresh_folder(sizes)
        round_, numbers = await asyncio.wrap_future(self._owner.live_state())
        if not await asyncio.to_thread(client.is_finite, numbers):
            raise NonFinite("this node's own weights hold NaN or Inf: average others, through another node")
        count = min(COMPARED, me.parameters)
        self._compared = np.sort(np.random.default_rng().integers(0, me.parameters, count))
        self._mine = self._compared_of(numbers)
        await self._keep(folder, me, LiveState(round_, numbers))
        for donor in donors:
            if len(self.view.states) > peers:
                break
            await self._take(folder, donor, None, oldest)
        for stage, turn in zip(stages, turns, strict=True):
            before, oldest = len(self.view.states), self._oldest(stage)
            for donor in turn:
                if len(self.view.states) - before >= peers:
                    break
                await self._take(folder, donor, stage, oldest)
            if len(self.view.states) == before:
                raise stage.missing()
        if len(self.view.states) == 1:
            nobody = "" if donors else ", as none with weights of the run is seen"
            raise SwarmUnreachable(
                f"no other node sent its state{nobody}: see `noloco-node peers`, or leave --average out to export this "
                "one's"
            )

    def _oldest(self, stage: OtherStage) -> int:
        """The earliest round of another stage's state that counts. Stages differ in speed, and so in round: the middle
        round of those that train there decides."""
        holders = [record for record in stage.there if record.state in HAS_WEIGHTS]
        training = [record for record in holders if record.state == NodeState.TRAINING]
        rounds = {record.peer_id: record.round for record in training or holders}
        own = self._own.round
        at = middle_round(rounds, self._place_of) if rounds else own
        return min(at, own) - STALE_ROUNDS  # so whoever claims a high round shuts nobody out

    def _in_turn(self, there: Collection[PeerRecord], peers: int, oldest: int) -> list[PeerRecord]:
        """The donors that are asked: drawn by place first, so that a crowd on one host keeps nobody waiting; of these
        those that train first, and of both kinds last those whose record is of a round before `oldest`. A record may be
        20 s old, which are many short rounds: what the donor answers decides."""
        fit = {r.peer_id: r for r in there if r.state in HAS_WEIGHTS and r.peer_id != self._own.peer_id}
        drawn = places.several(random, {peer: self._place_of(peer) for peer in fit}, peers + MOST_SKIPPED)
        return sorted((fit[peer] for peer in drawn), key=lambda r: (r.state != NodeState.TRAINING, r.round < oldest))

    def _fresh_folder(self, sizes: Sequence[int]) -> Path:
        """`sizes`: parameters of each state. Raises DiskFull, UsageError."""
        shutil.rmtree(self._home, ignore_errors=True)  # those of an export that was killed take room, too
        needed, free = _PLACE_BYTES * sum(sizes), atomic_files.free_bytes(self._home)
        if free is not None and free < needed:
            raise DiskFull(
                f"the disk is full: {len(sizes)} states need {size(needed)} in {self._home} and {size(free)} are left. "
                "Free some space, or average fewer"
            )
        try:
            self._home.mkdir(mode=0o700)
            return Path(tempfile.mkdtemp(dir=self._home))
        except OSError as error:
            raise cannot_write(self._home, error) from error

    async def _take(self, folder: Path, donor: PeerRecord, stage: OtherStage | None, oldest: int) -> None:
        """One donor's, if it sends it and is not of a round before `oldest`. Raises DiskFull, UsageError."""
        terms, parameters = (stage or self._own).terms, (stage or self._own).parameters
        name, download = peer_names.name_of(donor.peer_id), Download(2 * parameters)
        if not self._policy.room_to_receive(download.total_bytes):
            self._skip(name, "the day's download has no room for its state; --daily-download allows more")
            return
        attempt = _Attempt(self, name, oldest, self._own.budget)
        try:
            async with asyncio.timeout(BEGIN_S + download.total_bytes / self._slowest):
                state = await client.fetch(self._channel(donor.peer_id), terms, download, attempt, self._policy.traffic)
            if stage is None:
                attempt.say(", whose loss is measured")
                await self._compare(state)
            await self._keep(folder, donor, state, stage)
        except TimeoutError:
            self._skip(name, "too slow")
        except PeerFault as fault:
            self._skip(name, fault.reason.replace("_", " "))

    async def _compare(self, state: LiveState) -> None:
        """With this node's own. Raises PeerFault where the two have no mean."""
        if distance(self._compared_of(state.data), self._mine) > CLOSE:
            raise PeerFault("diverged")
        losses = await asyncio.wrap_future(self._owner.try_state(state.data))
        if why := doubt(losses, None, new=False, agreed=True):
            raise PeerFault(why)

    def _compared_of(self, numbers: memoryview) -> Weights:
        return np.frombuffer(numbers, np.float32)[self._compared]

    async def _keep(
        self, folder: Path, of: OwnState | PeerRecord, state: LiveState, stage: OtherStage | None = None
    ) -> None:
        """Raises DiskFull, UsageError."""
        path = folder / f"{len(self.view.states)}.f32"
        phi = state.data[: _PLACE_BYTES * (stage or self._own).parameters]
        await asyncio.to_thread(_write, path, phi)
        layout = stage.terms.layout.hex() if stage else ""
        kept = GatheredState(str(path), of.peer_id, state.round, self._step(of, state.round), layout)
        self.view = replace(self.view, states=(*self.view.states, kept))

    def _step(self, of: OwnState | PeerRecord, round: int) -> int | None:
        """At the boundary that φ is of. A phase by time has another number of steps on each node, which is known where
        what the node said of itself is of that round."""
        if self._own.steps_a_round:
            return round * self._own.steps_a_round
        return of.step if of.round == round else None

    def _skip(self, name: str, why: str) -> None:
        log.info("no state from %s for an average: %s", name, why)
        self.view = replace(self.view, skipped=(*self.view.skipped, f"{name}: {why}"))


class _Attempt:
    """One download: checks the donor's round, and shows progress."""

    def __init__(self, collector: Collector, name: str, oldest: int, budget: int) -> None:
        self._collector, self._name, self._oldest, self._budget = collector, name, oldest, budget
        self._words = client.DownloadProgress()
        self.say("")

    def queued(self, place: int) -> None:
        self.say(f", {place} before us" if place else ", which copies it")

    async def check_round(self, round: int) -> None:
        if round > self._budget:
            raise PeerMisbehaved("bad_round", f"{round}")
        if round < self._oldest:
            raise PeerFault("old_state", f"of round {round}")

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.say(f", {self._words(done_bytes, total_bytes)}")

    def say(self, how_far: str) -> None:
        self._collector.view = replace(self._collector.view, doing=f"state from {self._name}{how_far}")


def _write(path: Path, phi: memoryview) -> None:
    try:
        path.write_bytes(phi)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
