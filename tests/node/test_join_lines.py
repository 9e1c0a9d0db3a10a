"""The line that others join with follows the addresses of this machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from virtual_clock import run_virtual

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.node.trainer import TrainingNode
from noloco_node.peers.run_rules import RunRules
from noloco_node.run import invitation
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest


def test_another_address_of_the_provider_is_in_the_line_and_a_machine_without_network_says_so(tmp_path: Path) -> None:
    home, said = tmp_path / "home", list[str]()
    home.mkdir()
    author = Identity.load_or_create(home / "identity.key")
    signed = sign(Manifest(name="tiny"), author)

    def hosts(*hosts: str) -> list[Address]:
        return [Address("ip4", host, 4001, author.peer_id) for host in hosts]

    async def main() -> None:
        node = TrainingNode(NodeConfig(home=home), said.append, signed)
        addresses = hosts("127.0.0.1")
        node._transport = cast(
            "Any", SimpleNamespace(addresses=lambda: addresses, skew=None, reachable=None, via=lambda _: None)
        )
        await node._report_join_lines()
        assert not said and node._join_lines() == [], "what is wrong with the run is not found yet"
        node._ready, node._rules = cast("Any", object()), RunRules(home, signed)
        await node._report_join_lines()
        assert len(said) == 2 and "no address at which another one could call" in said.pop()
        assert any("no address at which" in each.text for each in node._health())
        for now in (hosts("203.0.113.7"), hosts("192.168.1.20", "203.0.113.8", "8.8.4.4")):
            addresses = now
            for _ in range(2):
                await node._report_join_lines()
        first, second, third = (invitation.read(line.rpartition(" ")[2]).addresses for line in said)
        assert [first[0].host, second[0].host] == ["127.0.0.1", "203.0.113.7"]
        assert [address.host for address in third] == ["8.8.4.4", "192.168.1.20", "203.0.113.8"], "public ones first"
        assert node._health() == ()

    run_virtual(main())
