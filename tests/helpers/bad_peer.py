"""The hostile peer of hostile_peer.py as a process of a test's nodes: started, sent in, ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_nodes import ROOT, Node, RealNodes, until

PROGRAM = ROOT / "tests" / "helpers" / "hostile_peer.py"


def run_as_everybody_knows_it(group: RealNodes) -> dict[str, Any]:
    """Of a run of the paced task."""
    from noloco_node.run import toml
    from noloco_node.training.model import layout_digest

    sys.path.append(str(ROOT / "tests" / "tasks"))
    from paced_task import Paced

    manifest = toml.load(group.root / "run.toml")
    module = Paced(dict(manifest.model.options), manifest.seed).model()
    parameters, layout = sum(p.numel() for p in module.parameters()), layout_digest(module).hex()
    return {"run_id": manifest.run_id, "layout": layout, "parameters": parameters, "codec": manifest.outer.codec}


class BadPeer:
    """`told`: the attack and its options. It begins at once, by these doors: addresses of nodes."""

    def __init__(
        self, group: RealNodes, doors: list[str], told: dict[str, Any], *, at: str, within: Sequence[str] = ()
    ) -> None:
        self.log = unused(group.root)
        told = {"run": run_as_everybody_knows_it(group), "log": str(self.log), "at": at, **told}
        told["home"] = str(self.log.with_suffix(""))
        with self.log.with_suffix(".err").open("wb") as err:
            self._process = subprocess.Popen(
                [*within, sys.executable, str(PROGRAM), json.dumps(told)],
                env=group.environ,
                stdin=subprocess.PIPE,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )
        assert self._process.stdin
        self._process.stdin.write(json.dumps(doors).encode() + b"\ngo\n")
        self._process.stdin.flush()

    def told(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [said for line in lines if (said := json.loads(line))["event"] == event]

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=10)


@contextmanager
def bad_peer(group: RealNodes, victims: list[Node], at: str = "127.0.0.66", **told: Any) -> Iterator[BadPeer]:
    """Begun: it has its identities and knows its victims."""
    doors = [until(lambda node=node: node.ask("status").get("addresses"), "a door")[0] for node in victims]
    peer = BadPeer(group, doors, told, at=at)
    try:
        until(lambda: peer.told("ready") or peer._process.poll() is not None, "the bad peer", 180)
        assert peer._process.poll() is None, peer.log.with_suffix(".err").read_text()[-2000:]
        yield peer
    finally:
        peer.end()


def unused(folder: Path) -> Path:
    number = len([*folder.glob("bad-*.err")])
    return folder / f"bad-{number}.jsonl"
