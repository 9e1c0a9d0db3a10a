"""What a visitor sees; and one that is killed leaves no files behind, above all not its key."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from donors import record
from virtual_clock import in_virtual_time

import noloco_node
from noloco_node.base.addresses import ANY_LOCAL_PORT
from noloco_node.base.identity import Identity
from noloco_node.errors import SwarmUnreachable
from noloco_node.peers.directory import REFUSED, Found
from noloco_node.peers.run_registry import MAX_RUNS
from noloco_node.peers.visitor import READS, Visitor
from noloco_node.run import manifest
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.p2pd import cleanup

VISITS = """
import asyncio, sys
from noloco_node.base.addresses import parse
from noloco_node.peers.visitor import visiting
async def main():
    async with visiting(list(map(parse, sys.argv[1:]))):
        print("there", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
HOLDS_A_KEY = """
import sys
from noloco_node.transport.p2pd.cleanup import temporary_key
with temporary_key() as key:
    key.touch()
    print("there", flush=True)
    sys.stdin.read()
"""
GONE_S = 15.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all temporary files."""
    with tempfile.TemporaryDirectory(prefix="nl-", dir="/tmp") as parent:  # short: sockets lie below it
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield Path(parent)


@in_virtual_time
async def test_look_ups_that_last_too_long_cost_their_run_its_peers_and_no_more(tmp_path: Path) -> None:
    """Anybody may announce runs, and have nodes of the DHT beside their keys that do not answer."""
    author = Identity.load_or_create(tmp_path / "key")
    known = [manifest.sign(Manifest(name="a-run", seed=seed), author) for seed in range(MAX_RUNS)]
    honest = manifest.verify(known[-1]).run_id

    async def peers_of(run: str) -> Found:
        if run == honest:
            return Found({"peer": record("peer", 5)})
        await asyncio.sleep(10)
        raise TimeoutError

    async def runs() -> list[Signed]:
        return known

    visit = Visitor(cast("Any", SimpleNamespace(introduce=lambda _: None)), [])
    visit.runs, visit._directory = runs, cast("Any", SimpleNamespace(peers_of=peers_of))  # type: ignore[method-assign]
    async with asyncio.timeout(READS * 10 + 1):
        found = await visit.peers()
    assert [run.peers for run in found.runs] == [0] * (MAX_RUNS - 1) + [1]


def begun(code: str, place: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has written its key, and the key."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(noloco_node.__file__).parents[1]), "TMPDIR": str(place)},
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    (key,) = place.glob("*/identity.key")
    return process, key


def test_the_key_of_a_killed_process_is_removed_and_no_other(place: Path) -> None:
    process, key = begun(HOLDS_A_KEY, place)
    with process:
        os.utime(key.parent, (0, 0))
        cleanup._remove_leftovers(place)
        assert key.exists(), "its process lives"
        process.kill()
    cleanup._remove_leftovers(place)
    assert not key.parent.exists()


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_visitor_that_was_killed_leaves_no_key(place: Path, tmp_path: Path) -> None:
    host = Libp2pTransport(Identity.load_or_create(tmp_path / "key"), ANY_LOCAL_PORT)
    await host.start()
    try:
        process, key = await asyncio.to_thread(begun, VISITS, place, *map(str, host.addresses()))
        with process:
            process.kill()
    finally:
        await host.close()
    deadline = time.monotonic() + GONE_S
    while await asyncio.to_thread(key.parent.exists):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("refused", ["first", "last"])
async def test_a_visitor_whose_look_ups_are_refused_does_not_say_that_nobody_is_there(
    refused: str, identity: Identity
) -> None:
    known = {name: manifest.sign(Manifest(name=name), identity) for name in ("first", "last")}

    async def runs() -> list[Signed]:
        return [*known.values()]

    async def nobody(run_id: str) -> Found:
        return Found({}, REFUSED if run_id == manifest.verify(known[refused]).run_id else None)

    visitor = Visitor(cast("Any", SimpleNamespace(introduce=len)), ())
    visitor.runs = runs  # type: ignore[method-assign]
    visitor._directory = cast("Any", SimpleNamespace(peers_of=nobody))
    with pytest.raises(SwarmUnreachable, match=REFUSED):
        await visitor.peers()
