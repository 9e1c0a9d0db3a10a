"""More GPUs of one machine: a process for each computes the gradients of its share of a batch (data parallelism).

The first GPU is the node's own. It has AdamW, the slow weights and all the rest, so to its peers and in its checkpoints
a node with several GPUs is what it is with one. Before a step the others get θ, afterwards the gradients are summed, by
torch.distributed: with NCCL, or with gloo on CPUs and where processes share a GPU. Together that is what an all-reduce
of the gradients sends. A process that has no memory for its share says so before anything is summed: then the step
begins again with smaller micro-batches. One that ends, ends training.

On the training thread; the other half of this file is what the processes do.
"""

import io
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from noloco_node.base.validation import in_one_line
from noloco_node.errors import NolocoError, UsageError
from noloco_node.run.schema import Manifest
from noloco_node.training import model, tasks
from noloco_node.training.inner.gradients import autocast, products, split
from noloco_node.training.task import Batch, device_batch

log = logging.getLogger(__name__)

START_S = 300.0
STEP_S = 900.0
"""Of the first step torch may compile the model."""
END_S, GOING_S = 10.0, 2.0
"""To end, when told to; until it is known that a process has ended by itself."""
LOOK_S = 0.001
SHORT = "a process that computes gradients has no memory for its share"


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a process is told."""

    manifest: Manifest
    module: bytes
    devices: tuple[str, ...]
    rank: int
    store: str
    """The file by which they find each other."""
    memory_fraction: float
    threads: int
    seed: int
    """For dropout, where a model has any. After a restart it begins anew: no checkpoint has a process's generator."""
    compiled: bool
    checkpointed: bool
    """Whether activations are computed again in the backward pass."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A share of a step's batch."""

    batch: list["_Numbers"]
    micro: int
    """Examples at once."""
    of: int
    """Examples of the whole step."""
    scale: float


@dataclass(frozen=True, slots=True)
class _Process:
    connection: Connection
    process: BaseProcess


