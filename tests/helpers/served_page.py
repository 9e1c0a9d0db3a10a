"""The page of a fake node, served on uvloop as real nodes do, in a thread of its own: a test may block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from fake_node import FakeNode

from noloco_node.web import server


class Served:
    def __init__(self, node: FakeNode, token_file: Path, port: int) -> None:
        self.node, self.token_file, self.url = node, token_file, ""
        self._port, self._ready = port, threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60), "it does not start"

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        async with server.page(f"127.0.0.1:{self._port}", self.node, self.token_file) as self.url:
            self._ready.set()
            await self._done.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()


@contextmanager
def served(node: FakeNode, directory: Path, port: int = 0) -> Iterator[Served]:
    page = Served(node, directory / "web.token", port)
    try:
        yield page
    finally:
        page.close()
