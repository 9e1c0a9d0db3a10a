"""A state over links of 100 Mbit/s and 1 Gbit/s, between two real transports in network namespaces: how much is used.

Two processes, each with a p2pd of its own, and statesync at either end: what a newcomer and its donor run, without the
training around it. The rate is that of the state's own bytes: what TCP, encryption and framing add counts against it.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import uvloop

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # it also runs as a script
from namespaces import slow_link, why_not

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


class Giver:
    """A state whose numbers are all 0.5."""

    def __init__(self, state_bytes: int) -> None:
        self._state = memoryview(b"\x00\x00\x00\x3f" * (state_bytes // 4))

    def live_state(self) -> "Future[tuple[int, memoryview]]":
        future: Future[tuple[int, memoryview]] = Future()
        future.set_result((7, self._state))
        return future


class Watcher:
    """When the first fragment and the last one came."""

    def __init__(self) -> None:
        self.at: list[tuple[float, int]] = []

    def queued(self, place: int) -> None:
        pass

    async def check_round(self, round: int) -> None:
        pass

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.at.append((time.monotonic(), done_bytes))


async def donor(host: str, directory: Path, state_bytes: int) -> None:
    from noloco_node.base.addresses import Address
    from noloco_node.base.identity import Identity
    from noloco_node.host.config import NodeConfig
    from noloco_node.host.home import Home
    from noloco_node.host.policy import Policy
    from noloco_node.state_transfer.client import StateTerms
    from noloco_node.state_transfer.server import StateService
    from noloco_node.transport.libp2p import Libp2pTransport
    from noloco_node.wire.peer_pb2_grpc import add_StateServicer_to_server

    transport = Libp2pTransport(Identity.load_or_create(directory / "donor.key"), Address("ip4", host, 0))
    policy = Policy(NodeConfig(home=directory), Home(directory), lambda: None)
    service = StateService(transport.caller, transport.caller, lambda: (7, None), policy)
    service.begin(StateTerms(b"r" * 32, b"l" * 32), Giver(state_bytes), state_bytes)
    transport.serve(lambda server: add_StateServicer_to_server(service, server))
    await transport.start()
    print(json.dumps(str(transport.addresses()[0])), flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def newcomer(host: str, directory: Path, state_bytes: int, address: str) -> None:
    from noloco_node.base.addresses import Address, parse
    from noloco_node.base.identity import Identity
    from noloco_node.state_transfer.client import Download, StateTerms, fetch
    from noloco_node.transport.libp2p import Libp2pTransport

    identity = Identity.load_or_create(directory / "newcomer.key")
    transport = Libp2pTransport(identity, Address("ip4", host, 0), bootstrap=[parse(address)])
    await transport.start()
    watcher = Watcher()
    channel = transport.channel(address.rpartition("/")[2])
    state = await fetch(channel, StateTerms(b"r" * 32, b"l" * 32), Download(state_bytes // 4), watcher)
    (began, before), (ended, after) = watcher.at[0], watcher.at[-1]
    assert state.round == 7 and len(state.data) == state_bytes
    print(json.dumps((after - before) / (ended - began)), flush=True)  # noqa: T201
    await transport.close()


def end(space: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", space, sys.executable, __file__, *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("link_bits_s", "state_bytes", "share"),
    [(100e6, 30 << 20, 0.9), (1e9, 250 << 20, 0.8)],
    ids=["100 Mbit", "1 Gbit"],
)
def test_a_state_uses_the_link(
    link_bits_s: float, state_bytes: int, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if why := why_not("tc"):
        pytest.skip(why)
    words = (str(tmp_path), str(state_bytes))
    with slow_link("rate", link_bits_s) as ((here, one), (there, other)):
        giver = end(here, "donor", one, *words)
        try:
            assert giver.stdout is not None
            address = json.loads(giver.stdout.readline())
            taker = end(there, "newcomer", other, *words, address)
            said, _ = taker.communicate(timeout=PATIENCE_S)
            assert taker.returncode == 0
        finally:
            giver.communicate(timeout=30)
    rate = 8 * json.loads(said)
    with capsys.disabled():
        print(f"\n  {state_bytes / 1e6:.0f} MB at {rate / 1e6:.1f} of {link_bits_s / 1e6:.0f} Mbit/s")  # noqa: T201
    assert rate >= share * link_bits_s


if __name__ == "__main__":
    verb, host, directory, state_bytes, *rest = sys.argv[1:]
    given = host, Path(directory), int(state_bytes)
    uvloop.run(donor(*given) if verb == "donor" else newcomer(*given, *rest))
