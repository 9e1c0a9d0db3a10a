"""`noloco-node bench`: what this machine can do. So far: the codecs."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.bench.codec import Row

ABOUT = "measure what this machine can do: the codecs' speed, bytes and errors"
EXAMPLE = "noloco-node bench codec --params 100000000 --json"
SCHEMA = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    options(subparsers.add_parser("bench", help=ABOUT, description=ABOUT, epilog=f"example:\n  {EXAMPLE}"))


def options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="codec", required=True, help="bytes, error, speed of each codec")
    codec = what.add_parser("codec", help="bytes, error and speed of each codec")
    add = codec.add_argument
    add("--params", metavar="N", type=int, default=100_000_000, help="elements for the speed (default: 100000000)")
    add("--device", metavar="DEVICE", default="auto", help="cpu, cuda, or auto: all there is (default)")
    add("--codecs", metavar="LIST", help="some only, as bf16,lattice:4 (default: all)")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.params < 1:
        raise UsageError("--params must be 1 or more")
    from noloco_node.bench import codec

    devices = _devices(args.device)
    names = args.codecs.split(",") if args.codecs else codec.CODECS
    if unknown := [name for name in names if name not in codec.CODECS]:
        raise UsageError(f"--codecs takes some of {', '.join(codec.CODECS)}, not {unknown[0]!r}")
    rows = list(codec.run(args.params, devices, names, _say))
    if args.json:
        print(json.dumps({"schema": SCHEMA, "params": args.params, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(rows)
    return 0


def _devices(wanted: str) -> list[str]:
    import torch

    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if wanted == "auto":
        return there
    if wanted not in ("cpu", "cuda"):
        raise UsageError(f"--device takes cpu, cuda or auto, not {wanted!r}")
    if wanted not in there:
        raise UsageError("torch sees no CUDA device here: use --device cpu")
    return [wanted]


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr)


def _print(rows: "list[Row]") -> None:
    from rich.console import Console

    from noloco_node.monitor.table import Column, fitting, table
    from noloco_node.monitor.units import NOTHING, share, size

    columns = [
        Column("codec"),
        Column("device", 1),
        Column("apart", right=True),
        Column("bytes/param", right=True),
        Column("with zstd", 2, right=True),
        Column("error", right=True),
        Column("resent", right=True),
        Column("encode", 5, right=True),
        Column("decode", 5, right=True),
        Column("copy GB/s", 4, right=True),
        Column("memory", 3, right=True),
    ]
    texts = [
        [
            row.codec if row.codec != "lattice" else f"lattice:{row.bits}",
            row.device,
            str(row.apart_rounds),
            f"{row.bytes_per_param:.3f}",
            NOTHING if row.zstd_bytes_per_param is None else f"{row.zstd_bytes_per_param:.3f}",
            f"{row.relative_error:.3g}",
            share(row.resent_share, 1),
            f"{row.encode_gb_s / row.copy_gb_s:.2f}",
            f"{row.decode_gb_s / row.copy_gb_s:.2f}",
            f"{row.copy_gb_s:.1f}",
            size(row.peak_extra_bytes),
        ]
        for row in rows
    ]
    console = Console()
    console.print(table(columns, texts, fitting(columns, texts, console.width)))
    print("encode and decode: fp32 in or out, as shares of a memory copy; memory: for one fragment, beyond the vector")
