"""A node that trains: builds its parts, connects them, and runs them until it is told to leave or its work is done.

It has no maths, no byte layouts, no retries and no states of its own: it passes events between the parts, reports what
happened to node/lifecycle.py and carries out what that decides. The order of starting and stopping is here.

    start:  transport -> which run -> presence -> model and optimizers (training thread) -> a peer's state -> training
    leave:  no more steps and calls, a swap under way may end -> checkpoint, last presence record -> transport
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from noloco_node.base import peer_names, periodic
from noloco_node.base.addresses import Address
from noloco_node.base.events import Evaluated, Event, RolledBack, RoundCommitted, Sampled, WentSolo
from noloco_node.base.states import AT_WORK, HAS_WEIGHTS, NodeState
from noloco_node.checkpoints import listing
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.checkpoints.schedule import CheckpointSchedule
from noloco_node.core.state import State
from noloco_node.core.verdict import SOMEBODY
from noloco_node.data import sources
from noloco_node.data.sources import Sources
from noloco_node.errors import NolocoError, SwarmUnreachable
from noloco_node.host import nvml, remembered
from noloco_node.host.config import NodeConfig
from noloco_node.host.policy import SAVE_S, Policy
from noloco_node.host.standstill import LOOK_S, Standstill
from noloco_node.node import build_training, find_run, lifecycle, outcome, status
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.follow_author import FollowAuthor
from noloco_node.node.own_stage import Move, OwnStage
from noloco_node.observe import exporters
from noloco_node.observe.jsonl import METRICS_EVERY_S
from noloco_node.observe.recorder import Recorder, rollback_sentence
from noloco_node.peers import run_registry
from noloco_node.peers.cache import PeerCache
from noloco_node.peers.membership import Membership
from noloco_node.peers.record import REFRESH_S, PeerRecord
from noloco_node.peers.run_rules import RunRules
from noloco_node.rounds.service import RoundService, RoundTerms
from noloco_node.run import invitation, signed_file
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.schema import Manifest
from noloco_node.stages.service import StageService
from noloco_node.state_transfer import catch_up, choose_donor, client
from noloco_node.state_transfer.collect import Collector, OwnState
from noloco_node.state_transfer.server import StateService
from noloco_node.training.mailbox import Done, Failed, Finished, Judged, Message, PhaseEnded, Ready
from noloco_node.training.task import Task
from noloco_node.training.thread import TrainingThread
from noloco_node.views.gather import GatherView
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView
from noloco_node.views.status import GpuView, Phase, StatusView
from noloco_node.wire.peer_pb2_grpc import add_RunsServicer_to_server, add_StateServicer_to_server
from noloco_node.wire.stage_pb2_grpc import add_StageServicer_to_server

log = logging.getLogger(__name__)

CACHE_S = 20.0
"""How often some peers of the cache (peers/cache.py) are looked up."""
LEAVE_S, TRANSPORT_S = 10.0, 5.0
"""How long leaving may take, without the last checkpoint; the second is p2pd's part of it."""
SETTLE_S = 3.0
"""How long a swap under way may take to end; what was applied stays."""
STOP_S = 0.5
"""At least so long the training thread may take to end: after its last state it ends at once."""
LIMITS_S = 1.0
"""How often the volunteer's hours and quota are checked."""
JOIN_LINE_S = 60.0
"""How often it is checked whether others join with another line: so long p2pd may take to be back after its end."""
TIME_S = 1.0
"""How often the training thread is asked for its progress."""
GPU_S = 2.0
"""How often the GPU's driver is asked: it has new figures once a second."""
_NEVER = 1 << 53
LAST_EVALUATION_S = 30.0
LAST_SWAP_S = 30.0
"""How long the last round's offer may wait for a partner when the work is done."""


