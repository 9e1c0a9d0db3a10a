"""When a node leaves its stage for one that nobody holds, when it stays though its rounds are done, and when it gives
up.
"""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_which_stage import holders
from virtual_clock import run_virtual

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.limits import PAUSED
from noloco_node.node import own_stage, which_stage
from noloco_node.node.own_stage import OwnStage
from noloco_node.peers.record import PeerRecord
from noloco_node.run import manifest, signed_file
from noloco_node.run.schema import Manifest
from noloco_node.stages.balance import HOLD_S, TURN_S
from noloco_node.stages.part import Position

RULES: Any = SimpleNamespace(run=SimpleNamespace(run_id="run"), signed=None)
DOOR = Address("ip4", "127.0.0.1", 1, "peer")


def of_stage(number: int, folder: Path, *, service: object = None, peer: str = "me", report: Any = print) -> OwnStage:
    made = OwnStage(*_given(NodeConfig(home=folder, bootstrap=(DOOR,)), report, service, peer))
    made.at = Position(number - 1, 3)
    return made


def _given(config: NodeConfig, report: Any, service: object = None, peer: str = "me") -> Any:
    return (config, Home(config.home), peer, None, service, lambda _: False, None, report)


def moves(node: OwnStage, others: Collection[PeerRecord], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Within ten minutes in which nothing changes."""
    for now in range(0, 600, 5):
        monkeypatch.setattr(own_stage.time, "monotonic", lambda now=now: float(now))
        if node.leaves(RULES, others):
            assert node.move
            return node.move.to
    return None


def test_those_that_came_at_the_same_moment_to_the_same_stage_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would hold the other two, and the run would never begin. Nobody has committed a round."""
    assert HOLD_S + 2 * TURN_S < 600
    assert moves(of_stage(1, tmp_path), holders(1, 1), monkeypatch) == 2
    assert moves(of_stage(1, tmp_path), holders(1, 2), monkeypatch) == 3
    assert moves(of_stage(1, tmp_path), holders(2, 3), monkeypatch) is None, "it is the only one there"
    assert moves(of_stage(1, tmp_path), holders(1, 1, round=3), monkeypatch) is None, "nobody has the others' states"


def test_a_run_that_is_not_cut_says_that_no_stage_is_held(tmp_path: Path) -> None:
    said: list[str] = []
    made = OwnStage(*_given(NodeConfig(home=tmp_path, stage=2, in_flight=4), said.append))
    run: Any = SimpleNamespace(stages=None)
    asyncio.run(made.choose(run, look=None))  # type: ignore[arg-type]
    assert made.at is None and said == [
        f"warning: the run is not cut into stages: {what}, as set, is not used" for what in ("stage 2", "in_flight 4")
    ]


class Service:
    """Of which one call a second is answered, until `until_s`."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s

    @property
    def totals(self) -> Any:
        return SimpleNamespace(answered=int(min(self._until_s, own_stage.time.monotonic())))


@pytest.mark.parametrize(
    ("answers_for_s", "ends_s", "stays_s"),
    [(9999, 1500, 1500), (300, 9999, 300 + which_stage.IDLE_S), (0, 0, 0), (PAUSED, 1500, 1500)],
)
def test_a_node_whose_rounds_are_done_stays_while_those_before_it_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_for_s: Any, ends_s: float, stays_s: float
) -> None:
    said: list[str] = []

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        began = clock()
        monkeypatch.setattr(own_stage.time, "monotonic", lambda: clock() - began)
        paused = answers_for_s == PAUSED
        node = of_stage(2, tmp_path, service=Service(0 if paused else answers_for_s), report=said.append)
        node._held_back = lambda: PAUSED if paused else None

        def seen() -> list[PeerRecord]:
            at_work = clock() - began < ends_s
            return [*holders(1, state="training" if at_work else "finished"), *holders(2, 3)]

        await node.serve_on(seen, 5)
        return clock() - began

    stayed: Any = run_virtual(main())
    assert stayed == pytest.approx(stays_s, abs=3) and len(said) == bool(stays_s)


def test_the_end_that_a_peer_saw_is_known_when_its_record_is_gone(tmp_path: Path) -> None:
    """The other one that sent to this node crashed: nobody else ever says that the run is over."""
    service = SimpleNamespace(candidates=lambda *_: None, heard=lambda: dict.fromkeys("ab", 5.0), idle_s=1.0)
    node = of_stage(2, tmp_path, service=service)
    a, b, other = (replace(holders(1)[0], peer_id=peer, round=30) for peer in "abc")
    assert node.update([a, b], 15, 100) == 0
    a, other = (replace(each, state="leaving", ended=100) for each in (a, other))
    assert node.update([a, other], 15, 100) == node.update([], 15, 100) == 0, "b may be back at any moment"
    service.idle_s = which_stage.IDLE_S + 1
    assert node.update([b], 15, 100) == 100, "half of them, and nothing comes"
    assert node.update([replace(a, ended=0, state="training")], 15, 100) == 0, "its author gave the run more rounds"
    assert node.update([], 15, 100) == 0


def alone(
    folder: Path, others: Collection[PeerRecord] | None, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[OwnStage, float | None]:
    """One of stage 2 that is back in round 4 and sees these at each look: and when it gives up, within three hours."""
    given = {"round": 4, "passed": False, "idle_s": lambda now: now, "ways_in": (DOOR,), "stays": False} | more
    said, service = list[str](), SimpleNamespace()
    made = OwnStage(*_given(NodeConfig(home=folder, bootstrap=given["ways_in"]), said.append, service))
    made.at = Position(1, 3)
    run = Manifest(name="tiny", rounds=10)
    for now in range(0, 10_800, 5):
        monkeypatch.setattr(own_stage.time, "monotonic", lambda now=now: float(now))
        service.has_passed, service.idle_s = given["passed"], given["idle_s"](now)
        seen = others(now) if callable(others) else others
        if made.waits_in_vain(run, seen, given["round"], stays=given["stays"]):
            assert made.gave_up and [line.partition("This node waits ")[2] for line in said] == [
                "for one of them for 1 h"
            ]
            return made, now
    assert made.gave_up is None
    assert len(said) == given.get("says", 0) and all(line.endswith("waits for one of them") for line in said)
    return made, None


def test_who_is_back_after_all_others_left_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it crashed before the end, it has not seen that; and a whole run's node would train on alone."""
    made, at = alone(tmp_path, (), monkeypatch)
    assert at == pytest.approx(own_stage.ALONE_S, abs=10)
    assert str(made.gave_up).startswith("nobody holds stage 1 of tiny-")
    made, at = alone(tmp_path, holders(1, 2, state="finished") + holders(3), monkeypatch)
    assert at and "nobody holds stage 1 " in str(made.gave_up), "nobody of it sends anything any more"
    _, at = alone(tmp_path, lambda now: holders(1, 2, 3) if now < 5000 else holders(1, 2), monkeypatch)
    assert at == pytest.approx(5000 + own_stage.ALONE_S, abs=10)


@pytest.mark.parametrize(
    ("others", "more"),
    [
        (holders(1, 3), {}),
        (holders(1, 3, state="paused"), {}),
        (None, {}),
        ((), {"idle_s": lambda now: now % 20}),
        ((), {"round": 0}),
        ((), {"passed": True, "says": 1}),
        ((), {"stays": True, "says": 1}),
        ((), {"ways_in": (), "says": 1}),
        (lambda now: () if now % 3000 > 1500 else holders(1, 3), {"stays": True, "says": 4}),
    ],
    ids=[
        *("all are there", "paused", "offline", "paused itself", "not begun"),
        *("it has trained", "it begins the run", "others come by it", "again and again"),
    ],
)
def test_who_may_be_waited_for_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Any, more: dict[str, Any]
) -> None:
    assert alone(tmp_path, others, monkeypatch, **more)[1] is None


def test_a_stage_that_saw_the_end_of_its_run_ends_when_it_comes_back_unless_it_is_sent_something(
    tmp_path: Path,
) -> None:
    """As where the author gave the run more rounds while it was away, or where a lie had ended it."""
    run, node = Manifest(name="tiny", rounds=10), of_stage(2, tmp_path)
    folder = Home(tmp_path).run(run.run_id)
    signed_file.keep(folder, manifest.sign(run, Identity.load_or_create(tmp_path / "author.key")))
    assert node.ended(run, ()) == 0
    signed_file.keep_end(folder, 10)
    assert node.ended(run, ()) == node.ended(run, holders(1, 2, state="finished")) == 10
    assert node.ended(run, holders(3, state="training")) == 10
    assert node.ended(run, holders(1, state="training", round=5)) == 0
    anew = OwnStage(*_given(NodeConfig(home=tmp_path, start_over=True), print))
    anew.at = node.at
    assert anew.ended(run, ()) == node.ended(run, ()) == 0, "with the run's first weights it is trained again"
