"""Which threads of a node get the CPU first where all cores train."""

import os
import sys
import threading
from contextlib import suppress

BEHIND = 5
"""Of the kernel's 20 steps of niceness: at equal priority a swap waits for a core three times as long as it works, and
takes 1.7 times as long as without training; 10 gains nothing more (bench/README.md)."""


def let_others_first() -> None:
    """This thread, and those that it starts, run behind the other threads of this process and behind its network
    daemon. Only Linux has a niceness for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + BEHIND)
