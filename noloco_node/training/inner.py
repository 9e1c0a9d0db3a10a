"""One replica: inner steps of AdamW, the boundary of a round, and a partner's correction. Plain blocking torch.

Notable choices:
- The model's parameters are views of ONE flat fp32 vector θ, their gradients of another, so AdamW, clipping, the outer
  step and a fragment's correction are each a few operations on slices. φ and δ are flat alike, on θ's device.
- The learning rate follows the run's progress, not this process's: a newcomer at round 40 decays with the others.
- A phase lasts so many steps, or so many seconds, told by whoever has a clock. What a phase by time overruns counts
  for the next one, so that boxes with short and with long steps do not drift apart.
- A step whose loss or gradient is not finite is skipped and counted; the position in data and schedule moves on.
- Rounds count boundaries that are behind us: before the first one the replica is in round 0.

The maths of a boundary is core/outer.py (arXiv 2506.10911), AdamW is arXiv 1711.05101 and torch's. Knows nothing of
peers, threads or files. Everything here belongs to the one thread that calls it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.core import outer
from noloco_node.core.codec import BLOCK
from noloco_node.errors import Diverged, Incompatible, NonFinite, OutOfMemory, PeerMisbehaved, UsageError
from noloco_node.manifest import InnerSpec, Manifest
from noloco_node.training import data, model

STATE_BYTES = 28
"""Per parameter: θ, φ, δ, gradient, AdamW's two moments, and the snapshot of an open offer, 4 bytes each."""
EVAL_TOKENS = 4096
"""Held-out tokens of one evaluation, or a step's batch where that is more: forward only, it costs 1.3 small steps."""
MICRO_LOGITS = 1 << 25
"""Elements of the largest logits made at once, 128 MiB: a batch beyond that is accumulated over micro-batches."""


@dataclass(frozen=True, slots=True)
class State:
    """All that a replica needs to go on exactly where it was: copies on the CPU."""

    round: int
    step: int
    weights: dict[str, Tensor]
    """θ by the model's own parameter names."""
    outer: dict[str, Tensor]
    """`phi` and `delta`, flat."""
    inner: dict[str, Any]
    """Optimizer, data position, random state: plain containers and tensors."""


class Saved(Protocol):
    """A State that came back from somewhere."""

    @property
    def round(self) -> int: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def outer(self) -> Mapping[str, Tensor]: ...
    @property
    def inner(self) -> Mapping[str, Any]: ...


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device here: use --device cpu, or install torch for your GPU")
    return torch.device(name)


def learning_rate(spec: InnerSpec, progress: float) -> float:
    """Warm-up, then cosine, over `progress` of the run from 0 to 1."""
    if progress < spec.warmup:
        return spec.learning_rate * progress / spec.warmup
    along = (min(progress, 1.0) - spec.warmup) / (1 - spec.warmup) if spec.warmup < 1 else 0.0
    falling = (1 + math.cos(math.pi * along)) / 2
    return spec.learning_rate * (spec.final_learning_rate + (1 - spec.final_learning_rate) * falling)


