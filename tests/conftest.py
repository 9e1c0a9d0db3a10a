"""Set before grpc or torch is imported anywhere: quiet and fork-safe gRPC, one torch thread a process, Ctrl-C heard.

The whole suite runs in four processes (pytest-xdist), of which two mostly wait for real nodes. Tests that are named on
the command line run in pytest's own process, which shows what they print; so do all of them with `--slow`.
Tests marked `slow` take more than two hours together on two cores; without `--slow` each says that it was skipped.
"""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from patience import PATIENCE
from xdist.scheduler import LoadFileScheduling

import noloco_node

if TYPE_CHECKING:
    from real_nodes import RealNodes

ROOT = Path(__file__).parents[1]
WORKERS = 4
REAL_NODES = ["tests/node/", "tests/system/"]
WAITING = [f"tests/node/test_{name}.py" for name in ("three_nodes", "blocking_overlap", "leaving", "top_real_node")]
"""One worker has these tests of real nodes, and another has the others, so that few nodes run at the same time."""
LONG = [
    *REAL_NODES,
    "tests/loop/test_own_loops.py",
    "tests/web/test_web_page.py",
    "tests/transport/test_libp2p.py",
    "tests/cli/test_cli_swarm.py",
]
"""Begun first, so that none of them is still running when everything else has ended."""

gc.disable()  # until all tests are imported, with a million objects that stay, which it need not look at afterwards
os.environ.update({"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE", "OMP_NUM_THREADS": "1"})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the tests ends their nodes
settings.register_profile("any machine", deadline=None)  # a busy one is not a failure
settings.load_profile("any machine")


def other_bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    parser.addoption("--figures", metavar="FILE", help="add what each test measured to this JSON file")


for name in [name for name in os.environ if name.startswith("NOLOCO_") or name == "HF_HUB_OFFLINE"]:
    del os.environ[name]  # the settings of whoever runs the tests


def pytest_configure(config: pytest.Config) -> None:
    checkout, installed = ROOT / "noloco_node", Path(noloco_node.__file__).parent
    if any(file.read_bytes() != other_bytes(installed / file.relative_to(checkout)) for file in checkout.rglob("*.py")):
        pytest.exit(
            f"the tests would try {installed}, which is not what is here: pip install '.[test]' again, or -e", 2
        )
    if (file := config.getoption("--figures")) and not hasattr(config, "workerinput"):
        from figures import FiguresFile

        config.pluginmanager.register(FiguresFile(Path(file)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else triton's parts say at the end that they were never freed


@pytest.fixture
def figure(record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a measured figure past pytest's capture, and keeps it for `--figures`."""

    def measured(text: str) -> None:
        record_property("figure", text)
        with capsys.disabled():
            print("\n ", text)  # noqa: T201

    return measured


@pytest.fixture(scope="module")
def real_nodes() -> "Iterator[RealNodes]":
    """The same nodes for all tests of a module. Where each test needs its own, the module overrides this fixture."""
    from real_nodes import RealNodes

    with RealNodes() as real_nodes:
        yield real_nodes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure comes what the real nodes printed last: their files are gone afterwards."""
    report = yield
    if report.failed and (nodes := getattr(item, "funcargs", {}).get("real_nodes")):
        report.sections.append(("the nodes", nodes.last_lines()))
    return report


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return WORKERS if whole and not config.getoption("--slow") else 0


class ByFile(LoadFileScheduling):
    """A file's tests run in one worker and in their order, and so do those of real nodes."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file in WAITING:
            return "real nodes that are waited for"
        return "real nodes" if file.startswith(tuple(REAL_NODES)) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((i for i, part in enumerate(LONG) if item.nodeid.startswith(part)), len(LONG)))
    for item in items if PATIENCE != 1 else ():
        limit = item.get_closest_marker("timeout")
        usual = float(limit.args[0] if limit else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(usual * PATIENCE), append=False)
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow runs it"))
