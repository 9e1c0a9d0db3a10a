"""A swarm in virtual time: its nodes meet, and what one does for a round hardly depends on how many there are."""

from noloco_node.bench import scale
from noloco_node.bench.virtual_swarm import VirtualSwarm


def each(nodes: int, rounds: int = 4) -> dict[str, float]:
    done = VirtualSwarm(nodes, 60.0, 6.0).run(rounds)
    return {what: done[what] / done["rounds"] for what in done}


def test_nodes_meet_and_take_the_same_for_a_round_in_a_larger_swarm() -> None:
    few, more = each(24), each(64)
    for found in (few, more):
        assert found["committed"] > 0.9
        assert found["swaps"] == found["committed"]
        assert found["calls"] < 1
        assert abs(found["look_ups"] - 12) < 0.6, "one in five seconds"
    assert abs(more["look_ups"] + more["stores"] - few["look_ups"] - few["stores"]) < 0.15 * 18


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [VirtualSwarm(8, 60.0, 6.0, seed).run(2) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_swap_of_more_than_a_phase_costs_rounds_and_no_swaps() -> None:
    done = VirtualSwarm(8, 10.0, 15.0).run(20)
    assert 0.3 < done["committed"] / done["rounds"] < 0.6


def test_rows_of_virtual_time() -> None:
    (row,) = scale.virtual([8], lambda *_: None)
    document = row.document()
    assert (document["system"], document["n"], document["mbit"]) == ("virtual time", 8, None)
    assert document["bytes_per_node"] > document["swap_bytes"] > 0
