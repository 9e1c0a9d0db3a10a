"""What is libp2p's own: processes, sockets, identities and ports; nothing may be left behind, however a node ends."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import base58
import grpc
import psutil
import pytest
from memory_network.network import started
from patience import PATIENCE
from ports import quiet_port
from transport_peers import STEP_S, Exchange, OverLibp2p, Runs, drain, echo, failure_of, fragment, list_no_runs, until
from virtual_clock import run_virtual

import noloco_node
from noloco_node.base.addresses import ANY_LOCAL_PORT, ANY_PORT, Address, ip_address, parse
from noloco_node.base.identity import Identity, peer_id_of
from noloco_node.base.places import GONE, RELAYED
from noloco_node.errors import IdentityInUse, NolocoError, SwarmUnreachable, UsageError
from noloco_node.host.memory import process_bytes
from noloco_node.peers import directory
from noloco_node.transport import grpc_bridge, libp2p, reachability, relayed_places, self_view
from noloco_node.transport.call_limits import OF_PEER, CallLimits
from noloco_node.transport.grpc_bridge import CHANNEL_OPTIONS, SERVER_OPTIONS, FarEnd, splice
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.p2pd import session
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.p2pd.process import P2pdProcess
from noloco_node.transport.probe import is_free_for_udp
from noloco_node.transport.reachability import AUTO, ONLY
from noloco_node.wire import mirror_pb2, peer_pb2
from noloco_node.wire.mirror_pb2_grpc import HolePunchingStub, MirrorServicer
from noloco_node.wire.peer_pb2_grpc import ExchangeStub, RunsStub, add_ExchangeServicer_to_server

LIBP2P_NODE = Path(__file__).parents[1] / "helpers" / "libp2p_node.py"
GONE_S = 5.0 * PATIENCE  # after kill -9, processes and files of a node are gone within this time
NOTICED_S = 7.0 * PATIENCE  # a p2pd that hangs is killed after 4.8 s at most; the rest is for a busy machine


WHERE_WORKERS_ARE_NO_FORKS = """
import multiprocessing
from multiprocessing import resource_tracker
from noloco_node.transport import libp2p
multiprocessing.set_start_method("spawn")
libp2p._import_hivemind()
print(multiprocessing.get_start_method(), resource_tracker._resource_tracker._pid)
"""


def test_hivemind_is_imported_without_a_semaphore_that_somebody_must_remove() -> None:
    """Python says on stderr, after a node's own last sentence, that one was left."""
    words = [sys.executable, "-c", WHERE_WORKERS_ARE_NO_FORKS]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "spawn None\n"


WHERE_NO_SEMAPHORE_CAN_BE_MADE = """
import resource
from noloco_node.errors import NolocoError
from noloco_node.transport import libp2p
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    libp2p._import_hivemind()
except NolocoError as error:
    print(error)
"""


def test_a_machine_without_shared_memory_is_told_what_it_lacks() -> None:
    words = [sys.executable, "-c", WHERE_NO_SEMAPHORE_CAN_BE_MADE]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert "Is /dev/shm there, and may this user write it?" in done.stdout


@pytest.mark.parametrize("parent", ["/proc", None])
async def test_without_a_folder_for_temporary_files_the_remedy_is_said(net, monkeypatch, parent):
    monkeypatch.setattr(tempfile, "tempdir", parent)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(UsageError, match=r"cannot write (/proc|temporary files): .*with TMPDIR"):
        await net.start()


@pytest.fixture
async def net(tmp_path):
    net = OverLibp2p(tmp_path)
    yield net
    async with asyncio.timeout(STEP_S):
        await net.close()


def transport(directory, name="other", **settings):
    identity = Identity.load_or_create(directory / f"{name}.key")
    return Libp2pTransport(identity, settings.pop("listen", ANY_LOCAL_PORT), **settings)


async def forever():
    await asyncio.Event().wait()
    yield


def directory_of(transport):
    return transport._session.process.socket.parent