class Workers:
    def __init__(  # noqa: PLR0913
        self,
        parameters: Sequence[nn.Parameter],
        theta: Tensor,
        *,
        module: bytes,
        manifest: Manifest,
        devices: Sequence[torch.device],
        memory_fraction: float,
        seed: int,
        compiled: bool,
        checkpointed: bool,
    ) -> None:
        """`devices`: the first one is where `theta` is, of which `parameters` are views. `module`: of `packed`. Returns
        when all are there."""
        self.shares = len(devices)
        self._theta, self._parameters = theta, parameters
        self._folder = tempfile.TemporaryDirectory(prefix="noloco-workers-")
        self._broken = False
        """Whether somebody may wait for somebody who does not come."""
        self._all: list[_Process] = []
        names, store = tuple(map(str, devices)), f"{self._folder.name}/store"
        threads, context = torch.get_num_threads(), multiprocessing.get_context("spawn")
        try:
            for rank in range(1, self.shares):
                ours, theirs = context.Pipe()
                setup = _Setup(
                    manifest, module, names, rank, store, memory_fraction, threads, seed + rank, compiled, checkpointed
                )
                name = f"gradients on {names[rank]}"
                process = context.Process(target=_work, args=(theirs, setup), name=name, daemon=True)
                self._all.append(_Process(ours, process))
                process.start()
                theirs.close()
            self._answers(START_S)
            self._tell(None)
            with self._together():
                _connect(store, names, 0)
                dist.broadcast(theta, 0)  # NCCL takes its memory now, before it is seen how much there is
        except BaseException:
            self.close()
            raise
        log.info("each step's batch is divided among %s", ", ".join(names))

    def begin(self, shares: Sequence[Batch], micro: int, of: int, scale: float) -> None:
        """Of the batch, one for each process."""
        for each, share in zip(self._all, shares, strict=True):
            self._send(each, _Order([_Numbers.of(part) for part in share], micro, of, scale))
        with self._together():
            dist.broadcast(self._theta, 0)

    def try_out(self, batch: Batch, of: int) -> None:
        """Each does these examples at once, and forgets them. Raises OutOfMemoryError where one cannot."""
        self.begin([batch] * len(self._all), len(batch[0]), of, 1.0)
        if None in self.drop():
            raise torch.OutOfMemoryError(SHORT)

    def drop(self) -> list[Any]:
        """What `begin` has begun: it begins again, or does not. None for each that had no memory for it."""
        found = self._answers(STEP_S)
        self._tell(None)
        return found

    def add(self, loss: Tensor) -> None:
        """Their losses to `loss`, and their gradients to ours. Raises OutOfMemoryError where one has no memory for its
        share; then nothing was added."""
        found = self._answers(STEP_S)
        if None in found:
            self._tell(None)
            raise torch.OutOfMemoryError(SHORT)
        have = sorted({at for at, p in enumerate(self._parameters) if p.grad is not None}.union(*found))
        try:
            gradients = _gradients(self._parameters, have)
        except torch.OutOfMemoryError:
            self._tell(None)
            raise
        self._tell(have)
        with self._together():
            _sum(loss, gradients)

    def until(self, done: Callable[[], bool]) -> None:
        """Raises NolocoError where one ends before."""
        while not done():
            if gone := self._ended(LOOK_S):
                raise self._gone(gone[0])

    def close(self) -> None:
        """When this returns, they are gone."""
        for each in self._all:
            with suppress(OSError):
                each.connection.send(None)  # in the middle of a step: drop it
                each.connection.send(None)
        if self._broken:  # NCCL's end would wait for what is never done
            for each in self._all:
                each.process.kill()
        if dist.is_initialized() and not (self._broken and dist.get_backend() == "nccl"):
            dist.destroy_process_group()
        for each in self._all:
            if each.process.pid is not None:
                each.process.join(END_S)
                if each.process.is_alive():
                    each.process.kill()
                    each.process.join()
            each.connection.close()
        self._folder.cleanup()

    def _tell(self, what: Any) -> None:
        for each in self._all:
            self._send(each, what)

    def _send(self, to: _Process, what: Any) -> None:
        try:
            to.connection.send(what)
        except OSError:
            raise self._gone(to) from None

    def _answers(self, within_s: float) -> list[Any]:
        """One of each. Raises NolocoError where one has failed, or does not answer."""
        found = []
        for each in self._all:
            if each.connection not in wait([each.connection, each.process.sentinel], within_s):
                raise self._gone(each)
            try:
                answer = each.connection.recv()
            except (EOFError, OSError):
                raise self._gone(each) from None
            if isinstance(answer, str):
                raise self._failed(each, answer)
            found.append(answer)
        return found

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all processes do."""
        try:
            yield
        except RuntimeError as error:
            if gone := self._ended(GOING_S):  # one may just be going
                raise self._gone(gone[0]) from error
            self._broken = True
            raise NolocoError(f"torch.distributed: {in_one_line(error)}") from error

    def _ended(self, within_s: float) -> list[_Process]:
        """Those that have ended, or are just ending."""
        ended = wait([each.process.sentinel for each in self._all], within_s)
        return [each for each in self._all if each.process.sentinel in ended]

    def _gone(self, it: _Process) -> NolocoError:
        with suppress(EOFError, OSError):
            while it.connection.poll():
                if isinstance(said := it.connection.recv(), str):
                    return self._failed(it, said)
        it.process.join(GOING_S)
        how = "does not answer" if it.process.is_alive() else f"has ended (exit code {it.process.exitcode})"
        return self._failed(it, f"the process {how}; start this node again, it goes on from its checkpoint")

    def _failed(self, it: _Process, why: str) -> NolocoError:
        self._broken = True
        return NolocoError(f"{it.process.name}: {why}")


# ---- a process -------------------------------------------------------------------------------------------------------
def _work(connection: Connection, setup: _Setup) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the node's to hear: it may be in the middle of a step
    threading.Thread(target=_end_with_the_node, args=(setup,), daemon=True).start()
    try:
        _Worker(connection, setup).serve()
    except (EOFError, OSError):
        _node_has_ended(setup)
    except BaseException as error:  # noqa: BLE001 - the node says it
        with suppress(OSError):
            connection.send(in_one_line(error))
    os._exit(0)  # a thread of gloo's may have to let go of a tensor, which it cannot do while the interpreter ends


def _end_with_the_node(setup: _Setup) -> None:
    node = multiprocessing.parent_process()
    if node is not None:
        node.join()
    _node_has_ended(setup)


def _node_has_ended(setup: _Setup) -> None:
    shutil.rmtree(Path(setup.store).parent, ignore_errors=True)  # which a node that was killed leaves
    os._exit(1)


class _Worker:
    def __init__(self, connection: Connection, setup: _Setup) -> None:
        self._connection, run = connection, setup.manifest
        torch.set_num_threads(setup.threads)
        torch.set_flush_denormal(True)  # as in the node itself
        torch.manual_seed(setup.seed)
        self._device = torch.device(setup.devices[setup.rank])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_per_process_memory_fraction(setup.memory_fraction, self._device)
        if run.model.task is None:
            model.register_attention()
        self._module = _Unpickler(setup.module, self._device).load()
        self._theta = model.flatten(self._module)
        self._parameters = list(self._module.parameters())
        of_language = lambda module, batch: model.next_token_loss(module, *batch)  # noqa: E731 (training/language.py)
        self._task_loss = of_language if run.model.task is None else tasks.load(run).loss
        self._products = products(self._device, run.inner.precision)
        if setup.checkpointed:
            model.checkpoint_activations(self._module)
        if setup.compiled:
            model.compile_layers(self._module)
        connection.send([])
        connection.recv()
        _connect(setup.store, setup.devices, setup.rank)
        dist.broadcast(self._theta, 0)

    def serve(self) -> None:
        while (order := self._connection.recv()) is not None:
            dist.broadcast(self._theta, 0)
            loss = torch.zeros((), device=self._device)
            have: list[int] | None = None
            try:
                self._backward(order, loss)
                have = [at for at, p in enumerate(self._parameters) if p.grad is not None]
            except torch.OutOfMemoryError:
                pass
            self._connection.send(have)
            if (summed := self._connection.recv()) is not None:
                _sum(loss, _gradients(self._parameters, summed))
            self._module.zero_grad()
            if have is None:
                torch.cuda.empty_cache()
        dist.destroy_process_group()

    def _backward(self, order: _Order, loss: Tensor) -> None:
        batch = device_batch(tuple(part.tensor() for part in order.batch), self._module)
        for micro in split(batch, order.micro):
            with autocast(self._device, self._products):
                share = self._task_loss(self._module, micro) * (order.scale * len(micro[0]) / order.of)
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach().reshape(())


# ---- both ------------------------------------------------------------------------------------------------------------
def _connect(store: str, devices: Sequence[str], rank: int) -> None:
    """NCCL wants a GPU for each process."""
    backend = "gloo" if "cpu" in devices or len(set(devices)) < len(devices) else "nccl"
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")  # no other machine is to reach them
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, len(devices)),  # type: ignore[attr-defined]
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(seconds=STEP_S),
    )


def _gradients(parameters: Sequence[nn.Parameter], have: Sequence[int]) -> list[Tensor]:
    """Of the parameters that some process has one of."""
    for at in have:
        if parameters[at].grad is None:
            parameters[at].grad = torch.zeros_like(parameters[at])
    return [gradient for at in have if (gradient := parameters[at].grad) is not None]


def _sum(loss: Tensor, gradients: Sequence[Tensor]) -> None:
    """Into the first process's."""
    for tensor in (loss, *gradients):
        if tensor.is_cuda and dist.get_backend() == "gloo":  # which sums a GPU's tensors for everybody only
            dist.all_reduce(tensor)
        else:
            dist.reduce(tensor, 0)


