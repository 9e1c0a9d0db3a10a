"""Where the training thread's time goes: every second between start and stop to exactly one account.

What is done within something else (a correction that is added while the thread waits) counts for itself alone, so the
accounts add up to the time that has passed. They are the host's time. On a GPU, what still runs when a call returns
counts for whatever waits for it; how long the GPU worked at steps is measured apart, by its own clock (StepTimer).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ACCOUNTS = ("step", "data", "boundary", "apply", "evaluate", "sample", "checkpoint", "waiting", "paused", "other")
"""`step`: forward, backward and AdamW; `data`: reading a batch, and waiting for it; `sample`: the sample text;
`checkpoint`: what copies of the state hold it up, for a joining node too; `waiting`: for a partner, with blocking
overlap, or for memory of the GPU; `paused`: by the volunteer."""
STALL = ("boundary", "apply")
"""The training time that a round takes."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds since training began."""

    accounts: Mapping[str, float]
    gpu_s: float | None = None
    """That a GPU worked at steps; None without one."""

    @property
    def trained_s(self) -> float:
        return self.accounts.get("step", 0.0) if self.gpu_s is None else self.gpu_s

    @property
    def all_s(self) -> float:
        return sum(self.accounts.values())

    @property
    def clock_s(self) -> float:
        """All of it, without pauses."""
        return sum(s for account, s in self.accounts.items() if account != "paused")


class Mark(Protocol):
    """A point in a GPU's work, as torch.cuda.Event."""

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class StepTimer:
    """How long a GPU works at inner steps: from where its stream begins one to where it has done all of it.

    Two events a step, read when the GPU has passed them; nothing waits. What the stream does between two steps does not
    count (evaluating, adding corrections), nor that it waits there for the host. Within a step everything counts: the
    GPU's waiting for the host's next kernel too, which MFU shows.
    """

    def __init__(self, mark: Callable[[], Mark], clock: Callable[[], float]) -> None:
        """`mark` puts a mark behind what the GPU has to do so far."""
        self._mark, self._clock = mark, clock
        self._under_way: deque[tuple[Mark, Mark, float]] = deque()
        """With the host's seconds, which stand for the GPU's until those are known: at most a step or two."""
        self._done_s = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        self._read()
        began, since = self._mark(), self._clock()
        try:
            yield
        finally:
            self._under_way.append((began, self._mark(), self._clock() - since))

    def seconds(self) -> float:
        self._read()
        return self._done_s + sum(host_s for *_, host_s in self._under_way)

    def _read(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            began, ended, _ = self._under_way.popleft()
            self._done_s += began.elapsed_time(ended) / 1e3


def on_gpu(device: "torch.device", clock: Callable[[], float]) -> StepTimer | None:
    """None for a CPU, whose time is the host's."""
    if device.type != "cuda":
        return None
    import torch

    def mark() -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return StepTimer(mark, clock)


class TimeAccounts:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = dict.fromkeys(ACCOUNTS, 0.0)
        self._account = "other"
        self._since = 0.0
        self._running = False
        self._timer: StepTimer | None = None

    def start(self, device: "torch.device | None" = None) -> None:
        """`device`: where the steps are done."""
        self._running, self._since = True, self._clock()
        self._timer = on_gpu(device, self._clock) if device is not None else None

    def stop(self) -> None:
        self._settle()
        self._running = False

    @contextmanager
    def on(self, account: str) -> Iterator[None]:
        before = self._turn_to(account)
        try:
            with self._timer.step() if self._timer and account == "step" else nullcontext():
                yield
        finally:
            self._turn_to(before)

    def so_far(self) -> Spent:
        self._settle()
        return Spent(dict(self._spent_s), self._timer.seconds() if self._timer else None)

    def stall_s(self) -> float:
        return sum(self._spent_s[account] for account in STALL)

    def _turn_to(self, account: str) -> str:
        self._settle()
        before, self._account = self._account, account
        return before

    def _settle(self) -> None:
        now = self._clock()
        if self._running:
            self._spent_s[self._account] += now - self._since
        self._since = now