def cleaners(directory):
    """Processes of any parent whose command line names the directory."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if str(directory) in (process.info["cmdline"] or [])
    ]


async def node_of_its_own(folder, other, *words, **environ):
    """A node in a process, and what it says of itself."""
    arguments = [LIBP2P_NODE, folder / "killed.key", str(other.addresses()[0]), *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(noloco_node.__file__).parents[1]), **environ}
    node = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=environ)
    async with asyncio.timeout(3 * STEP_S):
        return node, json.loads(await node.stdout.readline())


# ---- a busy machine ----
async def test_a_p2pd_whose_first_answers_are_late_is_waited_for(tmp_path, monkeypatch):
    """A node ended at its start where p2pd took more than 5 s for one of them."""
    start = P2pdProcess.start

    async def start_late(*arguments):
        process = await start(*arguments)
        os.kill(process.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(session.CONTROL_S + 1, os.kill, process.pid, signal.SIGCONT)
        return process

    monkeypatch.setattr(P2pdProcess, "start", start_late)
    async with started(late := transport(tmp_path)):
        assert late.addresses()


# ---- nothing is left ----


async def test_nothing_is_left_after_close(net, tmp_path):
    children, tasks = len(psutil.Process().children()), len(asyncio.all_tasks())
    server, client = await net.start(Exchange(echo), Runs(list_no_runs)), await net.start()
    await RunsStub(client.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    directory = directory_of(client)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / f"{server.peer_id}.sock").is_socket()
    assert all(path.name.endswith(".sock") for path in directory.iterdir())
    assert len(cleaners(directory)) == 1
    await client.close()
    await until(lambda: not server._parts.inbound._carried)
    await net.close()
    assert not directory.exists() and not directory_of(server).exists()
    assert len(psutil.Process().children()) == children
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_start_that_fails_leaves_nothing(net, tmp_path):
    children = len(psutil.Process().children())
    failing = transport(tmp_path, bootstrap=[Address("ip4", "127.0.0.1", 1, net.new_id())])
    with pytest.raises(SwarmUnreachable, match="bootstrap"):
        await failing.start()
    assert len(psutil.Process().children()) == children


async def test_child_processes_ignore_ctrl_c_in_the_terminal(net):
    others = psutil.Process().children()  # of other tests' libraries
    await net.start()
    helpers = set(psutil.Process().children()) - set(others)
    assert helpers
    for helper in helpers:
        assert os.getsid(helper.pid) != os.getsid(0)
        assert os.getpgid(helper.pid) != os.getpgid(0)


@pytest.mark.parametrize("condition", ["stuck", "fork"])
async def test_nothing_is_left_after_kill_9(net, tmp_path, condition):
    """With streams open, and a p2pd that hangs, or a forked worker that still holds every descriptor."""
    server = await net.start(Exchange(echo))
    node, left = await node_of_its_own(tmp_path, server, *(["fork"] if condition == "fork" else []))
    directory = Path(left["directory"])
    assert psutil.pid_exists(left["daemon"]) and cleaners(directory)
    if condition == "stuck":
        os.kill(left["daemon"], signal.SIGSTOP)
    node.kill()
    try:
        async with asyncio.timeout(GONE_S):
            await until(lambda: not (_alive(left["daemon"]) or directory.exists() or cleaners(directory)))
    finally:
        for pid in (left["worker"], left["daemon"] if _alive(left["daemon"]) else None):
            if pid:
                os.kill(pid, signal.SIGKILL)
        await node.communicate()


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a container's init may never reap it
    except psutil.NoSuchProcess:
        return False


async def test_the_next_node_removes_leftovers_and_nothing_in_use(net, tmp_path, monkeypatch):
    """The cleaner was killed with its node."""
    parent = Path(tempfile.mkdtemp(prefix="nl-", dir="/tmp"))  # short: sockets lie below it
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    living, others = await net.start(Exchange(echo)), parent / "noloco-notes"
    others.mkdir()
    (others / "file").touch()
    node, left = await node_of_its_own(tmp_path, living, TMPDIR=str(parent))
    directory = Path(left["directory"])
    for process in (*cleaners(directory), node):
        process.kill()
    await node.communicate()
    for path in (directory, directory_of(living), others):
        os.utime(path, (0, 0))
    await net.start()
    await until(lambda: not directory.exists())
    assert directory_of(living).exists() and others.exists()
    await until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(directory) in str(p.info["cmdline"])])
    await net.close()
    shutil.rmtree(parent)


# ---- when p2pd ends ----


@pytest.mark.parametrize(
    ("number", "busy_s"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 1.5), (signal.SIGSTOP, 0)],
    ids=["killed", "busy", "hangs"],
)
async def test_the_end_of_p2pd_is_noticed_and_another_one_started(net, number, busy_s):
    """Channels stay usable, and the port is the same. A busy machine hears of the end late, and all at once."""
    server, client = await net.start(Runs(list_no_runs), last_port=quiet_port()), await net.start()
    stub, addresses = RunsStub(client.channel(server.peer_id)), server.addresses()
    await stub.List(peer_pb2.RunsRequest(), timeout=STEP_S)
    lost = asyncio.create_task(server.lost())
    await asyncio.sleep(0)
    assert not lost.done()
    os.kill(server._session.process.pid, number)
    time.sleep(busy_s)  # noqa: ASYNC251 - the loop stands still
    async with asyncio.timeout(NOTICED_S):
        how = await lost
    assert how == ("p2pd was killed by signal 9" if number == signal.SIGKILL else "p2pd no longer answered")
    assert await failure_of(stub.List(peer_pb2.RunsRequest(), timeout=STEP_S)) is grpc.StatusCode.UNAVAILABLE
    await server.restart()
    assert server.addresses() == addresses
    await stub.List(peer_pb2.RunsRequest(), timeout=STEP_S, wait_for_ready=True)
    await client.restart()
    await stub.List(peer_pb2.RunsRequest(), timeout=STEP_S, wait_for_ready=True)


@pytest.mark.parametrize("broken", ["p2pd.session.process_bytes", "reachability.periodic.every"])
async def test_a_task_that_ends_by_a_defect_is_no_secret(net, monkeypatch, broken):
    def fails(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(f"noloco_node.transport.{broken}", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        await (await net.start()).lost()


async def test_a_bootstrap_peer_that_is_away_is_not_dialled(net):
    server, client = await net.start(), await net.start()
    (address,) = server.addresses()
    assert await client.may_answer(server.peer_id)
    await server.close()
    async with asyncio.timeout(STEP_S):
        while await client.may_answer(server.peer_id):  # noqa: ASYNC110 - its p2pd learns of it a moment later
            await asyncio.sleep(0.01)
    back = await asyncio.start_server(lambda _, writer: writer.close(), address.host, address.port)
    assert await client.may_answer(server.peer_id)
    back.close()
    assert await client.may_answer("not a bootstrap peer")


@pytest.mark.parametrize("moved", [False, True])
async def test_a_bootstrap_peer_that_was_away_as_p2pd_was_started_again_is_found_later(net, moved, monkeypatch):
    """The network was not back yet, and p2pd keeps an address that leads nowhere for two minutes after each try. It may
    be a node of the run, whose last record names an address that it had before, where the bootstrap address is a name
    that follows it."""
    server = await net.start(Runs(list_no_runs))
    client = await net.start()
    if moved:
        client.introduce({server.peer_id: [Address("ip4", "127.0.0.1", 1, server.peer_id)]})
    net.kill(client)
    await client.lost()
    with monkeypatch.context() as away:

        async def nobody_there(*_):
            await asyncio.sleep(0)

        away.setattr(P2pdControl, "try_connect", nobody_there)
        await client.restart()
    assert await client._find_connected(server.peer_id) is None
    stub = RunsStub(client.channel(server.peer_id))
    await stub.List(peer_pb2.RunsRequest(), timeout=STEP_S, wait_for_ready=True)


@pytest.mark.parametrize("turns", range(6))
async def test_a_node_that_is_told_to_leave_as_its_p2pd_ends_does_not_forget_it(turns):
    """asyncio.wait_for of Python 3.11 loses a cancellation that comes with the result: who waits for it waits for
    ever."""
    over = asyncio.get_running_loop().create_future()

    async def wait():
        return await asyncio.shield(over)

    process = P2pdProcess(
        SimpleNamespace(pid=0, stdout=None, terminate=lambda: None, kill=lambda: None, wait=wait), Path()
    )
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0.01)
    over.set_result(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()


async def test_a_p2pd_that_is_killed_while_it_starts_is_started_again(net, monkeypatch):
    """Two: the one that looks whether the identity is in use, and the node's own."""
    await net.start()
    launch, pids = P2pdProcess.launch, []

    async def killed_at_first(socket, arguments):
        process = await launch(socket, arguments)
        pids.append((socket.name, process.pid))
        if [name for name, _ in pids].count(socket.name) == 1:
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(P2pdProcess, "launch", killed_at_first)
    node = await net.start()
    assert [name for name, _ in pids] == ["observer.sock"] * 2 + ["p2pd.sock"] * 2
    assert node._session.process.pid == pids[-1][1]


