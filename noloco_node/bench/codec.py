"""Measure each codec on this machine: bytes, error, blocks sent again, speed beside a memory copy, memory.

As in a node, one codec object serves all swaps of a pair of replicas (bench/replica_pairs.py). Of each number of rounds
apart the last swap is reported; its error is the true one. Speed is measured on a vector of `parameters` elements: the
pair that was apart for one round, repeated (bench/cost.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from noloco_node.bench import Say, cost, replica_pairs
from noloco_node.bench.replica_pairs import PairMeeting, Side
from noloco_node.core import kernels
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import Codec, CodecStats, carry

BITS = {"fp32": 32, "bf16": 16, "int8": 8, **{f"lattice:{bits}": bits for bits in range(2, 9)}}
CODECS = tuple(BITS)


@dataclass(frozen=True, slots=True)
class Row:
    codec: str
    bits: int
    device: str
    apart_rounds: int
    bytes_per_param: float
    """Everything that one side sends, blocks sent again included."""
    relative_error: float
    """‖2 c − (u_j − u_i)‖ / ‖u_j − u_i‖"""
    resent_share: float
    encode_gb_s: float
    """GB of fp32 a second; so are the others."""
    decode_gb_s: float
    copy_gb_s: float
    peak_extra_bytes: int | None
    """For one fragment, without u itself. None where the system has no such figure."""


def run(parameters: int, devices: Sequence[str], names: Sequence[str], quick: bool, say: Say) -> Iterator[Row]:
    """`devices`: of cpu and cuda. `quick`: with replicas that hardly trained."""
    for device in devices:
        kernels.for_device(device)  # now: an interruption within an import ends a program at once, without its rows
    plan = (replica_pairs.QUICK_PLAN, replica_pairs.QUICK_STEPS) if quick else ()
    meetings = replica_pairs.meetings(say, *plan)
    near = next(met for met in reversed(meetings) if met.apart_rounds == 1)
    one, other = (side.repeated(parameters) for side in (near.one, near.other))
    # on a GPU the plain ones work on the CPU's copy of u
    measured = [(d, name) for d in devices for name in names if d == "cpu" or name.startswith("lattice")]
    for done, (device, name) in enumerate(measured):
        say(f"{name} on {device}", done, len(measured))
        speed = cost.speed(name, device, one, other)
        yield from _rows(name, device, meetings, speed)


def _rows(name: str, device: str, meetings: Sequence[PairMeeting], speed: cost.Speed) -> Iterator[Row]:
    peak = cost.peak_extra_bytes(name, device, meetings[0].one, meetings[0].other)
    parameters = len(meetings[0].one.u)
    codecs = codec(name), codec(name)
    swaps = {met.apart_rounds: _swap(codecs, device, met, bytes([number])) for number, met in enumerate(meetings)}
    for apart, (stats, error) in swaps.items():
        yield Row(
            codec=name.partition(":")[0],
            bits=BITS[name],
            device=device,
            apart_rounds=apart,
            bytes_per_param=stats.sent_bytes / parameters,
            relative_error=error,
            resent_share=stats.missed_share,
            encode_gb_s=speed.encode,
            decode_gb_s=speed.decode,
            copy_gb_s=speed.copy,
            peak_extra_bytes=peak,
        )


def _swap(codecs: tuple[Codec, Codec], device: str, met: PairMeeting, exchange_id: bytes) -> tuple[CodecStats, float]:
    """Of one side, and the relative error."""
    stats, squared = CodecStats(), 0.0
    for index, (mine, theirs) in enumerate(zip(met.one.fragments(device), met.other.fragments(device), strict=True)):
        ours, other = (
            codec.converse(side.u, index, exchange_id, side.moved)
            for codec, side in zip(codecs, (mine, theirs), strict=True)
        )
        c, _ = carry(ours, other)
        ours.learn()
        other.learn()
        stats.add(ours.stats)
        squared += float((2 * c.double() - _difference(mine, theirs)).square().sum())
    return stats, squared**0.5 / float(_difference(met.one, met.other).norm())


def _difference(one: Side, other: Side) -> Tensor:
    return other.u.double() - one.u.double()
