"""The schema of a run, as pydantic models: which keys a manifest and a run.toml have, and what each may hold.

A manifest names models and data, never code: presets, transformers config classes with plain values, sources that
every node has built in. Its canonical form (JSON, sorted keys, shortest floats) does not depend on machine or Python
version; the run id is the SHA-256 of it. How it is signed and read from the network is in run/manifest.py, how its
author writes it in run/toml.py. Imports no torch.

A key that a later version adds (`_added`) says what a run without it means, and that never changes: a manifest that
means just this is written without the key, so older runs keep their bytes, their run id and their meaning, and older
versions read every run that does not use what they do not know. The default of a new run.toml may be another one.
Keys of the first version are always written.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr, field_validator, model_validator

from noloco_node.base.validation import listed, plain_table, shown
from noloco_node.core import stability
from noloco_node.errors import UsageError

PRESETS = ("tiny", "125m", "350m", "1b", "7b")
SOURCES = ("stdlib", "files", "hub")
CODECS = ("lattice:3", "bf16", "fp32", "int8", *(f"lattice:{bits}" for bits in (2, 4, 5, 6, 7, 8)))
"""What core/codecs/by_name.py offers; the first is the default."""

MAX_ROUNDS = 10_000_000
MAX_SEQUENCES = 1 << 20
"""In a step's batch: each takes some time and memory of its own, however short it is."""
MAX_STAGES = 64
ACTIVATIONS = ("bf16", "fp32", "int8")
"""What core/codecs/activations.py offers; the first is the default."""

Swaps: TypeAlias = Annotated[int, Field(ge=1, le=16)] | Literal["auto"]

_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"


def _field(allowed: str, **rules: Any) -> Any:
    return Field(json_schema_extra={"allowed": allowed}, **rules)


def _one_of(words: tuple[str, ...], default: str | None) -> Any:
    return _field(listed(words), pattern=f"^({'|'.join(words)})$", default=default)


def _whole(low: int, high: int, **rules: Any) -> Any:
    return _field(f"a whole number from {low} to {high}", ge=low, le=high, **rules)


def _share(default: float) -> Any:
    return _field("a number from 0 to 1", ge=0, le=1, default=default)


def _positive(high: float, default: float) -> Any:
    return _field(f"a number above 0 and at most {high:g}", gt=0, le=high, default=default)


def _added(allowed: str, before: Any, **rules: Any) -> Any:
    """A key that the first version did not have. `before`: what its absence means, for ever."""
    return Field(json_schema_extra={"allowed": allowed, "before": before}, **rules)


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _one_zero(cls, value: object) -> object:
        """-0.0 equals 0.0 but is written differently: the run id would differ."""
        return 0.0 if isinstance(value, float) and value == 0 else value


class ModelSpec(Table):
    preset: str | None = _one_of(PRESETS, default=None)
    """A built-in model, in Llama's shape."""
    architecture: str | None = _field(
        "a transformers config class like LlamaConfig", pattern=r"^[A-Z][A-Za-z0-9]{0,58}Config$", default=None
    )
    """A transformers config class, instead of a preset."""
    config: dict[str, Any] = _field("a table of plain values for the config class", default={})
    """Its arguments. In run.toml also the name of a config.json, which is read when the run starts."""
    task: str | None = _field(
        "the name of a task, of the characters a-z, 0-9, - and _", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", default=None
    )
    """A task that every volunteer has installed, instead of a language model: it brings model and data."""
    options: dict[str, Any] = _field("a table of plain values for the task", default={})
    """Its arguments."""
    weights: str | None = _added(
        "the name of a folder with safetensors files", None, pattern=r"^sha256:[0-9a-f]{64}$", default=None
    )
    """Those that the run begins with, by their digest (run/first_weights.py); in run.toml their folder. None: random
    ones, of the seed."""

    @field_validator("config", "options")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        return plain_table(value)

    @model_validator(mode="after")
    def _one_model(self) -> "ModelSpec":
        if sum(named is not None for named in (self.preset, self.architecture, self.task)) != 1:
            raise ValueError("needs one of preset, architecture, weights and task")
        if self.architecture is None and self.config:
            raise ValueError("takes a config only with an architecture: presets and tasks bring their own")
        if self.task is None and self.options:
            raise ValueError("takes options only with a task")
        if self.task is not None and self.weights:
            raise ValueError("takes weights only for a language model: a task brings its own")
        return self


