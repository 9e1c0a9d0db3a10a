"""Set before grpc or torch is imported anywhere: quiet and fork-safe gRPC, one torch thread a process."""

import os

os.environ.update({"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE", "OMP_NUM_THREADS": "1"})
