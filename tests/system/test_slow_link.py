"""Two real nodes on a link so slow that a swap takes half a phase: training does not wait for it.

Each node lives in a network namespace of its own; a veth pair joins them, held at a rate by tc's token bucket in both
directions. Phases go by time, so the ratio of swap and phase does not depend on how fast this machine is.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

sys.path.append(str(Path(__file__).parents[1] / "node"))
from village import Node, Village, until

PHASE_S = 5.0
SWAP_S = PHASE_S / 2
ROUNDS = 4
MODEL = {"hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 1, "num_attention_heads": 2}
PARAMETERS = 2 * 256 * 96 + 4 * 96 * 96 + 3 * 96 * 224 + 3 * 96
"""Embeddings in and out, attention, MLP, gains: few FLOPs, so that two training threads leave the cores some air."""
OVERHEAD = 1.1
"""TCP, libp2p's encryption and framing, and what else the two say to each other."""


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    name = f"nv-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"cannot make a network namespace here: {tried.stderr.strip()}"
    sh("ip", "netns", "delete", name)
    return None


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=10)


@contextmanager
def slow_link(rate_bits_s: float) -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with the address of its end. Nothing of it can be seen outside them."""
    ends = [(f"nv-{os.getpid()}-{side}", f"10.83.0.{side}") for side in (1, 2)]
    try:
        for space, _ in ends:
            sh("ip", "netns", "add", space)
        (one, _), (other, _) = ends
        sh("ip", "link", "add", "link0", "netns", one, "type", "veth", "peer", "name", "link0", "netns", other)
        for space, address in ends:
            within = ("ip", "netns", "exec", space)
            sh(*within, "ip", "address", "add", f"{address}/24", "dev", "link0")
            sh(*within, "ip", "link", "set", "lo", "up")
            sh(*within, "ip", "link", "set", "link0", "up")
            limit = ("rate", f"{rate_bits_s / 1000:.0f}kbit", "burst", "16kb", "latency", "400ms")
            sh(*within, "tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit)
        yield ends
    finally:
        for space, _ in ends:  # the links go with them
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False, timeout=10)


def run_toml(village: Village, overlap: str) -> str:
    config = ", ".join(f"{key} = {value}" for key, value in MODEL.items())
    path = village.root / "run.toml"
    path.write_text(
        f"""
        name = "slow-link"
        rounds = 10000
        model = {{ architecture = "LlamaConfig", config = {{ {config} }} }}
        data = {{ sequence_length = 64 }}
        inner = {{ seconds = {PHASE_S}, batch_tokens = 512 }}
        outer = {{ overlap = "{overlap}", codec = "fp32" }}
        """
    )
    return str(path)


@dataclass
class Measured:
    busy: list[float]
    swap_s: float
    apart: float
    """How far the two's boundaries are apart, as a share of a phase: 0.5 is the most."""
    committed: int


def measure(overlap: str, ends: list[tuple[str, str]]) -> Measured:
    village = Village()
    try:
        nodes = start_two(village, overlap, ends)
        until(lambda: all(n.committed() >= ROUNDS for n in nodes), f"{ROUNDS} rounds together", 12 * ROUNDS)
        views = [node.ask("status") for node in nodes]
        whole = nodes[1].events("RoundCommitted")
        ends_at = [[event["at"] for event in node.events("PhaseDone")] for node in nodes]
        apart = fmean(offset(at, ends_at[0]) for at in ends_at[1])
        return Measured([v["busy_fraction"] for v in views], fmean(e["seconds"] for e in whole), apart, len(whole))
    finally:
        village.close()
        shutil.rmtree(village.root, ignore_errors=True)


def start_two(village: Village, overlap: str, ends: list[tuple[str, str]]) -> list[Node]:
    (here, one), (there, other) = ends
    first = village.node("a", "start", run_toml(village, overlap), within=("ip", "netns", "exec", here), at=one)
    words = until(lambda: first.said(rf"noloco-node (join --bootstrap /ip4/{one}/.*)"), "a line to join by")
    until(lambda: first.ask("status").get("round"), "a first phase alone")
    second = village.node("b", *words.split(), within=("ip", "netns", "exec", there), at=other)
    until(lambda: second.ask("status").get("state") == "training", "the second node's training")
    return [first, second]


def offset(at: float, others: list[float]) -> float:
    return min(abs(at - other) for other in others) / PHASE_S


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nobody_waits_for_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    if why := why_not():
        pytest.skip(why)
    with slow_link(8 * 4 * PARAMETERS * OVERHEAD / SWAP_S) as ends:
        eager = measure("eager", ends)
        blocking = measure("blocking", ends)
    with capsys.disabled():
        for name, m in (("eager", eager), ("blocking", blocking)):
            print(  # noqa: T201
                f"\n  {name}: busy {m.busy[0]:.3f} and {m.busy[1]:.3f}, {m.committed} swaps of {m.swap_s:.1f} s in "
                f"phases of {PHASE_S:.0f} s, boundaries {m.apart:.2f} of a phase apart"
            )
    assert 0.3 * PHASE_S < eager.swap_s < 0.8 * PHASE_S
    assert min(eager.busy) >= 0.97
    assert blocking.busy[1] < 0.85, "of the one that did not wait alone at first"
