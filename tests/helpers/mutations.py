"""Bytes that a parser has not been written for: examples changed a little, joined, cut, or made up."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

ODD_BYTES = [b"", b"\0", b"\xff", b"\x80", b"\xff" * 9 + b"\x01", b"\x7f\xff\xff\xff", b"\0" * 8, b"\n", b"\r\n\r\n"]
ODD_TEXT = r"""
-1 0 1e999 -0 NaN Infinity 9999999999999999999999 0x1p9 true null "" [] {} ' " \ \u0000 \ud800 [[[[[[[[ {"": ../../../
/ // %00 ٣ ² é 𐀀 ::1 fe80::1%eth0 0.0.0.0/0 ::/0 1979-05-27 inf -nan 0o7 1_000 fe80::1% %
""".split()  # noqa: SIM905
ODD_VALUES: list[Any] = [None, True, -1, 0, 1.5, 1e308, -(2**63), 2**64, 10**400, "", "\0", "é" * 9, "9" * 5000]
ODD_VALUES += [[], {}, [[]], {"": 0}, "nan", float("nan"), float("inf"), ["a"] * 999, "\ud800", "/ip4/1.2.3.4/tcp/1"]
MOST_BYTES = 1 << 20


def mutated(rng: Random, examples: Sequence[bytes]) -> bytes:
    """Of one of the examples, or made up."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice([0, 1, 2, 9, 100, 3000]))
    data = rng.choice(examples)
    if rng.random() < 0.4 and (changed := _other_json(rng, data)) is not None:
        data = changed
        if rng.random() < 0.7:
            return data
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        data = _changed(rng, data, examples)
    return data[:MOST_BYTES]


def _changed(rng: Random, data: bytes, examples: Sequence[bytes]) -> bytes:  # noqa: PLR0911 - one for each kind
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice([1, 1, 2, 4, 8, 50]))
    match rng.randrange(8):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :] if at < len(data) else data
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * rng.choice([2, 3, 100]) + data[end:]
        case 4:
            return data[:at] + rng.choice(ODD_BYTES) + data[rng.choice([at, end]) :]
        case 5:
            return data[:at] + rng.choice(ODD_TEXT).encode() + data[rng.choice([at, end]) :]
        case 6:
            other = rng.choice(examples)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case _:
            return data[:at]


def _other_json(rng: Random, data: bytes) -> bytes | None:
    """The same document with another value, or another key, at one place; None where it is none."""
    if data[:1] not in (b"{", b"["):
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    holders = [document]
    for holder in holders:
        inside = holder.values() if isinstance(holder, dict) else holder
        holders += [value for value in inside if isinstance(value, dict | list) and value]
    holder = rng.choice(holders)
    if not holder:
        return None
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    if isinstance(holder, dict) and rng.random() < 0.1:
        holder[str(rng.choice(ODD_VALUES))[:99]] = holder.pop(key)
    elif rng.random() < 0.1:
        del holder[key]
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(document).encode()