async def test_a_p2pd_into_which_strangers_write_too_much_is_replaced(net, monkeypatch):
    """libp2p's Kademlia table in p2pd keeps each provider record that it is sent."""
    server, stranger = await net.start(), await net.start()
    monkeypatch.setattr(session, "MOST_BYTES", (process_bytes(server._session.process.pid) or 0) + (24 << 20))
    lost = asyncio.create_task(server.lost())
    control = stranger._session.control
    await control.connect(server.peer_id, server.addresses())
    (_, writer), _ = await control.open_stream(server.peer_id, "/ipfs/kad/1.0.0", 5)
    async with asyncio.timeout(60 * PATIENCE):
        number = 0
        with suppress(OSError):
            while not lost.done():
                writer.write(b"".join(provider_record(number + i, stranger.peer_id) for i in range(1000)))
                number += 1000
                await asyncio.wait({asyncio.ensure_future(writer.drain()), lost}, return_when=asyncio.FIRST_COMPLETED)
        assert "of memory" in await lost
    writer.transport.abort()
    await server.restart()


def provider_record(number, peer):
    """ADD_PROVIDER of a made-up key, after its length."""
    key = b"\x12\x20" + number.to_bytes(32, "big")
    me, address = base58.b58decode(peer), bytes([4, 127, 0, 0, 1, 6, 15, 161])
    provider = bytes([10, len(me)]) + me + bytes([18, len(address)]) + address
    body = bytes([8, 2, 18, len(key)]) + key + bytes([74, len(provider)]) + provider
    return bytes([len(body)]) + body


