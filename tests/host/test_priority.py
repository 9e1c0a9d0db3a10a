"""A thread that lets others first: it, and those that it starts, and no other."""

import os
import sys
from threading import Thread

import pytest

from noloco_node.host import priority


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_a_thread_and_those_that_it_starts_run_behind_the_others() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), {}

    def look(name: str) -> None:
        found[name] = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> None:
        priority.let_others_first()
        look("itself")
        started = Thread(target=look, args=("its own",))
        started.start()
        started.join()

    for target, args in ((work, ()), (look, ("another",))):
        thread = Thread(target=target, args=args)
        thread.start()
        thread.join()
    behind = min(before + priority.BEHIND, 19)
    assert found == {"itself": behind, "its own": behind, "another": before}
