"""The command line on a GPU: `bench codec` and `bench training` end well, and their documents are whole."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checks.place import Place, Seen, Skip

ROOT = Path(__file__).resolve().parents[3]
NEEDS = ("base58", "cryptography", "rich")


def bench_codec(place: Place) -> Seen:
    device = place.device.type
    said = run(place, "bench", "codec", "--quick", "--device", device, "--codecs", "lattice:4,bf16", "--json")
    rows = said["rows"]
    assert {row["device"] for row in rows if row["codec"] == "lattice"} == {device}, rows
    assert all(row["relative_error"] < 1 and row["encode_gb_s"] > 0 for row in rows), rows
    return Seen(facts={"rows": rows})


def bench_training(place: Place) -> Seen:
    said = run(place, "bench", "training", "--model", "tiny", "--steps", "5", "--device", place.device.type, "--json")
    assert said["steps"] == 5 and said["loss_difference"] < 0.05 and said["peak_bytes"] > 0, said
    return Seen(facts=said)


def run(place: Place, *arguments: str, **environ: str) -> Any:
    """The document that `noloco-node` prints, with these further variables. Raises AssertionError where it ends with
    another exit code than 0."""
    for package in NEEDS:
        if find_spec(package) is None:
            raise Skip(f"{package} is not here: pip install {package}")
    with tempfile.TemporaryDirectory() as home:
        ended = subprocess.run(
            [sys.executable, "-m", "noloco_node", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "NOLOCO_HOME": home,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=max(10.0, place.left_s),
            check=False,
        )
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr[-1500:]}{ended.stdout[-500:]}"
    return json.loads(ended.stdout)


CHECKS = (bench_codec, bench_training)
