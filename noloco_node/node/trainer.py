"""A node that trains: builds its parts, connects them, and runs them until it is told to leave or its work is done.

It has no maths, no byte layouts and no retries of its own: here events go from one part to the next, and here stands
the order of starting and stopping.

    start:  transport -> which run? -> model and optimizers (training thread) -> presence -> a peer's state -> training
    leave:  no more steps, no more calls; a swap under way may end -> checkpoint, goodbye -> transport
"""

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from noloco_node.base import peer_names, periodic
from noloco_node.base.events import Evaluated, Event, RolledBack, RoundCommitted, WentSolo
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.checkpoints.schedule import CheckpointSchedule
from noloco_node.data.sources import Sources
from noloco_node.data.sources import check as check_sources
from noloco_node.errors import NolocoError
from noloco_node.host.config import NodeConfig
from noloco_node.host.limits import PAUSED, QUOTA
from noloco_node.host.policy import Policy
from noloco_node.node import build_training, find_run
from noloco_node.node.base import BaseNode, Report
from noloco_node.observe import exporters
from noloco_node.observe.minutes import EVERY_S
from noloco_node.observe.recorder import Recorder, told
from noloco_node.peers import rows, run_registry
from noloco_node.peers.cache import PeerCache
from noloco_node.peers.directory import Directory
from noloco_node.peers.membership import Membership
from noloco_node.peers.record import MAX_ADDRESSES, PeerRecord, Presence
from noloco_node.rounds.service import RoundService, RoundTerms
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors
from noloco_node.state_transfer import catch_up, choose_donor, client
from noloco_node.state_transfer.collect import Collector, OwnState
from noloco_node.state_transfer.server import StateService
from noloco_node.training.replica import State
from noloco_node.training.thread import Failed, Finished, Message, PhaseEnded, Ready, TrainingThread
from noloco_node.views.views import BytesView, GatherView, Health, HistoryView, PeersView, Phase, StatusView
from noloco_node.wire.peer_pb2_grpc import (
    add_ExchangeServicer_to_server,
    add_RunsServicer_to_server,
    add_StateServicer_to_server,
)

log = logging.getLogger(__name__)

ANNOUNCE_S = 60.0
"""A rendezvous that was restarted knows the run again after so long."""
LOOK_S, LOOK_ALONE_S = 5.0, 1.0
"""How often the DHT is read for candidates; more often while there are none."""
FRIENDS_S = 20.0
"""How often some of the peers that were there once are looked up."""
LEAVE_S, TRANSPORT_S = 10.0, 5.0
"""For everything that leaving takes but the last checkpoint, and of that for the network daemon to end."""
SETTLE_S = 3.0
"""For a swap under way when the node leaves; what is applied by then stays."""
STOP_S = 0.5
"""For the training thread, at the least: one that has given its last state ends at once."""
LIMITS_S = 1.0
"""How often the clock and the day's quota are looked at."""
TIME_S = 1.0
"""How often the training thread is asked where its time goes."""
LAST_EVALUATION_S = 30.0
LAST_SWAP_S = 30.0
"""For the last round's offer to find a partner when the work is done."""


