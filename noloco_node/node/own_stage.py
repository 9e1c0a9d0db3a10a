"""In a run with stages, the one that this node holds: how it chooses it, whom it works with there, and whether it
leaves it for a thinner one, which node/main.py then has it take. Without stages a node holds the whole model, as stage
0.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from noloco_node.base.states import AT_WORK, SERVES_STAGE, NodeState
from noloco_node.base.units import span
from noloco_node.data import sources, tokens
from noloco_node.data.sources import Sources
from noloco_node.errors import SwarmUnreachable, UsageError
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.node import which_stage
from noloco_node.node.base import Report
from noloco_node.node.find_run import NOBODY_S
from noloco_node.peers.record import PeerRecord
from noloco_node.peers.run_rules import RunRules
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.stages.balance import Balance
from noloco_node.stages.next_stage import StageTerms
from noloco_node.stages.part import Position, part_layout
from noloco_node.stages.service import StageService
from noloco_node.state_transfer.client import StateTerms
from noloco_node.state_transfer.collect import OtherStage
from noloco_node.training.task import Task

ALONE_S = 3600.0
"""How long a node that comes to a run under way waits for another stage that nobody holds: where a power cut stopped
all nodes, the others may be back later than this one."""


@dataclass(frozen=True, slots=True)
class Move:
    """From a stage to a thinner one."""

    stage: int
    """From 1, as is the other."""
    to: int
    signed: Signed


class OwnStage:
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        config: NodeConfig,
        home: Home,
        peer_id: str,
        data: Sources,
        service: StageService,
        known: Callable[[str], bool],
        takes: int | None,
        report: Report,
    ) -> None:
        """`known`: whether this node has committed a round with a peer. `takes`: the stage that it moves to."""
        self._config, self._home, self._data, self._service, self._known = config, home, data, service, known
        self._takes, self._report = takes, report
        self._balance = Balance(peer_id)
        self.at: Position | None = None
        """None: the whole model."""
        self.move: Move | None = None
        """Why this node leaves; None: for good, if it does."""
        self.gave_up: SwarmUnreachable | None = None
        """Why it leaves for good, if it is because it has waited for long enough."""
        self._ended: dict[str, PeerRecord] = {}
        """Of those that sent to this node and have come to the end. A record of a node that has left is there for a
        minute, and what it says may be needed later: who sent something, too, may never be seen again."""
        self._alone_since: float | None = None
        """When another stage was first seen to be held by nobody, by the monotonic clock."""
        self._said_alone = False
        self._held_back: Callable[[], str | None] = lambda: None

    @property
    def number(self) -> int:
        """As in a presence record."""
        return self.at.number if self.at else 0

    @property
    def reads(self) -> bool:
        """Whether it needs the run's data."""
        return self.at is None or self.at.first

    # ---- the stage ----
    async def choose(self, run: Manifest, look: Callable[[], Awaitable[Collection[PeerRecord]]]) -> None:
        """`look` gives the other nodes of the run. Raises UsageError."""
        if run.stages is None:
            for name in ("stage", "in_flight"):
                if (value := getattr(self._config, name)) is not None:
                    self._report(f"warning: the run is not cut into stages: {name} {value}, as set, is not used")
            return
        config, folder = replace(self._config, stage=self._takes or self._config.stage), self._folder(run)
        self.at = await which_stage.choose(look, run.stages.count, config, folder)
        if self.at.first:
            sources.check(run.data, self._data)
        if which_stage.held(folder):
            self.take(run)
        self._report(f"holding stage {self.at}")

    def take(self, run: Manifest) -> None:
        """Note on disk which stage it is. Raises DiskFull, UsageError."""
        if self.at:
            which_stage.take(self._folder(run), self.at.number)

    def part(self, run: Manifest) -> Callable[[Task], Task] | None:
        return self._service.part(run, self.at, self._config.in_flight) if self.at else None

    def begin(
        self, rules: RunRules, token: bytes, state: Callable[[], NodeState], held_back: Callable[[], str | None]
    ) -> None:
        """From now on micro-batches are taken from other stages, and given to them. `held_back`: why the volunteer's
        limits forbid it now, which the state of a node that has finished does not say."""
        self._held_back = held_back
        if stages := rules.run.stages:

            def works() -> bool:
                return state() in SERVES_STAGE and held_back() is None

            self._service.begin(
                StageTerms(bytes.fromhex(rules.run.run_id), stages.activations, token),
                rules.refuses,
                works=works,
                may_send=lambda: state() is NodeState.JOINING or works(),
            )

    def shown(self, state: NodeState) -> NodeState:
        """Of this node, to others: one that has finished answers no micro-batches while its limits hold it back."""
        return NodeState.PAUSED if self.at and state is NodeState.FINISHED and self._held_back() else state

    # ---- among the others: `others` are all nodes of the run ----
    def peers(self, others: Collection[PeerRecord], further: int = 0) -> list[PeerRecord]:
        """Those whose stage is so much further than this node's."""
        number = self.number + further if self.at else 0
        return [record for record in others if record.stage == number]

    def may_begin(self, others: Collection[PeerRecord]) -> bool:
        """Whether nobody needs to have later weights than the first ones: of a stage that nobody holds, while the other
        stages have not got anywhere without it."""
        return self.at is not None and not which_stage.has_begun(others)

    def update(self, others: Collection[PeerRecord], own_round: int, own_end: int) -> int:
        """After each look. `own_end`: this node's last round. Returns which one the stage before has come to the end
        of, so that no micro-batch comes any more; 0: it goes on."""
        if self.at is None:
            return 0
        serving = [record for record in others if record.state in SERVES_STAGE]
        after, beside = ([record.peer_id for record in self.peers(serving, further)] for further in (1, 0))
        every = {record.stage for record in serving} >= {*range(self.number + 1, self.at.stages + 1)}
        self._service.candidates(after if every else (), beside)  # else no gradient could come back
        heard = self._service.heard()
        self._ended |= {record.peer_id: record for record in others if record.peer_id in heard}
        self._ended = {peer: record for peer, record in self._ended.items() if record.ended and peer in heard}
        gone = [record for peer, record in self._ended.items() if peer not in {each.peer_id for each in others}]
        before = which_stage.stage_before(self.at, [*others, *gone], own_end)
        return which_stage.ended(before, own_round, own_end, heard, self._service.idle_s)

    def leaves(self, rules: RunRules, others: Collection[PeerRecord]) -> bool:
        """Whether it moves now. To be asked after each look, while this node trains and can save. Not who was told
        where to stay or for how long, nor the first node, by which others come."""
        config = self._config
        told = config.stage is not None or config.rounds is not None
        if self.at is None or self.move or told or not config.ways_in:
            return False
        run, holding, begun = rules.run, which_stage.holding(others), which_stage.has_begun(others)
        may_take = lambda stage, nodes: self._may_take(run, stage, nodes or not begun)  # noqa: E731
        # before the first round nobody has committed one: those that came at the same moment hold the same stage
        known = self._known if begun else lambda _: True
        if to := self._balance.moves_to(time.monotonic(), self.at, holding, known, may_take):
            self.move = Move(self.at.number, to, rules.signed)
            self._report(f"moving from stage {self.at.number} to stage {to}, which fewer hold")
        return to is not None

    def waits_in_vain(
        self, run: Manifest, others: Collection[PeerRecord] | None, own_round: int, *, stays: bool
    ) -> bool:
        """Whether this node gives up now, as nobody holds another stage and nothing has passed since it came. To be
        asked after each look, while it trains in a run that has begun. `others`: None where nobody says who is there.
        `stays`: others wait for it. They do, too, for a node that they come by, or that has trained with them."""
        if self.at is None or not own_round:
            return False
        held = {self.number, *which_stage.holding(others or ()).values()}
        missing = next((stage for stage in range(1, self.at.stages + 1) if stage not in held), None)
        if missing is None or others is None:
            self._alone_since, self._said_alone = None, False
            return False
        self._alone_since = self._alone_since or time.monotonic()
        alone_s = min(time.monotonic() - self._alone_since, self._service.idle_s)  # neither offline nor paused
        stays = stays or self._service.has_passed or not self._config.ways_in
        why = f"nobody holds stage {missing} of {run.label} at this moment: the run is over, or its nodes are off"
        if alone_s > NOBODY_S and not self._said_alone:
            self._said_alone = True
            self._report(f"{why}. This node waits for one of them" + ("" if stays else f" for {span(ALONE_S)}"))
        if alone_s > ALONE_S and not stays:
            self.gave_up = SwarmUnreachable(f"{why}. Join again when one is back")
        return self.gave_up is not None

    async def serve_on(self, seen: Callable[[], Collection[PeerRecord]], rounds: int) -> None:
        """When its own rounds are done: while nodes of the stages before train, their micro-batches pass through here.
        Where nobody else holds this stage, they could not train without it."""
        answered, since = self._service.totals.answered, time.monotonic()
        said = False
        while self._is_sent_to(seen(), rounds):
            if not said:
                self._report(
                    "its rounds are done; it stays while the stages before train, as their micro-batches pass here"
                )
            said = True
            if self._service.totals.answered != answered or self._held_back():
                answered, since = self._service.totals.answered, time.monotonic()
            elif time.monotonic() - since > which_stage.IDLE_S:
                return  # they say that they train, and send nothing
            await asyncio.sleep(which_stage.LOOK_S)

    def ended(self, run: Manifest, others: Collection[PeerRecord]) -> int:
        """The round that the stages before had come to the end of when this node was there last; 0: they go on. To be
        asked once, at the start."""
        if self._config.start_over:
            signed_file.forget_end(self._folder(run))
        goes_on = self.at is None or self._is_sent_to(others, run.rounds)
        return 0 if goes_on else signed_file.read(self._folder(run)).ended

    def _is_sent_to(self, others: Collection[PeerRecord], rounds: int) -> bool:
        return any(each.stage < self.number and each.state in AT_WORK and each.round < rounds for each in others)

    def _may_take(self, run: Manifest, stage: int, can_begin: int | bool) -> bool:
        """`can_begin`: somebody has its state, or nobody needs to; else this home has to. And the data for it."""
        if not (can_begin or which_stage.is_kept(self._folder(run), stage)):
            return False
        with suppress(UsageError):
            if stage == 1:
                sources.check(run.data, self._data)
            return True
        return False

    async def other_stages(self, run: Manifest, token: bytes, others: Collection[PeerRecord]) -> list[OtherStage]:
        """Whose states make up the whole model with this one's. Raises NolocoError where nothing could be made of
        them."""
        run.require_language()
        if self.at is None:
            return []
        vocabulary = tokens.load(run.data.tokenizer, self._config.tokenizer).vocabulary
        found = []
        for stage in range(self.at.stages):
            if stage != self.at.stage:
                at = Position(stage, self.at.stages)
                layout, parameters = await asyncio.to_thread(part_layout, run, vocabulary, at)
                terms = StateTerms(bytes.fromhex(run.run_id), layout, token)
                found.append(OtherStage(terms, parameters, self.peers(others, stage - self.at.stage), str(at)))
        return found

    def _folder(self, run: Manifest) -> Path:
        return self._home.run(run.run_id)
