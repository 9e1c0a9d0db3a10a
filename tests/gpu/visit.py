"""Run everything that wants a GPU, within 9 minutes: `python tests/gpu/visit.py --json visit.json`.

Needs neither network nor hivemind nor pytest, and runs from a plain checkout. What is checked lies in `checks/`, whose
functions `test_on_gpu.py` runs too. This file imports nothing but the standard library: it runs each part as a process
of its own, so that a part that crashes, hangs or breaks the GPU's context costs only its own lines. Parts that do not
measure run at the same time. Every result is in the JSON file as soon as it is there.

The exit code is 0 only if all that ran was as wanted.
"""

# ruff: noqa: T201 - a program of its own

import argparse
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SECONDS = 520
"""Of a visit: with a start and an end it stays below 9 minutes."""
POLL_S = 0.1
STOP_S = 5.0
TAIL = 4000
"""Characters of a process's output that are kept of a part that failed."""
NEEDED = ("torch", "numpy", "pydantic", "transformers", "safetensors", "tokenizers")
"""Without one of these nothing runs."""
WANTED = {
    "triton": "the lattice kernels on a GPU",
    "numba": "the lattice kernels on a CPU, to compare with",
    "base58": "`bench training`, and nodes",
    "cryptography": "`bench training`, and nodes",
    "rich": "the `bench` commands, and nodes",
    "grpc": "nodes",
    "google.protobuf": "stages, and nodes",
    "hivemind": "nodes",
}


@dataclass(frozen=True)
class Part:
    name: str
    """Its functions are in `checks/<name>.py`, or in `module`."""
    most_s: float
    """It is stopped after so many seconds."""
    alone: bool = True
    """It measures, or takes all memory: nothing else runs at the same time."""
    module: str = ""
    environment: tuple[tuple[str, str], ...] = ()


SAME = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With it products give the same bits each time (torch.use_deterministic_algorithms)."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""As the command line sets it for a node."""
PARTS = (
    Part("kernels", 150, alone=False),
    Part("replicas", 150, alone=False, environment=(SAME,)),
    Part("loops", 90, alone=False, environment=(SAME,)),
    Part("swaps", 150, alone=False, environment=(SAME,)),
    Part("swaps blocking", 150, alone=False, module="swaps", environment=(SAME, ("CUDA_LAUNCH_BLOCKING", "1"))),
    Part("commands", 150, alone=False),
    Part("nodes", 150, alone=False),
    Part("codec_speed", 60),
    Part("one_billion", 270),
    Part("plain_loop", 150),
    Part("stages", 120),
    Part("shortage", 90),
    Part("profile_steps", 90),
)
"""Those that are not alone first, all at once; then the most important first."""


@dataclass
class Done:
    """One function of a part, when it has ended."""

    part: str
    check: str
    seconds: float = 0.0
    failed: str | None = None
    """Why, with the stack's end."""
    skipped: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    """of each `what` `wanted` `seen` `ok` (None: not judged)"""
    facts: dict[str, Any] = field(default_factory=dict)


