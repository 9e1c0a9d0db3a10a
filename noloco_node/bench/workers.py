"""The processes of a bench: each is told what to do by a line of JSON on its standard input, and answers with one.

A worker's module ends in `if __name__ == "__main__": serve(Member())`. `Workers` starts some, each inside of a host of
bench/links.py or on loopback, and ends them with all that they have started. A worker ends by itself when its bench
does, however that ended.
"""

import asyncio
import inspect
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from noloco_node.bench.links import Host
from noloco_node.errors import NolocoError

Answer = dict[str, Any]

START_S = 300.0
"""For the imports of a worker on a busy machine."""
_LAST_LINES = 5
_numbers = itertools.count()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


# ---- the bench's side ----
class Workers:
    """`with Workers(module, hosts) as workers: workers.ask("step", 60.0)`."""

    def __init__(self, module: str, hosts: Sequence[Host | None], environ: Mapping[str, str] = {}) -> None:
        self._command = [sys.executable, "-m", module]
        self._hosts = hosts
        self._mark = f"BENCH_PROCESS={os.getpid()}-{next(_numbers)}"
        name, _, value = self._mark.partition("=")
        self._environ = {**os.environ, **environ, name: value}
        self._stack = ExitStack()
        self.each: list[Worker] = []

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(_kill_marked, self._mark.encode())
            # Not `noloco-...`: those that no daemon uses are removed by the next node that starts.
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-noloco-")))
            self._environ["TMPDIR"] = str(folder)  # what a worker that is killed leaves there goes with it
            for number, host in enumerate(self._hosts):
                words = [*(host.inside if host else ()), *self._command]
                worker = Worker(words, self._environ, folder / f"{number}.log")
                self._stack.callback(worker.kill)
                self.each.append(worker)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, what: str, within_s: float, each: Sequence[Answer] | None = None, **fields: Any) -> list[Answer]:
        """All of them at once; `each` has fields for one worker alone. Raises NolocoError where one fails."""
        for number, worker in enumerate(self.each):
            worker.tell(what, {**fields, **(each[number] if each else {})})
        until = time.monotonic() + within_s
        return [worker.answer(what, until) for worker in self.each]

    def used(self) -> "Used":
        sent = [host.traffic()[0] if host else 0 for host in self._hosts]
        return Used(sent, [cpu_s(worker.pid) for worker in self.each])


class Used(NamedTuple):
    """By each worker."""

    sent: list[int]
    """Bytes up the link of its host; 0 without one."""
    cpu_s: list[float]
    """With all that it started and that still runs."""

    def since(self, before: "Used") -> "Used":
        sent = [now - then for now, then in zip(self.sent, before.sent, strict=True)]
        return Used(sent, [now - then for now, then in zip(self.cpu_s, before.cpu_s, strict=True)])


class Worker:
    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
                start_new_session=True,  # Ctrl-C in the terminal is for the bench, which ends its workers
            )
        self.pid = self._process.pid
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def order(self, what: str, within_s: float, **fields: Any) -> Answer:
        """This one alone. Raises NolocoError."""
        self.tell(what, fields)
        return self.answer(what, time.monotonic() + within_s)

    def tell(self, what: str, fields: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
            self._process.stdin.flush()

    def answer(self, what: str, until: float) -> Answer:
        try:
            line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise NolocoError(f"a worker did not {what} in time. {self._last_words()}Is this machine busy?") from None
        if not line:
            raise NolocoError(f"a worker ended when it was to {what}. {self._last_words()}".rstrip())
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise NolocoError(f"a worker could not {what}: {answer['error']}")
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        _remove_shared(self.pid)
        with suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()

    def _read(self, out: IO[str]) -> None:
        with out:  # its end comes when the last process that the worker has forked is gone
            for line in out:
                self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"Its last words: {' / '.join(lines)}. " if lines else ""


def _kill_marked(mark: bytes) -> None:
    """What workers have started: a worker that has ended is no longer its parent, but its environment stays."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # of another user, or ended meanwhile
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                _remove_shared(int(entry.name))


def _remove_shared(pid: int) -> None:
    """The memory that torch shared among processes, by the one that had made it: a killed one leaves it for ever."""
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        path.unlink(missing_ok=True)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it, each since it began."""
    return sum(_TICK_S * (int(f[11]) + int(f[12])) for each in descendants(pid) if (f := _stat(each)))


def _stat(pid: int) -> list[str]:
    """What /proc says, from the state on; nothing where the process has ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# ---- a worker's side ----
def serve(member: Any) -> None:
    """Do what the bench asks: each order is a method of `member`, which returns the answer's fields. Methods may be
    async; they share one event loop, which runs from the first order to the last. Does not return."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    import uvloop  # late: the bench itself needs none

    uvloop.run(_serve(member, answers))  # as a node does
    os._exit(0)  # without the shutdown of torch and of a library's threads


async def _serve(member: Any, answers: IO[str]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            answer = getattr(member, order.pop("do"))(**order)
            if inspect.isawaitable(answer):
                answer = await answer
        except NolocoError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer or {}), file=answers, flush=True)
