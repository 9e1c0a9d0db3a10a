"""run.toml: a run as its author writes it, with comments, and the config.json that it may name.

Only the author's own node reads these two files, once: what travels is the manifest that they become. A mistake in them
is answered with the key and what is allowed. Imports no torch and no transformers.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from noloco_node.base.validation import explain, listed, shown
from noloco_node.errors import UsageError
from noloco_node.run import first_weights
from noloco_node.run.manifest import MAX_BYTES
from noloco_node.run.schema import ACTIVATIONS, CODECS, PRESETS, SOURCES, Manifest

_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "torch_dtype"}
    | {"transformers_version", "use_cache", "task_specific_params", "is_llama_config", "transformers.js_config"}
)
"""Keys of a config.json that say where a model came from and how it is to be run, not what it is."""
_OLDER = {"n_ctx": "n_positions", "_sliding_window_pattern": "layer_types"} | dict.fromkeys(
    ("rope_interleaved", "_remove_final_layer_norm"), ""
)
"""Keys of older versions, which say nothing where their value is false or the key beside them is there."""
_OF_BYTES = 512
"""Tokens that a model of bytes has at most, with some special ones."""


def load(path: Path, say: Callable[[str], None] = lambda line: None) -> Manifest:
    """Read a run.toml. `say` is told of what takes long. Raises UsageError, which names the key and what is allowed."""
    raw = _read(path, f"{path} does not exist: write one with `noloco-node init {shlex.quote(str(path))}`")
    try:
        run = Manifest.model_validate(_with_files(tomllib.loads(raw.decode("utf-8-sig")), path.parent, say))
    except ValidationError as error:
        raise UsageError(f"{path.name}: {explain(error, Manifest)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not text in UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"{path.name} is not valid TOML: {str(error).splitlines()[0]}") from None
    made = len(run.canonical())  # JSON, with a config.json; a character beyond ASCII takes 6 bytes there
    if made > MAX_BYTES:
        raise UsageError(f"{path.name} makes a manifest of {made} bytes, and {MAX_BYTES} are possible: shorten it")
    return run


def weights(path: Path) -> str | None:
    """The folder of the weights that the run of this run.toml begins with; it was loaded before."""
    found = _weights(tomllib.loads(path.read_text(encoding="utf-8-sig")), path.parent)
    return None if found is None else str(found)


def template(name: str = "tiny", *, rounds: int = 200) -> str:
    """The run.toml that `init` writes: every key with its default."""
    return _TEMPLATE.format(
        m=Manifest(name=name, rounds=rounds),
        presets=listed(PRESETS),
        sources=listed(SOURCES),
        codecs=listed(CODECS),
        activations=ACTIVATIONS[0],
        all_activations=listed(ACTIVATIONS),
    )


def _read(path: Path, missing: str) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(missing) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES} bytes: a manifest could not hold it")
    return raw


def _with_files(document: dict[str, Any], folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """`weights = "folder"` is a folder beside run.toml: its digest becomes the manifest's, and its config.json, if
    nothing else says what the model is, the model."""
    if (found := _weights(document, folder)) is None:
        return _with_config(document, folder)
    if "preset" in document["model"]:
        raise UsageError("model takes no preset with weights: their config.json says what the model is")
    say(f"reading the weights in {found}: the run is known by their digest")
    spec = {**document["model"], "weights": first_weights.digest(found)}
    if not spec.keys() & {"config", "task"}:
        spec["config"] = str(found.absolute() / "config.json")
    whole = _with_config({**document, "model": spec}, folder)
    config, data = whole["model"].get("config"), document.get("data", {})
    vocabulary = config.get("vocab_size") if isinstance(config, dict) else None
    of_bytes = isinstance(data, dict) and data.get("tokenizer", "bytes") == "bytes"
    if of_bytes and isinstance(vocabulary, int) and vocabulary > _OF_BYTES:
        raise UsageError(
            f"data.tokenizer is not theirs: these weights know {vocabulary} tokens; name the tokenizer that they were "
            "trained with, as hub:<owner>/<name>@<commit>, or what `noloco-node tokenize` prints for its file"
        )
    return whole


def _weights(document: dict[str, Any], folder: Path) -> Path | None:
    spec = document.get("model")
    name = spec.get("weights") if isinstance(spec, dict) else None
    if not isinstance(name, str) or name.startswith(first_weights.KIND):
        return None
    try:
        return folder / Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"model.weights: {shown(name)} names no user's home directory: write the path out") from None


def _with_config(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config = "config.json"` is a file beside run.toml: its values become the manifest's own."""
    spec = document.get("model")
    if not (isinstance(spec, dict) and isinstance(name := spec.get("config"), str)):
        return document
    architecture, values = _config(folder / name)
    if "architecture" not in spec and architecture is None:
        raise UsageError(f"model.architecture is missing, and {name} does not say it: add one, LlamaConfig or another")
    return {**document, "model": {"architecture": architecture, **spec, "config": values}}