class TrainingNode(BaseNode):
    """Trains, and exchanges with one peer a round."""

    def __init__(self, config: NodeConfig, report: Report, signed: Signed | None) -> None:
        super().__init__(config, report)
        self._signed = signed
        self._boot = secrets.token_bytes(16)
        self._sources = Sources(config.data, config.tokenizer, self._home.data)
        self._known_runs = run_registry.RunRegistry()
        self._chronicle = Recorder(self._identity.peer_id)
        self._ledger = self._chronicle.ledger
        self._allowance = Policy(config, self._home, lambda: self._ledger.last_round)
        traffic = self._allowance.traffic
        self._exchange = RoundService(self._transport, self._boot, random.Random(), self, self._observe, pace=traffic)
        self._states = StateService(self._transport, lambda: self._ledger.round, traffic, self._withholds_state)
        for add in (
            lambda server: add_RunsServicer_to_server(self._known_runs, server),
            lambda server: add_ExchangeServicer_to_server(self._exchange, server),
            lambda server: add_StateServicer_to_server(self._states, server),
        ):
            self._transport.serve(add)
        self._gatherer = Collector(
            self._home.root, self._transport.channel, traffic, self._allowance, config.max_download
        )
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._run: Manifest | None = None
        self._thread: TrainingThread | None = None
        self._keeper: CheckpointKeeper | None = None
        self._ready: Ready | None = None
        self._trains = False
        self._target: int | None = None
        """The round at which this node stops."""
        self._phase_s = 0.0
        self._saving: CheckpointSchedule[State] | None = None
        self._gave_up = False
        """Whether weights were given up that the exchange may still offer."""
        self._held_back: str | None = None
        """PAUSED or QUOTA, as it was last told to the training and the exchange."""
        friends = PeerCache(self._home.root / "peers.json")
        self._neighbours = Membership(self._transport, friends, self._meet_candidates)
        self._homecoming: catch_up.CatchUp | None = None
        exporters.check(config.sinks)

    # ---- its life ----
    async def _live(self) -> None:
        signed = self._signed or await self._find_run()
        run = self._run = verify(signed)
        check_sources(run.data, self._sources)
        self._known_runs.add(signed)
        signed_file.keep(self._home.run(run.run_id), signed)
        self._chronicle.open(self._home.run(run.run_id), run.label, self._config.sinks)
        self._thread = self._start_training(run)
        p2p, bootstrap = self._transport.p2p, self._config.bootstrap
        carries = self._transport.can_be_called
        swarm = Directory(p2p, bootstrap, self._identity, run.run_id, boot=self._boot, carries=carries)
        await self._enter(lambda: self._neighbours.enter(swarm))
        self._say_hello(run, signed)
        async with asyncio.TaskGroup() as group:
            duties = [group.create_task(duty) for duty in self._duties(signed, swarm)]
            await self._train(run, self._thread)
            for duty in duties:
                duty.cancel()

    def _start_training(self, run: Manifest) -> TrainingThread:
        loop, config, peer_id = asyncio.get_running_loop(), self._config, self._identity.peer_id

        def post(message: Message) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, message)

        keeper = self._keeper = CheckpointKeeper(self._home.run(run.run_id) / "checkpoints", run.run_id)
        return build_training.start(run, config, peer_id, self._sources, keeper, post)

    def _duties(self, signed: Signed, swarm: Directory) -> list[Coroutine[Any, Any, None]]:
        async def announce() -> None:
            await run_registry.announce([self._transport.channel(peer) for peer in self._rendezvous()], signed)

        def look_again_s() -> float:
            return LOOK_S if self._neighbours.seen else LOOK_ALONE_S

        return [
            periodic.every(lambda: ANNOUNCE_S, announce, (NolocoError,)),
            periodic.every(lambda: swarm.refresh_s, self._publish, (NolocoError, OSError)),
            periodic.every(look_again_s, self._neighbours.look, (NolocoError, OSError)),
            periodic.every(lambda: FRIENDS_S, self._neighbours.keep_friends, (NolocoError, OSError)),
            periodic.every(lambda: LIMITS_S, self._mind_limits, (NolocoError, OSError)),
            periodic.every(lambda: TIME_S, self._take_time, (NolocoError,)),
            periodic.every(lambda: TIME_S, self._save_now_and_then, ()),
            periodic.every(lambda: EVERY_S, self._note_figures, (NolocoError,)),
        ]

    async def _train(self, run: Manifest, thread: TrainingThread) -> None:
        self._waiting_for = "data and model to be ready"
        ready = await self._next_message()
        if not isinstance(ready, Ready):
            raise RuntimeError(f"the training thread began with {type(ready).__name__}")
        self._ready, self._ledger.round = ready, ready.round
        if self._keeper:
            log.info("%s", self._keeper.room(ready.parameters))
        terms = client.StateTerms(bytes.fromhex(run.run_id), ready.layout)
        home = self._homecoming = self._way_home(run, terms, ready)
        if not (ready.round and self._allowance.held_back()):  # what it has costs nothing
            self._state = "joining"
            await home.arrive()
        swaps = run.outer.swaps_per_round
        common = RoundTerms(terms.run_id, ready.layout, ready.fragments)
        blocking = run.outer.overlap == "blocking"
        self._exchange.begin(common, None if swaps == "auto" else swaps, blocking=blocking)
        self._states.begin(terms, thread)
        self._saving = self._saver(thread, ready.layout)
        self._state, self._waiting_for = "training", None
        self._trains = True
        began_at, own = self._ledger.round, self._config.rounds
        self._target = run.rounds if own is None else min(run.rounds, began_at + own)
        self._keep_limits()
        thread.begin(own)
        await self._publish_now()
        while not isinstance(message := await self._next_message(), Finished):
            self._follow(message)
        await self._finish()

    async def _take_time(self) -> None:
        if self._trains and self._thread:
            now, spent_s = await asyncio.wrap_future(self._thread.so_far())
            self._ledger.stand(now.steps, Phase(now.part, now.left_s, now.loss, now.tokens_per_s))
            self._ledger.spend(spent_s)
        tally = self._exchange.tally
        self._chronicle.history.sample(tally.sent_bytes, tally.received_bytes, time.time())

    async def _note_figures(self) -> None:
        self._chronicle.note(self.status())

    async def _next_message(self) -> Message:
        message = await self._inbox.get()
        if isinstance(message, Failed):
            self._trains = False
            raise message.error
        return message

    def _follow(self, message: Message) -> None:
        match message:
            case PhaseEnded(done, offer, closed, seconds, spent_s):
                self._ledger.spend(spent_s)
                self._phase_s = seconds
                self._observe(done)
                if self._gave_up and self._state == "training":
                    self._gave_up = False
                    self._let_exchange()
                self._exchange.boundary(done.round, seconds, offer, closed)
            case Evaluated():
                self._observe(message)
            case RolledBack():
                self._observe(message)
                if message.weights_of is not None:  # else the slow weights are what they were, and so are offers
                    self._gave_up = True
                    self._exchange.pause("rolled_back")  # the thread breaks a swap under way

    async def _finish(self) -> None:
        """The work is done: let the last offer find its partner, save, and stay to be looked at for a while."""
        self._waiting_for = "a partner for the last round"
        await self._settled(min(LAST_SWAP_S, self._phase_s))
        self._exchange.stop()
        await self._settled(SETTLE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVALUATION_S):
                self._follow(await self._next_message())
        self._state, self._waiting_for = "finished", None
        if self._saving:
            await self._saving.save_now()
        self._trains = False
        await self._publish_now()
        await asyncio.sleep(self._config.linger)

    async def _settled(self, patience_s: float) -> None:
        """Until no offer is open and no swap under way, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._exchange.settled()

    async def _depart(self) -> None:
        """Leave within LEAVE_S, whatever had been begun. Only the last checkpoint may take longer, for the inner step
        before it to end and the disk to take it: nothing that was trained is lost."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LEAVE_S - TRANSPORT_S
        if self._homecoming:
            self._homecoming.give_up()
        if self._thread:
            self._thread.pause()
        self._exchange.stop()
        await self._settled(SETTLE_S)
        await self._exchange.close()
        async with asyncio.TaskGroup() as last:  # none waits for another's slow disk or dead network
            last.create_task(self._save_the_last())
            last.create_task(self._say_goodbye(until))
            last.create_task(self._chronicle.close())
        if self._thread:
            await asyncio.to_thread(self._thread.stop, max(STOP_S, until - loop.time()))
        await self._allowance.write_down(leaving=True)

    async def _say_goodbye(self, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._neighbours.goodbye()
                await self._neighbours.close()

    # ---- checkpoints ----
    def _saver(self, thread: TrainingThread, layout: bytes) -> CheckpointSchedule[State]:
        def keep(state: State) -> None:
            if self._keeper:
                self._keeper.save(state, layout)

        def failed(why: str) -> None:
            self._last_error = why

        return CheckpointSchedule(thread, keep, failed, self._ledger.round, time.monotonic())

    async def _save_now_and_then(self) -> None:
        if self._saving and self._state == "training":
            self._saving.save_if_due(self._ledger.round, time.monotonic())

    async def _save_the_last(self) -> None:
        if self._saving and self._trains:
            self._waiting_for = "its last checkpoint"
            await self._saving.save_now(leaving=True)
            self._waiting_for = None

    def _say_hello(self, run: Manifest, signed: Signed) -> None:
        self._report(f"{peer_names.name_of(self._identity.peer_id)} ({self._identity.peer_id}) in run {run.label}")
        run_and_author = f" --run {run.run_id} --trust {signed.author}"
        self._tell_how_to_join(self._config.bootstrap or self._transport.addresses(), run_and_author)

    # ---- a newcomer ----
    def _rendezvous(self) -> list[str]:
        peers = [address.rpartition("/p2p/")[2] for address in self._config.bootstrap]
        return [peer for peer in peers if peer != self._identity.peer_id]

    async def _find_run(self) -> Signed:
        config, authors = self._config, TrustedAuthors(self._home.root / "authors.json")
        left = find_run.run(self._home, authors, self._rendezvous(), config.run)
        if left and config.run and config.trust in (None, left.author):
            return left  # its id is its hash: there is nothing to learn

        def choose(known: list[run_registry.KnownRun], rendezvous: str) -> Signed:
            signed = run_registry.choose(known, config.run, config.trust)
            name = verify(signed).name
            ways_in = dict.fromkeys([*self._rendezvous(), rendezvous])
            if authors.meet([*ways_in], name, signed.author, config.trust):
                self._report(
                    f"trusting {signed.author} as the author of {name} from now on: met here for the first time"
                )
            return signed

        signed = await choose_donor.find_run(self._transport.channel, self._rendezvous(), choose, self.waits_for, left)
        if signed is left:
            self._report(f"nobody has announced a run there: going on with {verify(signed).label}, as before")
        return signed

    def _way_home(self, run: Manifest, terms: client.StateTerms, ready: Ready) -> catch_up.CatchUp:
        coding = catch_up.coding(8 * ready.parameters, self._config.max_download)
        wanted = choose_donor.Wanted(terms, 2 * ready.parameters, run.rounds, coding=coding)
        channel, pace = self._transport.channel, self._allowance.traffic
        first = not self._rendezvous()
        return catch_up.CatchUp(self, self._identity.peer_id, channel, wanted, pace, first=first)

    # ---- what coming level with the others needs ----
    @property
    def round(self) -> int:
        return self._ledger.round

    async def look(self) -> Collection[PeerRecord]:
        await self._neighbours.look()
        return self.seen()

    def seen(self) -> Collection[PeerRecord]:
        return self._neighbours.seen.values()

    def waits_for(self, what: str | None) -> None:
        self._waiting_for = what

    def stands_aside(self) -> bool:
        if self._held_back or not (self._trains and self._thread):
            return False
        self._exchange.pause("diverged")
        self._thread.pause()
        self._state = "joining"
        return True

    async def quiet(self) -> bool:
        await self._settled(SETTLE_S)
        return self._exchange.partner is None

    async def adopts(self, state: client.LiveState) -> None:
        if self._thread and self._run:
            before = self._ledger.round
            await asyncio.wrap_future(self._thread.adopt(state.round, state.data))
            self._ledger.round = state.round
            if self._target:
                self._target = min(self._run.rounds, self._target + max(0, state.round - before))

    def goes_on(self) -> None:
        self._let_exchange()
        if self._thread:
            self._thread.resume()
        if self._state in ("paused", "joining"):
            self._state, self._waiting_for = "training", None

    def _let_exchange(self) -> None:
        """Go on, as far as the volunteer's limits allow."""
        if self._held_back:
            self._exchange.pause(self._held_back)
        else:
            self._exchange.resume()

    async def gather(self, peers: int) -> AsyncGenerator[GatherView, None]:
        ready, run, ledger = self._ready, self._run, self._ledger
        if not (ready and run and self._thread and self._state in ("training", "paused", "finished")):
            yield GatherView(failure="this node has no weights of the run yet: try again when it trains")
            return
        with suppress(NolocoError, OSError):  # while p2pd is down, whoever was seen last is asked
            await self._neighbours.look()
        terms = client.StateTerms(bytes.fromhex(run.run_id), ready.layout)
        own = OwnState(self._identity.peer_id, terms, ready.parameters, ledger.round, ledger.step, run.rounds)
        async with aclosing(self._gatherer.gather(own, self._thread, self.seen(), peers)) as views:
            async for view in views:
                yield view

    # ---- presence ----
    def _standing(self, run: Manifest) -> Presence:
        ledger = self._ledger
        return Presence(
            state=self._standing_state(),
            round=ledger.round,
            step=ledger.step,
            progress=min(1.0, ledger.round / run.rounds),
            loss=ledger.loss or 0.0,
            tokens_per_s=ledger.tokens_per_s or 0.0,
            tokens=ledger.tokens,
            addresses=tuple(self._transport.addresses()[:MAX_ADDRESSES]),
            eval_loss=ledger.eval_loss or 0.0,
            partner=ledger.last_round.partner if ledger.last_round else "",
            committed=ledger.committed,
        )

    async def _publish(self) -> None:
        if self._run:
            await self._neighbours.publish(self._standing(self._run))

    async def _publish_now(self) -> None:
        """If it cannot be, a duty will do it before long."""
        with suppress(NolocoError, OSError):
            await self._publish()

    async def _rejoin(self) -> None:
        self._exchange.candidates(frozenset())  # who could not be called over the dead p2pd is none to be shy of
        await self._neighbours.rejoin()
        await self._publish()
        await self._neighbours.look()  # now, and not when the duty that failed meanwhile tries again

    def _meet_candidates(self) -> None:
        """Who trains is a candidate."""
        training = [record for record in self.seen() if record.state == "training"]
        self._exchange.candidates(frozenset(record.peer_id for record in training))
        self._chronicle.history.seen(training)

    def _standing_state(self) -> str:
        """As others see it: who has used up the day's quota trains, but is nobody to call."""
        return "solo" if self._state == "training" and self._held_back == QUOTA else self._state

    # ---- what its volunteer allows ----
    def pause(self) -> None:
        self._allowance.pause()
        self._keep_limits()

    def resume(self) -> None:
        self._allowance.resume()
        self._keep_limits()

    async def _mind_limits(self) -> None:
        self._keep_limits()
        if self._neighbours.published != self._standing_state():
            await self._publish()
        await self._allowance.write_down()

    def _keep_limits(self) -> None:
        """Hold back, or go on, as the volunteer's limits say now."""
        why, before = self._allowance.held_back(), self._held_back
        if why == before or not (self._trains and self._thread):
            return
        self._held_back = why
        log.info("%s", f"holding back: {why}" if why else "going on")
        if self._homecoming:
            self._homecoming.give_up()
        if why == PAUSED:
            self._exchange.pause(why)
            self._thread.pause()
            self._state, self._waiting_for = "paused", self._allowance.pause_ends()
        elif before == PAUSED and why is None and self._homecoming and self._homecoming.after_pause():
            self._state = "joining"
        else:
            self.goes_on()

    def _withholds_state(self, promised_bytes: int) -> bool:
        """A pause does not: whoever joins while everybody pauses would begin from nothing."""
        return not self._allowance.room_to_send(promised_bytes + (8 * self._ready.parameters if self._ready else 0))

    # ---- what the exchange tells ----
    def swapping(self, under_way: bool) -> None:
        if self._thread:
            self._thread.swapping(under_way)

    def round_over(self, round: int) -> None:
        if self._thread:
            self._thread.round_over(round)

    def _observe(self, event: Event) -> None:
        self._chronicle.observe(event)
        match event:
            case RoundCommitted(_, partner):
                self._round_ended(None, partner)
            case WentSolo(_, reason, partner):
                self._round_ended(reason, partner)
            case RolledBack():
                self._last_error = told(event)
            case _:
                pass

    def _round_ended(self, solo: str | None, partner: str | None) -> None:
        if self._homecoming:
            self._homecoming.round_over(solo, partner)

    # ---- views ----
    def status(self) -> StatusView:
        run, ready, tally = self._run, self._ready, self._exchange.tally
        parameters = ready.parameters if ready else None
        figures = self._ledger.figures()
        if self._exchange.partner:
            figures["partner"] = self._exchange.partner
        return StatusView(
            **self._common_status(),
            **figures,
            run_id=run.run_id if run else None,
            run=run.label if run else None,
            rounds_target=self._target,
            device=ready.device if ready else None,
            parameters=parameters,
            bytes=BytesView(
                tally.sent_bytes,
                tally.received_bytes,
                self._ledger.per_param_round(parameters, tally.sent_bytes - tally.unsettled_bytes),
            ),
            calls=tally.calls,
            one_sided_fragments=tally.one_sided,
            peers_seen=len(self.seen()),
            peers_by_state=Counter(record.state for record in self.seen()),
            today=self._allowance.today(),
            checkpoint=self._keeper.view(parameters) if self._keeper and parameters else None,
            health=(*self._health(), *self._allowance.health(self._ledger.swaps_fit), *self._disk()),
        )

    def _disk(self) -> tuple[Health, ...]:
        return self._keeper.health(self._ready.parameters) if self._keeper and self._ready else ()

    def peers(self) -> PeersView:
        now, via, together = time.time(), self._transport.via, self._ledger.together
        living = rows.living(self.seen(), now)
        return PeersView(tuple(rows.row(r, self.round, now, via(r.peer_id), **together(r.peer_id)) for r in living))

    def history(self) -> HistoryView:
        return self._chronicle.history.view(self._lines.last())
