"""Whom a node names to those that it invites: a newcomer believes them as bootstrap nodes."""

from pathlib import Path

import pytest

from noloco_node.base.addresses import Address
from noloco_node.host.config import NodeConfig
from noloco_node.node.trainer import TrainingNode

PEERS = [f"12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5S{end}" for end in "ABC"]
BOOTSTRAP, SEEN, OWN = (Address("ip4", f"8.8.{n}.8", 4001, peer) for n, peer in enumerate(PEERS))


@pytest.mark.parametrize(
    ("bootstrap", "seen", "own", "named"),
    [
        ((), (), True, ["own"]),
        ((BOOTSTRAP,), (), True, [BOOTSTRAP]),
        ((BOOTSTRAP,), (SEEN,), True, [BOOTSTRAP, "own"]),
        ((), (SEEN,), True, ["own"]),
        ((), (SEEN,), False, []),
    ],
)
def test_peers_seen_earlier_are_not_named(
    bootstrap: tuple[Address, ...], seen: tuple[Address, ...], own: bool, named: list[Address | str], tmp_path: Path
) -> None:
    announce = (OWN.without_peers(),) if own else ()
    node = TrainingNode(NodeConfig(home=tmp_path, announce=announce, bootstrap=bootstrap, seen=seen), print, None)
    expected = [node._transport.addresses()[0] if each == "own" else each for each in named]
    assert node._ways_for_others() == expected
