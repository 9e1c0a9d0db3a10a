"""The control socket: who may open it, what it answers, and what is said when nobody answers."""

import asyncio
import logging
import os
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_node import OTHER, PEERS, STATUS, FakeNode

from noloco_node.control import socket_client, socket_server
from noloco_node.errors import NolocoError, NoNodeRunning, UsageError
from noloco_node.host.home import Home
from noloco_node.views.gather import GatherView
from noloco_node.views.peers import PingView


@pytest.fixture(params=["home", "a home of 100% blanks?#"])
def home(request):
    with TemporaryDirectory() as place:  # tmp_path may be too long for a socket
        yield Home(Path(place) / request.param).create()


async def test_views_and_leave(home):
    node = FakeNode()
    async with socket_server.serving(home, node), socket_client.connected(home) as asked:
        assert await asked.status() == STATUS
        assert await asked.peers() == PEERS
        assert node.done == []
        await asked.leave()
        assert node.done == ["leave"]


async def test_a_rendezvous_may_list_more_peers_than_grpc_reads_by_itself(home):
    many = replace(PEERS, peers=PEERS.peers * 20_000)
    async with socket_server.serving(home, FakeNode(peers=many)), socket_client.connected(home) as asked:
        assert await asked.peers() == many


async def test_a_call_whose_connection_is_closed_says_so(home):
    asked = asyncio.Event()

    class Silent(FakeNode):
        async def ping(self, *_):
            asked.set()
            await asyncio.Event().wait()

    async with socket_server.serving(home, Silent()):
        async with socket_client.connected(home) as client:
            ping = asyncio.create_task(client.ping(OTHER))
            async with asyncio.timeout(60):
                await asked.wait()
        with pytest.raises(NolocoError, match="its connection was closed"):
            await ping


async def test_a_node_that_collects_states_and_says_nothing_more_is_there(home, monkeypatch):
    class Silent(FakeNode):
        async def gather(self, _):
            yield GatherView(doing="asking")
            await asyncio.Event().wait()

    async with socket_server.serving(home, Silent()), socket_client.connected(home) as asked:
        views = asked.gather(1)
        assert (await anext(views)).doing == "asking"
        monkeypatch.setattr(socket_client, "GATHER_SILENCE_S", 0.2)
        with pytest.raises(NolocoError, match=r"does not answer \(deadline_exceeded\)"):
            await anext(views)


async def test_ping_and_log_level(home):
    async with socket_server.serving(home, FakeNode()), socket_client.connected(home) as asked:
        assert await asked.ping(OTHER) == PingView(OTHER, 0.002, "direct")
        most = await asked.ping(OTHER, 1 << 30)
        assert most.seconds == pytest.approx(0.002 + socket_server.MAX_PAYLOAD / 1e6), "no more than that is sent"
        assert (await asked.ping(STATUS.peer_id)).failure == "unavailable"
        for nonsense in (asked.ping("../x"), asked.log_level("loud")):
            with pytest.raises(NolocoError, match="invalid_argument"):
                await nonsense
        await asked.log_level("error")
        ours = logging.getLogger("noloco_node")
        assert ours.level == logging.ERROR
        ours.setLevel(logging.NOTSET)


async def test_only_the_user_may_open_it(home):
    async with socket_server.serving(home, FakeNode()):
        mode = home.socket.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
    assert not home.socket.exists()


NOBODY = 65534
"""A user who owns nothing of ours."""
AS_NOBODY = f"""\
import os, sys
from noloco_node.cli import main
assert main(sys.argv[1:]) == 0
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.exit(main(sys.argv[1:]))
"""
"""First as this user, so that all is imported before: where Python lies may be closed to others, too."""


@pytest.fixture
def open_place():
    """For everybody; pytest's own is closed to others above the home already."""
    with TemporaryDirectory() as outer:
        Path(outer).chmod(0o755)
        yield Path(outer)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: nobody else can become another user")
@pytest.mark.parametrize(
    ("directory", "mode", "code"), [(0o700, 0o600, 2), (0o755, 0o600, 2), (0o700, 0o666, 2), (0o755, 0o666, 0)]
)
async def test_a_process_of_another_user_is_refused(directory, mode, code, open_place):
    """By the directory's mode as well as by the socket's: with both wide open it would be heard."""
    home = Home(open_place / "home").create()
    async with socket_server.serving(home, FakeNode()):
        home.root.chmod(directory)
        home.socket.chmod(mode)
        words = [sys.executable, "-c", AS_NOBODY, "status", "--json", "--home", str(home.root)]
        asked = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    refusal = f"the node in {home.root} belongs to another user: ask as that user\n"
    assert (asked.returncode, asked.stderr) == (code, refusal if code else "")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: nobody else can become another user")
@pytest.mark.parametrize("verb", ["logs", "paths", "runs"])
def test_another_users_home_is_not_read(verb, open_place):
    home = Home(open_place / "home").create()
    home.log.touch()
    words = [sys.executable, "-c", AS_NOBODY, verb, "--home", str(home.root)]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    refusal = f"the node in {home.root} belongs to another user: ask as that user\n"
    assert (asked.returncode, asked.stderr) == (2, refusal)


async def test_a_leftover_of_a_killed_node_is_replaced(home):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(home.socket))
    with pytest.raises(NoNodeRunning):
        async with socket_client.connected(home):
            pass
    async with socket_server.serving(home, FakeNode()), socket_client.connected(home) as asked:
        assert (await asked.status()).name == STATUS.name


async def test_nobody_there(home):
    took_s = []
    for _ in range(3):  # a machine that stands still does so for one of them
        began = time.monotonic()
        with pytest.raises(NoNodeRunning, match="join <invitation>") as raised:
            async with socket_client.connected(home):
                pass
        assert raised.value.exit_code == 3
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 1


async def test_a_node_that_is_starting(home):
    with home.lock(), pytest.raises(NoNodeRunning, match=r"pid .*just starting or ending"):
        async with socket_client.connected(home):
            pass


async def test_a_node_on_another_machine_that_shares_the_home(home):
    """It is not about to start. `wait` ends by a UsageError, too."""
    with home.lock():
        home.lock_file.write_text("4711 another-box\n")
        with pytest.raises(UsageError, match=r"runs on the machine another-box \(pid 4711\): ask there"):
            async with socket_client.connected(home):
                pass


async def test_a_node_that_goes_meanwhile(home):
    async with client_of_a_gone_node(home) as asked:
        with pytest.raises(NoNodeRunning):
            await asked.status()


def client_of_a_gone_node(home):
    """A client as `connected` makes it, without the first knock."""
    import grpc.aio

    class Gone:
        async def __aenter__(self):
            self.channel = grpc.aio.insecure_channel(home.socket_url)
            return socket_client.ControlClient(self.channel, home)

        async def __aexit__(self, *_):
            await self.channel.close()

    return Gone()


async def test_a_node_that_is_broken(home):
    class Broken(FakeNode):
        def status(self):
            raise ZeroDivisionError

    async with socket_server.serving(home, Broken()), socket_client.connected(home) as asked:
        with pytest.raises(NolocoError, match=r"does not answer.*node.log"):
            await asked.status()


async def test_a_place_where_no_socket_can_be(home):
    home.root.rmdir()
    with pytest.raises(UsageError, match="control socket"):
        async with socket_server.serving(home, FakeNode()):
            pass
