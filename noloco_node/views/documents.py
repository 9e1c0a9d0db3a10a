"""Views to JSON and back, for the control socket and the page.

SCHEMA stays when a field is added, and is raised when one changes its meaning. Reading is lenient, because a node may
be older or newer than the command that asks it: unknown fields are skipped, missing ones have their default. Numbers
that JSON cannot hold (NaN, infinities) become null.

By hand, and not by pydantic: its import and its adapter for StatusView take 0.12 s of CPU, as much as a whole
`noloco-node status`. This module reads and writes a status in 2 ms, a history of 1000 points in 10 ms.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from noloco_node.errors import Incompatible
from noloco_node.views.gather import GatherView
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView, PingView
from noloco_node.views.status import StatusView

SCHEMA = 1

T = TypeVar("T")

View = StatusView | PeersView | HistoryView | PingView | GatherView


def document(view: View) -> dict[str, Any]:
    """The view as a JSON-ready document."""
    return {"schema": SCHEMA, **plain(view)}


def to_json(view: View) -> str:
    return json.dumps(document(view), allow_nan=False)


def as_error(sentence: str, code: int) -> dict[str, Any]:
    """`code`: the exit code."""
    return {"code": code, "sentence": sentence}


def from_json(kind: type[T], text: str) -> T:
    """Raises Incompatible."""
    try:
        written = json.loads(text)
        if written["schema"] != SCHEMA:
            raise Incompatible(f"the running node speaks schema {written['schema']}, this command {SCHEMA}: restart it")
        return _build(kind, written)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Incompatible("the running node's answer makes no sense to this version: restart the node") from error


def _build(kind: type[T], written: Mapping[str, Any]) -> T:
    known = ((name, of, written[name]) for name, of in _readers(kind) if name in written)  # type: ignore[arg-type]
    return kind(**{name: value if of is None else of(value) for name, of, value in known})


@cache
def _readers(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """How each field is read; None where JSON's value is the field's. Inspecting types is slow, hence the cache."""
    hints = get_type_hints(kind)
    return tuple((f.name, _reader(hints[f.name])) for f in fields(kind))


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if hint in (str, int, float, float | None, str | None, int | None):
        return None
    return partial(_value, hint)


def _value(hint: Any, value: Any) -> Any:
    """Dataclasses and tuples of them are built; everything else stays as JSON has it."""
    if value is None:
        return None
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], item) for item in value)
    inner = next((arg for arg in (hint, *get_args(hint)) if is_dataclass(arg)), None)
    return value if inner is None else _build(inner, value)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Ready for JSON, in one pass: a history has ten thousand values, and the node has more to do."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {name: plain(getattr(value, name)) for name in _field_names(type(value))}  # type: ignore[arg-type]


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))