async def test_a_p2pd_that_ends_while_hivemind_joins_it_is_an_error_of_ours(net, monkeypatch):
    """hivemind reads its answer then, and finds the end of the stream."""
    node = await net.start()

    async def ended(*_args, **_options):
        raise asyncio.IncompleteReadError(b"", 1)

    monkeypatch.setattr(node._hivemind.p2p, "replicate", ended)
    with pytest.raises(NolocoError, match="broke off while starting"):
        await node.restart()


async def test_a_node_that_stood_still_goes_on_with_the_dht(net):
    """As after a machine's sleep: a call's time is up and its answer is there, both at once."""
    node, other = await net.start(), await net.start()
    loop = asyncio.get_running_loop()

    def stand_still(turns):
        """Once the answer is on its way."""
        if turns:
            loop.call_soon(stand_still, turns - 1)
        else:
            time.sleep(0.5)

    async def answer(request, context):
        stand_still(4)
        return request

    async def call(within_s):
        peer = other.p2p.peer_id
        async with asyncio.timeout(within_s):
            await node.p2p.call_protobuf_handler(peer, "any", peer_pb2.RunsRequest(), peer_pb2.RunsRequest)

    await other.p2p.add_protobuf_handler("any", answer, peer_pb2.RunsRequest)
    await node._session.control.connect(other.peer_id, other.addresses())
    late = 0
    async with asyncio.timeout(STEP_S):
        while late < 5:
            try:
                await call(0.3)
            except TimeoutError:
                late += 1
        await call(STEP_S)


async def test_a_reader_of_hiveminds_that_breaks_is_noticed(net, monkeypatch):
    class Breaks(dict):
        def __contains__(self, call):
            raise RuntimeError

    node = await net.start()
    lost = asyncio.create_task(node.lost())
    monkeypatch.setattr(node.p2p._client.control, "_pending_calls", Breaks())
    waits = asyncio.create_task(node.p2p.add_protobuf_handler("any", None, peer_pb2.RunsRequest))
    async with asyncio.timeout(NOTICED_S):
        assert await lost == "hivemind's connection to p2pd broke"
    waits.cancel()
    await node.restart()


# ---- relays, and how a node looks from outside ----


async def test_the_port_that_it_listens_on_is_not_the_one_that_its_router_has_for_it(tmp_path):
    node = Libp2pTransport(Identity.load_or_create(tmp_path / "key"), ANY_PORT)
    assert node.listening_port == 0
    here = [Address("ip4", host, 40001) for host in ("127.0.0.1", "192.168.1.20")]
    node._latest = SimpleNamespace(addresses=here)
    node._reach._outside = [Address("ip4", "203.0.113.7", 51234, node.peer_id)]
    assert (node.addresses()[0].port, node.listening_port) == (51234, 40001)


async def test_a_node_that_learns_later_that_nobody_can_call_it_listens_for_quic(net, monkeypatch):
    monkeypatch.setattr(reachability, "KEEP_S", 0.2)
    await net.start(serves_relay=True)
    node = await net.start(last_port=quiet_port())
    lost = asyncio.create_task(node.lost())
    assert is_free_for_udp(libp2p._same_port(node._listen, node._session.addresses))
    node._reach.verdict = reachability.RELAYED
    async with asyncio.timeout(NOTICED_S):
        assert await lost == "no peer can call this node, so the next one listens for QUIC, too"
    await node.restart()
    assert not is_free_for_udp(node._listen)


async def test_a_node_is_called_through_a_relay(net, monkeypatch):
    monkeypatch.setattr(relayed_places, "_ANSWER_S", STEP_S)
    await net.start(serves_relay=True)
    hidden, caller = await net.start(Exchange(echo), relay=ONLY), await net.start()
    assert hidden.reachable == "relayed" and caller.reachable is None
    (address,) = hidden.addresses()
    assert str(address).endswith(f"{net.transports[0].peer_id}/p2p-circuit/p2p/{hidden.peer_id}")
    caller.introduce({hidden.peer_id: hidden.addresses()})
    assert caller.via(hidden.peer_id) is None
    frames = [fragment(bytes(1 << 20), index) for index in range(8)]
    call = ExchangeStub(caller.channel(hidden.peer_id)).Swap(iter(frames), timeout=STEP_S)
    assert await drain(call) == frames
    assert caller.via(hidden.peer_id) == hidden.via(caller.peer_id) == "relayed"
    assert caller.via(net.transports[0].peer_id) == "direct"
    assert caller._far_ends[hidden.peer_id].relay == net.transports[0].peer_id
    await until(lambda: caller.place_of(hidden.peer_id) == "127.0.0.1")  # the relay says so


