"""hivemind's DecentralizedAverager: an all-reduce in a group that peers form over a DHT.

A group is formed before the clock starts, as hivemind's Optimizer does while it still trains: what is measured is from
the trigger on.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, Uniform8BitQuantization
from hivemind.compression.quantization import Quantization
from hivemind.utils import get_dht_time

from noloco_node.bench.rivals import vectors
from noloco_node.bench.workers import Answer, serve
from noloco_node.errors import NolocoError

COMPRESSION = {"fp16": Float16Compression, "8bit": Uniform8BitQuantization}
MATCHMAKING_S, REQUEST_S = 5.0, 3.0
"""hivemind's own defaults."""
STEP_S = 600.0
POLL_S = 0.1


def _extract(self: Quantization, tensor: Any) -> torch.Tensor:
    """hivemind 1.1.12's own makes an int of an array, which numpy 2.4 refuses: then its peers average nothing, and it
    says so in its debug log only."""
    size = np.frombuffer(tensor.buffer, np.int64, 1).item()
    codebook = np.frombuffer(tensor.buffer, self.codebook_dtype, size, 8)
    codes = np.frombuffer(tensor.buffer, self.indices_dtype, offset=8 + codebook.nbytes)
    made = torch.as_tensor(codebook)[torch.as_tensor(codes, dtype=torch.int64)]
    return made.reshape(tuple(tensor.size)).to(getattr(torch, tensor.dtype))


Quantization.extract = _extract


class Member:
    def start(self, host: str, params: int, worker: int, variant: str) -> Answer:
        """`variant`: fp16 or 8bit."""
        torch.set_num_threads(1)
        self._worker, self._variant, self._params, self._host = worker, variant, params, host
        if worker:
            return {"address": ""}
        self._dht = self._join([])
        return {"address": str(self._dht.get_visible_maddrs()[0])}

    def _join(self, peers: Sequence[str]) -> Any:
        return hivemind.DHT(initial_peers=list(peers), host_maddrs=[f"/ip4/{self._host}/tcp/0"], start=True)

    def connect(self, addresses: Sequence[str], group: int = 0, matchmaking_s: float = MATCHMAKING_S) -> None:
        """One group of all, and no step without one of them; or groups of so many, from two on, as hivemind's own
        benchmark has them."""
        if self._worker:
            self._dht = self._join(addresses[:1])
        groups = max(1, len(addresses) // (group or len(addresses)))
        bits = (groups - 1).bit_length()
        self._averager = hivemind.DecentralizedAverager(
            [torch.zeros(self._params)],
            self._dht,
            prefix="bench",
            compression=COMPRESSION[self._variant](),
            initial_group_bits=f"{self._worker % groups:0{bits}b}" if bits else "",
            target_group_size=group or len(addresses),
            min_group_size=2 if group else len(addresses),
            min_matchmaking_time=matchmaking_s,
            request_timeout=min(REQUEST_S, matchmaking_s),
            start=True,
        )

    async def prepare(self, step: int, partners: Sequence[int]) -> Answer:
        with self._averager.get_tensors() as (vector,):
            vectors.weights(vector, self._worker, step)
            before = vectors.probe(vector)
        self._step = self._averager.step(
            scheduled_time=get_dht_time() + MATCHMAKING_S, timeout=STEP_S, require_trigger=True, wait=False
        )
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if self._step.done():
                raise NolocoError("hivemind found no group")
            await asyncio.sleep(POLL_S)
        return {"probe": before}

    def step(self) -> None:
        self._step.allow_allreduce()
        if self._step.result(STEP_S) is None:
            raise NolocoError("hivemind averaged nothing: it found no group")

    def brings(self) -> Answer:
        """The vector before all rounds."""
        with self._averager.get_tensors() as (vector,):
            vectors.weights(vector, self._worker, 1)
            return {"probe": vectors.probe(vector)}

    def rounds(self, count: int, patience_s: float) -> Answer:
        """So many, and then others that count for nobody, so that who is slower still finds somebody."""
        began = time.monotonic()
        self._had = succeeded = sum(self._round(patience_s) for _ in range(count))
        answer = {"succeeded": succeeded, "seconds": time.monotonic() - began, **self.result()}
        self._goes_on = True
        self._more = threading.Thread(target=self._go_on, args=(patience_s,), daemon=True)
        self._more.start()
        return answer

    def end(self) -> Answer:
        """How many rounds found somebody, those that count for nobody among them, once none is under way."""
        self._goes_on = False
        self._more.join()
        return {"rounds": self._had}

    def _go_on(self, patience_s: float) -> None:
        while self._goes_on:
            self._had += self._round(patience_s)

    def _round(self, patience_s: float) -> bool:
        with suppress(Exception):  # no group, or one that broke: its own benchmark counts no more than that
            return self._averager.step(timeout=patience_s) is not None
        return False

    def result(self) -> Answer:
        with self._averager.get_tensors() as (vector,):
            return {"probe": vectors.probe(vector)}


if __name__ == "__main__":
    serve(Member())
