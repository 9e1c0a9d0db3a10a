"""A real node, started by its command line as a user would, and asked over its control socket."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noloco_node.bench.workers import descendants, serve
from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NolocoError
from noloco_node.host.config import PREFIX
from noloco_node.host.home import Home
from noloco_node.host.memory import process_bytes

_POLL_S = 0.2


class Member:
    def start(self, home: str, address: str, words: Sequence[str], environ: dict[str, str], *, paused: bool) -> None:
        """`paused`: as its user left it, so that it is ready and waits for `resume`."""
        self._home = Home(Path(home)).create()
        if paused:
            (self._home.root / "paused").touch()
        self._log = self._home.root / "output"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        command = [sys.executable, "-P", "-m", "noloco_node", *words, "--home", home]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--listen", f"/ip4/{address}/tcp/0"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**clean, **environ},
            )

    async def until(self, state: str, patience_s: float, peers: int = 0, committed: int = 0) -> dict[str, Any]:
        """Its status, once it is in this state, sees so many peers, and has so many rounds behind it."""
        deadline, view = time.monotonic() + patience_s, None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise NolocoError(f"a node ended: {self._last_words()}")
            with suppress(NolocoError):
                view = await socket_client.ask(self._home, ControlClient.status)
                if view.state == state and view.peers_seen >= peers and view.rounds.committed >= committed:
                    return self._said(view)
            await asyncio.sleep(_POLL_S)
        seen = f"it is {view.state} and sees {view.peers_seen} peers" if view else "it does not answer"
        raise NolocoError(f"a node is not {state} with {peers} peers within {patience_s:.0f} s: {seen}")

    async def status(self) -> dict[str, Any]:
        return self._said(await socket_client.ask(self._home, ControlClient.status))

    def _said(self, view: Any) -> dict[str, Any]:
        """`rss`: bytes in memory, of the node and of its network daemon."""
        return {
            **asdict(view),
            "at": time.time(),
            "rss": [process_bytes(pid) or 0 for pid in descendants(self._process.pid)],
        }

    async def resume(self) -> dict[str, Any]:
        await socket_client.ask(self._home, ControlClient.resume)
        return {"at": time.time()}

    async def leave(self) -> None:
        with suppress(NolocoError):
            await socket_client.ask(self._home, ControlClient.leave)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    serve(Member())