class DataSpec(Table):
    """Names data, never a path: files on a volunteer's machine are read only where the volunteer names them."""

    source: str = _one_of(SOURCES, default=SOURCES[0])
    """`stdlib`: the sources of Python's standard library. `files`: what each volunteer names with `--data`. `hub`: a
    data set of the Hugging Face hub, streamed."""
    tokenizer: str = _field(
        "bytes, hub:<owner>/<name>@<commit> or sha256:<digest of a tokenizer.json>",
        pattern=rf"^(bytes|hub:{_HUB_NAME}@[0-9a-f]{{40}}|sha256:[0-9a-f]{{64}})$",
        default="bytes",
    )
    """`sha256:`: a file that each volunteer names with `--tokenizer`."""
    field: str = _field("the name of a field", pattern=r"^[A-Za-z0-9_.-]{1,64}$", default="text")
    """The text's field in records of jsonl, parquet and hub."""
    dataset: str | None = _field("a data set's name on the hub, <owner>/<name>", pattern=f"^{_HUB_NAME}$", default=None)
    revision: str | None = _added(
        "a commit of the data set, 40 hexadecimal digits", None, pattern=r"^[0-9a-f]{40}$", default=None
    )
    """Of the hub's data set. `start` looks it up, so that everybody reads the same. None: the newest."""
    where: str | None = _added(
        "up to 200 plain characters, as an address on the web", None, pattern=r"^[ -~]{1,200}$", default=None
    )
    """Where volunteers get the data and the tokenizer that they are to name: for people, nothing is fetched from there.
    """
    subset: str | None = _field("the name of a subset", pattern=r"^[A-Za-z0-9_.-]{1,64}$", default=None)
    split: str = _field("the name of a split", pattern=r"^[A-Za-z0-9_.]{1,64}$", default="train")
    """Of the hub's data set, to train on."""
    sequence_length: int = _whole(2, 1_048_576, default=128)
    """Tokens in one training sequence."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataSpec":
        if self.source == "hub" and self.dataset is None:
            raise ValueError('needs a dataset with source = "hub"')
        if self.source != "hub" and (self.dataset or self.subset or self.revision):
            raise ValueError('takes a dataset, its subset and its revision only with source = "hub"')
        return self


class InnerSpec(Table):
    steps: int | None = _whole(1, 100_000, default=25)
    """Steps of an inner phase (the paper's H); None with `seconds`."""
    seconds: float | None = _field("a number from 0.01 to 86400", ge=0.01, le=86_400, default=None)
    """How long an inner phase lasts on every machine, instead of `steps`: fast and slow machines end it together."""
    batch_tokens: int = _whole(1, 100_000_000, default=1024)
    """Tokens of one step on every machine; one with little memory accumulates gradients."""
    learning_rate: float = _positive(1, default=3e-3)
    schedule: Literal["cosine", "wsd"] = _field("cosine or wsd", default="cosine")
    """Of the learning rate after the warm-up: a cosine, or constant with a fall over the last part of the run (warm-up,
    stable, decay)."""
    warmup: float = _share(default=0.05)
    """Share of the run over which the learning rate rises."""
    cooldown: float = _share(default=0.2)
    """Share of the run over which it falls with `wsd`."""
    final_learning_rate: float = _share(default=0.1)
    """Learning rate at the end, as a share of its peak."""
    weight_decay: float = _share(default=0.1)
    betas: tuple[float, float] = _field("two numbers, each from 0 to below 1", default=(0.9, 0.95), strict=False)
    clip: float = _positive(1000, default=1.0)
    """Largest norm of a step's gradient."""
    precision: Literal["bf16", "fp32"] = _field("bf16 or fp32", default="bf16")
    """Of matrix products (autocast), on a GPU and on a CPU with AMX; on other CPUs bf16 would be slower. Weights,
    gradients and everything between partners are fp32 either way. A GPU without bf16 takes fp16 and scales the
    loss."""
    checkpoint_activations: bool = _field("true or false", default=False)
    """Compute activations again in the backward pass instead of keeping them: a third more work, a fraction of the
    memory. A volunteer may choose otherwise for a machine of theirs."""

    @model_validator(mode="before")
    @classmethod
    def _by_steps_or_by_time(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("seconds") is not None:
            given = {"steps": None, **given}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "InnerSpec":
        if self.schedule == "wsd" and self.warmup + self.cooldown > 1:
            raise ValueError("must have a warmup and a cooldown of at most 1 together")
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("needs one of steps and seconds, and not both")
        return self

    @field_validator("betas")
    @classmethod
    def _averages(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"must be two numbers, each from 0 to below 1, not {list(value)}")
        return (abs(value[0]), abs(value[1]))


class OuterSpec(Table):
    alpha: float = _field("a number from 0 to below 1", ge=0, lt=1, default=0.3)
    """Momentum of the outer step."""
    beta: float = _positive(10, default=0.7)
    """Outer learning rate."""
    gamma: float = _positive(10, default=1.0)
    """How strongly two partners are drawn to their mean."""
    keep_norm: bool = _field("true or false", default=True)
    """Undo the loss of length of Δ by averaging (core/length_correction.py)."""
    overlap: Literal["eager", "blocking"] = _field("eager or blocking", default="eager")
    """`eager`: training goes on during a swap. `blocking`: it waits."""
    codec: str = _one_of(CODECS, default=CODECS[0])
    """How vectors are encoded on the wire."""
    swaps_per_round: Swaps = _field("a whole number from 1 to 16, or auto", default=1)
    """Most swaps of a round, one after the other. `auto`: another while a swap takes less than a
    quarter of what is left of the phase."""

    @model_validator(mode="after")
    def _consistent(self) -> "OuterSpec":
        if self.overlap == "blocking" and self.swaps_per_round != 1:
            raise ValueError("takes more than one of swaps_per_round only with eager overlap")
        try:
            stability.check(self.alpha, self.beta, self.gamma)
        except ValueError as error:
            raise ValueError(f"is not stable: {error}") from None
        return self


class StagesSpec(Table):
    """A model that is cut into stages, of which a node holds one (noloco_node/stages/)."""

    count: int = _whole(2, MAX_STAGES)
    cut: Annotated[tuple[int, ...], FailFast()] = _field(
        "a list of layer numbers that grow, one fewer than stages", default=(), strict=False
    )
    """The first layer of each stage but the first; empty: as many layers in each as can be."""
    activations: str = _one_of(ACTIVATIONS, default=ACTIVATIONS[0])
    """How activations, and the gradients at them, are encoded between two stages."""

    @model_validator(mode="after")
    def _consistent(self) -> "StagesSpec":
        if self.cut and (len(self.cut) != self.count - 1 or any(a >= b for a, b in pairwise((0, *self.cut)))):
            raise ValueError(f"needs {self.count - 1} layer numbers that grow as cut, not {shown(list(self.cut))}")
        return self


class SampleSpec(Table):
    """A text that every replica lets the model continue, for people to read."""

    prompt: str = _field("a text of 1 to 500 characters", min_length=1, max_length=500)
    every: int = _whole(1, 1_000_000, default=10)
    """Rounds; and after the last one."""
    tokens: int = _whole(1, 512, default=64)
    """The longest continuation."""


class Manifest(Table):
    name: str = _field("1 to 32 of the characters a-z, 0-9 and -", pattern=r"^[a-z0-9-]{1,32}$")
    """For people; the run id tells runs apart."""
    seed: int = _whole(0, 2**32 - 1, default=1)
    """Of all random numbers: first weights, order of the data."""
    rounds: int = _whole(1, MAX_ROUNDS, default=200)
    """Every replica does so many rounds, and the learning rate falls over them."""
    model: ModelSpec = _field("a table", default_factory=lambda: ModelSpec(preset=PRESETS[0]))
    data: DataSpec = _field("a table", default_factory=DataSpec)
    inner: InnerSpec = _field("a table", default_factory=InnerSpec)
    outer: OuterSpec = _field("a table", default_factory=OuterSpec)
    sample: SampleSpec | None = _added("a table", None, default=None)
    """None: no sample texts."""
    membership: Literal["open", "invite"] = _added("open or invite", "open", default="open")
    """Who may take part: anybody, or whom the author gave a token (run/admission.py)."""
    stages: StagesSpec | None = _added("a table", None, default=None)
    """None: every node holds the whole model."""
    _signed_id: str | None = PrivateAttr(None)
    """The run's id, where this is the run as its author amended it."""

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        length, tokens = self.data.sequence_length, self.inner.batch_tokens
        rule = "a multiple of" if tokens % length else ""
        if tokens > MAX_SEQUENCES * length:
            rule = f"at most {MAX_SEQUENCES} times"
        if rule and self.model.task is None:
            raise ValueError(f"inner.batch_tokens must be {rule} data.sequence_length ({length}), not {tokens}")
        if self.sample is not None and self.model.task is not None:
            raise ValueError("sample: only a language model continues a text; leave this table out with model.task")
        if self.sample is not None and self.stages is not None:
            raise ValueError("sample: no node of a run with stages can write a text; leave one of both tables out")
        if self.model.weights is not None and self.stages is not None:
            raise ValueError("model.weights: a run with stages begins with random weights; leave one of both out")
        return self

    def canonical(self) -> bytes:
        """The bytes that are hashed, signed and sent. They do not depend on defaults: a new default changes no run."""
        document = _without_additions(type(self), self.model_dump(mode="json"))
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def amended(self, rounds: int | None, swaps_per_round: Swaps | None) -> "Manifest":
        """The same run, by its id, with the values that its author changed later; its rounds never become fewer."""
        swaps = swaps_per_round if swaps_per_round and self.outer.overlap == "eager" else self.outer.swaps_per_round
        outer = self.outer.model_copy(update={"swaps_per_round": swaps})
        changed = self.model_copy(update={"rounds": max(self.rounds, rounds or 0), "outer": outer})
        changed._signed_id = self.run_id
        return changed

    @property
    def run_id(self) -> str:
        return self._signed_id or hashlib.sha256(self.canonical()).hexdigest()

    @property
    def label(self) -> str:
        """`tiny-3f9a2c81d0e4`: for people. Programs compare the whole run id."""
        return f"{self.name}-{self.run_id[:12]}"

    def require_language(self) -> None:
        """Raises UsageError where there is nothing to export, evaluate or sample."""
        if self.model.task is not None:
            raise UsageError(
                f"{self.label} trains the task {self.model.task}, which is no language model: its package knows"
            )


def _additions(table: type[BaseModel]) -> dict[str, Any]:
    """The keys that came later, and what their absence means."""
    extras = {name: field.json_schema_extra for name, field in table.model_fields.items()}
    return {name: extra["before"] for name, extra in extras.items() if isinstance(extra, dict) and "before" in extra}


def _tables(table: type[BaseModel], document: dict[str, Any]) -> Iterator[tuple[str, type[BaseModel], dict[str, Any]]]:
    """The tables in a table: name, model and content."""
    for name, field in table.model_fields.items():
        kind, inner = field.annotation, document.get(name)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(inner, dict):
            yield name, kind, inner


def _without_additions(table: type[BaseModel], document: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _without_additions(kind, value) for name, kind, value in _tables(table, document)}
    absent = _additions(table)
    return {key: value for key, value in {**document, **inner}.items() if key not in absent or value != absent[key]}


def with_additions(table: type[BaseModel], document: Any) -> Any:
    """The document with the keys that are not written, as it was meant."""
    if not isinstance(document, dict):
        return document
    document = {**_additions(table), **document}
    inner = {name: with_additions(kind, value) for name, kind, value in _tables(table, document)}
    return {**document, **inner}
