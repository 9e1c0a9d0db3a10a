"""The first look at a bootstrap address, and the sentences a user reads when it fails."""

import asyncio
import errno
import socket
import subprocess
import sys

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
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # the queue is full: the kernel drops the next one
        try:
            with pytest.raises(SwarmUnreachable, match=rf"127.0.0.1:{port} does not answer in 0.2 s.*firewall"):
                await probe(at(port), 0.2)
        finally:
            writer.transport.abort()


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
