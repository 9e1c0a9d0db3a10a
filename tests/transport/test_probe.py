"""The first look at a bootstrap address, and the sentences a user reads when it fails."""

import asyncio
import errno
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from ports import quiet_port

from noloco_node.base.addresses import EXAMPLE, Address, parse
from noloco_node.errors import PortInUse, SwarmUnreachable, UsageError
from noloco_node.transport.probe import check_port, is_of_this_machine, probe

PEER = parse(EXAMPLE).peer


def at(port, kind="ip4", host="127.0.0.1"):
    return Address(kind, host, port, PEER)


async def test_something_that_listens_is_enough():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        await probe(at(port), 30.0)
        await probe(at(port, "dns4", "localhost"), 30.0)


async def test_nobody_listens():
    port = quiet_port()
    with pytest.raises(SwarmUnreachable, match=rf"127.0.0.1:{port} refuses the connection. Is the bootstrap node"):
        await probe(at(port), 30.0)


async def test_no_answer():
    async with silent() as port:
        with pytest.raises(SwarmUnreachable, match=rf"127.0.0.1:{port} does not answer in 0.2 s.*firewall"):
            await probe(at(port), 0.2)


@asynccontextmanager
async def silent(host="127.0.0.1", port=0):
    """A port that answers nobody: its queue is full, and the kernel drops the next one."""
    with socket.socket() as full:
        full.bind((host, port))
        full.listen(0)
        _, writer = await asyncio.open_connection(*full.getsockname())
        try:
            yield full.getsockname()[1]
        finally:
            writer.transport.abort()


def resolves_to(monkeypatch, *hosts):
    async def look_up(_, port, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)


async def test_one_of_the_addresses_of_a_name_is_enough(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with silent("127.0.0.2", listener.getsockname()[1]) as port:
            resolves_to(monkeypatch, "127.0.0.3", "127.0.0.2", "127.0.0.1")  # one refuses
            await probe(at(port, "dns", "meet.example.org"), 30.0)
            resolves_to(monkeypatch, "127.0.0.3", "127.0.0.2")
            with pytest.raises(SwarmUnreachable, match=rf"meet.example.org:{port} does not answer in 0.5 s"):
                await probe(at(port, "dns", "meet.example.org"), 0.5)
            resolves_to(monkeypatch, "127.0.0.3", "127.0.0.4")
            with pytest.raises(SwarmUnreachable, match=rf"meet.example.org:{port} refuses the connection"):
                await probe(at(port, "dns", "meet.example.org"), 30.0)


async def test_a_name_server_that_does_not_answer_is_no_closed_port(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *_, **__: asyncio.Event().wait())
    with pytest.raises(SwarmUnreachable, match=r"name meet.example.org is not known.*online"):
        await probe(at(4001, "dns", "meet.example.org"), 0.1)


@pytest.mark.parametrize("port", [4001, 0])
def test_an_address_that_is_not_there_yet_is_no_final_error(port):
    with pytest.raises(PortInUse, match="no address of this machine at this moment"):
        check_port(Address("ip4", "192.0.2.1", port))


def test_where_a_machine_has_no_ipv6_that_is_said(monkeypatch):
    def fail(*_):
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(UsageError, match=r"refused \(Address family not supported by protocol\): choose another"):
        check_port(Address("ip6", "::", 0))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(-2, "Name or service not known"), "name nowhere.invalid is not known"),
        (OSError(101, "Network is unreachable"), r"nowhere.invalid:4001 cannot be reached from here \(Network is unr"),
    ],
)
async def test_what_the_system_says_is_translated(monkeypatch, error, says):
    async def fail(*_, **__):
        raise error

    if isinstance(error, socket.gaierror):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    else:
        resolves_to(monkeypatch, "192.0.2.1")
        monkeypatch.setattr(asyncio, "open_connection", fail)
    with pytest.raises(SwarmUnreachable, match=says):
        await probe(at(4001, "dns4", "nowhere.invalid"), 5.0)


def test_which_addresses_are_of_this_machine():
    assert is_of_this_machine("127.0.0.1")
    assert not is_of_this_machine("192.0.2.1") and not is_of_this_machine("2001:db8::1"), "those are nobody's"


def test_probing_imports_nothing_heavy():
    code = (
        "import sys, noloco_node.transport.probe; print([m for m in ('torch', 'hivemind', 'grpc') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