async def test_a_relay_may_announce_what_does_not_lead_to_it_yet(net, caplog):
    port, announced = quiet_port(), [replace(ANY_LOCAL_PORT, port=quiet_port())]
    await net.start(listen=replace(ANY_PORT, port=port), announce=announced, serves_relay=True)
    assert not [record.message for record in caplog.records if "relay" in record.message]


async def test_who_comes_over_a_relay_that_says_nothing_stands_with_all_such(net, monkeypatch):
    monkeypatch.setattr(libp2p.SelfViewService, "Whence", MirrorServicer.Whence)  # one of an older version
    await net.start(serves_relay=True)
    hidden, caller = await net.start(relay=ONLY), await net.start()
    assert await caller.reaches(hidden.peer_id, hidden.addresses(), int(STEP_S))
    await until(lambda: not caller._relayed._asking)
    assert caller.place_of(hidden.peer_id) == RELAYED
    assert hidden.place_of(hidden.peer_id) == hidden.peer_id, "strangers share its relay"


async def test_a_relay_that_its_user_did_not_choose_carries_calls_and_is_not_believed(net):
    relay = await net.start(serves_relay=True)
    hidden, caller = [await net.start(relay=how, bootstrap=[], seen=relay.addresses()) for how in (ONLY, AUTO)]
    assert hidden.reachable == "relayed"
    assert await caller.reaches(hidden.peer_id, hidden.addresses(), int(STEP_S))
    assert caller.via(hidden.peer_id) == "relayed" and not caller._relayed._asking
    assert caller.place_of(hidden.peer_id) == RELAYED
    dial = HolePunchingStub(relay.channel(caller.peer_id)).Dial(mirror_pb2.DialRequest(), timeout=STEP_S)
    assert await failure_of(dial) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_peer_is_reached_only_where_it_is(net, tmp_path):
    server, client = await net.start(), await net.start()
    nobody = Identity.load_or_create(tmp_path / "nobody").peer_id
    nowhere = [replace(address, peer=nobody) for address in server.addresses()]
    assert await client.reaches(server.peer_id, server.addresses(), int(STEP_S))
    assert not await client.reaches(nobody, nowhere, 3), "somebody else answers there"
    assert client.met_at(server.peer_id) is not None and client.met_at(nobody) is None
    await until(lambda: server.met_at(client.peer_id) is not None)
    assert await server.place_seen(client.peer_id) == "127.0.0.1"
    assert await server.place_seen(nobody) == GONE, "one place, however many ids ask and are gone"
    assert server.place_of(server.peer_id) == "127.0.0.1"


async def test_without_a_relay_among_the_bootstrap_peers_there_is_no_reservation(net):
    await net.start(serves_relay=False)
    hidden = await net.start(relay=ONLY)
    assert hidden.reachable == "outgoing" and hidden.addresses() == []


async def test_bootstrap_peers_on_this_machine_give_no_verdict(net):
    await net.start()
    everywhere = await net.start(listen=ANY_PORT)
    assert everywhere.reachable is None


