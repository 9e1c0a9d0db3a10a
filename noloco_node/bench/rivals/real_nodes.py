"""Real nodes for a bench: each started by its command line inside of a host of its own, all in one run."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from noloco_node.base.states import NodeState
from noloco_node.bench.links import Host
from noloco_node.bench.rivals import paced
from noloco_node.bench.rivals.paced import Setting
from noloco_node.bench.workers import START_S, Answer, Workers

MODULE = "noloco_node.bench.rivals.real_node"
ROUNDS = 100_000
"""Of the run: it never ends by itself, and its learning rate stays what it is."""
LEAVE_S = 30.0


@contextmanager
def running(  # noqa: PLR0913
    hosts: Sequence[Host],
    setting: Setting,
    inner: Mapping[str, Any],
    outer: Mapping[str, Any],
    weights: Path | None = None,
    *,
    paused: bool = False,
    threads: int = 1,
) -> Iterator[Workers]:
    """Nodes that train and see each other; with `paused`, ready to. `weights`: where each leaves its own, in a
    folder named by its number. `threads`: torch's, of each."""
    with tempfile.TemporaryDirectory(prefix="nb-") as name, Workers(MODULE, hosts) as nodes:  # short: a socket's path
        folder = Path(name)
        environ = {"PYTHONPATH": _path(paced.install(folder / "task")), "OMP_NUM_THREADS": str(threads)}
        run = folder / "run.toml"
        model = {"task": paced.NAME, "options": setting.options}
        tables = {"model": model, "inner": {**setting.inner, **inner}, "outer": outer}
        run.write_text(_toml({"name": "bench", "rounds": ROUNDS, **tables}))
        state = NodeState.PAUSED if paused else NodeState.TRAINING
        within_s = START_S + 10 * len(hosts)
        first, others = nodes.each[0], nodes.each[1:]

        def start(number: int, *words: str) -> Answer:
            more = {paced.WEIGHTS: str(weights / f"{number}")} if weights else {}
            home, address = str(folder / f"{number}"), hosts[number].address
            orders = {"words": [*words, "--threads", str(threads)], "environ": {**environ, **more}, "paused": paused}
            return {"home": home, "address": address, **orders}

        first.order("start", START_S, **start(0, "start", str(run)))
        address = first.order("until", within_s, state=state, patience_s=within_s)["addresses"][0]
        for number, worker in enumerate(others, 1):
            worker.order("start", START_S, **start(number, "join", "--bootstrap", address))
        nodes.ask("until", within_s, state=state, patience_s=within_s, peers=min(len(others), 2))
        yield nodes
        nodes.ask("leave", LEAVE_S)


def _path(task: Path) -> str:
    """A node is started with -P, so this package is named too; what the user had in the path stays."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(task), str(Path(paced.__file__).parents[3]), *([before] if before else [])])


def _toml(value: Mapping[str, Any]) -> str:
    """Lines of a file; tables in it on one line each."""
    return "".join(f"{key} = {_inline(of)}\n" for key, of in value.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_inline(of)}' for key, of in value.items())} }}"
    return json.dumps(value)
