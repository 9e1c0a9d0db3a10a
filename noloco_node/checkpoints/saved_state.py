"""Can a replica go on with a loaded checkpoint? Every value that it would use is checked before anything changes.

The digests of a checkpoint say that it is what was written, not who wrote it: checkpoints are handed around, and who
crafts one makes its digests too. A node may also have written NaN. Knows no files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from noloco_node.base.validation import unsaveable
from noloco_node.core.codecs.codec import all_finite
from noloco_node.core.length_correction import LARGEST_SCALE
from noloco_node.core.state import State
from noloco_node.errors import Incompatible

_OTHER_ADAMW = "the checkpoint's AdamW is not of this model, or of another version: use another --home"
_FULL = "exp_avg", "exp_avg_sq"
_SMALL, _SCALES = ("state1", "state2"), ("absmax1", "absmax2")
"""Moments of 8 bits, and the scale of each block of them; small tensors' have 32 bits and no scales."""
_CODED = 4096
"""Elements of a tensor from which bitsandbytes codes its moments (training/inner/optimizer.py, SMALL)."""
_BLOCK = 256
_SCALE = 2 * LARGEST_SCALE  # with room for rounding, and for another version's limit
_LARGEST = 2**53
"""Of a counter: up to here floats count exactly."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the state of this replica looks like."""

    shapes: Mapping[str, Size]
    """Of the weights, by name, in the order of the flat vectors and of the optimizer."""
    keeps_norm: bool
    rounds: int
    """Of the run."""
    counters: Mapping[str, int]
    """The largest value of each counter."""


def check(saved: State, expected: Expected) -> None:
    """Raises ValueError, which names what is wrong, and Incompatible for the state of another model."""
    _whole("round", saved.round, expected.rounds)
    parameters = sum(shape.numel() for shape in expected.shapes.values())
    _same_shapes(saved.weights, expected.shapes)
    _same_shapes(saved.outer, {"phi": Size([parameters]), "delta": Size([parameters])})
    inner = saved.inner
    if not isinstance(inner, dict):
        raise ValueError("the rest of the state is no table")
    if missing := {*_CHECKS, *expected.counters, "optimizer"} - inner.keys():
        raise ValueError(f"{min(missing)} is missing")
    for name, is_right in _CHECKS.items():
        if not is_right(inner[name]):
            raise ValueError(f"{name} has a wrong value")
    for name, largest in expected.counters.items():
        _whole(name, inner[name], largest)
    if expected.keeps_norm and len(inner["norms"]) != len(expected.shapes):
        raise ValueError("norms has a wrong length")
    _check_moments(inner["optimizer"], list(expected.shapes.values()))


def _same_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> None:
    if {name: tensor.shape for name, tensor in tensors.items()} != dict(shapes):
        raise Incompatible("the checkpoint is of another model: use another --home for another run")
    for name, tensor in tensors.items():
        _numbers(name, tensor)


def _check_moments(moments: object, shapes: Sequence[Size]) -> None:
    if not isinstance(moments, dict):
        raise ValueError("optimizer has a wrong value")
    for place, of_one in moments.items():
        if not (type(place) is int and 0 <= place < len(shapes) and isinstance(of_one, dict)):
            raise Incompatible(_OTHER_ADAMW)
        both = _SMALL if _SMALL[0] in of_one else _FULL
        scales = _SCALES if both is _SMALL and shapes[place].numel() >= _CODED else ()
        wanted = {**dict.fromkeys(both, shapes[place]), **dict.fromkeys(scales, Size([_blocks(shapes[place])]))}
        if of_one.keys() != {"step", *wanted} or not all(isinstance(tensor, Tensor) for tensor in of_one.values()):
            raise Incompatible(_OTHER_ADAMW)
        if any(of_one[name].shape != shape for name, shape in wanted.items()):
            raise Incompatible(_OTHER_ADAMW)
        for name, tensor in of_one.items():
            _numbers(name, tensor, torch.uint8 if scales and name in both else torch.float32)
        if of_one["step"].numel() != 1 or not 0 <= of_one["step"].item() <= _LARGEST:
            raise ValueError("step of the optimizer has a wrong value")
        for name in scales or both[1:]:
            if bool(of_one[name].lt(0).any()):
                raise ValueError(f"{name} of the optimizer is below zero")


def _blocks(shape: Size) -> int:
    return -(-shape.numel() // _BLOCK)


def _numbers(name: str, tensor: Tensor, kind: torch.dtype = torch.float32) -> None:
    """Finite numbers of its own: a view that repeats one element could not be changed in place."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not (plain and tensor.dtype is kind and tensor.is_contiguous()):
        raise ValueError(f"{name} is no tensor of {'fp32' if kind is torch.float32 else '8-bit'} numbers")
    if not all_finite(tensor):
        raise ValueError(f"{name} holds NaN or Inf")


def _whole(name: str, value: object, largest: int) -> None:
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{name} is no whole number from 0 to {largest}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_random_state(state: object) -> bool:
    try:
        torch.Generator().set_state(state)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        return False
    return True


def _is_device_state(state: object) -> bool:
    """Of a GPU: whether this one takes it, only it can say."""
    return state is None or (isinstance(state, Tensor) and state.dtype is torch.uint8 and state.dim() == 1)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "position": lambda value: unsaveable(value) is None,
    "phase_s": lambda value: _finite(value) and value >= 0,
    "last_loss": _finite,
    "norms": lambda norms: isinstance(norms, list) and all(_finite(norm) and 1 <= norm <= _SCALE for norm in norms),
    "rng": _is_random_state,
    "device_rng": _is_device_state,
}
"""Every value that needs nothing of the replica to be checked."""
