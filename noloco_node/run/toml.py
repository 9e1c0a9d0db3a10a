"""run.toml: a run as its author writes it, with comments; read once, by the author's own node.

A mistake is the author's, and answered with the key and what is allowed. What the run then is, which bytes it has and
how it travels, is run/manifest.py's affair. Imports no torch.
"""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from noloco_node.base.validation import explain, listed
from noloco_node.errors import UsageError
from noloco_node.run import model_config
from noloco_node.run.manifest import MAX_BYTES
from noloco_node.run.schema import CODECS, PRESETS, SOURCES, Manifest


def load(path: Path) -> Manifest:
    """Read a run.toml. Raises UsageError, which names the key and what is allowed."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: write one with `noloco-node init {path}`") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES} bytes: that is no manifest")
    try:
        return Manifest.model_validate(_with_config(tomllib.loads(raw.decode()), path.parent))
    except ValidationError as error:
        raise UsageError(f"{path.name}: {explain(error, Manifest)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not text in UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"{path.name} is not valid TOML: {str(error).splitlines()[0]}") from None


def template(name: str = "tiny", *, rounds: int = 100) -> str:
    """The run.toml that `init` writes: every key with its default."""
    return _TEMPLATE.format(
        m=Manifest(name=name, rounds=rounds), presets=listed(PRESETS), sources=listed(SOURCES), codecs=listed(CODECS)
    )


def _with_config(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config = "config.json"` is a file beside run.toml: its values become the manifest's own."""
    spec = document.get("model")
    if not (isinstance(spec, dict) and isinstance(name := spec.get("config"), str)):
        return document
    architecture, values = model_config.read(folder / name)
    if "architecture" not in spec and architecture is None:
        raise UsageError(f"model.architecture is missing, and {name} does not say it: add one, LlamaConfig or another")
    return {**document, "model": {"architecture": architecture, **spec, "config": values}}


_TEMPLATE = """\
# A run: what is trained, and how. Everybody who joins trains exactly this, so a changed character is another run.
# Start it with   noloco-node start run.toml   and hand the line that it prints to others.

name = "{m.name}"            # for people: a-z, 0-9 and -
seed = {m.seed}                 # where all chance starts: first weights, order of the data
rounds = {m.rounds}             # the budget: the learning rate falls over so many rounds, then the run is done

[model]
preset = "{m.model.preset}"          # {presets}; or any transformers config class:
# architecture = "LlamaConfig"
# config = {{ hidden_size = 512, intermediate_size = 1376, num_hidden_layers = 8, num_attention_heads = 8 }}
# config = "config.json"    # the same in a file, as transformers writes it; it becomes part of the run
# or what is no language model: a task that every volunteer has installed, with its data. [data] says nothing then.
# task = "name"
# options = {{ }}

[data]
source = "{m.data.source}"        # {sources}: Python's own library, each volunteer's `--data`, or streamed from:
# dataset = "owner/name"    # a Hugging Face data set, with source = "hub"
# revision = "<commit>"     # of it; `start` looks up the present one
# subset = "en"
split = "{m.data.split}"          # of that data set
field = "{m.data.field}"           # where the text stands in a record of it, of jsonl or of parquet
tokenizer = "{m.data.tokenizer}"      # or "hub:owner/name@<commit>", or what `noloco-node tokenize` prints for a file
sequence_length = {m.data.sequence_length}    # tokens in one training sequence

[inner]                     # what one node does alone: AdamW
steps = {m.inner.steps}                  # steps in a round, between two meetings; or a time, the same on every box:
# seconds = 60.0
batch_tokens = {m.inner.batch_tokens}         # tokens in a step, whole sequences; a small box accumulates
learning_rate = {m.inner.learning_rate}
warmup = {m.inner.warmup}               # share of the run over which the learning rate rises
schedule = "{m.inner.schedule}"         # then it falls along a cosine; "wsd": it stays, and falls over the cooldown
cooldown = {m.inner.cooldown}              # share of the run over which "wsd" lets it fall
final_learning_rate = {m.inner.final_learning_rate}   # share of it that is left at the end
weight_decay = {m.inner.weight_decay}
betas = [{m.inner.betas[0]}, {m.inner.betas[1]}]
clip = {m.inner.clip}                  # largest norm of a step's gradient
precision = "{m.inner.precision}"          # of products on a GPU; weights are fp32 anyway. Or "fp32"
checkpoint_activations = false   # true: a third more work for a fraction of the memory

[outer]                     # what two nodes do when they meet (NoLoCo, arXiv 2506.10911)
alpha = {m.outer.alpha}                 # momentum
beta = {m.outer.beta}                  # learning rate
gamma = {m.outer.gamma}                 # how hard two partners pull together
keep_norm = true            # give back what averaging takes from the length of an update
overlap = "{m.outer.overlap}"           # eager: training goes on while they swap; blocking: it waits
codec = "{m.outer.codec}"              # how a vector is written on the wire: {codecs}
swaps_per_round = {m.outer.swaps_per_round}         # partners in a round; "auto": as many as an idle link has time for
"""
