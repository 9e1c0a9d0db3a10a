"""What either kind of node does at its start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from virtual_clock import run_virtual

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.errors import ClockTooFarOff
from noloco_node.host.config import NodeConfig
from noloco_node.node.rendezvous import RendezvousNode
from noloco_node.node.trainer import TrainingNode
from noloco_node.peers.run_rules import RunRules
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.transport.self_view import ClockSkew

BOOTSTRAP, SEEN = (
    Address("ip4", f"8.8.{n}.8", 4001, f"12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5S{end}")
    for n, end in enumerate("AB")
)


def test_peers_that_do_not_answer_do_not_have_the_network_daemon_replaced(tmp_path: Path) -> None:
    """To write the own record takes too long where several of those that should store it have gone."""

    async def works() -> None: ...

    async def too_late(*_: object) -> None:
        raise TimeoutError

    async def main() -> str | None:
        signed = sign(Manifest(name="tiny"), Identity.load_or_create(tmp_path / "author.key"))
        node = TrainingNode(NodeConfig(home=tmp_path), lambda _: None, signed)
        node._rules = RunRules(tmp_path, signed)
        node._transport = cast("Any", SimpleNamespace(restart=works, addresses=list))
        node._membership = cast("Any", SimpleNamespace(rejoin=works, publish=too_late, look=too_late))
        return await node._restart_network()

    assert run_virtual(main()) is None


class Started(Exception):
    """Nothing ended the start."""


def test_why_the_network_daemon_does_not_come_back_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = ["p2pd ended", *["the port is in use"] * 50, "no memory", None]

    async def lost() -> str | None:
        if not fails:
            raise Started
        return fails.pop(0)

    async def main() -> None:
        node = RendezvousNode(NodeConfig(home=tmp_path), lambda _: None)
        node._transport = cast("Any", SimpleNamespace(lost=lost))
        node._restart_network = lost  # type: ignore[method-assign]
        await node._keep_network()

    with pytest.raises(Started):
        run_virtual(main())
    said = [record.getMessage().removeprefix("the network daemon is ") for record in caplog.records]
    assert said == ["lost: p2pd ended", "lost: the port is in use", "lost: no memory"]


@pytest.mark.parametrize(("seen", "ends"), [((), ClockTooFarOff), ((SEEN,), Started)])
def test_no_clock_of_peers_that_nobody_chose_ends_a_start(
    seen: tuple[Address, ...], ends: type[Exception], tmp_path: Path
) -> None:
    async def start() -> None: ...

    async def live() -> None:
        raise Started

    async def main() -> None:
        node = RendezvousNode(NodeConfig(home=tmp_path, bootstrap=(BOOTSTRAP,), seen=seen), said.append)
        node._transport = cast("Any", SimpleNamespace(start=start, skew=ClockSkew(3600.0, 2), reachable=None))
        node._live, node._supervised = live, lambda life: life  # type: ignore[method-assign]
        await node._start_and_live()

    said: list[str] = []
    with pytest.raises(ends):
        run_virtual(main())
    assert ends is ClockTooFarOff or "1 h ahead of the others'. If it is this one, synchronise" in said[0]
