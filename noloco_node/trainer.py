"""A node that trains: builds its parts, connects them, and runs them until it is told to leave or its work is done.

It has no maths, no byte layouts and no retries of its own: here events go from one part to the next, and here stands
the order of starting and stopping.

    start:  transport -> which run? -> model and optimizers (training thread) -> presence -> a peer's state -> training
    leave:  no more calls, a swap under way may end -> training stops -> checkpoint -> goodbye -> transport
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from noloco_node import checkpoint, names, newcomer, runfile, runs, service, statesync
from noloco_node.acquaintance import Acquaintances
from noloco_node.allowance import Allowance
from noloco_node.config import NodeConfig
from noloco_node.control.views import Health, PeerRow, PeersView, StatusView, Traffic
from noloco_node.core.codec import codec, rehearse
from noloco_node.donor import StateService
from noloco_node.errors import NolocoError
from noloco_node.events import Evaluated, Event, PeerFaulted, RolledBack, RoundCommitted, WentSolo
from noloco_node.exchange import Exchange, Terms
from noloco_node.journal import Journal
from noloco_node.keeper import Keeper
from noloco_node.ledger import Ledger
from noloco_node.limits import PAUSED, QUOTA
from noloco_node.manifest import Manifest, Signed, verify
from noloco_node.peercache import PeerCache
from noloco_node.presence import MAX_ADDRESSES, PeerRecord, Standing
from noloco_node.resident import Report, Resident
from noloco_node.swarm import Swarm
from noloco_node.training.inner import Inner
from noloco_node.training.sources import Sources
from noloco_node.training.sources import check as check_sources
from noloco_node.training.thread import Failed, Finished, Message, PhaseEnded, Ready, TrainingThread
from noloco_node.wire.livestate import Coding
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
FRIENDS_S, FRIENDS_ANSWER_S, FRIENDS = 20.0, 5.0, 4
"""How often some of the peers that were there once are looked up, how long they have to answer, and how many."""
SETTLE_S = 3.0
"""For a swap under way when the node leaves; what is applied by then stays."""
LIMITS_S = 1.0
"""How often the clock and the day's quota are looked at."""
TIME_S = 1.0
"""How often the training thread is asked where its time goes."""
LAST_EVALUATION_S = 30.0
LAST_SWAP_S = 30.0
"""For the last round's offer to find a partner when the work is done."""
STATE_S = 5.0
"""For the training thread to come to the end of an inner step and copy its state."""
CATCH_UP_ROUNDS = 10
"""A node that is so far behind, after a restart or a pause, takes a peer's state instead of its own."""
DIVERGED_ROUNDS = 3
TRAINING = ("training", "solo")
"""What those are called in presence who train, with partners or on their own for the day."""
LONG_DOWNLOAD_S = 1800.0
"""For a state at the rate that a volunteer allows: beyond it, the state is fetched in bf16."""
CHECKPOINT_ROUNDS = 10
"""A kill costs at most so many rounds of this node; the swarm loses nothing."""


