"""One node: builds every part, connects them, and runs them until it is told to leave or its work is done.

The only place that knows all the parts. It has no maths, no byte layouts and no retries of its own: here events go from
one part to the next, and here stands the order of starting and stopping.

    start:  transport -> which run? -> model and optimizers (training thread) -> presence -> a peer's state -> training
    leave:  no more calls, a swap under way may end -> training stops -> checkpoint -> goodbye -> transport
"""

import asyncio
import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from noloco_node import mission as missions
from noloco_node import names, runs, service, statesync
from noloco_node.acquaintance import Acquaintances
from noloco_node.config import NodeConfig
from noloco_node.control.api import serving
from noloco_node.control.views import PeerRow, PeersView, StatusView, Traffic
from noloco_node.core.codec import codec
from noloco_node.errors import EXIT_INTERRUPTED, Incompatible, NolocoError, PeerFault, SwarmUnreachable
from noloco_node.events import Evaluated, Event, PeerFaulted, RoundCommitted, WentSolo
from noloco_node.exchange import Exchange, Terms
from noloco_node.home import Home
from noloco_node.identity import Identity
from noloco_node.journal import Journal
from noloco_node.ledger import Ledger, WithPeer
from noloco_node.manifest import Manifest, Signed, verify
from noloco_node.swarm import MAX_ADDRESSES, PeerRecord, Standing, Swarm
from noloco_node.training.inner import Inner
from noloco_node.training.thread import Failed, Finished, Message, PhaseEnded, Ready, TrainingThread
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.version import VERSION
from noloco_node.wire.peer_pb2_grpc import (
    add_ExchangeServicer_to_server,
    add_RunsServicer_to_server,
    add_StateServicer_to_server,
)

log = logging.getLogger(__name__)

Report = Callable[[str], None]

ANNOUNCE_S = 60.0
"""A rendezvous that was restarted knows the run again after so long."""
FIND_RUN_S = 60.0
"""For a rendezvous to learn of a run: its first node may be starting at this moment."""
LOOK_S, LOOK_ALONE_S = 5.0, 1.0
"""How often the DHT is read for candidates; more often while there are none."""
SETTLE_S = 3.0
"""For a swap under way when the node leaves; what it applied by then stays."""
LAST_SWAP_S = 30.0
"""For the last round's offer to find a partner when the work is done."""
STATE_S = 300.0
"""For a newcomer to find a peer that gives its state."""


async def run(config: NodeConfig, mission: missions.Mission, report: Report) -> int:
    """Be a node. Returns the exit code; raises NolocoError for what a user should read."""
    node: _Node
    match mission:
        case missions.Rendezvous():
            node = Rendezvous(config, report)
        case missions.Start(signed):
            node = Trainer(config, report, signed)
        case missions.Join():
            node = Trainer(config, report, None)
    with _signals(node.leave):
        await node.run()
    return 0


