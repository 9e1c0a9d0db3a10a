"""What is here of others' micro-batches."""

import pytest

from noloco_node.errors import PeerRefused
from noloco_node.stages import held as held_module


def test_what_a_caller_may_take_and_what_it_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MOST_HELD_BYTES", 100)
    monkeypatch.setattr(held_module, "MOST_BYTES_OF_CALLER", 50)
    held = held_module.Held()
    with held.call("a") as first:
        first.take(80)  # a single one may be as large as all together
        with pytest.raises(PeerRefused), held.call("a") as second:
            second.take(1)
        with held.call("b") as other:
            other.take(20)
            other.arrive()
            with pytest.raises(PeerRefused):
                first.take(1)
            assert held.callers == {"b": 1} and held.free == held_module.MOST_HELD - 1
    assert not held.calls and not held.callers and not held.bytes
