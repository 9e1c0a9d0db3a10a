"""The plain codecs: every element in one dtype, all at once."""

import numpy as np
import torch
from torch import Tensor

from noloco_node.core import gpu, outer
from noloco_node.core.codecs.codec import CodecStats, Payload, Received, check_length
from noloco_node.errors import NonFinite, PeerMisbehaved


class CastConversation:
    def __init__(self, mine: Tensor) -> None:
        """`mine`: in that dtype. In fp32 it shares the snapshot's memory."""
        self.stats = CodecStats()
        self._mine = mine

    def open(self) -> bytes:
        if not self._mine.isfinite().all():
            raise NonFinite(f"a weight is too large for {self._mine.dtype}: the training has diverged")
        (coded,) = gpu.to_host(self._mine.view(torch.uint8))
        payload = coded.tobytes()
        self.stats.sent_bytes += len(payload)
        return payload

    def receive(self, payload: Payload) -> Received:
        theirs = _decode(payload, self._mine)
        c = outer.correction(self._mine.float(), theirs.float())
        if not c.isfinite().all():  # as it is whenever an element of theirs is not
            raise PeerMisbehaved("nonfinite")
        return Received(None, c)

    def learn(self) -> None:
        pass


def _decode(payload: Payload, like: Tensor) -> Tensor:
    check_length(payload, like.nbytes)
    if not payload:
        return like
    return gpu.to_device(np.frombuffer(payload, np.uint8).copy(), like.device).view(like.dtype)
