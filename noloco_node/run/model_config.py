"""A model's config.json, as transformers writes it, turned into what a manifest holds: a config class and its values.

Only the run's author has the file, and only `runtoml.load` reads it: what travels is the table. Which keys a manifest
may hold at all is checked like for any other table. Imports no transformers.
"""

import json
import re
from pathlib import Path
from typing import Any

from noloco_node.errors import UsageError

MAX_BYTES = 64 << 10
"""Larger than the largest by far; a manifest would not hold it either."""

_SAYS_NOTHING = frozenset(
    {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)
"""Where a model came from and how it is to be run, not what it is."""


def read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """The config class where the file names its model, and the values for it. Raises UsageError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"model.config: cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"model.config: {path} is larger than {MAX_BYTES} bytes: that is no config.json")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"model.config: {path} is not a table in JSON, as a config.json of transformers is")
    return _class(found.get("architectures")), {k: v for k, v in found.items() if k not in _SAYS_NOTHING}


def _class(architectures: object) -> str | None:
    """`LlamaForCausalLM` has a LlamaConfig, `GPT2LMHeadModel` a GPT2Config."""
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        match = re.fullmatch(r"(\w+?)(ForCausalLM|LMHeadModel)", architectures[0], re.ASCII)
        return f"{match[1]}Config" if match else None
    return None