class Inner:
    """`build` makes the one that a manifest describes. `held_out`: (windows, sequence_length + 1)."""

    def __init__(self, module: nn.Module, stream: data.Stream, held_out: Tensor, manifest: Manifest) -> None:
        self._spec = manifest.inner
        self._hyper = outer.Hyper(manifest.outer.alpha, manifest.outer.beta, manifest.outer.gamma)
        self.module = module.train()
        self.stream = stream
        self._held_out = held_out
        self.layout = model.layout_digest(module)
        self.theta, self.gradient = model.flatten(module)
        self.phi = self.theta.clone()
        self.delta = torch.zeros_like(self.theta)
        self._optimizer = self._fresh_optimizer()
        self._sequences = self._spec.batch_tokens // manifest.data.sequence_length
        vocabulary = int(self.module.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
        self._micro = max(1, MICRO_LOGITS // (manifest.data.sequence_length * vocabulary))
        self.budget = manifest.rounds
        self.round = 0
        self.phase_step = 0
        """Steps since the last boundary."""
        self.phase_s = 0.0
        """Seconds since the last boundary, of a phase by time."""
        self._taken = 0
        self.skipped = 0
        """Steps without a finite loss and gradient."""

    @classmethod
    def build(  # noqa: PLR0913
        cls,
        manifest: Manifest,
        peer_id: str,
        *,
        device: str = "auto",
        threads: int | None = None,
        memory_fraction: float | None = None,
        corpus: data.Corpus | None = None,
    ) -> "Inner":
        """The replica of the node `peer_id`. To be called on the thread that will own it: torch's number of threads is
        set here, and torch counts it per calling thread."""
        if threads:
            torch.set_num_threads(threads)
        where = choose_device(device)
        if memory_fraction and where.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_fraction, where.index)
        corpus = corpus or data.load(manifest.data.source)
        length = manifest.data.sequence_length
        module = model.build(manifest.model, data.VOCABULARY, manifest.seed, length)
        _check_memory(sum(p.numel() for p in module.parameters()), where, memory_fraction or 1.0)
        stream = data.Stream(corpus.train, length, manifest.seed, peer_id)
        held_out = corpus.windows(length, max(1, max(EVAL_TOKENS, manifest.inner.batch_tokens) // length))
        own_seed = hashlib.sha256(f"{manifest.seed}/{peer_id}".encode()).digest()
        torch.manual_seed(int.from_bytes(own_seed[:8], "big"))  # for dropout, where a model has any
        return cls(module.to(where), stream, held_out, manifest)

    # ---- sizes and positions ----
    @property
    def parameters(self) -> int:
        return len(self.theta)

    @property
    def phase_over(self) -> bool:
        """Whether the boundary is due: after H steps, or after the time of a phase and at least one step."""
        if self._spec.seconds is None:
            return self.phase_step >= self._phase_steps
        return self.phase_step > 0 and self.phase_s >= self._spec.seconds

    @property
    def _phase_steps(self) -> int:
        return self._spec.steps or 1

    @property
    def tokens_per_step(self) -> int:
        return self._spec.batch_tokens

    @property
    def device(self) -> str:
        return self.theta.device.type

    @property
    def steps(self) -> int:
        """Steps behind this replica. With phases by steps, those that others took before it joined count too: it is
        where in the run's schedule the replica stands. With phases by time it is what this replica did itself."""
        return self.round * self._phase_steps + self.phase_step if self._spec.seconds is None else self._taken

    @property
    def _progress(self) -> float:
        """Of the run, 0 to 1, with the step that is being taken."""
        if self._spec.seconds is None:
            return (self.steps + 1) / (self.budget * self._phase_steps)
        return (self.round + min(1.0, self.phase_s / self._spec.seconds)) / self.budget

    # ---- inner steps ----
    def spend(self, seconds: float) -> None:
        """So much time of the phase has gone: phases by time end by it, and the schedule follows it."""
        if self._spec.seconds is not None:
            self.phase_s += seconds

    def step(self) -> float:
        """One step of AdamW. Returns its loss, which is not finite where the step was skipped."""
        windows = self.stream.next(self._sequences)
        loss = self._accumulate(windows)
        norm = float(torch.linalg.vector_norm(self.gradient))
        if math.isfinite(loss) and math.isfinite(norm):
            self.gradient.mul_(min(1.0, self._spec.clip / (norm + 1e-6)))
            self._descend()
        else:
            self.skipped += 1
        self.phase_step += 1
        self._taken += 1
        return loss

    def _accumulate(self, windows: Tensor) -> float:
        """Loss of a batch; its gradient afterwards stands in `gradient`. Halves the micro-batch until it fits."""
        while True:
            try:
                self.gradient.zero_()
                parts = torch.split(windows, self._micro)
                return float(sum(self._backward(part, len(part) / len(windows)) for part in parts))
            except torch.OutOfMemoryError as error:
                if self._micro == 1:
                    raise OutOfMemory("not even one sequence fits into the device's memory beside the model") from error
                self._micro = min(self._micro, len(windows)) // 2 or 1

    def _backward(self, windows: Tensor, share: float) -> float:
        loss = self._loss(windows) * share
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _loss(self, windows: Tensor) -> Tensor:
        device = self.theta.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model.next_token_loss(self.module, windows.to(device))

    def _descend(self) -> None:
        rate = learning_rate(self._spec, self._progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        """Two flat parameters: the matrices, which decay, and the rest (gains, biases), which does not."""
        matrices = sum(p.numel() for _, p in model.parameters(self.module) if p.dim() >= 2)
        groups = []
        for part, decay in ((slice(0, matrices), self._spec.weight_decay), (slice(matrices, None), 0.0)):
            if len(self.theta[part]):
                flat = nn.Parameter(self.theta[part])
                flat.grad = self.gradient[part]
                groups.append({"params": [flat], "weight_decay": decay})
        return torch.optim.AdamW(groups, lr=self._spec.learning_rate, betas=self._spec.betas, fused=True)

    # ---- the boundary of a round ----
    def snapshot(self) -> Tensor:
        """u = β Δ + γ φ, fp32 on the CPU and nobody else's: what a partner needs. Before `boundary`."""
        u = torch.empty(self.parameters)
        outer.snapshot(self.theta, self.phi, self._hyper, u)
        self._require_finite(u)
        return u

    def movement(self) -> Tensor:
        """The largest |βΔ| of each block of 256 elements, on the CPU: how far apart partners may stand. Before
        `boundary`."""
        return outer.movement(self.theta, self.phi, self._hyper, BLOCK)

    def boundary(self) -> None:
        """The local outer step: afterwards θ = φ and a round more is behind us. Raises NonFinite, and then nothing has
        changed: `discard` the phase."""
        self._require_finite(self.theta)
        outer.local_step(self.theta, self.phi, self.delta, self._hyper)
        self._next_round()

    def discard(self) -> None:
        """Throw away a phase that went wrong: θ is φ again, AdamW starts afresh. Raises Diverged if φ is no better."""
        if self._first_nonfinite(self.phi) is not None:
            raise Diverged("the model holds NaN or Inf: start the node again, it goes on from its last checkpoint")
        self.theta.copy_(self.phi)
        self._optimizer = self._fresh_optimizer()
        self._next_round()

    def apply(self, start: int, c: Tensor, offered_round: int) -> None:
        """A partner's correction of the elements from `start` on, for the offer made as round `offered_round` began."""
        part = slice(start, start + len(c))
        late = self.round - offered_round
        outer.correct(self.theta[part], self.phi[part], self.delta[part], c, self._hyper, late)

    def _next_round(self) -> None:
        self.round += 1
        self.phase_step = 0
        if self._spec.seconds is not None:
            self.phase_s %= self._spec.seconds

    def _require_finite(self, vector: Tensor) -> None:
        if (at := self._first_nonfinite(vector)) is not None:
            raise NonFinite(f"{self._name_at(at)} holds NaN or Inf")

    @staticmethod
    def _first_nonfinite(vector: Tensor) -> int | None:
        for start, piece in _pieces(vector):
            finite = piece.isfinite()
            if not finite.all():
                return start + int(finite.logical_not().nonzero()[0])
        return None

    def _name_at(self, element: int) -> str:
        for name, _, end in self._slices():
            if element < end:
                return name
        raise IndexError(element)

    def _slices(self) -> Iterator[tuple[str, int, int]]:
        start = 0
        for name, p in model.parameters(self.module):
            yield name, start, start + p.numel()
            start += p.numel()

    # ---- evaluation ----
    def evaluate(self) -> float:
        """Mean loss at the present θ over the held-out windows, the same for every replica. Right after a boundary, and
        until the next step, θ is φ: what one would publish."""
        self.module.eval()
        with torch.no_grad():
            parts = torch.split(self._held_out, self._micro)
            loss = sum(float(self._loss(part)) * len(part) for part in parts) / len(self._held_out)
        self.module.train()
        return loss

    # ---- the whole state ----
    def state(self) -> State:
        theta = self.theta.cpu().clone()
        shapes = {name: p.shape for name, p in model.parameters(self.module)}
        return State(
            self.round,
            self.steps,
            {name: theta[start:end].view(shapes[name]) for name, start, end in self._slices()},
            {"phi": self.phi.cpu().clone(), "delta": self.delta.cpu().clone()},
            {
                "optimizer": _copied(self._optimizer.state_dict()["state"]),
                "position": list(self.stream.position),
                "phase_step": self.phase_step,
                "phase_s": self.phase_s,
                "taken": self._taken,
                "skipped": self.skipped,
                "rng": torch.get_rng_state(),
                "device_rng": torch.cuda.get_rng_state(self.theta.device) if self.theta.is_cuda else None,
            },
        )

    def load(self, saved: Saved) -> None:
        """Go on where `state` was taken. Raises Incompatible for another model or another text."""
        named = dict(model.parameters(self.module))
        shapes = {name: p.shape for name, p in named.items()}
        flat = (saved.outer["phi"], saved.outer["delta"])
        if shapes != {name: w.shape for name, w in saved.weights.items()} or any(
            v.shape != self.phi.shape for v in flat
        ):
            raise Incompatible("the checkpoint is of another model: use another --home for another run")
        try:
            self.stream.seek((saved.inner["position"][0], saved.inner["position"][1]))
        except ValueError:
            raise Incompatible(
                "the checkpoint is of another text: was Python updated since? Use another --home"
            ) from None
        for name, p in named.items():
            p.data.copy_(saved.weights[name])
        self.phi.copy_(flat[0])
        self.delta.copy_(flat[1])
        self._optimizer = self._fresh_optimizer()
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": saved.inner["optimizer"], "param_groups": groups})
        self.round, self.phase_step = saved.round, saved.inner["phase_step"]
        self.phase_s, self._taken = saved.inner["phase_s"], saved.inner["taken"]
        self.skipped = saved.inner["skipped"]
        torch.set_rng_state(saved.inner["rng"])
        if self.theta.is_cuda and saved.inner["device_rng"] is not None:
            torch.cuda.set_rng_state(saved.inner["device_rng"], self.theta.device)

    def live_state(self) -> bytes:
        """What a newcomer needs beside the round: φ, then δ, fp32 and little-endian."""
        return b"".join(v.cpu().numpy().tobytes() for v in (self.phi, self.delta))

    def adopt(self, round: int, live_state: bytes) -> None:
        """Become a replica of what a peer gave: θ = φ, AdamW afresh. Raises PeerMisbehaved, and then nothing has
        changed."""
        if len(live_state) != 8 * self.parameters:
            raise PeerMisbehaved("bad_state", f"{len(live_state)} bytes instead of {8 * self.parameters}")
        both = torch.from_numpy(np.frombuffer(live_state, np.float32).copy())
        if self._first_nonfinite(both) is not None:
            raise PeerMisbehaved("nonfinite", "state")
        self.phi.copy_(both[: self.parameters])
        self.delta.copy_(both[self.parameters :])
        self.theta.copy_(self.phi)
        self._optimizer = self._fresh_optimizer()
        self.round, self.phase_step, self.phase_s = round, 0, 0.0


def _pieces(vector: Tensor) -> Iterator[tuple[int, Tensor]]:
    """So that a check of a long vector makes no copy of its length."""
    for start in range(0, len(vector), outer.PIECE):
        yield start, vector[start : start + outer.PIECE]


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.detach().cpu().clone() if isinstance(state, Tensor) else state


def _check_memory(parameters: int, device: torch.device, fraction: float) -> None:
    needed = parameters * STATE_BYTES
    if device.type == "cuda":
        there = fraction * torch.cuda.get_device_properties(device).total_memory
    else:
        there = model.memory_bytes()
    if needed > there:
        raise OutOfMemory(
            f"the run's model needs {needed / 1e9:.1f} GB to be trained ({parameters / 1e6:.0f} M parameters, "
            f"{STATE_BYTES} bytes each) and there are {there / 1e9:.1f} GB: join another run, or use a larger machine"
        )
