"""Every error of ours, with its exit code.

    NolocoError                     exit 1    anything below; a sentence that says what to do
    ├── UsageError                       2    a flag, a file or a manifest that the user can fix
    ├── NoNodeRunning                    3
    ├── NodeAlreadyRunning               4
    ├── PortInUse                        5    of --listen or --web
    ├── NotReached                       6    a peer that does not answer, a goal that was not reached in time
    ├── SwarmUnreachable                10
    ├── ClockTooFarOff                  11
    ├── Incompatible                    12    another version, another manifest, another layout
    ├── NotAdmitted                     13
    ├── IdentityInUse                   14
    ├── DiskFull                        20
    ├── OutOfMemory                     21
    ├── Diverged                        22
    ├── NonFinite                        1    our own vector holds NaN or Inf: nothing is sent
    └── PeerFault                        1    a peer's fault: recorded, never fatal to this node
        ├── PeerLost                          it vanished, sent nothing more, or broke the stream
        ├── PeerRefused                       it said no, with a code
        └── PeerMisbehaved                    what it sent is not what the protocol allows

Foreign errors cross into this tree at the module that calls the library. On the wire only codes travel, never `str(e)`.
"""

from typing import ClassVar

EXIT_INTERRUPTED = 130


class NolocoError(Exception):
    """A failure in one sentence with its remedy, and the process's exit code."""

    exit_code: ClassVar[int] = 1


class UsageError(NolocoError):
    exit_code = 2


class NoNodeRunning(NolocoError):
    exit_code = 3


class NodeAlreadyRunning(NolocoError):
    exit_code = 4


class PortInUse(NolocoError):
    exit_code = 5


class NotReached(NolocoError):
    exit_code = 6


class SwarmUnreachable(NolocoError):
    exit_code = 10


class ClockTooFarOff(NolocoError):
    exit_code = 11


class Incompatible(NolocoError):
    exit_code = 12


class NotAdmitted(NolocoError):
    exit_code = 13


class IdentityInUse(NolocoError):
    exit_code = 14


class DiskFull(NolocoError):
    exit_code = 20


class OutOfMemory(NolocoError):
    exit_code = 21


class Diverged(NolocoError):
    exit_code = 22


class NonFinite(NolocoError):
    """Our own vector holds NaN or Inf; the message names the parameter."""


class PeerFault(NolocoError):
    """A peer's fault. `reason` is a short code, for counters (`rounds.by_reason`) and for the wire."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerLost(PeerFault):
    pass


class PeerRefused(PeerFault):
    def __init__(self, reason: str, retry_in_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_in_s = retry_in_s


class PeerMisbehaved(PeerFault):
    pass


def known(error: BaseException) -> NolocoError | None:
    """The first error of ours, also inside the group that a TaskGroup raises."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(known, error.exceptions)), None)
    return error if isinstance(error, NolocoError) else None
