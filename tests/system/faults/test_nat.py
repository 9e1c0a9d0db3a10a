"""Real nodes behind routers that let nobody in: they swap through a relay, or directly where a way is open or
the router opens one when it is asked.

Network namespaces make an internet of one street: a bridge on which a public rendezvous stands, and routers that
MASQUERADE and drop what comes in unasked, with a host behind each.

    rendezvous 10.84.0.1 ──┬── router 10.84.0.11 ── host 10.84.1.2
                           └── router 10.84.0.12 ── host 10.84.2.2

Where a router is to map ports the street is 11.84.0.0/24 in their place: miniupnpd maps none to an address that the
internet cannot reach. No packet leaves the namespaces.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import inside, sh, space, spaces, why_not
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]

HOSTS = (1, 2)
PRIVATE, PUBLIC = "10.84.0", "11.84.0"
MAPS = f"""
ext_ifname=wan
listening_ip=lan
enable_natpmp=no
secure_mode=yes
upnp_forward_chain=UPNP
upnp_nat_chain=UPNP
upnp_nat_postrouting_chain=UPNP-OUT
allow 1024-65535 10.84.{HOSTS[0]}.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


@contextmanager
def street(net: str = PRIVATE, tables: str = "iptables", masquerade: str = "MASQUERADE") -> Iterator[None]:
    """`tables`: what the routers' rules are written with."""
    with spaces("public", *(f"{kind}{i}" for kind in ("router", "host") for i in HOSTS)):
        sh(f"ip -n {space('public')} link add street type bridge")
        give("public", "street", f"{net}.1/24")
        for i in HOSTS:
            build_house(i, net, tables, masquerade)
        yield


