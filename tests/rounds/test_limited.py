"""Two nodes, one of them on a limited link, in virtual time: the rate holds, and the swap still completes."""

import asyncio
import random

import pytest
import virtual_nodes
from virtual_clock import run_virtual
from virtual_nodes import FRAGMENTS, VirtualSwarm

from noloco_node.base.events import WentSolo
from noloco_node.host.limits import QUOTA
from noloco_node.host.traffic import SMALL_BYTES, Traffic
from noloco_node.rounds.link import ALIVE_S
from noloco_node.rounds.pieces import LARGE_PIECE_BYTES, PIECE_BYTES
from noloco_node.rounds.swap import FRAME_S
from noloco_node.wire.state_format import CHUNK_BYTES

RATE = 32_000.0
FRAGMENT_BYTES = 1_000_000
"""31 s at that rate: longer than a partner waits in silence."""


def day() -> str:
    return "2031-12-24"


@pytest.mark.parametrize("limits", [{"upload_bytes_s": RATE}, {"download_bytes_s": RATE}])
@pytest.mark.parametrize("who", [0, 1])
def test_a_fragment_that_takes_longer_than_the_deadline_still_arrives(
    limits: dict[str, float], who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_nodes, "PAYLOAD", b"\0" * FRAGMENT_BYTES)
    assert FRAGMENT_BYTES / RATE > FRAME_S
    traffic = Traffic(**limits, day=day)
    swarm = VirtualSwarm([400.0, 400.0], paces={who: traffic})
    run_virtual(swarm.run(8))
    one, other = swarm.nodes
    assert len(one.committed) == len(other.committed) >= 3
    assert not [e for n in swarm.nodes for e in n.events if isinstance(e, WentSolo) and e.applied], "none broke"
    least_s = (FRAGMENTS * FRAGMENT_BYTES - PIECE_BYTES) / RATE - 2
    for swap in swarm.nodes[who].committed:
        assert least_s <= swap.seconds <= 1.1 * least_s + 10, "the rate holds, and is used"
    assert one.x == pytest.approx(other.x, abs=1e-9)
    used = traffic.used
    assert min(used.sent, used.received) >= len(one.committed) * FRAGMENTS * FRAGMENT_BYTES, "and all is counted"


def test_streams_share_one_rate() -> None:
    async def main() -> None:
        traffic, loop = Traffic(upload_bytes_s=1e5, day=day), asyncio.get_running_loop()
        gone: list[tuple[float, int]] = []

        async def stream(rng: random.Random) -> None:
            for _ in range(50):
                size = rng.randrange(SMALL_BYTES, 50_000)
                await traffic.sending(size)
                gone.append((loop.time(), size))

        began = loop.time()
        await asyncio.gather(*(stream(random.Random(seed)) for seed in range(3)))
        total = sum(size for _, size in gone)
        assert loop.time() - began == pytest.approx(total / 1e5, abs=1.0)
        before = loop.time()
        await traffic.sending(SMALL_BYTES)
        assert loop.time() == before, "an acknowledgement waits for nothing"

    run_virtual(main())


def test_downloads_leave_a_swap_its_turns_however_many_they_are() -> None:
    """Beside twelve its pieces came every 26 s, which no partner waits for."""

    async def main() -> None:
        traffic, loop = Traffic(upload_bytes_s=2 * RATE, day=day), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as downloads:
            given = [downloads.create_task(download(traffic)) for _ in range(12)]
            for _ in range(10):
                began = loop.time()
                await traffic.sending(PIECE_BYTES)
                assert loop.time() - began <= (CHUNK_BYTES + PIECE_BYTES) / (2 * RATE) + 1
            for each in given:
                each.cancel()

    async def download(traffic: Traffic) -> None:
        while True:
            await traffic.giving(CHUNK_BYTES)

    run_virtual(main())


def test_signs_of_life_come_often_enough() -> None:
    assert 2 * PIECE_BYTES / RATE + ALIVE_S < FRAME_S, "two streams on the slowest link there may be"
    assert LARGE_PIECE_BYTES / RATE < FRAME_S, "a quick link may become one in the middle of a swap"


def test_a_paused_node_refuses_and_comes_back() -> None:
    swarm = VirtualSwarm([10.0, 10.0, 10.0])
    held = swarm.nodes[2]

    async def pause() -> None:
        await asyncio.sleep(100)
        held.exchange.pause(QUOTA)
        await asyncio.sleep(20)  # a swap under way may have ended
        marks = [len(n.committed) for n in swarm.nodes]
        await asyncio.sleep(100)
        assert len(held.committed) == marks[2]
        assert held.solo[QUOTA] >= 9, "each round says why"
        assert all(len(n.committed) >= mark + 6 for n, mark in zip(swarm.nodes[:2], marks[:2], strict=True))
        held.exchange.resume()
        await asyncio.sleep(100)
        assert len(held.committed) >= marks[2] + 4

    run_virtual(swarm.run(40, pause()))
