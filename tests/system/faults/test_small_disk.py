"""A real node with a full disk trains on and reports it; with damaged checkpoints it resumes from a whole one.

The tests below build on each other, because a node takes seconds to start; each may also run alone. The disk is a small
tmpfs.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_nodes import QUICK, Node, RealNodes, until

from noloco_node.errors import DiskFull

pytestmark = [pytest.mark.timeout(150), pytest.mark.system]

ROOMY_BYTES, TIGHT_BYTES = 64 << 20, 6 << 20
"""A checkpoint of its model takes 8.2 MB."""


@pytest.fixture(scope="module")
def disk(real_nodes: RealNodes) -> Iterator[Path]:
    disk = real_nodes.root / "lone"
    disk.mkdir()
    if os.geteuid() != 0 or not mounted("-t", "tmpfs", "-o", f"size={TIGHT_BYTES}", "tmpfs", str(disk)):
        pytest.skip("needs root and a tmpfs to be mounted")
    yield disk
    real_nodes.close()
    subprocess.run(["umount", str(disk)], check=True)


def mounted(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def node(real_nodes: RealNodes, disk: Path) -> Node:
    return real_nodes.node("lone", "start", str(real_nodes.paced(outputs=1600, steps=1, outer=QUICK)))


@pytest.fixture(scope="module")
def saved(node: Node, disk: Path) -> dict[str, Any]:
    """The first status after the disk got room and the node saved. It saved again, and left."""
    assert mounted("-o", f"remount,size={ROOMY_BYTES}", str(disk))
    saved = lambda: (view := node.ask("status")) and (view["checkpoint"] or {}).get("saved_round") and view  # noqa: E731
    view = until(saved, "a checkpoint")
    first = view["checkpoint"]["saved_round"]
    until(lambda: (now := saved()) and now["checkpoint"]["saved_round"] > first, "another one")
    node.leave()
    return view


def test_what_will_not_fit_is_said_beforehand(node: Node) -> None:
    view = until(lambda: (view := node.ask("status")) and view["checkpoint"] and view, "the first status")
    assert view["checkpoint"]["bytes"] == 20 * view["parameters"] == pytest.approx(8.2e6, rel=0.01)
    assert 0 < view["checkpoint"]["free_bytes"] <= TIGHT_BYTES
    (finding,) = view["health"]
    assert finding["text"].startswith("disk: ") and "a checkpoint needs 8.2 MB" in finding["text"]
    assert node.printed(r"(a checkpoint takes 8\.2 MB, the disk has \S+ MB left)")


def test_a_full_disk_costs_the_checkpoint_and_no_training(node: Node) -> None:
    failed = until(lambda: (view := node.ask("status")) and view["last_error"] and view, "the first try to save")
    assert "the disk is full" in failed["last_error"]
    assert failed["health"][0]["level"] == "error"
    assert "! disk: " in node.run("status").stdout
    until(lambda: node.round() >= failed["round"] + 5, "it trains on")
    assert not list(node.home.glob("runs/*/checkpoints/*")), "nothing is left of what did not fit"
    assert node.events("PhaseDone")[-1]["round"] > failed["round"], "what else is written goes on too"


def test_who_saved_nothing_at_the_end_says_so(real_nodes: RealNodes, disk: Path, node: Node) -> None:
    """Another node on the same disk."""
    words = ("start", str(real_nodes.root / "run.toml"), "--rounds", "1")
    full = real_nodes.node(f"{disk.name}/full", *words)
    assert full.ended() == DiskFull.exit_code
    said = full.log.read_text()
    assert re.search(r"warning: a checkpoint takes 8\.2 MB, the disk has \S+ MB left: what is trained cannot be", said)
    why, _reached, lost = said.splitlines()[-3:]
    assert why.startswith("round 1 is not saved, and no earlier one is: the disk is full: ")
    assert lost.startswith("no checkpoint was written: what was trained is lost (the disk is full: ")


def test_with_room_again_it_saves(saved: dict[str, Any]) -> None:
    assert saved["health"] == []


def test_it_resumes_from_the_newest_that_is_whole(real_nodes: RealNodes, node: Node, saved: dict[str, Any]) -> None:
    (folder,) = node.home.glob("runs/*/checkpoints")
    newest, before = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)[:2]
    round = json.loads((before / "state.json").read_text())["round"]
    model = newest / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1000])
    (folder / "999999").mkdir()
    again = real_nodes.node("lone", "start", str(real_nodes.root / "run.toml"), "--rounds", "1", "--linger", "600")
    view = until(lambda: (view := again.ask("status")) and view["state"] == "finished" and view, "a round more")
    assert again.printed(r"(checkpoint 999999 is skipped: it has no state\.json)")
    assert again.printed(rf"(checkpoint {newest.name} is skipped: model\.safetensors has \d+ bytes instead of)")
    assert view["checkpoint"]["resumed_round"] == round
    assert view["round"] == round + 1
    shown = again.run("status").stdout
    assert f"resumed from the checkpoint of round {round}" in shown
    again.leave()