class _Pickler(pickle.Pickler):
    """A module without its parameters' numbers, which are sent before each step."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        return number, _Numbers.of(obj), obj.requires_grad if isinstance(obj, nn.Parameter) else None


class _Unpickler(pickle.Unpickler):
    """Of what this node's own process has sent."""

    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        number, numbers, requires_grad = pid
        if number not in self._made:
            tensor = numbers.tensor(self._device)
            self._made[number] = tensor if requires_grad is None else nn.Parameter(tensor, requires_grad)
        return self._made[number]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A tensor in plain values: torch's own way would share its memory, by a file for each."""

    kind: str
    shape: tuple[int, ...]
    data: bytes | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Numbers":
        """Without those of a parameter."""
        kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            return cls(kind, shape, None)
        return cls(kind, shape, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def tensor(self, device: torch.device | None = None) -> Tensor:
        dtype = getattr(torch, self.kind)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape).to(device or "cpu")


def packed(module: nn.Module) -> bytes:
    """Raises UsageError where this model cannot be sent to other processes."""
    into = io.BytesIO()
    try:
        _Pickler(into).dump(module)
    except Exception as error:  # of any library's model
        why = in_one_line(error)
        raise UsageError(f"--device with several: this run's model cannot be sent to other processes: {why}") from error
    return into.getvalue()
