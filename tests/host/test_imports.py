"""The garbage collector rests during a large import and works afterwards, without what was imported."""

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from noloco_node.host.imports import large_import


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.freeze()  # as tests/conftest.py leaves it


def test_it_works_again_also_where_the_import_fails() -> None:
    with pytest.raises(ImportError), large_import():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_where_it_did_not_work_it_does_not_afterwards() -> None:
    gc.disable()
    with large_import():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("is_a_nodes", [True, False])
def test_only_a_process_that_has_frozen_is_frozen_again(
    is_a_nodes: bool, imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop's process is its user's, who may have objects that become garbage. And only what was imported stays."""
    gc.unfreeze()
    if is_a_nodes:
        gc.freeze()
    before = gc.get_freeze_count()
    with large_import():
        kept = [[] for _ in range(1000)]
        if imported:
            monkeypatch.setitem(sys.modules, "another", ModuleType("another"))
    assert (gc.get_freeze_count() >= before + len(kept)) == (is_a_nodes and imported)
    assert (gc.get_freeze_count() == 0) != is_a_nodes
