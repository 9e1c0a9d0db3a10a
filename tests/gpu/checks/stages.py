"""A model that is cut into stages: a chain of them on the device, beside a CPU's and beside the whole model there."""

import time
from importlib.util import find_spec

from checks.models import require_close_losses
from checks.place import Place, Seen, Skip
from checks.plain_loop import sizes
from stage_pairs import chain, staged_run, train_together

from noloco_node.bench import training
from noloco_node.run.schema import StagesSpec
from noloco_node.training.build import build_replica

STEPS, IN_FLIGHT = 10, 4
WITHIN = {"fp32": 1e-3, "bf16": 2e-2}
"""How far losses may be from those of a CPU in fp32, relatively."""


def a_chain_has_the_losses_of_a_cpu(place: Place) -> Seen:
    _require()
    there = _losses("cpu", "fp32")
    found = {precision: _losses(str(place.device), precision) for precision in WITHIN}
    for precision, within in WITHIN.items():
        require_close_losses(precision, found[precision], there, within)
    return Seen(facts={**found, "cpu": there})


def _losses(device: str, precision: str) -> list[float]:
    nodes = chain(staged_run(3, precision=precision), device=device)
    train_together(nodes, STEPS)
    return nodes[-1].losses[:STEPS]


def two_stages_beside_the_whole_model(place: Place) -> Seen:
    """Both stages on this device, each on a thread of its own; activations cross the host, in fp32."""
    _require()
    place.require_s(60)
    steps = 3 if place.quick else STEPS
    run = training.manifest("tiny" if place.quick else "350m", steps, **sizes(place))
    tokens = run.inner.batch_tokens
    whole = build_replica(run, "bench", device=str(place.device))
    whole.step()
    took = place.seconds_of(whole.step, times=steps)
    del whole
    place.tidy()
    cut = run.model_copy(update={"stages": StagesSpec(count=2, activations="fp32")})
    nodes = chain(cut, in_flight=IN_FLIGHT, device=str(place.device), corpus=None, threads=None)
    train_together(nodes, 2)
    began = time.monotonic()
    train_together(nodes, 2 + steps)
    stages_s = (time.monotonic() - began) / steps
    lost = sum(node.task.counts.lost for node in nodes)
    said = f"{tokens / stages_s:.0f} of {tokens / took:.0f} ({took / stages_s:.2f})"
    row = place.figure("two stages of a model on one GPU, tokens/s beside the whole's", "-", said, True)
    assert lost == 0, lost
    return Seen(
        [row], {"whole_s": took, "stages_s": stages_s, "micro_batch": [node.replica.micro_batch for node in nodes]}
    )


def _require() -> None:
    if find_spec("google.protobuf") is None:
        raise Skip("no protobuf")


CHECKS = (a_chain_has_the_losses_of_a_cpu, two_stages_beside_the_whole_model)
