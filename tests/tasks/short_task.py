"""As blobs, but in a process that computes gradients for another one no more than two examples fit into memory."""

import multiprocessing

import torch
from blobs_task import Blobs
from torch import Tensor, nn

from noloco_node.training.task import Batch

MOST = 2


class Short(Blobs):
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if multiprocessing.parent_process() is not None and len(batch[0]) > MOST:
            raise torch.OutOfMemoryError("as a GPU of which another program has taken memory")
        return super().loss(module, batch)
