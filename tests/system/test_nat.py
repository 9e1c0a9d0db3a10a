"""Real nodes behind routers that let nobody in: they exchange through a relay, and without one where a way is open.

Network namespaces make an internet of one street: a bridge on which a public rendezvous stands, and routers that
MASQUERADE and drop what comes in unasked, with a host behind each.

    rendezvous 10.84.0.1 ──┬── router 10.84.0.11 ── host 10.84.1.2
                           └── router 10.84.0.12 ── host 10.84.2.2
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "node"))
from namespaces import inside, sh, space, spaces, why_not
from village import Node, Village, until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]

HOSTS = (1, 2)


@contextmanager
def street() -> Iterator[None]:
    with spaces("public", *(f"{kind}{i}" for kind in ("router", "host") for i in HOSTS)):
        sh(f"ip -n {space('public')} link add street type bridge")
        give("public", "street", "10.84.0.1/24")
        for i in HOSTS:
            build_house(i)
        yield


def build_house(i: int) -> None:
    public, router, host = space("public"), space(f"router{i}"), space(f"host{i}")
    sh(f"ip link add wan netns {router} type veth peer name house{i} netns {public}")
    sh(f"ip link add lan netns {router} type veth peer name eth0 netns {host}")
    sh(f"ip -n {public} link set house{i} master street up")
    give(f"router{i}", "wan", f"10.84.0.1{i}/24")
    give(f"router{i}", "lan", f"10.84.{i}.1/24")
    give(f"host{i}", "eth0", f"10.84.{i}.2/24")
    sh(f"ip -n {host} route add default via 10.84.{i}.1")
    sh(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
    sh(f"ip netns exec {router} iptables -t nat -A POSTROUTING -o wan -j MASQUERADE")
    sh(f"ip netns exec {router} iptables -A FORWARD -i wan -m state --state NEW -j DROP")


def give(name: str, device: str, address: str) -> None:
    sh(f"ip -n {space(name)} address add {address} dev {device}")
    sh(f"ip -n {space(name)} link set {device} up")


@pytest.fixture
def village() -> Iterator[Village]:
    if why := why_not("iptables"):
        pytest.skip(why)
    with street(), Village() as village:
        yield village


def rendezvous(village: Village) -> str:
    return village.rendezvous(within=inside("public"), at="10.84.0.1").address()


def way(node: Node, other: Node) -> str | None:
    peer = other.ask("status").get("peer_id")
    return next((row["via"] for row in node.ask("peers").get("peers", ()) if row["peer_id"] == peer), None)


def test_two_behind_routers_exchange_through_the_rendezvous(
    village: Village, capsys: pytest.CaptureFixture[str]
) -> None:
    address = rendezvous(village)
    first = village.node(
        "a", "start", str(village.manifest(warmup="0.0")), "--bootstrap", address, within=inside("host1"), at="0.0.0.0"
    )
    second = village.node("b", "join", "--bootstrap", address, within=inside("host2"), at="0.0.0.0")
    for node in (first, second):
        until(lambda node=node: node.committed() >= 2, "two rounds with the other")
        status = node.ask("status")
        assert status["reachable"] == "relayed"
        assert any("/p2p-circuit/" in known for known in status["addresses"])
        assert node.said("(through a relay only)"), "with advice"
    assert way(first, second) == way(second, first) == "relayed"
    last = first.ask("status")["last_round"]
    megabytes, seconds = (last["sent"] + last["received"]) / 1e6, last["seconds"]
    with capsys.disabled():
        print(f"\n  through the relay: {megabytes:.2f} MB both ways in {seconds:.2f} s")  # noqa: T201


def test_with_one_of_them_reachable_no_relay_is_used(village: Village) -> None:
    address = rendezvous(village)
    manifest = str(village.manifest(warmup="0.0"))
    open_ = village.node("a", "start", manifest, "--bootstrap", address, within=inside("public"), at="10.84.0.1")
    until(lambda: open_.ask("status").get("round"), "a first phase alone")
    hidden = village.node("b", "join", "--bootstrap", address, within=inside("host2"), at="0.0.0.0")
    for node in (open_, hidden):
        until(lambda node=node: node.committed() >= 2, "two rounds with the other")
    assert open_.ask("status")["reachable"] == "directly"
    assert hidden.ask("status")["reachable"] == "relayed"
    assert way(open_, hidden) == way(hidden, open_) == "direct"
