"""The layers of noloco_node/README.md, checked: who may import whom, and which libraries stay out of which folder."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "noloco_node"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_pb2" not in p.name)

ROWS = [
    {"loop"},
    {"cli"},
    {"terminal", "node"},
    {"doctor", "web", "publish", "simulate", "bench"},
    {"control", "observe"},
    {"state_transfer", "rounds", "stages"},
    {"checkpoints", "peers", "training"},
    {"transport", "data"},
    {"host", "wire"},
    {"run", "views"},
    {"core"},
    {"base"},
    {"errors", "version"},
]
"""A folder imports from the rows below its own, never from its own row or from above."""
ROW_OF = {folder: len(ROWS) - row for row, folders in enumerate(ROWS) for folder in folders}
PRESENTATION = {"cli", "terminal", "web"}
MOST_MODULES = 14

HEAVY = {"torch", "hivemind"}
STAYS_OUT = {
    "errors": {*HEAVY, "asyncio", "grpc", "google", "pydantic"},
    "base": {*HEAVY, "grpc", "google"},
    "core": {"asyncio", "threading", "time", "random", "os", "pathlib", "google", "grpc", "hivemind"},
    "views": {*HEAVY, "asyncio", "grpc", "google"},
    "run": HEAVY,
    "host": {*HEAVY, "pydantic"},
    "wire": {*HEAVY, "asyncio"},
    "transport": {"torch"},
    "data": {"asyncio", "grpc", "google", "hivemind"},
    "training": {"asyncio", "grpc", "google", "hivemind"},
    "checkpoints": {"grpc", "google", "hivemind"},
    "peers": {"torch"},
    "rounds": HEAVY,
    "state_transfer": HEAVY,
    "stages": {"hivemind"},
    "observe": {"hivemind"},
    "control": HEAVY,
    "web": {*HEAVY, "grpc"},
    "terminal": HEAVY,
    "publish": {"grpc", "hivemind"},
    "simulate": {"grpc", "hivemind"},
    "bench": {"grpc", "hivemind"},
    "doctor": {"hivemind"},
    "node": HEAVY,
    "cli": {"hivemind"},
    "loop": {"hivemind", "grpc"},
}
"""Libraries that a folder does not import itself, not even late."""


def folder_of(path: Path) -> str:
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


def folders_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("noloco_node.")} - {folder_of(path)}


def each(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_folder_has_one_row_and_nothing_lies_at_the_root() -> None:
    assert sum(map(len, ROWS)) == len(ROW_OF)
    found = {folder_of(path) for path in MODULES}
    assert found - {"__init__", "__main__"} == set(ROW_OF) == set(STAYS_OUT) | {"version"}
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "version.py"}


@pytest.mark.parametrize("path", [p for p in MODULES if folder_of(p) in ROW_OF], ids=each)
def test_arrows_point_down(path: Path) -> None:
    me = folder_of(path)
    for other in folders_imported(path) & ROW_OF.keys():
        assert ROW_OF[other] < ROW_OF[me], f"{me} imports {other}, which is not in a lower row"


def test_presentation_is_imported_by_nothing_but_what_starts_it() -> None:
    users = {(folder_of(p), other) for p in MODULES for other in folders_imported(p) & PRESENTATION}
    assert users <= {("__main__", "cli"), ("loop", "cli"), ("cli", "terminal"), ("node", "web")}, users


def test_a_folder_has_at_most_14_modules() -> None:
    for folder in {path.parent for path in MODULES}:
        names = [path.name for path in folder.glob("*.py") if path.name != "__init__.py" and "_pb2" not in path.name]
        assert len(names) <= MOST_MODULES, f"{folder.relative_to(PACKAGE)} has {len(names)} modules"


@pytest.mark.parametrize("path", MODULES, ids=each)
def test_what_stays_out(path: Path) -> None:
    libraries = {name.split(".")[0] for name in imports(path)}
    if each(path).startswith("bench/rivals/"):
        return  # programs of their own, of the libraries that are measured
    assert not libraries & STAYS_OUT.get(folder_of(path), set())
    if "hivemind" in libraries:
        assert each(path) in {"transport/libp2p.py", "peers/directory.py", "peers/dht_storage.py"}


def test_only_these_core_modules_import_torch() -> None:
    users = {each(p).removeprefix("core/") for p in MODULES if folder_of(p) == "core" and "torch" in imports(p)}
    with_tensors = {"bounds.py", "device.py", "gpu.py", "length_correction.py", "outer.py"}
    assert {name for name in users if not name.startswith(("kernels/", "codecs/", "cross_entropy/"))} <= with_tensors
