"""What a replica's process has in memory at most, beside its plan: `python memory_peak.py HIDDEN LAYERS MOMENTS`.

With a folder as fourth argument there is no room for the copy of a checkpoint, which goes there.
"""

import json
import sys
from pathlib import Path

import torch

from noloco_node.core.codecs.codec import BLOCK, Packed
from noloco_node.host import memory
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training.build import build_replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS


def main(hidden: int, layers: int, moments: str, folder: str | None = None) -> None:
    """An offer is open, its corrections are added and kept, a checkpoint is being written, and training goes on. A
    boundary comes before that offer is closed."""
    config = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "vocab_size": 4096}
    run = Manifest(
        name="peak",
        rounds=9,
        model=ModelSpec(architecture="LlamaConfig", config={**config, **heads}),
        data=DataSpec(sequence_length=32),
        inner=InnerSpec(steps=1, batch_tokens=64),
    )
    replica = build_replica(run, "a", device="cpu", threads=1, moments=moments)
    replica.try_out()
    if folder:
        replica.spill_folder, memory.free_bytes = lambda: Path(folder), lambda: 0
    replica.step()
    offer = replica.snapshot()
    replica.boundary()
    written = replica.state()
    replica.step()
    for start in range(0, replica.parameters, FRAGMENT_ELEMENTS):
        elements = min(FRAGMENT_ELEMENTS, replica.parameters - start)
        c = torch.full((elements,), 1e-6)
        replica.slow.apply(start, c, replica.round, Packed(c, torch.full((-(-elements // BLOCK),), 1e-6)))
    replica.losses_without()
    replica.step()
    replica.slow.let_stay()
    following = replica.snapshot()
    replica.boundary()
    offer = following
    replica.step()
    items = {item.what: item.bytes for item in replica.memory_plan().host}
    plan = replica.memory_plan()
    planned = plan.host_least_bytes if folder else plan.host_bytes
    found = {"peak": memory.peak_bytes(), "plan": planned, "items": items}
    print(json.dumps({**found, "parameters": replica.parameters, "held": len(offer) + written.round}))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
