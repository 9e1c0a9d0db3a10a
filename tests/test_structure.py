"""What keeps the package easy to read: no circle of imports, and every file that a text names is there."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "noloco_node"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if "_pb2" not in path.name
}
READMES = [ROOT / "README.md", *PACKAGE.rglob("README.md")]
READMES += [ROOT / folder / "README.md" for folder in ("proto", "docker", "deploy")]
TEXTS = [*MODULES.values(), *PACKAGE.rglob("*.js"), *READMES]
FILE = re.compile(r"(?<![\w/.<*{}-])((?:[\w.-]+/)*[a-z_0-9]+\.py|(?:[\w.-]+/)+[\w.-]+\.(?:js|md|proto|sh|ya?ml))\b")
ELSEWHERE = {"modeling.py", "train.py", "base/bootstrap.yaml"}
"""A reader's own files; and one in deploy/kubernetes, which its paragraph is about."""


def imported_with(path: Path) -> set[str]:
    """Modules of the package that are imported when this one is, so not inside a function or for type checking only."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: imported_with(path) - {name, "noloco_node"} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_text_names_is_there(text: Path) -> None:
    """By its path from the root, from the package, or from the text's own folder; links of a README by the last."""
    words = text.read_text()
    places = (ROOT, PACKAGE, text.parent)
    named = set(FILE.findall(words)) - ELSEWHERE
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    links = re.findall(r"\]\((?!http)([^)]+)\)", words) if text in READMES else []
    assert not [link for link in links if not (text.parent / link).exists()]


def test_no_cancellation_is_lost() -> None:
    """Python 3.11's asyncio.wait_for loses one that comes as its result does; asyncio.timeout does not."""
    assert not [name for name, path in MODULES.items() if "asyncio.wait_for(" in path.read_text()]