def build_house(i: int, net: str, tables: str, masquerade: str) -> None:
    public, router, host = space("public"), space(f"router{i}"), space(f"host{i}")
    sh(f"ip link add wan netns {router} type veth peer name house{i} netns {public}")
    sh(f"ip link add lan netns {router} type veth peer name eth0 netns {host}")
    sh(f"ip -n {public} link set house{i} master street up")
    give(f"router{i}", "wan", f"{net}.1{i}/24")
    give(f"router{i}", "lan", f"10.84.{i}.1/24")
    give(f"host{i}", "eth0", f"10.84.{i}.2/24")
    sh(f"ip -n {host} route add default via 10.84.{i}.1")
    sh(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
    sh(f"ip netns exec {router} {tables} -t nat -A POSTROUTING -o wan -j {masquerade}")
    for chain in ("FORWARD", "INPUT"):
        sh(f"ip netns exec {router} {tables} -A {chain} -i wan -m state --state NEW -j DROP")


@contextmanager
def maps_ports(i: int, tables: str, root: Path) -> Iterator[None]:
    """Router i maps ports by UPnP, through iptables chains of its own."""
    for rule in (
        "-t nat -N UPNP",
        "-t nat -A PREROUTING -i wan -j UPNP",
        "-t nat -N UPNP-OUT",
        "-t nat -I POSTROUTING -o wan -j UPNP-OUT",
        "-N UPNP",
        "-I FORWARD -i wan -j UPNP",
    ):
        sh(f"ip netns exec {space(f'router{i}')} {tables} {rule}")
    settings, log = root / "upnp.conf", root / "upnp.log"
    settings.write_text(MAPS)
    with log.open("wb") as out:
        words = [*inside(f"router{i}"), "miniupnpd", "-d", "-f", str(settings), "-P", str(root / "upnp.pid")]
        router = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        until(lambda: "HTTP listening" in log.read_text() or router.poll(), "a router that maps ports", 10)
        assert router.poll() is None, log.read_text()
        yield
    finally:
        router.terminate()
        router.wait(10)


def why_maps_none(tables: str) -> str | None:
    """Why no router can map ports here; None if one can. miniupnpd's other build writes its rules with nft."""
    if why := why_not(tables, "miniupnpd"):
        return why
    said = subprocess.run(["miniupnpd", "--version"], capture_output=True, text=True, check=False, timeout=10)
    return None if "netfilter(iptables)" in said.stdout + said.stderr else "needs miniupnpd of miniupnpd-iptables"


def give(name: str, device: str, address: str) -> None:
    sh(f"ip -n {space(name)} address add {address} dev {device}")
    sh(f"ip -n {space(name)} link set {device} up")


@pytest.fixture
def real_nodes(request: pytest.FixtureRequest) -> Iterator[RealNodes]:
    """Behind routers, of a kind that a test may choose."""
    if why := why_not("iptables"):
        pytest.skip(why)
    with street(masquerade=getattr(request, "param", "MASQUERADE")), RealNodes() as real_nodes:
        yield real_nodes


def rendezvous(real_nodes: RealNodes, net: str = PRIVATE) -> str:
    return real_nodes.rendezvous(within=inside("public"), at=f"{net}.1").address()


def carried_by_rendezvous() -> int:
    """Bytes that came to it: the bridge does not count what it carries between the routers."""
    counter = [*inside("public"), "cat", "/sys/class/net/street/statistics/rx_bytes"]
    return int(subprocess.run(counter, capture_output=True, text=True, check=True, timeout=10).stdout)


def way(node: Node, other: Node) -> str | None:
    peer = other.ask("status").get("peer_id")
    return next((row["via"] for row in node.ask("peers").get("peers", ()) if row["peer_id"] == peer), None)


@pytest.mark.parametrize(
    ("real_nodes", "expected"),
    [("MASQUERADE", "direct"), ("MASQUERADE --random-fully", "relayed")],
    ids=["one port for all", "symmetric"],
    indirect=["real_nodes"],
)
def test_two_behind_routers_exchange(real_nodes: RealNodes, expected: str, figure: Callable[[str], None]) -> None:
    """A symmetric router takes another port of its own for each far end, so the port that one sees helps no other:
    what they swap goes through the rendezvous."""
    address = rendezvous(real_nodes)
    first = real_nodes.node(
        "a",
        "start",
        str(real_nodes.manifest(warmup="0.0")),
        "--bootstrap",
        address,
        within=inside("host1"),
        at="0.0.0.0",
    )
    second = real_nodes.node("b", "join", "--bootstrap", address, within=inside("host2"), at="0.0.0.0")
    for node in (first, second):
        until(lambda node=node: node.committed() >= 2, "two rounds with the other")
        status = node.ask("status")
        assert status["reachable"] == "relayed"
        assert any("/p2p-circuit/" in known for known in status["addresses"])
        assert node.printed("(over a relay)"), "with advice"
    assert way(first, second) == way(second, first) == expected
    carried, before = carried_by_rendezvous(), first.committed()
    until(lambda: first.committed() >= before + 10, "ten more rounds")
    last = first.ask("status")["last_round"]
    megabytes, seconds = (last["sent"] + last["received"]) / 1e6, last["seconds"]
    through = (carried_by_rendezvous() - carried) / (first.committed() - before) / 1e6
    figure(
        f"{expected}: {megabytes:.2f} MB both ways in {seconds:.2f} s, {through:.3f} MB a round through the rendezvous"
    )
    assert through < 0.1 * megabytes if expected == "direct" else through > 0.9 * megabytes


def test_with_one_of_them_reachable_no_relay_is_used(real_nodes: RealNodes) -> None:
    address = rendezvous(real_nodes)
    manifest = str(real_nodes.manifest(warmup="0.0"))
    open_ = real_nodes.node("a", "start", manifest, "--bootstrap", address, within=inside("public"), at="10.84.0.1")
    until(lambda: open_.ask("status").get("round"), "a first phase alone")
    hidden = real_nodes.node("b", "join", "--bootstrap", address, within=inside("host2"), at="0.0.0.0")
    for node in (open_, hidden):
        until(lambda node=node: node.committed() >= 2, "two rounds with the other")
    assert open_.ask("status")["reachable"] == "directly"
    assert hidden.ask("status")["reachable"] == "relayed"
    assert way(open_, hidden) == way(hidden, open_) == "direct"


def test_a_port_that_the_router_maps_is_a_direct_way_in(figure: Callable[[str], None]) -> None:
    tables = "iptables-legacy"
    if why := why_maps_none(tables):
        pytest.skip(why)
    with street(PUBLIC, tables), RealNodes() as real_nodes, maps_ports(1, tables, real_nodes.root):
        address = rendezvous(real_nodes, PUBLIC)
        doctor = real_nodes.node("doctor", "doctor", "--bootstrap", address, within=inside("host1"), at="0.0.0.0")
        assert doctor.process.wait(60) == 0
        assert doctor.printed(r"\breachable +(.+)") == "at a port of the router"

        manifest, began = str(real_nodes.manifest(warmup="0.0")), time.monotonic()
        mapped = real_nodes.node("a", "start", manifest, "--bootstrap", address, within=inside("host1"), at="0.0.0.0")
        until(lambda: mapped.ask("status").get("reachable") == "mapped", "a port of the router")
        seconds = time.monotonic() - began
        told = mapped.ask("status")["addresses"]
        assert told[0].startswith(f"/ip4/{PUBLIC}.11/tcp/") and not any("/p2p-circuit/" in known for known in told)
        assert "reachable at a port of the router" in mapped.run("status").stdout

        hidden = real_nodes.node("b", "join", "--bootstrap", address, within=inside("host2"), at="0.0.0.0")
        for node in (mapped, hidden):
            until(lambda node=node: node.committed() >= 2, "two rounds with the other")
        assert hidden.ask("status")["reachable"] == "relayed"
        assert way(mapped, hidden) == way(hidden, mapped) == "direct"
        assert not mapped.printed("(over a relay)"), "no advice: the start waited for the router"
        figure(f"a port of the router: known {seconds:.1f} s after the node's start")
