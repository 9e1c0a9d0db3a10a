"""How much memory this process has and had."""

from pathlib import Path

import numpy as np
import pytest

from noloco_node.host import memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no proc(5) here")
def test_the_peak_of_a_process_is_found() -> None:
    before = memory.forget_peak()
    block = np.ones(64 << 20, np.uint8)
    del block
    peak = memory.peak_bytes()
    assert before and peak and 60 << 20 <= peak - before < 200 << 20
