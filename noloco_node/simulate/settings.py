"""Settings and results of a simulation. No torch: the command line reads this before anything heavy."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from noloco_node.base.validation import did_you_mean
from noloco_node.core import stability
from noloco_node.errors import UsageError
from noloco_node.run.schema import DataSpec, InnerSpec, ModelSpec, OuterSpec

EAGER_SHARE = 25
"""`eager` applies a correction 1/25 of a phase after its boundary: 1 of 25 steps, as with 1 B parameters, 3 s a step
and 1 Gbit/s. `delay=N` is for slower links; `--links` computes N from a link."""


ATTACKS = ("nan", "scale", "sign-flip", "noise", "stale", "creep", "collude", "hold", "capture")
"""What attackers may do: simulate/attacks.py."""
ROUTINGS = ("random", "fixed")


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm and its hyper-parameters. Those that it does not have keep their value in DEFAULTS."""

    name: str
    alpha: float
    """Outer momentum."""
    beta: float
    """Outer learning rate."""
    gamma: float = 0.0
    """Outer weight of the difference to the partner (NoLoCo)."""
    swaps: int = 1
    """Partners in one phase, one after the other (NoLoCo)."""
    keep_norm: int = 0
    """1: Δ gets the length back that averaging takes from it (NoLoCo). 0: it does not."""
    inner_steps: int = 0
    """Its own H, for more boundaries with the same tokens. 0: the H of the comparison."""
    fragments: int = 1
    """Parts of the vector that are sent one after the other in a phase (Streaming DiLoCo)."""
    own: float = 0.0
    """How much of its own weights a replica keeps when a fragment lands (Streaming DiLoCo)."""
    share: float = 1.0
    """Of the weights, averaged after each inner step (SPARTA)."""

    @property
    def label(self) -> str:
        """As `--algorithms` takes it: the name, and what differs from its defaults."""
        plain = DEFAULTS[self.name]
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return ":".join([self.name, *(f"{f.name}={getattr(self, f.name):g}" for f in changed if f.name != "name")])


_RUN = OuterSpec()
"""The defaults of a manifest."""
_SWAPS = 1 if _RUN.swaps_per_round == "auto" else _RUN.swaps_per_round  # auto depends on a link, which is not simulated

DEFAULTS = {
    choice.name: choice
    for choice in (
        Choice("noloco", _RUN.alpha, _RUN.beta, _RUN.gamma, _SWAPS, int(_RUN.keep_norm)),
        Choice("noloco-paper", alpha=0.5, beta=0.7, gamma=0.7),
        Choice("diloco", alpha=0.3, beta=0.7),  # tuned for DiLoCo in the NoLoCo paper; DiLoCo's own has alpha 0.9
        Choice("streaming", alpha=0.3, beta=1.0, fragments=5, own=0.5),  # `own` is the paper's
        Choice("sparta", alpha=0.0, beta=1.0, share=0.005),  # SPARTA's own
        Choice("gasloc", alpha=0.3, beta=1.0, gamma=1.0),
        Choice("fedavg", alpha=0.0, beta=1.0),
        Choice("ddp", alpha=0.0, beta=1.0),
        Choice("local", alpha=0.0, beta=1.0),
    )
}
SETTINGS = {
    "noloco": ("alpha", "beta", "gamma", "swaps", "keep_norm"),
    "noloco-paper": ("alpha", "beta", "gamma"),
    "diloco": ("alpha", "beta"),
    "streaming": ("alpha", "beta", "fragments", "own"),
    "sparta": ("share",),
    "gasloc": ("alpha", "beta", "gamma"),
}
"""The settings of each, beside `inner_steps`."""


def choice(text: str) -> Choice:
    """`noloco:beta=1:swaps=2` -> a Choice. Raises UsageError."""
    name, *pairs = text.split(":")
    if name not in DEFAULTS:
        raise UsageError(f"there is no algorithm {name!r}, {did_you_mean(name, DEFAULTS)}")
    changed: dict[str, Any] = dict(_setting(text, pair) for pair in pairs)
    made = replace(DEFAULTS[name], **changed)
    check(made)
    return made


def check(made: Choice) -> None:
    """Raises UsageError unless it can be trained."""
    try:
        if made.name.startswith("noloco"):
            stability.check(made.alpha, made.beta, made.gamma)
        elif not (0 <= made.alpha < 1 and 0 < made.beta < math.inf):
            raise ValueError("alpha must be from 0 to below 1 and beta above 0")
        elif made.name == "diloco" and made.beta >= (most := stability.largest_nesterov_beta(made.alpha)):
            raise ValueError(
                f"with alpha {made.alpha:g} beta must be below {most:.3g}: beyond, the outer step overshoots"
            )
        if made.swaps < 1 or made.inner_steps < 0 or made.keep_norm not in (0, 1):
            raise ValueError("swaps must be 1 or more, inner_steps 0 or more (0: everybody's) and keep_norm 0 or 1")
        if made.fragments < 1 or not (0 <= made.own <= 1 and 0 < made.share <= 1 and 0 <= made.gamma <= 2):
            raise ValueError("fragments must be 1 or more, own from 0 to 1, share above 0 to 1 and gamma from 0 to 2")
    except ValueError as error:
        raise UsageError(f"{made.label}: {error}") from None


