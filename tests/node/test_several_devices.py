"""A node whose gradients several processes compute."""

import pytest
from real_nodes import RealNodes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def processes(group: RealNodes) -> list[str]:
    return [words for words in group.left_over() if "spawn_main" in words]


def test_it_is_one_node_and_its_processes_end_with_it(real_nodes: RealNodes) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.manifest()), "--device", "cpu,cpu")
    other = real_nodes.node("other", *author.invitation())
    until(lambda: other.committed() >= 2 and author.committed() >= 2, "swaps")
    assert author.ask("status")["device"] == "2 × cpu"
    assert len(processes(real_nodes)) == 1
    author.kill()
    until(lambda: not processes(real_nodes), "its process ends", 10)
    assert not list(real_nodes.scratch.glob("noloco-workers-*"))
    again = real_nodes.node("author", "join")
    until(lambda: again.printed(r"going on with \S+.*, round (\d+) of"), "its checkpoint")
    until(lambda: again.committed() >= 1, "a swap")
    assert again.ask("status")["device"] == "2 × cpu"
    again.tell("leave")
    assert again.ended(60) == 0
    assert not processes(real_nodes)
