"""The village that most modules here tell their story in."""

from collections.abc import Iterator

import pytest
from village import Village


@pytest.fixture(scope="module")
def village() -> Iterator[Village]:
    """One for all tests of a module. Where each test wants its own, the module has a fixture of the same name."""
    with Village() as village:
        yield village
