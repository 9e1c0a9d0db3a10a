"""Whom a rendezvous sees in the runs that it knows."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from virtual_clock import run_virtual

from noloco_node.base import periodic
from noloco_node.base.identity import Identity
from noloco_node.errors import NolocoError
from noloco_node.host.config import NodeConfig
from noloco_node.node.rendezvous import LOOK_S, RendezvousNode
from noloco_node.peers.directory import Found
from noloco_node.peers.run_registry import MAX_RUNS
from noloco_node.run import manifest
from noloco_node.run.schema import Manifest


@pytest.mark.parametrize("fails", [TimeoutError, None])
def test_many_runs_of_one_host_keep_no_other_run_from_being_looked_up(
    fails: type[Exception] | None, tmp_path: Path
) -> None:
    """Each of its look-ups lasts as long as one may: its nodes of the DHT do not answer."""
    node = RendezvousNode(NodeConfig(home=tmp_path), lambda _: None)
    node._transport = cast("Any", SimpleNamespace(introduce=lambda _: None, addresses=list))
    author = Identity.load_or_create(tmp_path / "author.key")
    runs = [manifest.sign(Manifest(name="a-run", seed=seed), author) for seed in range(MAX_RUNS)]
    for number, run in enumerate(runs):
        last = number == MAX_RUNS - 1
        assert node._runs.add(run, f"peer {number // 2}", place="elsewhere" if last else "one host")
    honest = manifest.verify(runs[-1]).run_id
    looked: list[float] = []

    async def peers_of(run: str) -> Found:
        if run == honest:
            looked.append(asyncio.get_running_loop().time())
            return Found({})
        await asyncio.sleep(10)
        if fails:
            raise fails
        return Found({})

    async def main() -> None:
        swarm = cast("Any", SimpleNamespace(peers_of=peers_of))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await periodic.every(lambda: LOOK_S, lambda: node._look(swarm), (NolocoError, OSError))

    run_virtual(main())
    assert len(looked) >= 600 / (10 + LOOK_S) - 2, "a record lives for a minute"
    assert len(node._seen) == MAX_RUNS, "the others have their turns, too"
