"""A training loop as somebody may have it: a small network learns from noisy data what another one computes. It knows
no swarm but for the lines that enter one. Its words are those of `noloco-node start` and `join`. Torchrun may start
several of it, which are one node then. In its environment: LOOP_SEES names its data, LOOP_STEPS says how many steps it
makes at most, LOOP_OPTIMIZER which of torch's optimizers it has, LOOP_JUDGES=no that it has no evaluation, or `badly`,
LOOP_LEAVES=no that it forgets to leave, LOOP_LOADS=yes that it has a data loader with workers, LOOP_FAILS after how
many steps it fails, LOOP_DEVICE where its model is, and LOOP_ADAPTS=yes that it trains adapters (LoRA) of a frozen
model.
"""

import gc
import os
import sys
import time
from contextlib import nullcontext

from noloco_node.host.imports import large_import

with large_import():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from noloco_node import loop

STEP_S = 0.02
NOISE = 0.3
DEVICE = torch.device(os.environ.get("LOOP_DEVICE", "cpu"))
if not {"RANK", "LOOP_ADAPTS"} & os.environ.keys():  # which need it
    import without_compiler  # noqa: F401
gc.freeze()


def network(wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(32, wide), nn.Tanh(), nn.Linear(wide, 8))


def backend() -> str:
    """NCCL wants a GPU for each process."""
    return "nccl" if DEVICE.type == "cuda" and os.environ["WORLD_SIZE"] == "1" else "gloo"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    teacher = network(16).to(DEVICE)
    held_out = torch.randn(256, 32), torch.randn(256, 8)
    rank, sees = int(os.environ.get("RANK", "0")), int(os.environ.get("LOOP_SEES", "2"))
    adapts = os.environ.get("LOOP_ADAPTS") == "yes"
    torch.manual_seed(1 if adapts else sees)  # what is frozen is everywhere the same, what is trained comes from others
    model: nn.Module = network(64)
    model.register_buffer("one", torch.ones(1))  # which DistributedDataParallel sends in each forward pass
    if adapts:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"]))
    bare = model.to(DEVICE)
    torch.manual_seed(100 * rank + sees)
    if "RANK" in os.environ:
        dist.init_process_group(backend())
        model = DistributedDataParallel(model)
    optimizer = getattr(torch.optim, os.environ.get("LOOP_OPTIMIZER", "AdamW"))(model.parameters(), lr=1e-3)

    def loss_of(network: nn.Module, inputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        inputs, noise = inputs.to(DEVICE), noise.to(DEVICE)
        return nn.functional.mse_loss(network(inputs), teacher(inputs).detach() + NOISE * noise)

    def evaluate(network: nn.Module = model) -> float:
        return loss_of(network, *held_out).item()

    verb, *words = sys.argv[1:]
    named = [] if words[0].startswith("--") else [words.pop(0)]
    settings = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    enter = {"start": loop.start, "join": loop.join}[verb]
    judged = {"no": None, "badly": lambda: 1 / 0}.get(os.environ.get("LOOP_JUDGES", ""), evaluate)
    swarm = enter(named[0] if named else None, model, optimizer, evaluate=judged, **settings)
    with swarm if os.environ.get("LOOP_LEAVES") != "no" else nullcontext(swarm.__enter__()):
        _loads = os.environ.get("LOOP_LOADS") == "yes" and iter(DataLoader(range(10), num_workers=1))
        if rank == 0:
            view = swarm.status()
            print(f"round {view.round}: begins at {evaluate(bare):.4f} with {len(optimizer.state)} moments", flush=True)  # noqa: T201
        for step in range(int(os.environ.get("LOOP_STEPS", "1000000"))):
            if rank == 0 and step == int(os.environ.get("LOOP_FAILS", "-1")):
                raise MemoryError("as a step may raise it")
            loss = loss_of(model, torch.randn(16, 32), torch.randn(16, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            swarm.step(loss)
            if swarm.over:
                break
    if rank == 0:
        print(f"ends at {evaluate(bare):.4f}, over: {swarm.over}", flush=True)  # noqa: T201
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"rank {rank} has {weights.double().sum().item():.9f} and {len(optimizer.state)} moments", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
