"""Python runs this first in every process that has this folder on its path: what a test changes or counts in a node.

CLOCK_AHEAD_S: this process's clock is so far ahead of the machine's. SPEAKS_PROTOCOL: the version of the wire that it
says it speaks. STAGE_ATTACK: what its service of stages does (tests/helpers/stage_attacks.py). COUNT_OBJECTS: a folder,
in which a file named by the process's id holds how many blocks of memory Python's objects take, each 15 s.
gc.get_objects() would be exact, but another thread that is just filling a tuple then fails with a SystemError, because
somebody else holds the tuple.
"""

import gc
import os
import sys
import threading
import time
from pathlib import Path

COUNT_EVERY_S = 15.0

if ahead := float(os.environ.get("CLOCK_AHEAD_S", "0")):
    _time, _time_ns = time.time, time.time_ns

    def off() -> float:
        """gRPC takes its deadlines from here and compares them with the machine's clock, so it gets that one."""
        return _time() + (0.0 if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc.") else ahead)

    time.time = off
    time.time_ns = lambda: _time_ns() + int(ahead * 1e9)

if protocol := os.environ.get("SPEAKS_PROTOCOL"):
    from noloco_node import version

    version.PROTOCOL = int(protocol)

if attack := os.environ.get("STAGE_ATTACK"):
    from stage_attacks import HostileService

    from noloco_node.stages import service

    service.StageService = HostileService.with_attack(attack)

if folder := os.environ.get("COUNT_OBJECTS"):

    def count() -> None:
        while True:
            time.sleep(COUNT_EVERY_S)
            gc.collect()
            (Path(folder) / f"{os.getpid()}.new").write_text(str(sys.getallocatedblocks()))
            (Path(folder) / f"{os.getpid()}.new").rename(Path(folder) / str(os.getpid()))

    threading.Thread(target=count, daemon=True).start()
