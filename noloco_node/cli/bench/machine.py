"""`bench codec` and `bench training`: the codecs, and the training loop beside a plain PyTorch loop."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from noloco_node.base.units import count, share, size
from noloco_node.base.validation import listed
from noloco_node.cli.bench.output import measured, names, print_table
from noloco_node.cli.options import Verbs, as_json, option, print_json, verb
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.bench.codec import Row
    from noloco_node.bench.training import Report

PARAMS, QUICK_PARAMS = 100_000_000, 10_000_000


def options(what: Verbs) -> None:
    training = verb(what, "training", "the training loop beside a plain PyTorch loop", "--model 125m --device cuda")
    add = partial(option, training)
    add("--model PRESET", "as in a run.toml, for example 125m (default: tiny)", default="tiny")
    add("--steps N", "timed steps (default: 50)", type=int, default=50)
    add("--batch-tokens N", "tokens per step (default: 1024; 65536 on a GPU)", type=int)
    add("--sequence-length N", "tokens per sequence (default: 128; 1024 on a GPU)", type=int)
    add("--device DEVICE", "cpu, cuda, or auto: a GPU if there is one (default)", default="auto")
    add("--precision P", "bf16 where the machine is quicker with it (default), or fp32", default="bf16")
    add("--threads N", "CPU threads (default: torch's choice)", type=int)
    as_json(training)
    codec = verb(what, "codec", "bytes, error and speed of each codec", "--quick")
    add = partial(option, codec)
    add("--quick", "rough figures, in about 20 s: 10 M elements, little training")
    add("--params N", "elements for the speed (default: 100000000; with --quick 10000000)", type=int)
    add("--device DEVICE", "cpu, cuda, or auto: all that exist (default)", default="auto")
    add("--codecs LIST", "only these, as bf16,lattice:4 (default: all)")
    as_json(codec)


def run(args: argparse.Namespace) -> int:
    return _codec(args) if args.what == "codec" else _training(args)


def _codec(args: argparse.Namespace) -> int:
    params = (QUICK_PARAMS if args.quick else PARAMS) if args.params is None else args.params
    if params < 1:
        raise UsageError("--params must be 1 or more")
    from noloco_node.bench import codec

    devices = _devices(args.device)
    wanted = names(args.codecs, "--codecs", codec.CODECS)

    def show(rows: "list[Row]") -> None:
        if args.json:
            print_json({"params": params, "quick": args.quick, "rows": rows})
        else:
            _print(rows)

    measured(lambda say: codec.run(params, devices, wanted, args.quick, say), show)
    return 0


def _training(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in ("steps", "threads", "batch_tokens", "sequence_length")}
    for name, value in given.items():
        if value is not None and not 1 <= value <= 1_000_000:
            raise UsageError(f"--{name.replace('_', '-')} must be from 1 to 1000000")
    from noloco_node.run.schema import PRESETS

    if args.model not in PRESETS:
        raise UsageError(f"--model takes {listed(PRESETS)}, not {args.model!r}")
    if args.precision not in ("bf16", "fp32"):
        raise UsageError(f"--precision takes bf16 or fp32, not {args.precision!r}")
    from noloco_node.bench import training
    from noloco_node.terminal.progress import Progress

    device = _devices(args.device)[-1]
    batch_tokens, length = (given[name] or size for name, size in training.SIZES[device].items())
    if not 2 <= length <= 2048 or batch_tokens % length:
        raise UsageError(f"--batch-tokens must be a multiple of --sequence-length ({length}), which is from 2 to 2048")
    run = training.manifest(args.model, args.steps, batch_tokens, length, args.precision)
    with Progress() as say:
        report = training.run(args.model, run, device, args.threads, say)
    if args.json:
        print_json(report)
    else:
        _print_training(report)
    return 0


def _devices(wanted: str) -> list[str]:
    import torch

    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if wanted == "auto":
        return there
    if wanted not in ("cpu", "cuda"):
        raise UsageError(f"--device takes cpu, cuda or auto, not {wanted!r}")
    if wanted not in there:
        raise UsageError("torch finds no CUDA device here: use --device cpu")
    return [wanted]


def _print(rows: "list[Row]") -> None:
    cells: dict[str, Callable[[Row], str]] = {
        "codec": lambda row: row.codec if row.codec != "lattice" else f"lattice:{row.bits}",
        "device": lambda row: row.device,
        "apart": lambda row: str(row.apart_rounds),
        "bytes/param": lambda row: f"{row.bytes_per_param:.3f}",
        "error": lambda row: f"{row.relative_error:.3g}",
        "resent": lambda row: share(row.resent_share, 1),
        "encode": lambda row: _speed(row.encode_gb_s, row.copy_gb_s),
        "decode": lambda row: _speed(row.decode_gb_s, row.copy_gb_s),
        "copy": lambda row: f"{row.copy_gb_s:.1f}",
        "memory": lambda row: size(row.peak_extra_bytes),
    }
    print_table(rows, cells)
    print("encode, decode: GB of fp32 a second, and its share of a memory copy's")
    print("memory: peak for one fragment, without the vector")


def _speed(gb_s: float, copy_gb_s: float) -> str:
    return f"{gb_s:.1f} {gb_s / copy_gb_s:.2f}"


def _print_training(report: "Report") -> None:
    from noloco_node.run.schema import InnerSpec

    head = f"{report.model}, {report.parameters / 1e6:.1f} M parameters, {report.device}, {report.precision}"
    print(f"{head}: {report.batch_tokens} tokens a step, {report.micro_batch} x {report.sequence_length} at once")
    print(
        f"a step      {report.step_s * 1e3:.1f} ms, a plain loop's {report.plain_step_s * 1e3:.1f} ms: "
        f"{report.overhead:+.1%} (median of {count(report.steps, 'pair')})"
    )
    lost, steps = report.stall_s + report.evaluate_s, InnerSpec().steps or 0
    print(
        f"a round     {report.stall_s * 1e3:.1f} ms of the training, "
        f"{report.stall_s * 1e11 / report.parameters:.0f} ms for 100 M parameters; "
        f"evaluating {report.evaluate_s * 1e3:.1f} ms: {share(lost / (lost + steps * report.step_s), 2)} of {steps} "
        "steps' time"
    )
    print(f"tokens/s    {report.tokens_per_s:.0f}, a plain loop's {report.plain_tokens_per_s:.0f}")
    if report.mfu is not None:
        print(
            f"MFU         {share(report.mfu, 1)} of the GPU's arithmetic, a plain loop's {share(report.plain_mfu, 1)}"
        )
    print(f"losses      differ by {report.loss_difference:.1g} at most")
    print(
        f"memory      {size(report.peak_bytes)} at most, a plain loop's {size(report.plain_peak_bytes)}; "
        f"slow weights, momentum, an offer and a checkpoint are {size(report.outer_bytes)}"
    )