class TrainingNode(BaseNode):
    def __init__(
        self,
        config: NodeConfig,
        report: Report,
        signed: Signed | None,
        moves_to: int | None = None,
        brought: Task | None = None,
    ) -> None:
        """`moves_to`: the stage that it takes now, and held another one of this run a moment ago. `brought`: what it
        trains, where a loop of the volunteer's own brings it (loop/)."""
        super().__init__(config, report)
        self._signed, self._brought = signed, brought
        self._brings_run = (signed is not None or config.start_over) and moves_to is None
        """Whether it may begin with the run's first weights where nobody has later ones."""
        self._sources = Sources(config.data, config.tokenizer, self._home.data, config.encoding)
        self._recorder = Recorder(self._identity.peer_id)
        self._stats = self._recorder.stats
        self.found_others = False
        """Others of the run are seen, or this node needs none."""
        self._policy = Policy(config, self._home, lambda: self._stats.last_round)
        traffic = self._policy.traffic
        self._rounds = RoundService(self._transport, random.Random(), self, self._observe, pace=traffic)
        is_partner = self._transport.is_partner = lambda peer: self._rounds.standing(peer).committed > 0
        caller, channel, place = self._transport.caller, self._transport.channel, self._transport.place
        self._known_runs = run_registry.RunRegistry(place=place, traffic=traffic)
        progress = lambda: (self._stats.round, self._stats.eval_loss)  # noqa: E731
        self._state_service = StateService(caller, place, progress, self._policy)
        self._transport.serve(lambda server: add_RunsServicer_to_server(self._known_runs, server))
        self._transport.serve(self._rounds.add_to)
        self._transport.serve(lambda server: add_StateServicer_to_server(self._state_service, server))
        self._stages = StageService(self._transport, random.Random(), self._rounds.misbehaved, traffic)
        self._transport.serve(lambda server: add_StageServicer_to_server(self._stages, server))
        self._own_stage = OwnStage(
            config, self._home, self._identity.peer_id, self._sources, self._stages, is_partner, moves_to, report
        )
        self._collector = Collector(self._home.root, channel, self._policy, self._transport.place_of)
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._rules: RunRules | None = None
        self._author: FollowAuthor | None = None
        self._token = config.token or b""
        self._thread: TrainingThread | None = None
        self._keeper: CheckpointKeeper | None = None
        self._ready: Ready | None = None
        self._gpu = GpuView()
        self._own_end = _NEVER
        """The round at which this node stops by its own limit."""
        self._before_ended = self._ended = 0
        """What the stage before has come to the end of, and what this node has."""
        self._schedule: CheckpointSchedule[State] | None = None
        self._outcome: tuple[str, ...] = ()
        cache = PeerCache(self._home.root / "peers.json")
        self._membership = Membership(self._transport, cache, self._update_candidates, self._refuses)
        self._catch_up: catch_up.CatchUp | None = None
        exporters.check(config.sinks)

    # ---- from start to end ----
    async def run(self) -> None:
        """Raises what kept the last checkpoint from being written, and why the node gave up, once it has left. What was
        reached is reported; where an error is raised, its notes say it, as the reason comes first."""
        try:
            await super().run()
            if error := (self._keeper and self._keeper.unsaved) or self._own_stage.gave_up:
                raise error
        except BaseException as error:
            for line in self._outcome:
                error.add_note(line)
            raise
        for line in self._outcome:
            self._report(line)

    async def _live(self) -> None:
        signed = self._signed or await find_run.find(
            self._config, self._rendezvous(), self._transport.channel, self._report, self.waits_for
        )
        rules = RunRules(self._home.run(verify(signed).run_id), signed)
        author = FollowAuthor(
            rules,
            self._token,
            self._transport,
            self._membership,
            self._rendezvous(),
            self._rounds.misbehaved,
            self._run_amended,
        )
        author.require()
        self._author, self._rules, run = author, rules, rules.run
        keeper = self._keeper = CheckpointKeeper(self._home.run(run.run_id) / "checkpoints", run.run_id)
        if self._signed is None:
            self._remember(run, signed)  # data that it lacks can then be given to `join` alone
        if run.stages is None:
            sources.check(run.data, self._sources)
        for unused in sources.unused(run, self._sources):
            self._report(unused)
        if self._config.weights and not run.model.weights:
            self._report("warning: this run begins with random weights: --weights is not used")
        if run.model.weights and self._config.weights is None:
            self._brings_run = False
        thread = None if run.stages else self._start_training(run, keeper)
        stores = self._transport.can_be_called
        directory = self._directory(self._policy.traffic, self._identity, run.run_id, stores=stores)
        self.waits_for("the directory of peers")
        await self._enter(lambda: self._membership.enter(directory))
        await self._own_stage.choose(run, self._look)
        thread = thread or self._start_training(run, keeper)
        if not (self._brings_run or listing.newest(self._home.run(run.run_id) / "checkpoints")):
            await find_run.require_somebody(self._look, run, self.waits_for)
        self.found_others = True
        async with asyncio.TaskGroup() as group:
            publish = periodic.every(lambda: REFRESH_S, self._publish_now, ())  # a later one would come too late
            duties = [group.create_task(publish)]  # who joins meanwhile sees that somebody is in the run
            self.waits_for("data and model to be ready")
            ready = await self._model_ready()  # what is wrong with the run is found by now: nobody was invited to it
            if self._lost_weights:  # which is known only now
                await find_run.require_somebody(self._look, run, self.waits_for, lost=True)
            self._remember(run, signed)
            signed_file.keep(self._home.run(run.run_id), signed)
            self._own_stage.take(run)
            self._known_runs.add(signed, amended=rules.amended)
            await author.learn_first()
            if rules.ended and not (ready.resumed or self._brings_run):
                raise SwarmUnreachable(f"{run.label} is over: its author has ended it. Join another run")
            self._recorder.open(self._home.run(run.run_id), run.label, self._config.sinks)
            self._report(f"{peer_names.name_of(self._identity.peer_id)} ({self._identity.peer_id}) in run {run.label}")
            await self._report_join_lines()
            if run.membership == "invite":
                self._report("each of them needs a token, which the author makes: `noloco-node invite <their peer id>`")
            duties += [group.create_task(duty) for duty in (*author.duties(), *self._duties())]
            await self._train(author, keeper, thread, ready)
            for duty in duties:
                duty.cancel()

    def _ways_for_others(self) -> list[Address]:
        """The bootstrap nodes; where there are none, or none answered, also this node itself. Not peers seen earlier:
        whoever is invited would believe them."""
        own = self._transport.addresses() if self._config.seen or not self._config.bootstrap else ()
        own = sorted(own, key=lambda way: way.ip is not None and not way.ip.is_global)  # not all may fit
        return [way for way in (*self._config.bootstrap, *own) if way.transport == "tcp" and not way.relay]

    def _remember(self, run: Manifest, signed: Signed) -> None:
        remembered.keep(self._home, self._config.given, run.run_id, signed.author, self._transport.listening_port)

    def _join_lines(self) -> list[str]:
        if self._ready is None or self._rules is None:
            return []  # what is wrong with the run is not found yet
        return invitation.lines(self._ways_for_others(), self._rules.run.run_id, self._rules.signed.author)

    def _start_training(self, run: Manifest, keeper: CheckpointKeeper) -> TrainingThread:
        loop, config, peer_id = asyncio.get_running_loop(), self._config, self._identity.peer_id

        def post(message: Message) -> None:
            loop.call_soon_threadsafe(self._messages.put_nowait, message)

        weights = config.weights if self._brings_run else None
        self._thread = build_training.start(
            run,
            config,
            peer_id,
            self._sources,
            keeper,
            post,
            self._own_stage.part(run),
            reads=self._own_stage.reads,
            weights=weights,
            brought=self._brought,
        )
        return self._thread

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        def look_again_s() -> float:
            return self._membership.look_again_s(self._life.state, self._stats.with_peer)

        standstill = Standstill()

        async def notice() -> None:
            if standstill.is_over():
                log.info("this node stood still for a while")
                self._handle(lifecycle.Signal.STOOD_STILL)

        return [
            periodic.every(lambda: LOOK_S, notice, ()),
            periodic.every(look_again_s, self._membership.look, (NolocoError, OSError)),
            periodic.every(lambda: CACHE_S, self._membership.refresh_cache, (NolocoError, OSError)),
            periodic.every(lambda: LIMITS_S, self._check_limits, (NolocoError, OSError)),
            periodic.every(lambda: SAVE_S, self._policy.write_down, ()),
            periodic.every(lambda: JOIN_LINE_S, self._report_join_lines, ()),
            periodic.every(lambda: TIME_S, self._read_progress, (NolocoError,)),
            periodic.every(lambda: GPU_S, self._read_gpu, ()),
            periodic.every(lambda: TIME_S, self._save_when_due, ()),
            periodic.every(lambda: METRICS_EVERY_S, self._write_metrics, (NolocoError,)),
        ]

    async def _model_ready(self) -> Ready:
        ready = await self._next_message()
        if not isinstance(ready, Ready):
            raise RuntimeError(f"the training thread began with {type(ready).__name__}")
        self._ready, self._stats.tokens = ready, ready.tokens
        self._stats.move_to(ready.round, ready.step)
        return ready

    async def _train(
        self, author: FollowAuthor, keeper: CheckpointKeeper, thread: TrainingThread, ready: Ready
    ) -> None:
        rules, run = author.rules, author.rules.run
        self._stats.steps_a_round, self._stats.seconds_a_round = run.inner.steps, run.inner.seconds
        keeper.say_room(ready.parameters)
        terms = client.StateTerms(bytes.fromhex(run.run_id), ready.layout, self._token)
        self._own_stage.begin(rules, self._token, lambda: self._life.state, self._policy.held_back)
        self._catch_up = self._new_catch_up(run, thread, terms, ready)
        self._obey_limits()
        self._handle(lifecycle.ModelReady(ready.resumed))
        if self._life.state is NodeState.JOINING:
            came = await self._catch_up.fetch_first_state()
            if not (came or ready.resumed or self._may_begin):
                at = self._own_stage.at
                raise find_run.nobody(run, f"stage {at} of {run.label}" if at else run.label, lost=self._lost_weights)
            if self._is_behind():  # who was asked, and did not send its state, is not asked again at once
                self._handle(lifecycle.Signal.KEPT_UP)
        self._begin_rounds(rules, ready)
        self._state_service.begin(terms, thread, 8 * ready.parameters, rules.refuses)
        self._schedule = self._new_schedule(thread, keeper, ready)
        run = rules.run  # it may have been amended meanwhile
        if self._config.rounds is not None:
            self._own_end = self._stats.round + self._config.rounds
        self._stats.rounds_target = min(run.rounds, self._own_end)
        if rules.ended:  # this home may have known it at the start already
            thread.amend(run.rounds, ended=True)
        elif (end := self._own_stage.ended(run, self._all_seen())) >= run.rounds:
            self._before_ended = end
            thread.amend(run.rounds, ended=True)
        self._obey_limits()
        self._handle(lifecycle.Signal.CAUGHT_UP)
        await self._publish_now()
        while not isinstance(message := await self._next_message(), Finished):
            self._follow(message)
        await self._finish(author)

    @property
    def _may_begin(self) -> bool:
        """Whether it may begin with the first weights where nobody has later ones."""
        begins = self._brings_run or self._own_stage.may_begin(self._membership.seen.values())
        return begins and not self._lost_weights

    @property
    def _lost_weights(self) -> bool:
        """Whether it had weights and cannot use them: what it trained from the beginning would take their places, so it
        has to be told to."""
        return self._keeper is not None and self._keeper.none_usable and not self._config.start_over

    def _begin_rounds(self, rules: RunRules, ready: Ready) -> None:
        run = rules.run
        swaps = run.outer.swaps_per_round
        terms = RoundTerms(bytes.fromhex(run.run_id), ready.layout, ready.fragments, self._token)
        blocking = run.outer.overlap == "blocking"
        self._rounds.begin(terms, None if swaps == "auto" else swaps, blocking=blocking, refuses=rules.refuses)

    def _perform(self, action: lifecycle.Action) -> None:
        thread, catching_up = self._thread, self._catch_up
        match action:
            case lifecycle.PauseRounds(reason):
                log.info("no rounds: %s", reason.replace("_", " "))
                self._rounds.pause(reason)
            case lifecycle.Order.RESUME_ROUNDS:
                log.info("rounds go on")
                self._rounds.resume()
            case lifecycle.Order.STOP_ROUNDS:
                self._rounds.stop()
            case lifecycle.Order.PAUSE_TRAINING if thread:
                thread.pause()
            case lifecycle.Order.RESUME_TRAINING if thread:
                thread.resume()
            case lifecycle.Order.BEGIN_TRAINING if thread:
                thread.begin(self._config.rounds)
            case lifecycle.StartCatchUp(diverged) if catching_up:
                catching_up.start(diverged=diverged)
            case lifecycle.Order.STOP_CATCH_UP if catching_up:
                catching_up.stop()
            case _:
                pass  # a node that leaves may not have a training thread yet

    async def _read_progress(self) -> None:
        if self._life.at_work and self._thread:
            now, spent = await asyncio.wrap_future(self._thread.so_far())
            phase = Phase(now.part, now.left_s, now.loss, now.tokens_per_s)
            self._stats.progress(now.steps, phase, now.device_bytes)
            self._stats.short_of_memory = now.short_of_memory
            self._stats.spend(spent)
        self._stages.note(time.monotonic())
        used = self._policy.traffic.used
        self._recorder.curves.sample(used.sent, used.received, self._stats.round, time.time())

    async def _read_gpu(self) -> None:
        if self._ready and self._ready.gpu_uuid:
            self._gpu = await asyncio.to_thread(nvml.read, self._ready.gpu_uuid)  # a driver may take its time

    async def _write_metrics(self) -> None:
        self._recorder.note(self.status())

    async def _next_message(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, Failed):
            if not message.whole:
                self._handle(lifecycle.Signal.FAILED)
            raise message.error
        return message

    def _follow(self, message: Message) -> None:
        match message:
            case PhaseEnded(done, offer, closed, seconds, spent):
                self._stats.spend(spent)
                self._stats.phase_s = seconds
                self._observe(done)
                self._handle(lifecycle.Signal.BOUNDARY)
                self._rounds.boundary(done.round, seconds, offer, closed)
            case Evaluated() | Sampled():
                self._observe(message)
            case Judged(exchange, verdict, loss_with, loss_without):
                self._rounds.judged(exchange, verdict, loss_with, loss_without)
            case RolledBack():
                self._observe(message)
                if message.weights_of is not None:  # else the slow weights, and so the offers, are unchanged
                    self._handle(lifecycle.Signal.ROLLED_BACK)  # the thread breaks a swap under way
                    self._state_service.weights_replaced()

    async def _finish(self, author: FollowAuthor) -> None:
        """The work is done: let the last offer find its partner, save, and stay visible for a while (--linger)."""
        own_end = self._stats.rounds_target or 0
        if self._own_stage.at or author.rules.ended:
            self._stats.rounds_target = self._stats.round  # it may have ended earlier than planned
        self._handle(lifecycle.Signal.WORK_DONE)
        await self._settled(min(LAST_SWAP_S, self._stats.phase_s))
        self._handle(lifecycle.Signal.LAST_ROUND_OVER)
        await self._settled(SETTLE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVALUATION_S):
                while not isinstance(message := await self._next_message(), Done):
                    self._follow(message)
        self._handle(lifecycle.Signal.FINISHED)
        if self._schedule:
            await self._schedule.save_now()
        if self._keeper and self._keeper.unsaved is None:  # else it is tried again: the disk may get room
            self._handle(lifecycle.Signal.SAVED)
        rounds = author.rules.run.rounds
        if self._before_ended >= rounds > self._stats.round:
            with suppress(NolocoError):  # then it waits for micro-batches when it comes back
                signed_file.keep_end(self._home.run(author.rules.run.run_id), self._before_ended)
        await self._publish_now()
        await author.tell_others()
        if self._stats.round >= rounds:  # else its volunteer or the author ended it
            await self._own_stage.serve_on(self._all_seen, rounds)
        self._ended = max(self._before_ended, own_end)  # not before: the stage behind would end
        await self._publish_now()
        await asyncio.sleep(self._config.linger)

    @property
    def joins(self) -> Signed | None:
        """The run, once it is known which."""
        return self._rules.signed if self._rules else None

    def moves(self) -> Move | None:
        """Why it leaves: to come again at another stage (node/main.py). None: for good."""
        return self._own_stage.move

    def leave(self) -> None:
        self._own_stage.move = None
        super().leave()

    @property
    def has_trained(self) -> bool:
        return self._stats.rounds_target is not None

    async def _settled(self, patience_s: float) -> None:
        """Waits until no offer is open and no swap under way, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._rounds.settled()

    async def _depart(self) -> None:
        """Leave within LEAVE_S from any state. Only the last checkpoint may take longer, for the inner step before it
        and for the disk: nothing that was trained is lost."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LEAVE_S - TRANSPORT_S
        await self._settled(SETTLE_S)
        await self._rounds.close()
        await self._stages.close()
        async with asyncio.TaskGroup() as last:  # none waits for the others' disk or network
            last.create_task(self._save_last())
            last.create_task(self._leave_directory(until))
            last.create_task(self._recorder.close())
        if self._thread:
            patience_s = max(STOP_S, until - loop.time()) if self._ready else 0.0  # it may load a model for minutes
            await asyncio.to_thread(self._thread.stop, patience_s)
        if self._ready:
            await self._policy.write_down()
        if (rules := self._rules) and not self.moves():
            over = rules.ended or self._ended >= rules.run.rounds  # a stage may end with fewer than the run has
            rounds, is_loop = self._stats.round if over else rules.run.rounds, self._brought is not None
            view, task = self.status(), rules.run.model.task
            self._outcome = tuple(outcome.lines(view, rounds, self._home, task, is_loop=is_loop))

    async def _leave_directory(self, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._membership.leave()
                await self._membership.close()

    # ---- checkpoints ----
    def _new_schedule(
        self, thread: TrainingThread, keeper: CheckpointKeeper, ready: Ready
    ) -> CheckpointSchedule[State]:
        def failed(why: NolocoError) -> None:
            self._last_error = str(why)
            keeper.not_saved(self._stats.round, why)

        keep, bytes_ = partial(keeper.save, layout=ready.layout), keeper.view(ready.parameters).bytes
        return CheckpointSchedule(thread, keep, failed, self._stats.round, time.monotonic(), bytes_)

    async def _save_when_due(self) -> None:
        if self._schedule and self._life.at_work and self._life.state in AT_WORK | {NodeState.FINISHED}:
            self._schedule.save_if_due(self._stats.round, self._stats.step, time.monotonic())

    async def _save_last(self) -> None:
        if self._schedule and self._life.at_work:
            self.waits_for("its last checkpoint")
            await self._schedule.save_now(leaving=True)
            self.waits_for(None)

    # ---- what the run's author says ----
    def _refuses(self, peer: str, token: bytes) -> str | None:
        return self._rules.refuses(peer, token) if self._rules else None

    async def _run_amended(self, rules: RunRules) -> None:
        run = rules.run
        self._report(f"{run.label} was {rules.words} by its author")
        if self._life.state is NodeState.FINISHED and run.rounds > self._stats.round and not rules.ended:
            self._report(f"{run.label} goes on, and this node has ended its work in it: start it again to train on")
        self._known_runs.add(rules.signed, amended=rules.amended)
        if self._thread:
            self._thread.amend(run.rounds, ended=rules.ended)
        if self._catch_up:
            self._catch_up.wanted.budget = run.rounds
        if self._stats.rounds_target is not None and self._ready:  # else the rounds have not begun
            self._stats.rounds_target = min(run.rounds, self._own_end)
            self._begin_rounds(rules, self._ready)
        await self._publish_now()

    # ---- joining a run ----
    def _rendezvous(self) -> list[str]:
        return [address.peer for address in self._config.ways_in if address.peer != self._identity.peer_id]

    def _new_catch_up(
        self, run: Manifest, thread: TrainingThread, terms: client.StateTerms, ready: Ready
    ) -> catch_up.CatchUp:
        coding = catch_up.coding(8 * ready.parameters, self._config.max_download)
        wanted = choose_donor.Wanted(terms, 2 * ready.parameters, run.rounds, coding=coding)
        return catch_up.CatchUp(
            self,
            thread,
            self._transport.channel,
            wanted,
            self._policy.traffic,
            first=self._brings_run and not self._rendezvous(),
            begins=self._may_begin,
            resumed=ready.resumed,
            same_data=run.model.task is None and run.data.source != "files",
            place_of=self._transport.place_of,
        )

    # ---- catching up: what state_transfer/catch_up.py needs ----
    @property
    def round(self) -> int:
        return self._stats.round

    async def _look(self) -> Collection[PeerRecord]:
        """All nodes of the run; `look` and `seen` give those that hold the same stage."""
        return await self._membership.others()

    async def look(self) -> Collection[PeerRecord]:
        return self._own_stage.peers(await self._look())

    def seen(self) -> Collection[PeerRecord]:
        return self._own_stage.peers(self._all_seen())

    def _all_seen(self) -> Collection[PeerRecord]:
        return self._membership.seen.values()  # of the last look-up: each makes another dict

    async def swap_is_over(self) -> bool:
        await self._settled(SETTLE_S)
        return self._rounds.partner is None

    async def adopt(self, state: client.LiveState) -> None:
        if self._thread and self._rules:
            # what the training thread has begun it ends, though this node may be paused meanwhile
            await asyncio.shield(asyncio.ensure_future(self._adopt(self._thread, self._rules, state)))

    async def _adopt(self, thread: TrainingThread, rules: RunRules, state: client.LiveState) -> None:
        before = self._stats.round
        await asyncio.wrap_future(thread.adopt(state.round, state.data))
        self._stats.move_to(state.round)
        self._handle(lifecycle.Signal.KEPT_UP)
        self._state_service.weights_replaced()
        if self._schedule:
            self._schedule.weights_replaced()
        if self._stats.rounds_target:
            self._own_end += max(0, state.round - before)  # the number of its own rounds stays the same
            self._stats.rounds_target = min(rules.run.rounds, self._own_end)

    def caught_up(self) -> None:
        self._handle(lifecycle.Signal.CAUGHT_UP)

    async def gather(self, peers: int) -> AsyncGenerator[GatherView, None]:
        ready, rules, stats = self._ready, self._rules, self._stats
        if not (ready and rules and self._thread and self._life.state in HAS_WEIGHTS):
            yield GatherView(failure="this node has no weights of the run yet: try again when it trains")
            return
        with suppress(NolocoError, OSError):  # while p2pd is down, the peers seen last are asked
            await self._membership.look()
        run, terms = rules.run, client.StateTerms(bytes.fromhex(rules.run.run_id), ready.layout, self._token)
        now = (stats.round, stats.step, stats.steps_a_round)
        own = OwnState(self._identity.peer_id, terms, ready.parameters, *now, run.rounds)
        try:
            stages = await self._own_stage.other_stages(run, self._token, self._membership.seen.values())
        except NolocoError as error:
            yield GatherView(failure=str(error), exit_code=error.exit_code)
            return
        async with aclosing(self._collector.gather(own, self._thread, self.seen(), peers, stages)) as views:
            async for view in views:
                yield view

    # ---- presence ----
    async def _publish(self) -> None:
        if self._rules:
            addresses = self._transport.addresses()
            known = self._known_runs.version(self._rules.run.run_id)  # what others get who ask for it
            stage = self._own_stage.number
            state = self._own_stage.shown(self._life.state)
            record = status.presence(state, self._stats, addresses, known, self._token, stage, self._ended)
            await self._membership.publish(record)

    async def _publish_now(self) -> None:
        """Publish the presence record. If this fails, `_check_limits` tries again in a second where the state is
        another one, else the next one is soon enough: a record lives for three times REFRESH_S."""
        with suppress(NolocoError, OSError):
            await self._publish()

    async def _rejoin(self) -> None:
        self._rounds.candidates({})  # forgets back-offs: peers did not answer because our p2pd was dead
        await self._membership.rejoin()
        await self._publish_now()  # peers that do not answer are no reason to start p2pd again
        with suppress(NolocoError, OSError):
            await self._membership.look()  # at once: the periodic look may just have failed

    def _update_candidates(self) -> None:
        training = [record for record in self.seen() if record.state == NodeState.TRAINING]
        place_of, own = self._transport.place_of, self._transport.place_of(self._transport.peer_id)
        self._rounds.candidates({record.peer_id: place_of(record.peer_id) for record in training}, own)
        self._recorder.curves.seen(training)
        if self._life.stood_still and training and self._rounds.partner is None:
            self._handle(lifecycle.Signal.LEFT_BEHIND if self._is_behind() else lifecycle.Signal.KEPT_UP)
        if self._rules and self._thread and self._keeper:
            self._update_stage(self._rules, self._thread, self._keeper)

    def _update_stage(self, rules: RunRules, thread: TrainingThread, keeper: CheckpointKeeper) -> None:
        seen, stats, rounds = self._all_seen(), self._stats, rules.run.rounds
        own_end = stats.rounds_target or rounds
        if end := self._own_stage.update(seen, stats.round, own_end):
            self._before_ended = end
            thread.amend(rounds, ended=True)  # no micro-batch comes any more
        goes_on = self._life.state is NodeState.TRAINING and stats.round < own_end
        if goes_on and keeper.unsaved is None and self._own_stage.leaves(rules, seen):
            super().leave()
        elif goes_on:
            others = seen if self._membership.answered else None
            if self._own_stage.waits_in_vain(rules.run, others, stats.round, stays=self._brings_run):
                super().leave()

    # ---- the volunteer's limits ----
    async def pause(self) -> None:
        self._policy.pause()
        self._obey_limits()
        await self._policy.keep_mark()

    async def resume(self) -> None:
        self._policy.resume()
        self._obey_limits()
        await self._policy.keep_mark()

    async def _check_limits(self) -> None:
        self._obey_limits()
        if self._membership.published != self._own_stage.shown(self._life.state):
            await self._publish()

    def _obey_limits(self) -> None:
        self._handle(lifecycle.Limits(self._policy.held_back(), self._policy.pause_ends(), self._is_behind()))

    def _is_behind(self) -> bool:
        return self._catch_up is not None and self._catch_up.is_behind()

    # ---- events of the rounds ----
    def swapping(self, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
        if self._thread:
            self._thread.swapping(under_way, source)

    def round_over(self, round: int) -> None:
        if self._thread:
            self._thread.round_over(round)

    def _observe(self, event: Event) -> None:
        self._recorder.observe(event)
        match event:
            case RoundCommitted(_, partner):
                self._round_ended(None, partner)
            case WentSolo(_, reason, partner):
                self._round_ended(reason, partner)
            case RolledBack():
                self._last_error = rollback_sentence(event)

    def _round_ended(self, solo: str | None, partner: str | None) -> None:
        if self._catch_up and self._catch_up.round_over(solo, partner):
            # Not at once: the round machine's other actions, of which this is the first, come before.
            asyncio.get_running_loop().call_soon(self._handle, lifecycle.Signal.DIVERGED)

    # ---- views ----
    def status(self) -> StatusView:
        node = replace(super().status(), dht=self._membership.dht)
        seen = self._membership.living
        found = (*(self._rules.health() if self._rules else ()), *(self._catch_up.health() if self._catch_up else ()))
        now = time.monotonic()
        unfound = self._membership.health(now) or (self._author.health(now) if self._author else ())
        found = (*found, *self._sources.awaited.health(now), *unfound)
        if self._ready:
            found = (*found, *self._stages.health(seen, self._life.state))
        return status.status(
            node,
            self._stats,
            self._rounds,
            seen,
            self._policy,
            self._rules,
            self._keeper,
            self._ready,
            self._gpu,
            found,
            stage=self._stages.view(seen, self._life.state),
        )

    def peers(self) -> PeersView:
        seen, seen_of = self._membership.living, self._rounds.standings()
        return status.peers(self._recorder, seen, self._transport.via, seen_of)

    def round_events(self) -> list[str]:
        return self._rounds.event_log()

    def history(self) -> HistoryView:
        return self._recorder.curves.view(self._lines.last())