def _config(path: Path) -> tuple[str | None, dict[str, Any]]:
    """A config.json as transformers writes it: the config class, where the file names its model, and its values."""
    raw = _read(path, f"model.config: cannot read {path}: there is no such file")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"model.config: {path} is not a table in JSON, as a config.json of transformers is")
    said = {key: value for key, value in found.items() if key not in _NOT_OF_THE_MODEL}
    values = {key: value for key, value in said.items() if key not in _OLDER or (value and _OLDER[key] not in said)}
    return _config_class(found.get("architectures"), found.get("model_type")), values


def _config_class(architectures: object, model_type: object) -> str | None:
    """`LlamaForCausalLM` has a LlamaConfig, `GPT2LMHeadModel` a GPT2Config; the text part of a model that also sees has
    a type like `gemma3_text`, and a Gemma3TextConfig."""
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        match = re.fullmatch(r"(\w+?)(ForCausalLM|LMHeadModel)", architectures[0], re.ASCII)
        text = "Text" if str(model_type).endswith("_text") else ""
        return f"{match[1]}{text}Config" if match else None
    return None


_TEMPLATE = """\
# A run: what is trained, and how. Everybody who joins trains exactly this: another value is another run.
# `noloco-node start` with this file starts it, and prints a line for others to join with.

name = "{m.name}"            # for people: a-z, 0-9 and -
seed = {m.seed}                 # of all random numbers: first weights, order of the data
rounds = {m.rounds}             # so many rounds each replica does, and the learning rate falls over them
membership = "{m.membership}"         # or "invite": only whom you give a token with `noloco-node invite` takes part

[model]
preset = "{m.model.preset}"          # {presets}; or any transformers config class:
# architecture = "LlamaConfig"
# config = {{ hidden_size = 512, intermediate_size = 1376, num_hidden_layers = 8, num_attention_heads = 8 }}
# config = "config.json"    # the same in a file, as transformers writes it; it becomes part of the run
# weights = "folder"        # begin with these: config.json and safetensors, as transformers writes them; no preset then
# or, for anything but a language model, a task that every volunteer has installed; [data] is not used then:
# task = "name"
# options = {{ }}

[data]
source = "{m.data.source}"        # {sources}: Python's own library, each volunteer's `--data`, or streamed from:
# dataset = "owner/name"    # a Hugging Face data set, with source = "hub"
# revision = "<commit>"     # of it; `start` looks up the present one
# subset = "en"
split = "{m.data.split}"          # of that data set
field = "{m.data.field}"           # the text's field in its records, in jsonl and in parquet
tokenizer = "{m.data.tokenizer}"      # or "hub:owner/name@<commit>", or what `noloco-node tokenize` prints for a file
# where = "https://..."     # where volunteers get the data and the tokenizer; it is shown to who lacks them
sequence_length = {m.data.sequence_length}    # tokens in one training sequence

[inner]                     # the inner phase, on each node alone: AdamW
steps = {m.inner.steps}                  # steps of an inner phase; or its duration, the same on every machine:
# seconds = 60.0
batch_tokens = {m.inner.batch_tokens}         # tokens in a step, whole sequences
learning_rate = {m.inner.learning_rate}
warmup = {m.inner.warmup}               # share of the run over which the learning rate rises
schedule = "{m.inner.schedule}"         # then it falls along a cosine; "wsd": it stays, and falls over the cooldown
cooldown = {m.inner.cooldown}              # share of the run over which "wsd" lets it fall
final_learning_rate = {m.inner.final_learning_rate}   # at the end, as a share of learning_rate
weight_decay = {m.inner.weight_decay}
betas = [{m.inner.betas[0]}, {m.inner.betas[1]}]
clip = {m.inner.clip}                  # largest norm of a step's gradient
precision = "{m.inner.precision}"          # of matrix products, on a GPU or a CPU with AMX. Or "fp32"
checkpoint_activations = false   # true: a third more work for a fraction of the memory

[outer]                     # the outer step, of two partners (NoLoCo, arXiv 2506.10911)
alpha = {m.outer.alpha}                 # momentum
beta = {m.outer.beta}                  # learning rate
gamma = {m.outer.gamma}                 # how strongly two partners are drawn to their mean
keep_norm = true            # undo the loss of length of an update by averaging
overlap = "{m.outer.overlap}"           # eager: training goes on during a swap; blocking: it waits
codec = "{m.outer.codec}"              # how vectors are encoded on the wire: {codecs}
swaps_per_round = {m.outer.swaps_per_round}         # most swaps of a round; "auto": as many as there is time for

# [sample]                  # a text that every node lets the model continue, for people to read
# prompt = "def main("
# every = 10                # rounds; and after the last one
# tokens = 64               # the longest continuation

# [stages]                  # a model larger than one machine: each node holds one stage of it
# count = 2                 # stages
# cut = [6]                 # the first layer of each stage but the first; without it as many layers in each
# activations = "{activations}"      # how activations travel: {all_activations}
"""
