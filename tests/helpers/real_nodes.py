"""Real node processes for the tests: started as a user would, watched through their command line, gone afterwards.

What only looks at a node runs the verb's code in this process, because a Python of its own for each look would take
more CPU time than the nodes; `run` starts a process, as a user does.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import psutil
from patience import PATIENCE

from noloco_node import cli
from noloco_node.errors import NolocoError
from noloco_node.run import invitation, toml

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architecture": "LlamaConfig",
    "config": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
}
"""Five fragments, 8.4 MB in bf16."""
QUICK = {"codec": "fp32"}
"""[outer] of a run whose nodes do not import numba for the codec's kernels: half a second of CPU for each start."""
T = TypeVar("T")
_looking = threading.Lock()
"""stdout is one for all threads of a test, and gRPC's asyncio wants one event loop at a time."""


def until(found: Callable[[], T | None], what: str | Callable[[], str], within_s: float = 90) -> T:
    """Poll until `found` returns something true. Fails after `within_s`, longer on a busy machine."""
    deadline = time.monotonic() + within_s * PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.1)
    return value


class Node:
    def __init__(
        self,
        group: "RealNodes",
        name: str,
        *words: str,
        within: Sequence[str] = (),
        at: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`within`: what its command is put behind, `ip netns exec ...`; `at` and `port`: where it listens."""
        self.home = group.root / name
        self.log = group.root / f"{name}.out"
        self.group = group
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*within, *group.program, *words, "--home", str(self.home), "--listen", f"/ip4/{at}/tcp/{port}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=group.environ,
                start_new_session=True,
            )

    def printed(self, pattern: str) -> str | None:
        """The first group of the pattern, where it printed something like that."""
        match = re.search(pattern, self.log.read_text(errors="replace"))
        return match[1] if match else None

    def invitation(self) -> list[str]:
        """The words that it prints for others to join with: `join <invitation>`, or `join --bootstrap <address>`."""
        return until(lambda: self.printed(r"others join with: noloco-node (.*)"), "the line to join with").split()

    def address(self) -> str:
        words = self.invitation()
        return words[2] if len(words) > 2 else str(invitation.read(words[1]).addresses[0])

    def run(self, *words: str, within_s: float = 90) -> subprocess.CompletedProcess[str]:
        """Run a command for this node."""
        return self.group.run(*words, "--home", str(self.home), within_s=within_s)

    def command(self, verb: str) -> None:
        """Run a verb that must succeed."""
        done = self.run(verb)
        assert done.returncode == 0, done.stderr

    def ask(self, verb: str) -> dict[str, Any]:
        """A view as JSON; empty while no node answers. One that is there may need longer than the verb waits."""
        for _ in range(3):
            with _looking, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
                code = cli.main([verb, "--json", "--home", str(self.home)])
            if code != NolocoError.exit_code:
                break
        return json.loads(out.getvalue()) if code == 0 else {}

    def tell(self, verb: str) -> None:
        """As `command`, without a process of its own."""
        with _looking, redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            code = cli.main([verb, "--home", str(self.home)])
        assert code == 0, said.getvalue()

    def events(self, kind: str) -> list[dict[str, Any]]:
        (path,) = self.home.glob("runs/*/events.jsonl")
        return [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == kind]

    def committed(self) -> int:
        return self.ask("status").get("rounds", {}).get("committed", 0)

    def round(self) -> int:
        return self.ask("status").get("round", 0)

    def received_state(self, within_s: float = 90) -> int:
        """Wait until it has a peer's state, and return the state's round."""
        return int(until(lambda: self.printed(r"received the state of \S+ at round (\d+)"), "a peer's state", within_s))

    def processes(self) -> set[int]:
        """The ids of its process and of that one's children."""
        me = psutil.Process(self.process.pid)
        return {me.pid, *(child.pid for child in me.children(recursive=True))}

    def ended(self, within_s: float = 120) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(within_s * PATIENCE)

    def leave(self) -> None:
        self.tell("leave")
        assert self.ended() == 0, self.log.read_text()[-2000:]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.ended()


class RealNodes:
    """Some nodes in one directory, by which their processes and files are found and removed at the end."""

    def __init__(self, **environ: str) -> None:
        """`environ`: added to every command's environment. The tasks of tests/tasks are installed."""
        self.root = Path(tempfile.mkdtemp(prefix="nn-"))  # short: the path of a control socket has a limit
        self.program = [sys.executable, "-m", "noloco_node"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("NOLOCO_")}
        self.scratch = self.root / "t"
        self.scratch.mkdir()
        ours = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'tasks'}", "OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch)}
        self.environ = {**clean, **ours, **environ}
        self.nodes: list[Node] = []

    def __enter__(self) -> "RealNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        shutil.rmtree(self.root)

    def run(self, *words: str, within_s: float = 90) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.program, *words],
            capture_output=True,
            text=True,
            env=self.environ,
            cwd=self.root,
            timeout=within_s * PATIENCE,
            check=False,
        )

    def manifest(self, *, steps: int = 4, rounds: int = 100_000, **changes: str) -> Path:
        """A run.toml whose rounds take a second or two."""
        text = toml.template("test", rounds=rounds)
        small = {"steps": str(steps), "batch_tokens": "512", "sequence_length": "64", **changes}
        for key, value in small.items():
            text, count = re.subn(rf"(?m)^{key} = \S+", f"{key} = {value}", text)
            assert count == 1, key
        return self._run_toml(text)

    def paced(self, *, step_s: float = 0.05, outputs: int = 384, outer: Mapping[str, Any] = {}, **inner: float) -> Path:
        """A run.toml of the paced task, whose steps take so long and hardly any CPU. Its model has 257 parameters for
        each of the `outputs`. `inner`: of its phases."""
        model = {"task": "paced", "options": {"step_s": step_s, "outputs": outputs}}
        return self.tables(model=model, inner={"batch_tokens": 8, "warmup": 0.0, **inner}, outer=outer)

    def llama(self, *, seconds: float, **outer: str) -> Path:
        """A run.toml of a larger model, in phases of so many seconds."""
        inner = {"seconds": seconds, "batch_tokens": 64, "warmup": 0.0}
        return self.tables(model=LLAMA, data={"sequence_length": 64}, inner=inner, outer=outer)

    def tables(self, *, rounds: int = 100_000, **tables: Mapping[str, Any]) -> Path:
        """A run.toml of these tables; everything else has its default."""
        run = {"name": "test", "rounds": rounds, **tables}
        return self._run_toml("".join(f"{key} = {_toml(value)}\n" for key, value in run.items()))

    def _run_toml(self, text: str) -> Path:
        path = self.root / "run.toml"
        path.write_text(text)
        return path

    def rendezvous(self, *, within: Sequence[str] = (), at: str = "127.0.0.1") -> Node:
        self.nodes.append(Node(self, "rendezvous", "bootstrap", within=within, at=at))
        return self.nodes[-1]

    def node(self, name: str, *words: str, within: Sequence[str] = (), at: str = "127.0.0.1", port: int = 0) -> Node:
        self.nodes.append(Node(self, name, *words, "--threads", "1", within=within, at=at, port=port))
        return self.nodes[-1]

    def last_lines(self, count: int = 30) -> str:
        """What each node printed last, and how it ended."""
        return "\n\n".join(
            f"{node.log.name}, exit code {node.process.poll()}:\n"
            + "\n".join(node.log.read_text(errors="replace").splitlines()[-count:])
            for node in self.nodes
        )

    def left_over(self) -> list[str]:
        """Processes and sockets of these nodes that are still there."""
        found = [words for p in psutil.process_iter() if (words := self._ours(p))]
        try:
            return found + [str(path) for path in self.root.rglob("*") if path.is_socket()]
        except FileNotFoundError as just_going:
            return [*found, str(just_going.filename)]

    def _ours(self, process: psutil.Process) -> str | None:
        """Pid and command, if it is a live process of these nodes."""
        try:
            ours = process.environ().get("TMPDIR") == str(self.scratch)
            alive = ours and process.status() != psutil.STATUS_ZOMBIE
            return f"{process.pid} {' '.join(process.cmdline())}" if alive else None
        except psutil.Error:
            return None  # it is just going

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill()
        until(lambda: not self.left_over(), lambda: f"nothing left: {self.left_over()}", 60)


def _toml(value: Any) -> str:
    """Tables on one line; all else is written as in JSON."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}"
    return json.dumps(value)
