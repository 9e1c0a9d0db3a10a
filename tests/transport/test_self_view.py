"""How far our clock is off, from what peers report of theirs; and how many ports a peer looks at for one place."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from certificates import certificate
from cryptography.hazmat.primitives.asymmetric import ec
from memory_network.network import MemoryNetwork, started
from virtual_clock import run_virtual

from noloco_node.base.identity import Identity
from noloco_node.transport import self_view
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.self_view import ClockSkew
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, add_MirrorServicer_to_server

HOUR = 3600.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's time is simulated, so that of the day is, too: a millisecond from one reading to the next."""
    readings = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(readings) / 1000)


class Clock(MirrorServicer):
    """Answers with the right time and some seconds."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    async def Look(self, request: pb.LookRequest, context: object) -> pb.LookReply:  # noqa: N802
        return pb.LookReply(time=time.time() + self._ahead_s)


async def _skew(*ahead_s: float, place_of: Callable[[str], str] = str) -> ClockSkew | None:
    network = MemoryNetwork(random.Random(0))
    us, peers = network.join("us"), [network.join(f"peer {number}") for number in range(len(ahead_s))]
    for peer, ahead in zip(peers, ahead_s, strict=True):
        peer.serve(lambda server, ahead=ahead: add_MirrorServicer_to_server(Clock(ahead), server))
    async with started(us, *peers):
        return await self_view.skew([peer.peer_id for peer in peers], us.channel, place_of)


@pytest.mark.parametrize(
    ("clocks", "ahead_s", "witnesses"),
    [
        ([], None, 0),
        ([-HOUR], HOUR, 1),
        ([-HOUR, -HOUR], HOUR, 2),
        ([HOUR, -2 * HOUR], -HOUR, 1),  # they differ more from one another than from us
        ([0, -HOUR, -HOUR], HOUR, 2),
        ([0, 0, -HOUR], 0, None),  # how many depends on the delays
    ],
    ids=str,
)
def test_the_median_skew_and_how_many_report_it(
    clocks: list[float], ahead_s: float | None, witnesses: int | None
) -> None:
    found = run_virtual(_skew(*clocks))
    assert (found.ahead_s if found else None) == (None if ahead_s is None else pytest.approx(ahead_s, abs=1))
    assert witnesses is None or (found.witnesses if found else 0) == witnesses


def test_identities_of_one_host_have_one_clock() -> None:
    place_of = {"peer 0": "there", "peer 1": "elsewhere"}.get
    found = run_virtual(_skew(0, 0, *5 * [-HOUR], place_of=lambda peer: place_of(peer, "one host")))
    assert found is not None and found.ahead_s == pytest.approx(0, abs=1)
    found = run_virtual(_skew(-HOUR, *5 * [-HOUR], place_of=lambda peer: place_of(peer, "one host")))
    assert found is not None and (round(found.ahead_s), found.witnesses) == (HOUR, 2)


@pytest.mark.parametrize("nonsense", [math.inf, -math.inf, math.nan, 1e300, -1e12])
def test_a_time_that_no_clock_shows_is_no_answer(nonsense: float) -> None:
    assert run_virtual(_skew(nonsense)) is None
    found = run_virtual(_skew(nonsense, 0.0))
    assert found is not None and found.ahead_s == pytest.approx(0, abs=1)


async def test_one_place_cannot_take_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that drops all packets lets each of them last for seconds."""
    hangs = asyncio.Event()

    async def dropped(peer: str, host: str, port: int) -> bool:
        await hangs.wait()
        return True

    monkeypatch.setattr(self_view, "_answers_as", dropped)
    ends = {"greedy": FarEnd("greedy", "8.8.8.8"), "honest": FarEnd("honest", "9.9.9.9")}

    async def nobody(peer: str) -> None:
        return None

    service = self_view.SelfViewService(ends.__getitem__, nobody)

    class Call(str):
        async def abort(self, code: Any, text: str) -> None:
            raise grpc.aio.AbortError

    ask = pb.LookRequest(ports=[1, 2, 3, 4])
    greedy = [asyncio.create_task(service.Look(ask, Call("greedy"))) for _ in range(30)]
    await asyncio.wait(greedy, return_when=asyncio.FIRST_EXCEPTION)
    honest = asyncio.create_task(service.Look(ask, Call("honest")))
    await asyncio.wait([honest], timeout=0.1)
    hangs.set()
    assert list((await honest).open) == [1, 2, 3, 4]
    answers = await asyncio.gather(*greedy, return_exceptions=True)
    assert sum(isinstance(answer, pb.LookReply) for answer in answers) == 2


def test_a_certificate_proves_its_peer_if_that_one_signed_its_key(tmp_path: Path) -> None:
    one, other = (Identity.load_or_create(tmp_path / name) for name in ("one", "other"))
    key, stolen = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    assert self_view.proves(certificate(one, key, key), one.peer_id)
    assert not self_view.proves(certificate(one, key, key), other.peer_id)
    assert not self_view.proves(certificate(one, key, stolen), one.peer_id), "copied from another certificate"
    for nonsense in (b"", b"nonsense", certificate(one, key, key)[:-1]):
        assert not self_view.proves(nonsense, one.peer_id)
