"""Set before grpc or torch is imported anywhere: quiet and fork-safe gRPC, one torch thread a process."""

import os

from noloco_node.transport.base import GRPC_ENVIRONMENT

os.environ.update(GRPC_ENVIRONMENT)
os.environ["OMP_NUM_THREADS"] = "1"
