"""Makes the replica that a manifest describes: its task and its model, where it trains, and whether there is room."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from noloco_node.core.device import REMEDY, choose_devices, why_no_gpu
from noloco_node.data import corpus
from noloco_node.data.sources import Sources
from noloco_node.errors import UsageError
from noloco_node.host import memory
from noloco_node.host.config import FULL
from noloco_node.host.gpu_cards import has_nvidia_card
from noloco_node.run.schema import InnerSpec, Manifest
from noloco_node.training import memory_budget, model, tasks, workers
from noloco_node.training.inner.gradients import examples_of, products
from noloco_node.training.replica import Replica
from noloco_node.training.task import Driven, Passing, Sized, Task, new_model
from noloco_node.training.workers import Workers

log = logging.getLogger(__name__)


def build_replica(  # noqa: PLR0913
    manifest: Manifest,
    peer_id: str,
    *,
    device: str = "auto",
    threads: int | None = None,
    memory_fraction: float | None = None,
    micro_batch: int | None = None,
    moments: str = FULL,
    compiled: bool = False,
    checkpoint_activations: bool | None = None,
    sources: Sources = corpus.NOTHING,
    corpus: corpus.Readable | None = None,
    part: Callable[[Task], Task] = lambda whole: whole,
    brought: Task | None = None,
) -> Replica:
    """The replica of the node `peer_id`. To be called on the thread that will own it: torch's number of threads and its
    GPU are set here, settings of the calling thread. `micro_batch`: examples at once; None: found by trying.
    `checkpoint_activations` None: as the manifest says. `part`: what this node trains of the run's task.
    `brought`: that task, where a loop brings it."""
    where, *others = devices = choose_devices(device)
    if others and where.type == "cpu":
        threads = threads or max(1, torch.get_num_threads() // len(devices))
    if threads:
        torch.set_num_threads(threads)
    if device == "auto" and where.type == "cpu" and has_nvidia_card(os.environ):
        log.warning("training on the CPU, and this machine has an NVIDIA GPU; %s: %s", why_no_gpu(), REMEDY)
    if where.type == "cuda":
        torch.cuda.set_device(where.index or 0)  # Triton starts a kernel on the thread's device, whatever its tensors'
        if memory_fraction:
            torch.cuda.set_per_process_memory_fraction(memory_fraction, where.index)
    on_gpu, bf16 = where.type == "cuda", products(where, manifest.inner.precision) is not None
    fraction = memory_fraction or 1.0

    def check(parameters: int, made_bytes: int = 0) -> int:
        program = max(0, (memory.process_bytes() or 0) - made_bytes)
        planned = partial(memory_budget.plan, parameters, on_gpu=on_gpu, bf16=bf16, program=program)
        memory_budget.check(lambda kind: planned(moments=kind), moments, where, fraction)
        return program

    if brought and manifest.model.task is None:
        raise UsageError(
            "the run trains a language model, and not what a loop brings: that needs a run whose run.toml has "
            '`model = { task = "mine" }`'
        )
    task = part(brought or tasks.load(manifest, sources, corpus))
    if isinstance(task, Sized) and (expected := task.parameters()) is not None:
        check(expected)  # a run's author chooses the size, and to make it may take all the memory that there is
    is_driven = isinstance(task, Driven)  # then the model is there, and random numbers are the loop's
    if compiled and isinstance(task, Passing):
        raise UsageError("--compile: the layers of a stage are not compiled: start without it")
    if others:
        _check_several(task, manifest.inner, devices)
    module = task.model() if is_driven else new_model(task, manifest.seed)
    model.require_float32(module, 'inner.precision = "bf16"')
    if name := model.with_running_statistics(module.train()):
        raise UsageError(f"the model's part {name} {model.BUFFERS_STAY}")
    parameters = sum(p.numel() for p in module.parameters())
    program = check(parameters, 4 * parameters)
    sent = workers.packed(module) if others else b""  # before hooks, which cannot be sent
    checkpointed = manifest.inner.checkpoint_activations if checkpoint_activations is None else checkpoint_activations
    if checkpointed:
        model.checkpoint_activations(module)
    stream = task.stream(peer_id)
    own_seed = int.from_bytes(hashlib.sha256(f"{manifest.seed}/{peer_id}".encode()).digest()[:7], "big")
    if not is_driven:
        torch.manual_seed(own_seed)  # for dropout, where a model has any
    module.to(where)
    compile = partial(model.compile_layers, module) if compiled else None
    started = partial(
        Workers,
        module=sent,
        manifest=manifest,
        devices=devices,
        memory_fraction=fraction,
        seed=own_seed,
        compiled=compiled,
        checkpointed=checkpointed,
    )
    replica = Replica(
        task, module, stream, manifest, micro_batch, fraction, moments, compile, started if others else None
    )
    replica.program_bytes = program
    return replica


def _check_several(task: Task, spec: InnerSpec, devices: Sequence[torch.device]) -> None:
    """Raises UsageError where these devices cannot share a step."""
    if isinstance(task, (Passing, Driven)):
        raise UsageError("--device: a stage, and a loop of one's own, trains on one device: name one")
    if (examples := examples_of(task, spec)) < len(devices):
        raise UsageError(f"--device: {examples} examples a step, as this run has, are too few for {len(devices)}")
    if len({products(device, spec.precision) for device in devices}) > 1:
        raise UsageError("--device: some of these GPUs compute in bf16, and older ones in fp16: name GPUs of one kind")