class Trainer(Resident):
    """Trains, and exchanges with one peer a round."""

    def __init__(self, config: NodeConfig, report: Report, signed: Signed | None) -> None:
        super().__init__(config, report)
        self._signed = signed
        self._boot = secrets.token_bytes(16)
        self._sources = Sources(config.data, config.tokenizer, self._home.data)
        self._known_runs = runs.Runs()
        self._ledger = Ledger()
        self._allowance = Allowance(config, self._home, lambda: self._ledger.last_round)
        traffic = self._allowance.traffic
        self._exchange = Exchange(self._transport, self._boot, random.Random(), self, self._observe, pace=traffic)
        self._states = StateService(self._transport, lambda: self._ledger.round, traffic, self._withholds_state)
        for add in (
            lambda server: add_RunsServicer_to_server(self._known_runs, server),
            lambda server: add_ExchangeServicer_to_server(self._exchange, server),
            lambda server: add_StateServicer_to_server(self._states, server),
        ):
            self._transport.serve(add)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._run: Manifest | None = None
        self._journal: Journal | None = None
        self._swarm: Swarm | None = None
        self._thread: TrainingThread | None = None
        self._keeper: Keeper | None = None
        self._ready: Ready | None = None
        self._seen: dict[str, PeerRecord] = {}
        self._trains = False
        self._target: int | None = None
        """The round at which this node stops."""
        self._phase_s = 0.0
        self._saving: asyncio.Task[None] | None = None
        self._held_back: str | None = None
        """PAUSED or QUOTA, as it was last told to the training and the exchange."""
        self._returning: asyncio.Task[None] | None = None
        self._published: str | None = None
        self._friends = PeerCache(self._home.root / "peers.json")
        self._apart = 0
        """Rounds that ended as diverged since one was committed."""

    # ---- its life ----
    async def _live(self) -> None:
        signed = self._signed or await self._find_run()
        run = self._run = verify(signed)
        check_sources(run.data, self._sources)
        self._known_runs.add(signed)
        runfile.keep(self._home.run(run.run_id), signed)
        self._journal = Journal(self._home.run(run.run_id) / "events.jsonl")
        self._thread = self._start_training(run)
        p2p, bootstrap = self._transport.p2p, self._config.bootstrap
        carries = self._transport.can_be_called
        swarm = self._swarm = Swarm(p2p, bootstrap, self._identity, run.run_id, boot=self._boot, carries=carries)
        await swarm.start()
        await self._look_up_friends(swarm)
        self._say_hello(run, signed)
        async with asyncio.TaskGroup() as group:
            duties = [group.create_task(duty) for duty in self._duties(signed, swarm)]
            await self._train(run, self._thread)
            for duty in duties:
                duty.cancel()

    def _start_training(self, run: Manifest) -> TrainingThread:
        loop = asyncio.get_running_loop()
        config, peer_id = self._config, self._identity.peer_id

        def post(message: Message) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, message)

        keeper = self._keeper = Keeper(self._home.run(run.run_id) / "checkpoints", run.run_id)

        def build() -> Inner:
            fraction = config.gpu_memory_fraction
            inner = Inner.build(
                run,
                peer_id,
                device=config.device,
                threads=config.threads,
                memory_fraction=fraction,
                micro_batch=config.micro_batch,
                compiled=config.compile,
                sources=self._sources,
            )
            found = keeper.resume(inner.layout)
            rehearse(run.outer.codec)
            if found:
                inner.load(found)
                log.info("going on from the checkpoint of round %d", inner.round)
            return inner

        def last_good() -> checkpoint.Checkpoint | None:
            return keeper.last_good(self._ready.layout if self._ready else b"")

        thread = TrainingThread(
            build,
            codec(run.outer.codec),
            post,
            rounds=run.rounds,
            blocking=run.outer.overlap == "blocking",
            last_good=last_good,
        )
        thread.start()
        return thread

    def _duties(self, signed: Signed, swarm: Swarm) -> list[Coroutine[Any, Any, None]]:
        async def announce() -> None:
            await runs.announce([self._transport.channel(peer) for peer in self._rendezvous()], signed)

        def look_again_s() -> float:
            return LOOK_S if self._seen else LOOK_ALONE_S

        return [
            self._keep_network(),
            service.every(lambda: ANNOUNCE_S, announce, (NolocoError,)),
            service.every(lambda: swarm.refresh_s, self._publish, (NolocoError, OSError)),
            service.every(look_again_s, self._look, (NolocoError, OSError)),
            service.every(lambda: FRIENDS_S, self._keep_friends, (NolocoError, OSError)),
            service.every(lambda: LIMITS_S, self._mind_limits, (NolocoError, OSError)),
            service.every(lambda: TIME_S, self._take_time, (NolocoError,)),
        ]

    async def _train(self, run: Manifest, thread: TrainingThread) -> None:
        self._waiting_for = "data and model to be ready"
        ready = await self._next_message()
        if not isinstance(ready, Ready):
            raise RuntimeError(f"the training thread began with {type(ready).__name__}")
        self._ready, self._ledger.round = ready, ready.round
        if self._keeper:
            log.info("%s", self._keeper.room(ready.parameters))
        terms = statesync.Terms(bytes.fromhex(run.run_id), ready.layout)
        await self._catch_up(terms, ready, thread, self._ahead)
        swaps = run.outer.swaps_per_round
        self._exchange.begin(Terms(terms.run_id, ready.layout, ready.fragments), None if swaps == "auto" else swaps)
        self._states.begin(terms, thread)
        self._state, self._waiting_for = "training", None
        self._trains = True
        began_at, own = self._ledger.round, self._config.rounds
        self._target = run.rounds if own is None else min(run.rounds, began_at + own)
        self._keep_limits()
        thread.begin(own)
        await self._publish()
        while not isinstance(message := await self._next_message(), Finished):
            self._follow(message)
        await self._finish()

    async def _take_time(self) -> None:
        if self._trains and self._thread:
            self._ledger.spend(await asyncio.wrap_future(self._thread.spent_s()))

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
                self._exchange.boundary(done.round, seconds, offer, closed)
                if done.round % CHECKPOINT_ROUNDS == 0 and (self._saving is None or self._saving.done()):
                    self._saving = asyncio.create_task(self._save())
            case Evaluated() | RolledBack():
                self._observe(message)

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
            await asyncio.wait({self._saving})  # two at a time would take each other's files for left-overs
        await self._save()
        self._trains = False
        await self._publish()
        await asyncio.sleep(self._config.linger_s)

    async def _settled(self, patience_s: float) -> None:
        """Until no offer is open and no swap under way, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._exchange.settled()

    async def _depart(self) -> None:
        """Leave within 10 s, whatever had been begun; nothing that was trained is lost."""
        if self._returning:
            self._returning.cancel()
        self._exchange.stop()
        await self._settled(SETTLE_S)
        await self._exchange.close()
        if self._saving:
            await asyncio.wait({self._saving})
        async with asyncio.TaskGroup() as last:  # neither waits for the other's slow disk or dead network
            if self._trains:
                last.create_task(self._save())
            if self._swarm:
                last.create_task(self._swarm.goodbye())
        if self._swarm:
            await self._swarm.close()
        if self._thread:
            await asyncio.to_thread(self._thread.stop)
        if self._journal:
            self._journal.close()
        with suppress(OSError):
            self._allowance.write_down()

    async def _save(self) -> None:
        """Write a checkpoint; a disk that is full costs the checkpoint, never what is trained."""
        if not (self._keeper and self._ready and self._thread):
            return
        try:
            async with asyncio.timeout(STATE_S):
                state = await asyncio.wrap_future(self._thread.state())
            await asyncio.to_thread(self._keeper.save, state, self._ready.layout)
        except (TimeoutError, NolocoError) as error:
            self._last_error = str(error) or "the training thread did not give its state in time for a checkpoint"
            log.warning("no checkpoint: %s", self._last_error)

    def _say_hello(self, run: Manifest, signed: Signed) -> None:
        self._report(f"{names.name_of(self._identity.peer_id)} ({self._identity.peer_id}) in run {run.label}")
        for address in self._config.bootstrap or self._transport.addresses():
            line = f"noloco-node join --bootstrap {address} --run {run.run_id} --trust {signed.author}"
            self._report(f"others join with: {line}")

    # ---- a newcomer ----
    def _rendezvous(self) -> list[str]:
        peers = [address.rpartition("/p2p/")[2] for address in self._config.bootstrap]
        return [peer for peer in peers if peer != self._identity.peer_id]

    async def _find_run(self) -> Signed:
        config, authors = self._config, Acquaintances(self._home.root / "authors.json")

        def choose(known: list[Signed], rendezvous: str) -> Signed:
            signed = runs.choose(known, config.run, config.trust)
            name = verify(signed).name
            if authors.meet(rendezvous, name, signed.author, config.trust):
                self._report(
                    f"trusting {signed.author} as the author of {name} from now on: met here for the first time"
                )
            return signed

        return await newcomer.find_run(self._transport.channel, self._rendezvous(), choose, self._wait_for)

    async def _catch_up(
        self, terms: statesync.Terms, ready: Ready, thread: TrainingThread, worth: Callable[[int], list[str]]
    ) -> None:
        own = self._ledger.round
        if self._run is None or (own and self._allowance.held_back()):
            return  # what it has costs nothing

        async def donors() -> list[str]:
            await self._look()
            return worth(own)

        self._state = "joining"
        state = await newcomer.take_state(
            self._transport.channel,
            donors,
            newcomer.Wanted(terms, 2 * ready.parameters, self._run.rounds, own, self._coding(8 * ready.parameters)),
            self._wait_for,
            pace=self._allowance.traffic,
        )
        if state is not None:
            await asyncio.wrap_future(thread.adopt(state.round, state.data))
            self._ledger.round = state.round
            if self._target:
                self._target = min(self._run.rounds, self._target + max(0, state.round - own))

    def _ahead(self, own: int) -> list[str]:
        """Whose state is worth more than that of `own` rounds, which is worth more than a few rounds. A newcomer asks
        everybody: the round in a record may be 20 s old, and the state itself says how far it is."""
        least = own + CATCH_UP_ROUNDS if own else 0
        found = [record for record in self._seen.values() if record.round >= least]
        training = [record.peer_id for record in found if record.state in TRAINING]
        return training or [record.peer_id for record in found if record.state == "paused"]

    def _coding(self, state_bytes: int) -> Coding:
        """Half the bytes where the volunteer's rate would make all of them a long wait: what rounding changes is far
        less than what the replicas differ by."""
        rate = self._config.max_download
        return Coding.BF16 if rate and state_bytes / rate > LONG_DOWNLOAD_S else Coding.FP32

    def _wait_for(self, what: str | None) -> None:
        self._waiting_for = what

    # ---- presence ----
    def _standing(self, run: Manifest) -> Standing:
        ledger = self._ledger
        return Standing(
            state=self._standing_state(),
            round=ledger.round,
            step=ledger.step,
            progress=min(1.0, ledger.round / run.rounds),
            loss=ledger.loss or 0.0,
            tokens_per_s=ledger.tokens_per_s or 0.0,
            tokens=ledger.tokens,
            addresses=tuple(self._transport.addresses()[:MAX_ADDRESSES]),
        )

    async def _publish(self) -> None:
        if self._swarm and self._run:
            self._published = self._standing_state()
            await self._swarm.publish(self._standing(self._run))

    async def _rejoin(self) -> None:
        if self._swarm:
            await self._swarm.rejoin(self._transport.p2p)
            await self._publish()
            await self._look()  # now, and not when the duty that failed meanwhile tries again

    async def _keep_friends(self) -> None:
        if self._swarm:
            await self._look_up_friends(self._swarm)
            self._friends.keep(self._seen.values())

    async def _look_up_friends(self, swarm: Swarm) -> None:
        """Some who were there once and are out of sight: all others may be gone, or live on an island of their own."""
        known = self._friends.peers()
        absent = [peer for peer in known if peer not in self._seen and peer != self._identity.peer_id]
        chosen = random.sample(absent, min(FRIENDS, len(absent)))
        self._transport.introduce({peer: known[peer] for peer in chosen})
        calls = {peer: asyncio.create_task(runs.ask(self._transport.channel(peer))) for peer in chosen}
        if calls:
            await asyncio.wait(calls.values(), timeout=FRIENDS_ANSWER_S)
        there = [peer for peer, call in calls.items() if call.done() and call.exception() is None]
        for call in calls.values():
            call.cancel()
        if there:
            await swarm.meet(there)

    async def _look(self) -> None:
        """Read who is there; who trains is a candidate."""
        if self._swarm:
            self._seen = await self._swarm.peers()
            self._transport.introduce({peer: record.addresses for peer, record in self._seen.items()})
            training = {peer for peer, record in self._seen.items() if record.state == "training"}
            self._exchange.candidates(frozenset(training))

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
        if self._published != self._standing_state():
            await self._publish()
        self._allowance.write_down()

    def _keep_limits(self) -> None:
        """Hold back, or go on, as the volunteer's limits say now."""
        why, before = self._allowance.held_back(), self._held_back
        if why == before or not (self._trains and self._thread):
            return
        self._held_back = why
        log.info("%s", f"holding back: {why}" if why else "going on")
        if self._returning:
            self._returning.cancel()
            self._returning = None
        if why == PAUSED:
            self._exchange.pause(why)
            self._thread.pause()
            self._state, self._waiting_for = "paused", self._allowance.pause_ends()
        elif before == PAUSED and self._run and self._ready and self._ahead(self._ledger.round or 1):
            self._returning = asyncio.create_task(self._return(self._run, self._ready, self._thread, self._ahead))
        else:
            self._go_on(self._thread)

    def _go_on(self, thread: TrainingThread) -> None:
        if self._held_back:
            self._exchange.pause(self._held_back)
        else:
            self._exchange.resume()
        thread.resume()
        if self._state in ("paused", "joining"):
            self._state, self._waiting_for = "training", None

    async def _return(
        self, run: Manifest, ready: Ready, thread: TrainingThread, worth: Callable[[int], list[str]]
    ) -> None:
        """From a pause in which the others went far ahead, or from standing apart. A swap that was under way changes
        what would be replaced."""
        await self._settled(SETTLE_S)
        try:
            if self._exchange.partner is None:
                await self._catch_up(statesync.Terms(bytes.fromhex(run.run_id), ready.layout), ready, thread, worth)
        except (NolocoError, OSError) as error:
            log.warning("going on from where it paused: %s", error)
        self._returning = None
        self._go_on(thread)

    def _count_divergence(self, reason: str) -> None:
        """Who stands apart round after round takes the state of a peer."""
        self._apart += reason == "diverged"
        if self._apart < DIVERGED_ROUNDS or self._returning or self._held_back:
            return
        if self._trains and self._run and self._ready and self._thread:
            log.warning("standing apart from the others: taking the state of one of them")
            self._apart = 0
            self._exchange.pause("diverged")
            self._thread.pause()
            self._returning = asyncio.create_task(self._return(self._run, self._ready, self._thread, self._not_behind))

    def _not_behind(self, own: int) -> list[str]:
        """Of two that stand apart from each other, only one turns to the other."""
        me = (own, self._identity.peer_id)
        found = [record for record in self._seen.values() if record.state in TRAINING]
        return [record.peer_id for record in found if (record.round, record.peer_id) > me]

    def _withholds_state(self) -> bool:
        """A pause does not: whoever joins while everybody pauses would begin from nothing."""
        return not self._allowance.room_to_send(8 * self._ready.parameters if self._ready else 0)

    # ---- what the exchange tells ----
    def swapping(self, under_way: bool) -> None:
        if self._thread:
            self._thread.swapping(under_way)

    def round_over(self, round: int) -> None:
        if self._thread:
            self._thread.round_over(round)

    def _observe(self, event: Event) -> None:
        self._ledger.observe(event)
        if self._journal:
            self._journal.write(event)
        match event:
            case RoundCommitted(round, partner, seconds, sent):
                self._apart = 0
                name = names.name_of(partner)
                log.info(
                    "round %d with %s: loss %s, %.1f s, %.2f MB out", round, name, self._loss(), seconds, sent / 1e6
                )
            case WentSolo(round, reason):
                log.info("round %d solo (%s): loss %s", round, reason.replace("_", " "), self._loss())
                self._count_divergence(reason)
            case RolledBack(_, weights_of, reason):
                whose = (
                    "of this round's beginning" if weights_of is None else f"of the checkpoint of round {weights_of}"
                )
                self._last_error = f"{reason}: the weights are those {whose} again"
                log.warning("%s", self._last_error)
            case PeerFaulted(peer, reason):
                log.warning("%s broke the protocol: %s", names.name_of(peer), reason)
            case _:
                pass

    def _loss(self) -> str:
        return "-" if self._ledger.loss is None else f"{self._ledger.loss:.3f}"

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
            bytes=Traffic(tally.sent_bytes, tally.received_bytes, self._ledger.per_param_round(parameters)),
            calls=tally.calls,
            peers_seen=len(self._seen),
            today=self._allowance.today(),
            checkpoint=self._keeper.view(parameters) if self._keeper and parameters else None,
            health=(*self._health(), *self._allowance.health(self._ledger.swaps_fit), *self._disk()),
        )

    def _disk(self) -> tuple[Health, ...]:
        return self._keeper.health(self._ready.parameters) if self._keeper and self._ready else ()

    def peers(self) -> PeersView:
        now = time.time()
        alive = [record for record in self._seen.values() if record.expires > now]
        return PeersView(tuple(self._row(record, now) for record in alive))

    def _row(self, record: PeerRecord, now: float) -> PeerRow:
        return PeerRow(
            peer_id=record.peer_id,
            name=names.name_of(record.peer_id),
            state=record.state,
            round=record.round,
            lag=self._ledger.round - record.round,
            via=self._transport.via(record.peer_id),
            tokens_per_s=record.tokens_per_s,
            loss=record.loss,
            last_seen_s=max(0.0, now - record.time),
            **self._ledger.together(record.peer_id),
        )
