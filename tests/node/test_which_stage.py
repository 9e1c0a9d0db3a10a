"""Which stage a node takes: the one that is named, the one it held, the thinnest."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_clock import run_virtual

from noloco_node.errors import SwarmUnreachable, UsageError
from noloco_node.host.config import NodeConfig
from noloco_node.node import which_stage
from noloco_node.peers.directory import REFUSED
from noloco_node.peers.record import PeerRecord
from noloco_node.stages.part import Position


def holders(*stages: int, state: str = "training", round: int = 0, ended: int = 0) -> list[PeerRecord]:
    of_all = {"step": 9, "loss": 2.0, "tokens_per_s": 9.0, "addresses": ()}
    now = {"round": round, "ended": ended, "boot": b"b" * 16, "time": 2.0, "version": "1", "peers": 0, "expires": 60.0}
    return [PeerRecord(peer_id=f"{at}", state=state, stage=stage, **of_all, **now) for at, stage in enumerate(stages)]


async def chosen(folder: Path, others: list[PeerRecord], stage: int | None = None) -> Position:
    async def look() -> list[PeerRecord]:
        return others

    return await which_stage.choose(look, 3, NodeConfig(home=folder, stage=stage), folder)


def test_the_thinnest_is_the_one_that_fewest_hold() -> None:
    rng = random.Random(1)
    assert which_stage.thinnest(holders(1, 1, 2, 3, 3), [1, 2, 3], rng) == 2
    assert which_stage.thinnest(holders(1, 3), [1, 2, 3], rng) == 2
    leaving = holders(2) + holders(1, 3, state="leaving")
    assert which_stage.thinnest(leaving, [1, 2, 3], rng) == 1, "the first empty one"
    assert {which_stage.thinnest(holders(1, 2, 2, 3), [1, 2, 3], rng) for _ in range(40)} == {1, 3}


async def test_the_named_one_comes_first_then_the_one_it_held(tmp_path: Path) -> None:
    assert await chosen(tmp_path, holders(1, 2), stage=1) == Position(0, 3)
    assert await chosen(tmp_path, holders(1, 2)) == Position(2, 3)
    which_stage.take(tmp_path, 2)
    assert await chosen(tmp_path, holders(1, 2, 2)) == Position(1, 3), "though another one is thinner"
    assert await chosen(tmp_path, [], stage=3) == Position(2, 3)
    with pytest.raises(UsageError, match="from 1 to 3"):
        await chosen(tmp_path, [], stage=4)


async def test_a_stage_that_everybody_lost_is_taken_only_by_who_has_its_checkpoint(tmp_path: Path) -> None:
    """Nobody could give its state to anybody else: who takes another stage waits for it with the others."""
    lost = holders(1, 1, 3, round=7)
    assert await chosen(tmp_path, lost) == Position(2, 3)
    which_stage.take(tmp_path, 2)
    assert await chosen(tmp_path, lost) == Position(1, 3)
    other = tmp_path / "other"
    which_stage._kept(other, 2).mkdir(parents=True)
    assert await chosen(other, lost) == Position(1, 3)
    assert await chosen(tmp_path / "third", holders(1, 1, 3)) == Position(1, 3), "before the first round it is begun"


def test_that_nobody_holds_a_stage_has_to_be_answered(tmp_path: Path) -> None:
    """Who is refused at first would take any stage, also one that is lost."""

    async def look() -> list[PeerRecord]:
        if asyncio.get_running_loop().time() < 30:
            raise SwarmUnreachable(REFUSED)
        return holders(1, 1, 3, round=7)

    assert run_virtual(which_stage.choose(look, 3, NodeConfig(home=tmp_path), tmp_path)) == Position(2, 3)


def checkpoint(folder: Path, of: str) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "of").write_text(of)


def of_checkpoints(folder: Path) -> str | None:
    path = folder / "checkpoints" / "of"
    return path.read_text() if path.exists() else None


def test_the_checkpoints_of_another_stage_are_kept_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert which_stage.held(folder) is None
    which_stage.take(folder, 1)
    checkpoint(folder, "one")
    which_stage.take(folder, 1)
    assert (which_stage.held(folder), of_checkpoints(folder)) == (1, "one")
    which_stage.take(folder, 3)
    assert (which_stage.held(folder), of_checkpoints(folder)) == (3, None)
    assert which_stage.is_kept(folder, 1) and not which_stage.is_kept(folder, 3)
    checkpoint(folder, "three")
    which_stage.take(folder, 1)
    assert (which_stage.held(folder), of_checkpoints(folder)) == (1, "one")
    assert which_stage.is_kept(folder, 3) and not which_stage.is_kept(folder, 1)


@pytest.mark.parametrize("next_stage", [1, 2, 3])
@pytest.mark.parametrize("fails_at", range(4))
def test_a_crash_while_it_moves_mixes_no_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, next_stage: int
) -> None:
    """Killed before its n-th rename, from stage 1 back to stage 2; then it takes any of the three."""
    folder = tmp_path / "run"
    which_stage.take(folder, 2)
    checkpoint(folder, "2")
    which_stage.take(folder, 1)
    checkpoint(folder, "1")
    rename, left = Path.replace, fails_at

    def killed(path: Path, to: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        which_stage.take(folder, 2)
    which_stage.take(folder, next_stage)
    assert which_stage.held(folder) == next_stage
    assert of_checkpoints(folder) == {1: "1", 2: "2", 3: None}[next_stage], "nothing is lost, nothing mixed up"
    for stage in {1, 2} - {next_stage}:
        assert which_stage.is_kept(folder, stage)


def test_who_has_left_or_finished_holds_nothing() -> None:
    gone = holders(1, state="leaving") + holders(1, state="finished")
    assert which_stage.holding([*gone, *holders(2, 1)]) == {"0": 2, "1": 1}


def seen(**rounds: int) -> list[PeerRecord]:
    """Of the first stage, by name; -1: it has come to the end of the run, and left."""
    each = {name: {"state": "leaving", "ended": 100} if at < 0 else {"round": at} for name, at in rounds.items()}
    return [replace(holders(1, **says)[0], peer_id=name) for name, says in each.items()]


def done(before: list[PeerRecord], rounds: int, heard: dict[str, float], idle_s: float = 0.0, *, own: int = 0) -> bool:
    return which_stage.ended(before, own, rounds, heard, idle_s) == rounds


HEARD, GONE_S, LONG = {"a": 5.0, "b": 5.0}, which_stage.HEARD_S + 1, which_stage.IDLE_S + 1


def test_a_stage_has_no_more_to_do_when_all_that_send_to_it_are_done() -> None:
    assert not done([], 100, HEARD)
    assert not done(seen(a=-1, b=7), 100, HEARD)
    assert done(seen(a=-1, b=-1), 100, HEARD)
    assert done(seen(a=-1, b=-1, liar=3), 100, HEARD), "it has never sent anything"
    assert not done(seen(liar=-1), 100, HEARD), "the others may be back at any moment"
    assert not done(seen(a=-1), 100, HEARD)
    assert done(seen(a=-1), 100, {"a": 5.0}), "nobody else was ever there"
    assert done(seen(a=-1), 100, HEARD | {"b": GONE_S}, own=95), "it is gone"
    assert done(seen(a=-1, b=7), 100, HEARD, LONG), "it says that it trains, and sends nothing"
    assert not done(seen(a=-1, b=7, c=7), 100, HEARD | {"c": LONG}, LONG)
    assert not done(seen(a=-1), 100, {}) and done(seen(a=-1), 100, {}, LONG)


def test_one_peer_alone_does_not_end_the_run_of_a_node_that_is_in_the_middle_of_it() -> None:
    assert not done(seen(a=5, b=5, liar=-1), 100, {"liar": 1.0}), "the node has just started, and heard it first"
    assert not done(seen(a=5, liar=-1), 100, {"liar": 1.0})
    for honest in ("a", "ab", "abc"):
        heard = dict.fromkeys(honest, GONE_S) | {"liar": 1.0}
        assert not done(seen(liar=-1), 100, heard, own=50), "they are away for a while"
        assert not done(seen(liar=-1, **dict.fromkeys(honest, 50)), 100, heard, own=50)
        assert done(seen(**dict.fromkeys(honest, -1)), 100, dict.fromkeys(honest, 5.0), own=50)


def test_before_the_first_stage_is_nobody_whatever_a_record_says() -> None:
    others = [*seen(a=3), *holders(0, state="finished")]
    assert which_stage.stage_before(Position(0, 2), others, 9) == []
    assert [record.peer_id for record in which_stage.stage_before(Position(1, 2), others, 9)] == ["a"]


def test_who_finished_early_by_its_own_rounds_ends_no_other_nodes_run() -> None:
    early, whole = replace(seen(a=-1)[0], ended=20), seen(b=-1)[0]

    def before(*others: PeerRecord, rounds: int = 100) -> list[PeerRecord]:
        return which_stage.stage_before(Position(1, 2), others, rounds)

    assert before(early) == [] and before(whole) == [whole] and before(early, *seen(c=30)) == seen(c=30)
    assert before(early, rounds=20) == [early], "this node does no more rounds either"
    assert which_stage.ended([early], 19, 20, {"a": 5.0}, 0.0) == 20, "so it comes to the end of no more than that"
    assert which_stage.ended([whole], 19, 20, {"b": 5.0}, 0.0) == 100


def test_a_run_has_begun_when_most_say_so() -> None:
    assert not which_stage.has_begun([]) and which_stage.has_begun(seen(a=1))
    assert not which_stage.has_begun(seen(a=0, b=0, liar=9)) and which_stage.has_begun(seen(a=1, b=1, new=0))
    loading = holders(1, 1, 1, state="joining")
    assert which_stage.has_begun([*seen(a=1, b=1), *loading]), "those have only come now"