def _setting(text: str, pair: str) -> tuple[str, float | int]:
    key, _, value = pair.partition("=")
    name = text.partition(":")[0]
    known = (*SETTINGS.get(name, ()), "inner_steps")
    if key not in known:
        raise UsageError(f"{text}: {name} has no setting {key!r}, {did_you_mean(key, known)}")
    kind = int if key in ("swaps", "keep_norm", "inner_steps", "fragments") else float
    try:
        return key, kind(value)
    except ValueError:
        raise UsageError(f"{text}: {key} must be a number, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """What all algorithms of a comparison share: the same start, data, order and number of tokens."""

    replicas: int = 8
    rounds: int = 24
    """Phases of `inner.steps` steps; an algorithm with its own H has more or fewer of them for the same steps."""
    seed: int = 1
    iid: bool = True
    """False: each replica has modules of the corpus that no other has."""
    overlap: str = _RUN.overlap
    """`eager` or `delay=N`: inner steps that a swap takes; training goes on. `blocking`: it waits."""
    codec: str = _RUN.codec
    precision: str = "auto"
    """Of matrix products: `fp32`, `bf16`, or `auto`, which is bf16 where that is quicker (core/device.py)."""
    device: str = "auto"
    compiled: bool = False
    """Through torch.compile: about 1.5 times as fast on a CPU, after a minute of compiling; needs a C++ compiler."""
    attack: str = ""
    """What the last `attackers` replicas do instead of their part; losses are those of the others. "": nobody does."""
    attackers: int = 0
    defences: bool = True
    """Whether honest replicas bound corrections, take harmful ones back and meet fairly, as nodes do (NoLoCo)."""
    stages: int = 1
    """Parts that the model is cut into; `replicas` is of each."""
    routing: str = "random"
    """Of micro-batches between stages: `random`, a new permutation for each, or `fixed`."""
    activations: str = "fp32"
    """How they are coded between stages: core/codecs/activations.py."""
    held_out_sequences: int = 64
    """The same in every evaluation; 64 are enough to tell losses 0.2% apart, as all are evaluated on the same ones."""
    model: ModelSpec = field(default_factory=lambda: ModelSpec(preset="tiny"))
    data: DataSpec = field(default_factory=DataSpec)
    inner: InnerSpec = field(default_factory=InnerSpec)

    def __post_init__(self) -> None:
        if self.replicas < 2 or min(self.rounds, self.stages, self.held_out_sequences) < 1:
            raise UsageError("replicas must be 2 or more, and rounds, stages and held-out sequences 1 or more")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"precision must be auto, fp32 or bf16, not {self.precision!r}")
        if self.routing not in ROUTINGS:
            raise UsageError(f"routing must be {' or '.join(ROUTINGS)}, not {self.routing!r}")
        if self.stages > 1 and (self.attack or self.defences):
            raise UsageError("stages are simulated among the honest, without defences: add --no-defences, no --attack")
        if (
            self.compiled and self.activations != "fp32"
        ):  # a compiled model does not see what is hooked into another one
            raise UsageError("--compile takes activations in fp32 only: leave one of both out")
        if self.attack and self.attack not in ATTACKS:
            raise UsageError(f"there is no attack {self.attack!r}, {did_you_mean(self.attack, ATTACKS)}")
        if bool(self.attack) != bool(self.attackers) or not 0 <= self.attackers <= self.replicas - 2:
            raise UsageError(f"an attack takes 1 attacker or more, and two honest replicas of {self.replicas} too")
        self.delay(self.inner_steps)

    @property
    def honest(self) -> int:
        """Replicas that do their part; attackers come after them."""
        return self.replicas - self.attackers

    @property
    def inner_steps(self) -> int:
        """Of a phase, the paper's H."""
        if self.inner.steps is None:
            raise UsageError("simulate has no clock, and this run's phases are so many seconds: add --inner-steps")
        return self.inner.steps

    @property
    def steps(self) -> int:
        return self.rounds * self.inner_steps

    @property
    def batch(self) -> int:
        """Sequences of one replica in one step."""
        return max(1, self.inner.batch_tokens // self.data.sequence_length)

    def delay(self, inner_steps: int) -> int:
        """Inner steps from a boundary to the end of a swap."""
        kind, _, steps = self.overlap.partition("=")
        if kind == "delay" and steps.isdecimal():
            return int(steps)
        if self.overlap not in ("eager", "blocking"):
            raise UsageError(f"overlap must be eager, blocking or delay=N, not {self.overlap!r}")
        return 0 if self.overlap == "blocking" else -(-inner_steps // EAGER_SHARE)


@dataclass(slots=True)
class Curve:
    """The result of one algorithm: a point after each phase of the comparison, and one before any training."""

    algorithm: str
    seed: int
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Of all honest replicas together: where there are attackers, nothing here is about them."""
    averaged_model_loss: list[float] = field(default_factory=list)
    """Held-out loss of the mean of all replicas."""
    replica_mean_loss: list[float] = field(default_factory=list)
    """Mean of the replicas' own held-out losses."""
    replica_std: list[float] = field(default_factory=list)
    """Spread of a weight between replicas: root mean square over all weights."""
    resent_block_fraction: list[float] = field(default_factory=list)
    """Of the swaps that the last boundary began: the share of blocks that the codec sent again,"""
    relative_error: list[float] = field(default_factory=list)
    """and how far off it was: ‖2 c − (u_j − u_i)‖ / ‖u_j − u_i‖."""
    bytes_sent_per_param: list[float] = field(default_factory=list)
    """By one replica so far, for each parameter of the model."""
    bytes_per_param: float = 0.0
    """In all."""
    bytes_per_token: float = 0.0
    """Of activations and gradients, over one boundary between stages."""
    failed_swaps: int = 0
    """Given up by both sides: their rounds were solo."""
    scaled_swaps: int = 0
    """Made smaller by the bounds of one side,"""
    taken_back: int = 0
    """and corrections that an honest replica took back,"""
    taken_back_from_honest: int = 0
    """of them of honest partners."""
    wall_s: float = 0.0
