"""Another program takes nearly all memory of the GPU for a while: the node stays, and takes it back later."""

import time

import torch
from checks.models import replica as small_replica
from checks.models import small_run
from checks.place import Place, Row, Seen
from checks.threads import Posts
from torch import Tensor

from noloco_node.core.codecs.by_name import codec
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import PhaseEnded, Ready
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

LEFT_BYTES = 64 << 20
HELD_S = 8.0
PHASES = 4
STEPS = 10


def a_shortage_is_survived(place: Place) -> Seen:
    """Two phases, the shortage, and training as before it."""
    place.require_gpu("a CPU's memory is not to be filled")
    posts, built = Posts(), []
    run = _run(place)

    def build() -> Replica:
        if place.quick:
            inner = small_replica(place, run, micro_batch=None)
        else:
            inner = build_replica(run, "visit", device=str(place.device))
        built.append(inner)
        return inner

    thread = TrainingThread(build, codec("lattice:3"), posts.put, rounds=run.rounds)
    thread.start()
    phases, micro = [], []
    held: list[Tensor] = []
    try:
        posts.until(Ready, 120)
        thread.begin(PHASES + 2)
        for _ in range(2):
            phases.append(posts.until(PhaseEnded, 120))
        micro.append(built[0].micro_batch)
        held = _all_but_a_little(place)
        began = time.monotonic()
        while time.monotonic() < began + HELD_S:
            time.sleep(0.2)
            micro.append(built[0].micro_batch)
        taken = sum(tensor.nbytes for tensor in held)
        held.clear()
        torch.cuda.empty_cache()
        for _ in range(PHASES):
            phases.append(posts.until(PhaseEnded, max(10.0, place.left_s - 5)))  # raises what it failed with
            micro.append(built[0].micro_batch)
    finally:
        held.clear()
        thread.stop(60)
    losses = [ended.done.loss for ended in phases]
    assert all(loss < 20 for loss in losses), losses
    before, after = phases[1].seconds, phases[-1].seconds
    rows = [
        Row(
            f"a shortage of memory for {HELD_S:.0f} s ({taken / 1e9:.0f} GB taken)",
            "survived",
            f"survived, {len(phases)} phases",
            True,
        ),
        place.figure(
            "afterwards: micro-batch, and seconds of a phase",
            "as before",
            f"{micro[-1]} of {micro[0]}, {after:.2f} of {before:.2f}",
            micro[-1] == micro[0] and after <= 1.1 * before,
        ),
    ]
    return Seen(rows, {"micro_batches": micro, "phases_s": [ended.seconds for ended in phases], "losses": losses})


def _all_but_a_little(place: Place) -> list[Tensor]:
    """In pieces, so that holes are filled too."""
    held: list[Tensor] = []
    piece = 8 << 30
    torch.cuda.empty_cache()  # what training's last step has freed is taken first
    while piece >= LEFT_BYTES:
        try:
            if torch.cuda.mem_get_info(place.device)[0] - piece < LEFT_BYTES:
                raise torch.OutOfMemoryError
            held.append(torch.empty(piece, dtype=torch.uint8, device=place.device))
        except torch.OutOfMemoryError:
            piece //= 2
    return held


def _run(place: Place) -> Manifest:
    if place.quick:
        return small_run(place, steps=STEPS, rounds=100)
    return Manifest(
        name="shortage",
        rounds=100,
        model=ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["125m"], "vocab_size": 32_000}),
        data=DataSpec(sequence_length=1024),
        inner=InnerSpec(steps=STEPS, batch_tokens=65_536),
    )


CHECKS = (a_shortage_is_survived,)