# ---- the command -----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.part:
        return _as_part(options)
    began = time.monotonic()
    missing = _say_what_is_missing()
    if any(name in NEEDED for name in missing):
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and the parts end too
    visit = Visit(options, missing, began)
    with tempfile.TemporaryDirectory() as folder:
        visit.run(Path(folder))
    visit.write(finished=True)
    for line in table(visit.rows()):
        print(line)
    return 0 if all(row["ok"] is not False for row in visit.rows()) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="run everything that wants a GPU, and print a table of what was seen")
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default), cuda:1 ..., or cpu to try this program itself")
    add("--quick", action="store_true", help="tiny sizes; no figure is judged")
    add("--seconds", type=float, default=SECONDS, help=f"stop after so many (default: {SECONDS})")
    add("--json", type=Path, metavar="FILE", help="default: $OUT/visit.json, or none where OUT is not set")
    names = ", ".join(f"'{part.name}'" for part in PARTS)
    add("--only", metavar="PARTS", help=f"some of these, with commas between: {names}")
    add("--part", help=argparse.SUPPRESS)
    add("--skip", type=int, default=0, help=argparse.SUPPRESS)
    add("--into", type=Path, help=argparse.SUPPRESS)
    add("--turn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.json is None and os.environ.get("OUT"):
        options.json = Path(os.environ["OUT"]) / "visit.json"
    known = {part.name for part in PARTS}
    if options.only and not {name.strip() for name in options.only.split(",")} <= known:
        parser.error(f"--only takes some of {names}")
    return options


def _say_what_is_missing() -> list[str]:
    missing = [name for name in (*NEEDED, *WANTED) if not _there(name)]
    needed = [name for name in missing if name in NEEDED]
    if needed:
        print(f"NOT HERE, and nothing runs without: {', '.join(needed)}. Remedy: pip install {' '.join(needed)},")
        print("or carry their wheels along and put the folder that they are unpacked in into PYTHONPATH.")
    for name in missing:
        if name in WANTED:
            print(f"not here: {name} ({WANTED[name]})")
    return missing


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package that it is part of
        return False


# ---- all parts, in processes -----------------------------------------------------------------------------------------
class Visit:
    def __init__(self, options: argparse.Namespace, missing: Sequence[str], began: float) -> None:
        self._options = options
        self._missing = missing
        self._began = began
        self._until = began + options.seconds
        self._done: list[Done] = []
        self._machine: dict[str, Any] = {}

    def run(self, folder: Path) -> None:
        chosen = [name.strip() for name in (self._options.only or "").split(",") if name.strip()]
        parts = [part for part in PARTS if not chosen or part.name in chosen]
        together = [part for part in parts if not part.alone]
        if self._options.device == "cpu":  # few cores: one after the other
            groups = [[part] for part in parts if not part.module]
        else:
            groups = ([together] if together else []) + [[part] for part in parts if part.alone]
        waiting: list[_Process] = []
        try:
            for number, group in enumerate(groups):
                running = waiting or self._started(group, folder / str(number))
                left_s = self._until - time.monotonic()
                if left_s < min(20.0, 0.1 * self._options.seconds):
                    waiting = running
                    self._skip([part for group in groups[number:] for part in group], NO_TIME)
                    return
                following = groups[number + 1 : number + 2]
                waiting = self._started(following[0], folder / str(number + 1)) if following else []
                self._go_on(running)
        finally:
            for process in waiting:
                process.end()

    def _started(self, parts: Sequence[Part], folder: Path) -> list["_Process"]:
        """They import what they need, and wait for their turn. Together they have no more threads than there are cores:
        with more, products on the CPU that take 5 s took minutes."""
        threads = max(1, (os.cpu_count() or 1) // len(parts))
        return [_Process(part, self._options, folder / str(number), threads) for number, part in enumerate(parts)]

    def _go_on(self, running: list["_Process"]) -> None:
        try:
            for process in running:
                process.go(self._until)
            while running:
                time.sleep(POLL_S)
                for process in list(running):
                    for done in process.news():
                        self._take(done)
                    if process.over():
                        running.remove(process)
        finally:
            for process in running:
                process.end()

    def _take(self, done: Done) -> None:
        if done.check == MACHINE:
            self._machine = done.facts
            print(", ".join(f"{name} {value}" for name, value in done.facts.items()), flush=True)
            return
        self._done.append(done)
        how = "FAILED" if done.failed else f"not run: {done.skipped}" if done.skipped else "ok"
        print(f"{time.monotonic() - self._began:5.0f} s  {done.part}: {done.check}: {how} ({done.seconds:.1f} s)")
        if done.failed:
            print(f"         {done.failed.strip().splitlines()[-1]}")
        sys.stdout.flush()
        self.write(finished=False)

    def _skip(self, parts: Sequence[Part], why: str) -> None:
        for part in parts:
            self._take(Done(part.name, "all", skipped=why))

    # ---- what was seen ----
    def rows(self) -> list[dict[str, Any]]:
        checks = [done for done in self._done if not done.rows]
        failed = [done for done in self._done if done.failed]
        skipped = [done for done in self._done if done.skipped]
        unwanted = self._options.device != "cpu" and any(done.skipped not in USUAL for done in skipped)
        counts = f"{len(self._done) - len(failed) - len(skipped)} as wanted, {len(failed)} failed"
        rows = [
            _row(
                f"gpu tests ({len(checks)}) and measurements ({len(self._done) - len(checks)})",
                "0 failed, 0 skipped",
                f"{counts}, {len(skipped)} skipped",
                not failed and not unwanted,
            )
        ]
        rows += [_row(f"{done.part}: {done.check}", "as wanted", _last_line(done.failed), False) for done in failed]
        rows += [_row(f"{done.part}: {done.check}", "to run", f"not run: {done.skipped}", None) for done in skipped]
        return rows + [row for done in self._done for row in done.rows]

    def write(self, finished: bool) -> None:
        if self._options.json is None:
            return
        document = {
            "schema": 1,
            "finished": finished,
            "device": self._options.device,
            "quick": self._options.quick,
            "seconds": round(time.monotonic() - self._began, 1),
            "machine": self._machine,
            "missing": self._missing,
            "rows": self.rows(),
            "checks": [asdict(done) for done in self._done],
        }
        self._options.json.parent.mkdir(parents=True, exist_ok=True)
        self._options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


NO_TIME = "no time was left"
USUAL = (NO_TIME, "no hivemind", "no bitsandbytes")
"""Why something may be left out."""
MACHINE = "machine"
"""The check that a process sends first: what it runs on."""


class _Process:
    """A part as a process. Where it ends in the middle of a function, another one goes on behind that."""

    def __init__(self, part: Part, options: argparse.Namespace, folder: Path, threads: int) -> None:
        self._part, self._options, self._folder = part, options, folder
        self._environ = {"OMP_NUM_THREADS": str(threads), **dict([ALLOCATOR]), **os.environ, **dict(part.environment)}
        self._turn = folder / "turn"
        self._until = math.inf
        self._ended = 0
        self._under_way: tuple[str, float] | None = None
        self._names: list[str] = []
        self._over = False
        self._folder.mkdir(parents=True)
        self._start()

    def go(self, until: float) -> None:
        """Its turn has come."""
        self._until = min(until, time.monotonic() + self._part.most_s)
        self._say_until()

    def _say_until(self) -> None:
        written = self._turn.with_suffix(".part")
        written.write_text(str(self._until), encoding="ascii")
        written.replace(self._turn)

    def _start(self) -> None:
        self._into = self._folder / f"from-{self._ended}.jsonl"
        self._into.touch()
        self._output = self._folder / f"from-{self._ended}.txt"
        self._read = 0
        options = ["--device", self._options.device, "--part", self._part.name, "--into", str(self._into)]
        options += ["--skip", str(self._ended), "--turn", str(self._turn)]
        options += ["--quick"] if self._options.quick else []
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
            )

    def news(self) -> Iterator[Done]:
        running = self._process.poll() is None
        lines = self._into.read_text(encoding="utf-8").splitlines(keepends=True)
        for line in lines[self._read :]:
            if not line.endswith("\n"):
                break  # it is being written
            self._read += 1
            found = json.loads(line)
            if "began" in found:
                self._under_way = found["began"], time.monotonic()
            else:
                done = Done(**found)
                if done.check == MACHINE:
                    self._names = done.facts.pop("checks")
                else:
                    self._ended += 1
                    self._under_way = None
                yield done
        if running and time.monotonic() < self._until:
            return
        if running:
            self.end()
        yield from self._cut_off(running)

    def _cut_off(self, stopped: bool) -> Iterator[Done]:
        """What was under way, when the process ended without a result for it."""
        if self._over or (self._under_way is None and self._process.returncode == 0):
            self._over = True
            return
        check, began = self._under_way or ("begin", time.monotonic())
        self._under_way = None
        why = NO_TIME if stopped else f"the process ended with {_ending(self._process.returncode)}"
        said = self._output.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        seconds = time.monotonic() - began
        failed = f"{said}\n{why} after {seconds:.0f} s"
        yield Done(self._part.name, check, seconds, failed=failed)
        self._ended += 1
        self._over = stopped or check == "begin" or self._until - time.monotonic() < 20
        if not self._over:
            self._start()
            return
        for name in self._names[self._ended :]:
            yield Done(self._part.name, name, skipped=NO_TIME)

    def over(self) -> bool:
        return self._over

    def end(self) -> None:
        """The process, and those that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    continue


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1][:120] if (text or "").strip() else "failed"


# ---- one part, in its process ----------------------------------------------------------------------------------------
def _as_part(options: argparse.Namespace) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    part = next(part for part in PARTS if part.name == options.part)
    from checks import place as places

    checks: Sequence[Callable[[places.Place], places.Seen | None]]
    checks = import_module(f"checks.{part.module or part.name}").CHECKS
    parent = os.getppid()
    while not options.turn.exists():
        time.sleep(POLL_S)
        if os.getppid() != parent:
            return 1
    place = places.Place.of(options.device, options.quick, float(options.turn.read_text(encoding="ascii")))
    with options.into.open("a", encoding="utf-8") as file:

        def tell(document: dict[str, Any]) -> None:
            file.write(json.dumps(document) + "\n")
            file.flush()

        names = [check.__name__ for check in checks]
        tell(asdict(Done(part.name, MACHINE, facts={**place.machine(), "checks": names})))
        for check in checks[options.skip :]:
            tell({"began": check.__name__})
            tell(asdict(_tried(part.name, check, place)))
            place.tidy()
    return 0


def _tried(part: str, check: Callable[[Any], Any], place: Any) -> Done:
    import traceback

    from checks.place import Skip

    began = time.monotonic()
    done = Done(part, check.__name__)
    try:
        if seen := check(place):
            done.rows, done.facts = [asdict(row) for row in seen.rows], seen.facts
    except Skip as why:
        done.skipped = str(why)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        done.failed = traceback.format_exc()[-TAIL:]
        if "CUDA error" in str(error):  # nothing works in this process any more
            print(done.failed, file=sys.stderr, flush=True)
            os._exit(70)
    done.seconds = round(time.monotonic() - began, 2)
    return done


# ---- the table -------------------------------------------------------------------------------------------------------
def _row(what: str, wanted: str, seen: str, ok: bool | None) -> dict[str, Any]:
    return {"what": what, "wanted": wanted, "seen": seen, "ok": ok}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    heads = ("what", "wanted", "seen", "ok")
    said = {True: "ok", False: "NO", None: "-"}
    cells = [[*(str(row[head]) for head in heads[:3]), said[row["ok"]]] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in [list(heads), ["---"] * len(heads), *cells]]
    return [*lines, f"Python {platform.python_version()}"]


if __name__ == "__main__":
    sys.exit(main())