async def test_a_peer_reports_at_which_ports_we_answer_and_not_another_libp2p_host(net, monkeypatch):
    server, client = await net.start(), await net.start()
    own = client.addresses()[0].port
    monkeypatch.setattr(self_view, "_LOOK_S", STEP_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = silent.getsockname()[1]
        image = await self_view.look(client.channel(server.peer_id), [own, other, server.listening_port])
    assert image == ("127.0.0.1", (own,))
    assert client.skew == (0, 1), "there is one clock here"


def test_who_has_asked_something_counts_where_it_is_now(tmp_path):
    """64 identities that had been at 64 places once, and then all on one host, had the answers of 64 places."""

    class Control:
        host = "9.9.9.9"

        async def find_connected(self, peer):
            return FarEnd(peer, self.host)

    async def test():
        node, control = transport(tmp_path), Control()
        node._latest = SimpleNamespace(control=control)
        node._note(FarEnd("met", "9.9.9.9"))
        for host, place, why in (
            ("9.9.9.9", "9.9.9.0/24", ""),
            ("8.8.8.8", "9.9.9.0/24", "p2pd is asked once a minute"),
            ("8.8.8.8", "8.8.8.0/24", ""),
        ):
            control.host = host
            assert {await node.place_seen(peer) for peer in ("met", "asks")} == {place}, why
            await asyncio.sleep(31)

    run_virtual(test())


async def test_a_peer_over_a_transport_that_hivemind_cannot_name_is_where_its_bytes_come_from(net, tmp_path):
    """p2pd knows it, and dials it where a peer has said that it listens there. Each call raised and left a socket."""
    node = await net.start()
    runtime, messages, multiaddr = directory_of(node), node._hivemind.messages, node._hivemind.multiaddr
    listen = "/ip4/127.0.0.1/udp/0/quic-v1/webtransport"
    process = await P2pdProcess.launch(tmp_path / "peer.sock", [f"-hostAddrs={listen}"])

    async def ask(control, **request):
        answer, stream = await control._ask(**request)
        stream[1].close()
        return answer

    try:
        await process.wait_ready()
        peer, own = P2pdControl(process.socket, messages, multiaddr), node._session.control
        listener = await asyncio.start_unix_server(lambda _, writer: writer.transport.abort(), runtime / "peer.sock")
        await peer.hand_over_streams(libp2p.PROTOCOL, runtime / "peer.sock")
        known = (await ask(peer, type=messages.Request.IDENTIFY)).identify
        connect = messages.ConnectRequest(peer=known.id, addrs=list(known.addrs), timeout=5)
        await ask(own, type=messages.Request.CONNECT, connect=connect)
        peer_id = str(base58.b58encode(known.id), "ascii")
        assert await node.place_seen(peer_id) == "127.0.0.1"
        assert await node.reaches(peer_id, [], int(STEP_S)) and node.via(peer_id) == "direct"
        (there,) = (await ask(own, type=messages.Request.LIST_PEERS)).peers
        with pytest.raises(ValueError, match="Unknown Protocol"):
            str(multiaddr(there.addrs[0]))
    finally:
        await process.stop()
    listener.close()  # sooner, asyncio would drop a stream that comes at this moment, and say that nobody closed it


async def test_a_record_may_name_what_hivemind_takes_for_no_name(net, tmp_path):
    """Go resolves it, as Docker does. hivemind raised, and the next start of p2pd, which calls all peers, failed."""
    node = await net.start()
    stranger = Identity.load_or_create(tmp_path / "stranger.key").peer_id
    named = [parse(f"/dns4/no_such.invalid/tcp/1/p2p/{stranger}")]
    assert not await node.reaches(stranger, named, 3)
    node.introduce({stranger: named})
    await node.restart()


async def test_a_node_may_announce_what_hivemind_takes_for_no_name(net):
    node = await net.start(announce=[parse("/dns4/my_host/tcp/4001")])
    assert node.addresses() == [parse(f"/dns4/my_host/tcp/4001/p2p/{node.peer_id}")]


async def test_where_a_peer_is_stays_known_as_long_as_it_is_seen(net):
    """Of 1500 identities in one network, 500 were forgotten, and each was a place of its own."""
    node = net.make()
    ids = [peer_id_of(n.to_bytes(32)) for n in range(directory._MAX_KNOWN)]
    peers = {peer: [ip_address(f"8.8.8.{n % 250}", 1)] for n, peer in enumerate(ids)}
    for _ in range(2):
        node.introduce(peers)
    assert set(map(node.place_of, peers)) == {"8.8.8.0/24"}


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/203.0.113.7/tcp/4001",
        "/ip6/2001:db8::1/udp/65535/quic-v1",
        "/dns/a-node.example/tcp/1/ws",
        "/dns4/a/tcp/1",
        "/dns6/a.b/tcp/443/wss",
    ],
)
async def test_addresses_in_binary(net, text):
    multiaddr = net.make()._hivemind.multiaddr
    assert P2pdControl(Path(), None, multiaddr)._binary(parse(text)) == bytes(multiaddr(text).to_bytes())


@pytest.mark.parametrize(
    ("before", "theirs", "round_trip_s", "skew"),
    [(100, 100, 0, 0), (100, 101, 4, 0), (105, 100, 1, 5), (100, 160, 2, -58), (100.0, 90.0, 0.0, 10)],
)
def test_skew_is_only_what_the_delay_does_not_explain(before, theirs, round_trip_s, skew):
    assert self_view.least_skew(before, theirs, round_trip_s) == skew


# ---- who may call ----


