"""The architecture of noloco_node/README.md, checked: who may import whom, and what stays out of which layer."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "noloco_node"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_pb2" not in p.name)

LAYERS = [
    [
        "errors",
        "config",
        "manifest",
        "modelconfig",
        "events",
        "identity",
        "names",
        "home",
        "disk",
        "ram",
        "mission",
        "validation",
        "version",
        "service",
        "journal",
        "acquaintance",
        "limits",
        "daybook",
        "runfile",
        "runtoml",
        "inventory",
    ],
    ["core"],
    ["wire"],
    ["transport", "swarm", "presence", "crowd", "peercache", "training", "checkpoint"],
    ["exchange", "swap", "statesync", "donor", "runs", "newcomer", "traffic", "control"],
    [
        "monitor",
        "simulate",
        "bench",
        "ledger",
        "history",
        "chronicle",
        "sinks",
        "keeper",
        "saving",
        "workshop",
        "gathering",
        "homecoming",
        "neighbourhood",
        "allowance",
        "outages",
        "unfinished",
        "outlook",
        "web",
        "resident",
        "rendezvous",
        "trainer",
        "node",
        "local_swarm",
        "minutes",
        "onlook",
        "visit",
        "doctor",
        "bugreport",
        "publish",
    ],
    ["cli", "__main__"],
]
LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}
COLUMNS = {"transport", "swarm", "training", "checkpoint"}
"""Of L3: none knows another."""
ALLOWED_UP = {("manifest", "core")}
"""The manifest is checked with the stability condition, which is pure arithmetic."""


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that is imported anywhere in a file, type-checking blocks left out."""
    tree = ast.parse(path.read_text())
    found = []
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_down(path: Path) -> None:
    me = part_of(path)
    if me == "__init__":
        return
    assert me in LAYER_OF, f"{me} has no layer yet"
    for name in imports(path):
        match = re.match(r"noloco_node\.(\w+)", name)
        if not match or match[1] == me or match[1] not in LAYER_OF:
            continue
        other = match[1]
        assert LAYER_OF[other] <= LAYER_OF[me] or (me, other) in ALLOWED_UP, f"{me} imports {other}, which is above it"
        assert not {me, other} <= COLUMNS, f"{me} imports {other}: columns of L3 do not know each other"


FORBIDDEN = {
    "core": {"asyncio", "threading", "time", "random", "os", "pathlib", "google", "grpc", "hivemind"},
    "wire": {"torch", "asyncio", "hivemind"},
    "transport": {"torch"},
    "swarm": {"torch"},
    "training": {"asyncio", "grpc", "hivemind", "google"},
    "exchange": {"torch", "hivemind"},
    "swap": {"torch", "hivemind"},
    "statesync": {"torch", "hivemind"},
    "donor": {"torch", "hivemind"},
    "control": {"torch", "hivemind"},
    "web": {"torch", "hivemind", "grpc"},
    "manifest": {"torch"},
    "runtoml": {"torch"},
    "config": {"torch", "pydantic"},
    "node": {"torch"},
    "trainer": {"torch"},
    "workshop": {"torch"},
    "homecoming": {"torch"},
    "neighbourhood": {"torch"},
    "resident": {"torch"},
    "rendezvous": {"torch"},
}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_stays_out(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & FORBIDDEN.get(part_of(path), set())
    if "hivemind" in roots:
        assert path.relative_to(PACKAGE).as_posix() in {"transport/libp2p.py", "swarm.py"}


def test_torch_stays_in_its_corner_of_the_core() -> None:
    users = {
        p.relative_to(PACKAGE / "core").as_posix() for p in (PACKAGE / "core").rglob("*.py") if "torch" in imports(p)
    }
    assert all(re.match(r"(outer|norms|codec|lattice|int8|trust)\.py|kernels/", name) for name in users), users