class _Node:
    """What every node has: an identity, a transport, the runs it knows, and a control socket that shows them."""

    def __init__(self, config: NodeConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._home = Home(config.home)
        self._identity = Identity.load_or_create(self._home.identity)
        self._transport = Libp2pTransport(self._identity, config.listen, config.announce, config.bootstrap)
        self._started = time.monotonic()
        self._leaving = asyncio.Event()
        self._state = "starting"
        self._waiting_for: str | None = "the network daemon"
        self._last_error: str | None = None

    async def run(self) -> None:
        async with serving(self._home, self):
            try:
                await self._transport.start()
                await self._unless_leaving(self._live())
            finally:
                self._state, self._waiting_for = "leaving", None
                await self._depart()
                await self._transport.close()

    def leave(self) -> None:
        self._leaving.set()

    def status(self) -> StatusView:
        return StatusView(**self._common_status())

    def peers(self) -> PeersView:
        return PeersView()

    async def _live(self) -> None:
        raise NotImplementedError

    async def _depart(self) -> None:
        raise NotImplementedError

    async def _unless_leaving(self, life: Coroutine[Any, Any, None]) -> None:
        """Run `life` until it ends, or until this node is told to leave."""
        living = asyncio.create_task(life)
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            ended = living.done()
            living.cancel()
            await asyncio.wait({living})
        if ended:
            try:
                living.result()
            except BaseExceptionGroup as group:
                raise _first(group) from group

    async def _watch_transport(self) -> None:
        raise NolocoError(f"the network is gone: {await self._transport.lost()}; start the node again")

    def _common_status(self) -> dict[str, Any]:
        return {
            "peer_id": self._identity.peer_id,
            "name": names.name_of(self._identity.peer_id),
            "version": VERSION,
            "state": self._state,
            "waiting_for": self._waiting_for,
            "uptime_s": time.monotonic() - self._started,
            "addresses": tuple(self._transport.addresses()),
            "last_error": self._last_error,
        }


class Rendezvous(_Node):
    """Others find each other, and their run, through it."""

    def __init__(self, config: NodeConfig, report: Report) -> None:
        super().__init__(config, report)
        self._runs = runs.Runs(keeps_announced=True)
        self._transport.serve(lambda server: add_RunsServicer_to_server(self._runs, server))
        self._swarm: Swarm | None = None

    async def _live(self) -> None:
        self._waiting_for = "the directory of peers"
        self._swarm = Swarm(self._transport.p2p, self._config.bootstrap)
        await self._swarm.start()
        self._state, self._waiting_for = "rendezvous", None
        for address in self._transport.addresses():
            self._report(f"others join with: noloco-node join --bootstrap {address}")
        await self._watch_transport()

    async def _depart(self) -> None:
        if self._swarm:
            await self._swarm.close()


class Trainer(_Node):
    """Trains, and exchanges with one peer a round."""

    def __init__(self, config: NodeConfig, report: Report, signed: Signed | None) -> None:
        super().__init__(config, report)
        self._signed = signed
        self._boot = secrets.token_bytes(16)
        self._known_runs = runs.Runs()
        self._exchange = Exchange(self._transport, self._boot, random.Random(), self, self._observe)
        self._states = statesync.StateService(self._transport)
        for add in (
            lambda server: add_RunsServicer_to_server(self._known_runs, server),
            lambda server: add_ExchangeServicer_to_server(self._exchange, server),
            lambda server: add_StateServicer_to_server(self._states, server),
        ):
            self._transport.serve(add)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._ledger = Ledger()
        self._run: Manifest | None = None
        self._journal: Journal | None = None
        self._swarm: Swarm | None = None
        self._thread: TrainingThread | None = None
        self._ready: Ready | None = None
        self._seen: dict[str, PeerRecord] = {}
        self._spent_s: Mapping[str, float] = {}
        self._training_since: float | None = None

    # ---- its life ----
    async def _live(self) -> None:
        signed = self._signed or await self._find_run()
        run = self._run = verify(signed)
        self._known_runs.add(signed)
        self._journal = Journal(self._home.run(run.run_id) / "events.jsonl")
        self._thread = self._start_training(run)
        p2p, bootstrap = self._transport.p2p, self._config.bootstrap
        swarm = self._swarm = Swarm(p2p, bootstrap, self._identity, run.run_id, boot=self._boot)
        await swarm.start()
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

        def build() -> Inner:
            return Inner.build(run, peer_id, device=config.device, threads=config.threads)

        thread = TrainingThread(
            build,
            codec(run.outer.codec),
            post,
            rounds=min(run.rounds, config.rounds or run.rounds),
            blocking=run.outer.overlap == "blocking",
        )
        thread.start()
        return thread

    def _duties(self, signed: Signed, swarm: Swarm) -> list[Coroutine[Any, Any, None]]:
        async def announce() -> None:
            await runs.announce([self._transport.channel(peer) for peer in self._rendezvous()], signed)

        def look_again_s() -> float:
            return LOOK_S if self._seen else LOOK_ALONE_S

        return [
            self._watch_transport(),
            service.every(lambda: ANNOUNCE_S, announce, (NolocoError,)),
            service.every(lambda: swarm.refresh_s, self._publish, (NolocoError, OSError)),
            service.every(look_again_s, self._look, (NolocoError, OSError)),
        ]

    async def _train(self, run: Manifest, thread: TrainingThread) -> None:
        self._waiting_for = "the model to be built"
        ready = await self._next_message()
        if not isinstance(ready, Ready):
            raise RuntimeError(f"the training thread began with {type(ready).__name__}")
        self._ready, self._ledger.round = ready, ready.round
        terms = statesync.Terms(bytes.fromhex(run.run_id), ready.layout)
        if ready.round == 0:
            await self._catch_up(terms, ready, thread)
        self._exchange.begin(Terms(terms.run_id, ready.layout, ready.fragments))
        self._states.begin(terms, thread)
        self._state, self._waiting_for = "training", None
        self._training_since = time.monotonic()
        thread.begin()
        await self._publish()
        while not isinstance(message := await self._next_message(), Finished):
            self._follow(message)
        await self._finish(run, thread)

    async def _next_message(self) -> Message:
        message = await self._inbox.get()
        if isinstance(message, Failed):
            raise message.error
        return message

    def _follow(self, message: Message) -> None:
        match message:
            case PhaseEnded(done, offer, closed, seconds, spent_s):
                self._spent_s = spent_s
                self._observe(done)
                self._exchange.boundary(done.round, seconds, offer, closed)
            case Evaluated():
                self._observe(message)

    async def _finish(self, run: Manifest, thread: TrainingThread) -> None:
        """The work is done: let the last offer find its partner, save, and stay to be looked at for a while."""
        self._waiting_for = "a partner for the last round"
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SWAP_S):
                await self._exchange.settled()
        self._state, self._waiting_for = "finished", None
        await self._save(run, thread)
        await self._publish()
        await asyncio.sleep(self._config.linger_s)

    async def _depart(self) -> None:
        """Leave within 10 s, whatever had been begun; nothing that was trained is lost."""
        self._exchange.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._exchange.settled()
        await self._exchange.close()
        if self._thread and self._run and self._training_since is not None and self._state != "failed":
            await self._save(self._run, self._thread)
        if self._swarm:
            await self._swarm.goodbye()
            await self._swarm.close()
        if self._thread:
            await asyncio.to_thread(self._thread.stop)
        if self._journal:
            self._journal.close()

    async def _save(self, run: Manifest, thread: TrainingThread) -> None:
        pass

    # ---- a newcomer ----
    def _rendezvous(self) -> list[str]:
        peers = [address.rpartition("/p2p/")[2] for address in self._config.bootstrap]
        return [peer for peer in peers if peer != self._identity.peer_id]

    async def _find_run(self) -> Signed:
        """Ask the rendezvous which run there is; one whose first node is just starting is waited for."""
        self._waiting_for = "a run to be announced"
        failure: NolocoError = SwarmUnreachable("no bootstrap node answers: check the addresses, or try again later")
        deadline = time.monotonic() + FIND_RUN_S
        while time.monotonic() < deadline:
            for peer in self._rendezvous():
                try:
                    known = await runs.ask(self._transport.channel(peer))
                except PeerFault as fault:
                    log.debug("%s does not say what it runs: %s", peer, fault)
                    continue
                failure = Incompatible("no run is announced there: has its first node been started, with --bootstrap?")
                if known:
                    return self._choose(known, peer)
            await asyncio.sleep(1.0)
        raise failure

    def _choose(self, known: list[Signed], rendezvous: str) -> Signed:
        signed = runs.choose(known, self._config.run, self._config.trust)
        name = verify(signed).name
        acquaintances = Acquaintances(self._home.root / "authors.json")
        if acquaintances.meet(rendezvous, name, signed.author, self._config.trust):
            self._report(f"trusting {signed.author} as the author of {name} from now on: met here for the first time")
        return signed

    def _say_hello(self, run: Manifest, signed: Signed) -> None:
        self._report(f"{names.name_of(self._identity.peer_id)} ({self._identity.peer_id}) in run {run.label}")
        for address in self._config.bootstrap or self._transport.addresses():
            line = f"noloco-node join --bootstrap {address} --run {run.run_id} --trust {signed.author}"
            self._report(f"others join with: {line}")

    async def _catch_up(self, terms: statesync.Terms, ready: Ready, thread: TrainingThread) -> None:
        """Where the run is under way, take a peer's state; where nobody has come further than we, there is nothing."""
        self._state, self._waiting_for = "joining", "the others' presence"
        deadline = time.monotonic() + STATE_S
        failure: PeerFault | None = None
        while time.monotonic() < deadline:
            await self._look()
            donors = [peer for peer, record in self._seen.items() if record.state == "training" and record.round > 0]
            if not donors:
                return
            peer = random.choice(donors)
            try:
                await self._fetch(peer, terms, ready, thread)
                return
            except PeerFault as fault:
                failure = fault
                log.info("%s does not give its state (%s)", names.name_of(peer), fault)
                await asyncio.sleep(1.0)
        raise SwarmUnreachable(f"no peer gave its state within {STATE_S:g} s (the last: {failure}): try again later")

    async def _fetch(self, peer: str, terms: statesync.Terms, ready: Ready, thread: TrainingThread) -> None:
        name, began = names.name_of(peer), time.monotonic()

        def progress(done: int, total: int) -> None:
            left_s = (time.monotonic() - began) * (total - done) / done
            self._waiting_for = f"state from {name}, {done / total:.0%}, {left_s:.0f} s left"

        self._waiting_for = f"state from {name}"
        state = await statesync.fetch(self._transport.channel(peer), terms, 8 * ready.parameters, progress)
        await asyncio.wrap_future(thread.adopt(state.round, state.data))
        self._ledger.round = state.round
        log.info("took the state of %s at round %d", name, state.round)

    # ---- presence ----
    def _standing(self, run: Manifest) -> Standing:
        ledger = self._ledger
        return Standing(
            state=self._state,
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
            await self._swarm.publish(self._standing(self._run))

    async def _look(self) -> None:
        """Read who is there; who trains is a candidate."""
        if self._swarm:
            self._seen = await self._swarm.peers()
            training = {peer for peer, record in self._seen.items() if record.state == "training"}
            self._exchange.candidates(frozenset(training))

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
                name = names.name_of(partner)
                log.info(
                    "round %d with %s: loss %s, %.1f s, %.2f MB out", round, name, self._loss(), seconds, sent / 1e6
                )
            case WentSolo(round, reason):
                log.info("round %d solo (%s): loss %s", round, reason.replace("_", " "), self._loss())
            case PeerFaulted(peer, reason):
                log.warning("%s broke the protocol: %s", names.name_of(peer), reason)
            case _:
                pass

    def _loss(self) -> str:
        return "-" if self._ledger.loss is None else f"{self._ledger.loss:.3f}"

    # ---- views ----
    def status(self) -> StatusView:
        ledger, run, ready = self._ledger, self._run, self._ready
        last = ledger.last_round
        parameters = ready.parameters if ready else None
        tally = self._exchange.tally
        return StatusView(
            **self._common_status(),
            run_id=run.run_id if run else None,
            run=run.label if run else None,
            round=ledger.round,
            rounds_target=min(run.rounds, self._config.rounds or run.rounds) if run else None,
            step=ledger.step,
            tokens=ledger.tokens,
            tokens_per_s=ledger.tokens_per_s,
            loss=ledger.loss,
            loss_first=ledger.loss_first,
            eval_loss=ledger.eval_loss,
            eval_loss_first=ledger.eval_loss_first,
            device=ready.device if ready else None,
            parameters=parameters,
            partner=self._exchange.partner or (last.partner if last else None),
            busy_fraction=self._busy_fraction(),
            rounds=ledger.rounds(),
            bytes=Traffic(tally.sent_bytes, tally.received_bytes, ledger.per_param_round(parameters)),
            resent_block_fraction=last.resent_block_fraction if last else None,
            last_round=last,
            partners=ledger.partners(),
            calls=tally.calls,
            peers_seen=len(self._seen),
        )

    def peers(self) -> PeersView:
        now = time.time()
        return PeersView(tuple(self._row(r, now) for r in self._seen.values() if r.expires > now))

    def _row(self, record: PeerRecord, now: float) -> PeerRow:
        together = self._ledger.with_peer.get(record.peer_id, WithPeer())
        return PeerRow(
            peer_id=record.peer_id,
            name=names.name_of(record.peer_id),
            state=record.state,
            round=record.round,
            lag=self._ledger.round - record.round,
            tokens_per_s=record.tokens_per_s,
            loss=record.loss,
            last_seen_s=max(0.0, now - record.time),
            sent=together.sent,
            received=together.received,
            exchanges=together.exchanges,
        )

    def _busy_fraction(self) -> float | None:
        """Inner steps' time over the time since training began, up to the last boundary."""
        total = sum(self._spent_s.values())
        return self._spent_s.get("step", 0.0) / total if total else None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _signals(leave: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM leaves cleanly, the second at once."""
    loop = asyncio.get_running_loop()
    asked = False

    def hear() -> None:
        nonlocal asked
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked = True
        leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
