"""What is released, away from the checkout: a source archive, wheels, and a swarm of nodes out of the wheel.

Nothing is downloaded: the wheel is installed alone, in an empty environment that sees the dependencies where this one
has them, behind what is its own.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from noloco_node.version import PROTOCOL, VERSION


def can_build() -> bool:
    """Without downloads: with the packages that are installed here."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_build(), reason="needs setuptools 77 or later, to build without a download"),
]

ROOT = Path(__file__).parents[2]
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the sources: the checkout is not changed, and its untracked files are not used."""
    place = tmp_path_factory.mktemp("release")
    (place / "sources").mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, place / "sources" / name)
    shutil.copytree(ROOT / "noloco_node", place / "sources/noloco_node", ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.fixture(scope="module")
def package(place: Path) -> set[str]:
    """All that must arrive: code, generated code, its types, `py.typed`, the page."""
    sources = place / "sources"
    return {str(path.relative_to(sources)) for path in sources.glob("noloco_node/**/*") if path.is_file()}


@pytest.fixture(scope="module")
def sdist(place: Path, package: set[str]) -> Path:
    run(place / "sources", sys.executable, "-c", BUILD_SDIST, str(place))
    (path,) = place.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(place: Path, sdist: Path) -> Path:
    return build_wheel(sdist, place / "of_sdist")


@pytest.fixture(scope="module")
def elsewhere(place: Path, wheel: Path) -> Path:
    """An environment with the wheel."""
    environment = place / "environment"
    run(place, sys.executable, "-m", "venv", "--without-pip", str(environment))
    pip(place, "--python", str(environment / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return environment / "bin"


def build_wheel(sources: Path, into: Path) -> Path:
    pip(into.parent, "wheel", str(sources), "--wheel-dir", str(into), "--no-deps", "--no-index", "--no-build-isolation")
    (path,) = into.glob("*.whl")
    return path


def pip(at: Path, *words: str) -> None:
    run(at, sys.executable, "-m", "pip", *words)


def run(at: Path, *words: str) -> str:
    """The environment of a shell outside this checkout."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NOLOCO_", "PYTHON"))}
    done = subprocess.run(words, cwd=at, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as pack:
        return set(pack.namelist())


def test_the_source_archive_is_whole(sdist: Path, package: set[str]) -> None:
    with tarfile.open(sdist) as pack:
        inside = {name.partition("/")[2] for name in pack.getnames()}
    assert package | {"pyproject.toml", "README.md"} <= inside


def test_a_wheel_has_all_of_the_package_and_nothing_else(place: Path, wheel: Path, package: set[str]) -> None:
    about = f"noloco_node-{VERSION}.dist-info"
    assert {name for name in contents(wheel) if not name.startswith(about)} == package
    with zipfile.ZipFile(wheel) as pack:
        told = pack.read(f"{about}/METADATA").decode()
    assert re.search(r"^License-Expression: Apache-2\.0$", told, re.MULTILINE)
    assert contents(build_wheel(place / "sources", place / "of_tree")) == contents(wheel)


def test_a_swarm_with_no_checkout_near(place: Path, elsewhere: Path) -> None:
    home = run(place, str(elsewhere / "python"), "-c", "import noloco_node; print(noloco_node.__file__)")
    assert Path(home).is_relative_to(elsewhere.parent)
    program = str(elsewhere / "noloco-node")
    assert run(place, program, "--version") == f"noloco-node {VERSION} (protocol {PROTOCOL})\n"
    told = json.loads(run(place, program, "swarm", "--nodes", "2", "--rounds", "4", "--json"))
    assert [node["exit_code"] for node in told["nodes"]] == [0, 0]
    assert all(node["rounds"]["committed"] for node in told["nodes"])
    assert told["eval_loss"]["last"] < told["eval_loss"]["first"]
