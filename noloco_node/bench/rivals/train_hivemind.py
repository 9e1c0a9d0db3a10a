"""hivemind with local updates, as OpenDiLoCo uses it (its hivemind_diloco).

Local AdamW; at the end of a phase the pseudo-gradients are averaged among all by hivemind's averager in 16-bit floats,
for which everybody waits, and SGD with Nesterov momentum (0.7, 0.9) takes the outer step. The search for a group begins
before the phase ends. OpenDiLoCo also averages the whole state in the background after every phase, which is left out
here, in its favour; so is hivemind's progress tracker, as all nodes have the same pace.
"""

import logging
from contextlib import suppress
from typing import Any

import torch

from noloco_node.bench.rivals.local_steps import LocalSteps
from noloco_node.bench.workers import serve

PREFIX = "bench"
MATCHMAKING_S = 3.0
"""hivemind's own advice for small local runs is 3 to 5 s."""
TIMEOUT_S = 60.0


class Member(LocalSteps):
    def join(self, peers: list[str]) -> dict[str, Any]:
        import hivemind

        where = [f"/ip4/{self._addresses['address']}/tcp/0"]
        self._dht = hivemind.DHT(host_maddrs=where, initial_peers=peers, start=True, await_ready=True)
        return {"peers": [str(address) for address in self._dht.get_visible_maddrs()]}

    def connect(self, count: int) -> None:
        from hivemind import DecentralizedAverager
        from hivemind.compression import Float16Compression

        self._outer = [p.detach().clone() for p in self.parameters]
        self._averager = DecentralizedAverager(
            averaged_tensors=[torch.zeros_like(p) for p in self._outer],
            dht=self._dht,
            prefix=PREFIX,
            target_group_size=count,
            min_group_size=count,
            min_matchmaking_time=MATCHMAKING_S,
            allreduce_timeout=TIMEOUT_S,
            compression=Float16Compression(),
            start=True,
        )

    def train(self, steps: int) -> dict[str, Any]:
        """`steps`: of a phase."""
        return self.begin(lambda: self._train(steps))

    def _train(self, steps: int) -> None:
        inner = self.adamw()
        outer = torch.optim.SGD(self._outer, lr=0.7, momentum=0.9, nesterov=True)
        while True:
            control = None
            for step in range(steps):
                left_s = (steps - step) * self.setting.step_s
                if control is None and left_s <= MATCHMAKING_S + self.setting.step_s:
                    control = self._schedule(left_s)
                self.gradient(self.module)
                self.descend(inner)
            self._average(control)
            outer.step()
            with torch.no_grad():
                for p, slow in zip(self.parameters, self._outer, strict=True):
                    p.copy_(slow)
            self.evaluate()

    def _schedule(self, in_s: float) -> Any:
        from hivemind.utils import get_dht_time

        when = get_dht_time() + max(in_s, MATCHMAKING_S)
        return self._averager.step(scheduled_time=when, wait=False, require_trigger=True, timeout=TIMEOUT_S)

    def _average(self, control: Any) -> None:
        """The pseudo-gradient becomes the outer gradient: the mean of all, or its own where that fails."""
        with torch.no_grad(), self._averager.get_tensors() as averaged:
            for into, slow, p in zip(averaged, self._outer, self.parameters, strict=True):
                into.copy_(slow - p)
        control.allow_allreduce()
        self.rounds += 1
        self.alone += 1
        with suppress(Exception):  # hivemind's many kinds of failed rounds
            self.alone -= control.result(TIMEOUT_S) is not None
        with self._averager.get_tensors() as averaged:
            for slow, found in zip(self._outer, averaged, strict=True):
                slow.grad = found.clone()


if __name__ == "__main__":
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    serve(Member())
