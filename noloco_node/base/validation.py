"""Error messages for a wrong key, in one sentence: the key, what is allowed, what was there, and the likely typo.

Used for the run's manifest (pydantic) and for this machine's settings (without). pydantic is imported late, so that the
command line starts fast. `plain_table` checks the free tables that another node may fill: a model's config, a task's
options; `unsaveable` a place in a stream of data.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_DEPTH = 4  # RoPE scaling is a table in a table; nothing plain goes deeper
_VALUES = 256
_TEXT = 128
_NUMBER = 2**31  # vocabularies and RoPE bases are far below it
_COUNT = re.compile(r"(layers?|experts|labels|depth|types)$")
_PARTS = 1024
"""Of a key that counts parts, which config and model are made of in a loop. Llama 3's largest has 126 layers, and 512
experts are many."""
_PRODUCT = 32_768
"""Of layers and experts."""
_LOADING_KEYS = frozenset(
    {"auto_map", "trust_remote_code", "custom_pipelines", "quantization_config"}
    | {"attn_implementation", "experts_implementation", "use_kernels"}  # each can fetch kernels from a hub
)
_SAVED_VALUES = 10_000
"""A hub stream's position has some dozen values for each file that it reads."""
_SAVED_BITS = 2000  # of a whole number: torch reads no longer one back
_SHOWN = 40  # characters of a wrong value that help; the rest would bury the sentence


def shown(value: object) -> str:
    """A wrong value on one line and short, as its author would recognise it."""
    if isinstance(value, bool | None):
        return json.dumps(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and not all(isinstance(each, int | float) for each in value):
        return "a list"  # repr of a deep one could exhaust the stack
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean steps?`; the list of all where none is similar."""
    known = sorted(known)
    close = similar(word, known)
    return f"did you mean {listed(close)}?" if close else f"it may be {listed(known)}"


def similar(word: str, known: Iterable[str]) -> list[str]:
    """Those that begin so, or one that is nearly the same."""
    known = sorted(known)
    return [each for each in known if each.startswith(word)] or get_close_matches(word, known, n=1)


def listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def explain(error: "ValidationError", model: "type[BaseModel]") -> str:
    """pydantic's first error as our sentence, a key that is not known before one that is missing: it may be a typo of
    it. A field says what it allows in `json_schema_extra`."""
    found = error.errors(include_url=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    key, parent, allowed = _walk(first["loc"], model)
    match first["type"]:
        case "extra_forbidden":
            name = str(first["loc"][-1])
            return f"{shown(key)[1:-1]} is not known, {did_you_mean(name, parent.model_fields if parent else ())}"
        case "missing" if isinstance(first["loc"][-1], str):  # an index: a list is too short
            return f"{key} is missing: it must be {allowed}"
        case "value_error":
            return f"{key} {first['ctx']['error']}".strip()
        case _:
            return f"{key} must be {allowed}, not {shown(first['input'])}"


def _walk(where: Sequence[int | str], model: "type[BaseModel]") -> "tuple[str, type[BaseModel] | None, str]":
    """The dotted key at `where`, its table, and what its field allows."""
    from pydantic import BaseModel

    at: Any = model
    parent: type[BaseModel] | None = None
    allowed, key = "a table", ""
    for part in where:
        if not (isinstance(at, type) and issubclass(at, BaseModel)):
            break  # inside a list or a free table: the field above says what is allowed
        parent, key = at, f"{key}.{part}".lstrip(".")
        field = at.model_fields.get(str(part))
        at = table_in(field.annotation) if field else None
        extra = field.json_schema_extra if field else None
        allowed = str(extra["allowed"]) if isinstance(extra, dict) else "a table"
    return key, parent, allowed


def table_in(annotation: Any) -> Any:
    """`SomeTable`, also of `SomeTable | None`."""
    return next((kind for kind in get_args(annotation) if hasattr(kind, "model_fields")), annotation)


def plain_table(config: dict[str, Any]) -> dict[str, Any]:
    """Only JSON values, few and small, and nothing that makes transformers load code, files or kernels."""
    leaves = list(islice(_leaves("", config, 0), _VALUES + 1))
    if len(leaves) > _VALUES:
        raise ValueError(f"must not hold more than {_VALUES} values")
    for where, value in leaves:
        _plain_value(where[1:], value)
    _few_parts(leaves)
    return config


def _few_parts(leaves: Iterable[tuple[str, object]]) -> None:
    most: dict[str, float] = {}
    for where, value in leaves:
        if (match := _COUNT.search(where)) and isinstance(value, int | float):
            most[match[1]] = max(value, most.get(match[1], 1))
            if value > _PARTS:
                raise ValueError(f"has a number in {where[1:]} above {_PARTS}, which no model needs")
    if math.prod(most.values()) > _PRODUCT:
        raise ValueError(f"has more than {_PRODUCT} parts: {listed(sorted(most))} multiplied")


def _leaves(where: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    if depth > _DEPTH:
        raise ValueError(f"must not nest deeper than {_DEPTH} tables")
    if isinstance(value, dict | list):
        yield where, None  # it counts, too: a list of 20,000 empty lists takes 30 ms to read
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{where}.{_config_key(key)}", item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(where, item, depth + 1)
    else:
        yield where, value


def _config_key(key: object) -> str:
    if not (isinstance(key, str) and key.isascii() and key.isidentifier() and len(key) <= 64):
        raise ValueError(f"may not hold the key {shown(key)}: keys are plain words")
    if key in _LOADING_KEYS or key.startswith("_") or key.endswith("name_or_path"):
        raise ValueError(f"may not hold {key}: a manifest loads no code, no kernels and no files")
    return key


def _plain_value(where: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > _TEXT or not value.isprintable():
            raise ValueError(f"has a text in {where} that is not one line of at most {_TEXT} characters")
        if "/" in value or "\\" in value or ".." in value:
            raise ValueError(f"has a path in {where}: a manifest loads no files")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= _NUMBER:  # NaN is not
            raise ValueError(f"has a number in {where} that is not between -2^31 and 2^31")
    elif not isinstance(value, bool | None):
        raise ValueError(f"may hold texts, numbers, true and false, lists and tables: {where} is none of them")


def unsaveable(position: object) -> str | None:
    """What keeps a stream's position out of a checkpoint, as the end of a sentence; None where nothing does. Values may
    be named many times in a few bytes, so they are counted before anything prints or copies them."""
    waiting, left = [position], _SAVED_VALUES
    while waiting:
        if not left:
            return f"has more than {_SAVED_VALUES} values"
        left -= 1
        value: Any = waiting.pop()
        kind = type(value)  # exactly: one of numpy's floats is a float, and its pickle names numpy
        if kind is dict:
            waiting += [*value.keys(), *value.values()][: left + 1]
        elif kind is list or kind is tuple:
            waiting += value[: left + 1]
        elif kind is int and value.bit_length() > _SAVED_BITS:
            return f"has a number of more than {_SAVED_BITS} bits"
        elif kind not in {str, int, float, bool, type(None)}:
            return f"holds a {kind.__module__}.{kind.__qualname__}"
    return None


def printable(text: str) -> str:
    """Text of others without control characters, which a terminal obeys. Lines and tabs stay."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{REPLACEMENT CHARACTER}" for mark in text)


def in_one_line(error: BaseException) -> str:
    """What a library says, within a sentence of ours; its kind where it says nothing. It may repeat what a file
    of a stranger has."""
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
