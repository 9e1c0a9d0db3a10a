"""Set before grpc or torch is imported anywhere: quiet and fork-safe gRPC, one torch thread a process, Ctrl-C heard.

Tests marked `slow` take a quarter of an hour together on two cores; without `--slow` each says that it was skipped.
"""

import os
import signal

import pytest
from hypothesis import settings

os.environ.update({"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE", "OMP_NUM_THREADS": "1"})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
settings.register_profile("any machine", deadline=None)  # a busy one is not a failure
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow runs it"))
