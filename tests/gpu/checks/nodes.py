"""Several nodes on one GPU that exchange for real, where hivemind's wheel is installed."""

from importlib.util import find_spec

from checks.commands import run
from checks.place import Place, Seen, Skip

NODES = 4


def four_nodes_on_one_gpu(place: Place) -> Seen:
    return _swarm(place, *((2, 2) if place.quick else (NODES, 6)))


def four_nodes_of_two_stages_on_one_gpu(place: Place) -> Seen:
    return _swarm(place, 4, 2 if place.quick else 6, "--stages", "2")


def two_nodes_with_compiled_layers(place: Place) -> Seen:
    place.require_gpu("compiling takes half a minute of a CPU")
    place.require_s(60)
    return _swarm(place, 2, 6, NOLOCO_COMPILE="true")


def _swarm(place: Place, nodes: int, rounds: int, *more: str, **environ: str) -> Seen:
    missing = [name for name in ("hivemind", "grpc", "uvloop") if find_spec(name) is None]
    if missing:
        raise Skip(f"no {missing[0]}")
    said = run(place, "swarm", "--nodes", str(nodes), "--rounds", str(rounds), "--json", *more, **environ)
    committed = [node["rounds"]["committed"] for node in said["nodes"]]
    devices = sorted({node["device"] for node in said["nodes"]})
    assert len(committed) == nodes and all(committed), committed
    assert devices == [place.device.type], devices
    how = " of two stages" if more else " with compiled layers" if environ else ""
    row = place.figure(
        f"{nodes} nodes{how} on one {devices[0]}, rounds committed by each of {rounds}",
        ">= half",
        ", ".join(map(str, committed)),
        min(committed) >= rounds / 2,
    )
    return Seen([row], said)


CHECKS = (four_nodes_on_one_gpu, four_nodes_of_two_stages_on_one_gpu, two_nodes_with_compiled_layers)
