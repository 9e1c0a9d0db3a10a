"""Set before grpc or torch is imported anywhere: quiet and fork-safe gRPC, one torch thread a process, Ctrl-C heard."""

import os
import signal

os.environ.update({"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE", "OMP_NUM_THREADS": "1"})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
