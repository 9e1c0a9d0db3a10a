"""A run with blocking overlap: a node alone trains on, and two nodes that wait for their swap commit rounds."""

import pytest
from real_nodes import RealNodes, until


@pytest.mark.slow
def test_a_lone_blocking_node_trains_on_and_meets_who_comes(real_nodes: RealNodes) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(seconds=1.0, outer={"overlap": "blocking"})))
    there = author.address()
    until(lambda: len(author.events("WentSolo")) >= 3, "rounds of its own")
    other = real_nodes.node("other", "join", "--bootstrap", there)
    until(lambda: other.printed(r"(round \d+ with)") and author.printed(r"(round \d+ with)"), "a round of the two")
    other.kill()
    gone = author.round()
    until(lambda: author.round() >= gone + 3, "rounds without it")
