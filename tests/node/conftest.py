"""The fixture that most modules here start their nodes with."""

from collections.abc import Iterator

import pytest
from real_nodes import RealNodes


@pytest.fixture(scope="module")
def real_nodes() -> Iterator[RealNodes]:
    """The same nodes for all tests of a module. Where each test needs its own, the module overrides this fixture."""
    with RealNodes() as real_nodes:
        yield real_nodes