async def test_a_call_that_is_given_back_does_not_count(net):
    async def served(requests, context):
        async for request in requests:
            if request.fragment.index:
                server.give_back(context)
            yield request

    async def one(index):
        yield fragment(b"x", index=index)

    server = net.make()
    server._call_limits = CallLimits(peer_a_minute=30)
    server.serve(lambda to: add_ExchangeServicer_to_server(Exchange(served), to))
    net.transports.append(server)
    await server.start()
    client = await net.start()
    stub = ExchangeStub(client.channel(server.peer_id))
    for _ in range(60):
        await drain(stub.Swap(one(1), timeout=STEP_S))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        for _ in range(60):
            await drain(stub.Swap(one(0), timeout=STEP_S))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_local_process_that_is_no_peer_is_refused(net):
    server, client = await net.start(Runs(list_no_runs)), await net.start()
    await RunsStub(client.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    inbound = server._parts.inbound
    async with grpc.aio.insecure_channel(f"127.0.0.1:{inbound._port}") as stranger:
        call = RunsStub(stranger).List(peer_pb2.RunsRequest(), timeout=STEP_S)
        assert await failure_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_newcomer_is_answered_while_15_identities_of_5_places_hold_all_calls_that_they_get(net, monkeypatch):
    """They held all that strangers may have at once."""
    held, refused = Counter(), 0

    async def hold(requests, context):
        held[server.place(context)] += 1
        await asyncio.Event().wait()
        yield

    async def read_caller(reader):
        return FarEnd(*(await reader.readline()).decode().split())

    async def dial(peer):
        streams = await asyncio.open_unix_connection(directory_of(server) / libp2p._STREAMS)
        streams[1].write(f"{peer} {hosts[peer]}\n".encode())
        return streams

    async def ask_and_hold(peer):
        nonlocal refused
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await drain(ExchangeStub(callers.channel(peer)).Swap(forever()))
        refused += ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    server = await net.start(Exchange(hold), Runs(list_no_runs))
    monkeypatch.setattr(server._parts.inbound, "_read_caller", read_caller)
    hosts = {net.new_id(): f"127.0.0.{2 + number // 3}" for number in range(15)}
    newcomer = net.new_id()
    hosts[newcomer] = "127.0.0.9"
    callers = grpc_bridge.Outbound(directory_of(server), dial)
    calls = [asyncio.create_task(ask_and_hold(peer)) for _ in range(OF_PEER) for peer in hosts if peer != newcomer]
    await until(lambda: held.total() + refused == len(calls))
    assert len(held) == 5 and held.total() > 100
    runs = RunsStub(callers.channel(newcomer))
    await asyncio.gather(*(runs.List(peer_pb2.RunsRequest(), timeout=STEP_S) for _ in range(8)))
    assert held.total() + refused == len(calls), "the attack holds"
    await callers.close()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_the_same_port_on_another_loopback_address_is_another_caller(net, tmp_path):
    server, client = await net.start(Runs(list_no_runs)), await net.start()
    await RunsStub(client.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)
    inbound = server._parts.inbound
    ((known, carried),) = inbound._carried.items()
    assert carried.caller.peer == client.peer_id
    port = int(known.rpartition(":")[2])

    async def forward(*stream):
        await splice(stream, await asyncio.open_connection("127.0.0.1", inbound._port, local_addr=("127.0.0.2", port)))
        ended.set()

    ended, path = asyncio.Event(), tmp_path / "s"
    proxy = await asyncio.start_unix_server(forward, path)
    async with grpc.aio.insecure_channel(f"unix:{path}") as stranger:
        code = await failure_of(RunsStub(stranger).List(peer_pb2.RunsRequest(), timeout=STEP_S))
        assert code is grpc.StatusCode.UNAUTHENTICATED
    async with asyncio.timeout(STEP_S):
        await ended.wait()
    proxy.close()


async def test_a_connection_without_calls_is_closed(net, monkeypatch):
    quick = [(name, 400 if name == "grpc.max_connection_idle_ms" else value) for name, value in SERVER_OPTIONS]
    monkeypatch.setattr(libp2p, "SERVER_OPTIONS", quick)
    server, client = await net.start(Runs(list_no_runs), Exchange(echo)), await net.start()

    async def again(call):
        """On a busy machine the short idle time here may end between connecting and calling."""
        for attempt in range(20):
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE and attempt < 19
        return None

    async def begin():
        swap = ExchangeStub(client.channel(server.peer_id)).Swap(timeout=STEP_S)
        await swap.write(fragment())
        await swap.read()
        return swap

    swap = await again(begin)
    inbound = server._parts.inbound
    await until(lambda: len(inbound._carried) == 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await until(lambda: not inbound._carried)
    await swap.write(fragment(index=1))
    assert await swap.read() == fragment(index=1), "a call is under way"
    await swap.done_writing()
    assert await swap.read() is grpc.aio.EOF
    await until(lambda: not (inbound._carried or inbound._per_peer))
    await again(lambda: RunsStub(client.channel(server.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S))


def test_a_caller_closes_an_idle_connection_before_the_server_does():
    """Else a call that begins at that moment would fail. grpc ends an idle connection after one to two of its times."""
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert 2 * channel["grpc.client_idle_timeout_ms"] <= server["grpc.max_connection_idle_ms"] == 60_000


# ---- what a user can get wrong ----


async def test_an_identity_that_is_in_use_is_refused_and_the_first_node_keeps_it(net, tmp_path):
    first, caller = await net.start(Runs(list_no_runs)), await net.start()
    for bootstrap in (first.addresses(), caller.addresses()):
        second = Libp2pTransport(first._identity, ANY_LOCAL_PORT, bootstrap=bootstrap)
        with pytest.raises(IdentityInUse, match="NOLOCO_HOME"):
            await second.start()
    await RunsStub(caller.channel(first.peer_id)).List(peer_pb2.RunsRequest(), timeout=STEP_S)


async def test_a_first_node_may_name_itself_and_a_restart_is_no_second_node(net, tmp_path):
    others = (await net.start()).addresses()
    for _ in range(2):
        async with started(node := transport(tmp_path, "restarted", bootstrap=others)):
            pass
    async with started(transport(tmp_path, "restarted", bootstrap=[Address("ip4", "127.0.0.1", 1, node.peer_id)])):
        pass


async def test_a_port_in_use_is_named(net, tmp_path):
    server = await net.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = [listener.getsockname()[1], server.addresses()[0].port]
        for port in ports:
            with pytest.raises(NolocoError, match=rf"{port} .* in use .*--listen"):
                await transport(tmp_path, listen=replace(ANY_LOCAL_PORT, port=port)).start()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "taken_at_that_moment"])
async def test_a_port_that_nobody_asked_for_and_another_program_has_is_replaced(net, tmp_path, monkeypatch, seen):
    """A node did not come back, or stayed without a network, where its last port was taken."""
    if not seen:
        monkeypatch.setattr("noloco_node.transport.libp2p.check_port", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        async with started(node := transport(tmp_path, last_port=taken)):
            first = node.listening_port
            assert first not in {0, taken}
            lost = asyncio.create_task(node.lost())
            os.kill(node._session.process.pid, signal.SIGKILL)
            await lost
            with socket.create_server(("127.0.0.1", first)):
                await node.restart()
                assert node.listening_port not in {0, taken, first}


async def test_the_last_port_is_taken_again(net, tmp_path):
    port = quiet_port()
    async with started(node := transport(tmp_path, last_port=port)):
        assert node.listening_port == port


async def test_a_bootstrap_address_with_another_peers_id_is_unreachable(net, tmp_path):
    server = await net.start()
    wrong = replace(server.addresses()[0], peer=net.new_id())
    with pytest.raises(SwarmUnreachable, match="peer id"):
        await transport(tmp_path, bootstrap=[wrong]).start()
    async with started(transport(tmp_path, bootstrap=[wrong, server.addresses()[0]])):
        pass  # one that answers is enough


async def test_addresses(net, tmp_path):
    server = await net.start()
    (own,) = server.addresses()
    assert str(own) == f"/ip4/127.0.0.1/tcp/{own.port}/p2p/{server.peer_id}"
    announce = [parse("/ip4/203.0.113.7/tcp/4001"), parse("/dns4/example.org/tcp/4001")]
    async with started(announcing := transport(tmp_path, announce=announce)):
        assert list(map(str, announcing.addresses())) == [
            f"/ip4/203.0.113.7/tcp/4001/p2p/{announcing.peer_id}",
            f"/dns4/example.org/tcp/4001/p2p/{announcing.peer_id}",
        ]
    for wrong in (parse("/ip4/203.0.113.7/tcp/0"), replace(announce[0], peer=net.new_id())):
        with pytest.raises(UsageError, match="cannot be announced"):
            transport(tmp_path, announce=[wrong])


def test_of_a_package_only_parts_are_imported_and_later_all_of_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("from whole import part\nmuch = part\n")
    (tmp_path / "whole" / "part.py").touch()
    with libp2p._parts_of("whole"):
        from whole import part

        assert not hasattr(sys.modules["whole"], "much")
    import whole

    with libp2p._parts_of("whole"):
        assert whole.much is part and sys.modules["whole"] is whole
    for name in ("whole", "whole.part"):
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:'asyncio.get_event_loop_policy' is deprecated:DeprecationWarning")  # Python 3.14
async def test_hivemind_leaves_our_logging_and_signals_alone(net):
    handlers, interrupt = list(logging.root.handlers), signal.getsignal(signal.SIGINT)
    policy = asyncio.get_event_loop_policy()
    await net.start()
    assert not logging.getLogger("hivemind").handlers and logging.getLogger("hivemind").propagate
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    assert logging.root.handlers == handlers
    assert signal.getsignal(signal.SIGINT) is interrupt
    assert asyncio.get_event_loop_policy() is policy
