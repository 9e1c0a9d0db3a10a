"""The page's paths: its files, the views as JSON, metrics, and three actions.

A request in, a response out, without IO; server.py sends the events of `/api/live`.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import Protocol

from noloco_node.views.documents import View, to_json
from noloco_node.web import prometheus
from noloco_node.web.access import check_host, check_write
from noloco_node.web.http import RefusedRequest, Request, Response
from noloco_node.web.live import NodeViews

LIVE = "/api/live"
LARGE_S = 0.5
"""How old an answer with all peers or the whole history may be: of 2048 peers one takes 45 ms, and anybody may ask."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PLAIN = "text/plain; charset=utf-8"


class Node(NodeViews, Protocol):
    """The part of a node that the page uses. Called on the event loop; what is no coroutine returns at once."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def leave(self) -> None: ...


class Site:
    def __init__(self, node: Node, token: str) -> None:
        self._node, self._token = node, token
        self._reads: Mapping[str, Callable[[], Response]] = {
            **{path: lambda file=file: file for path, file in _files().items()},  # type: ignore[misc]
            "/api/status": lambda: _json(node.status()),
            "/api/peers": _seldom(lambda: _json(node.peers())),
            "/api/history": _seldom(lambda: _json(node.history())),
            "/metrics": lambda: Response(prometheus.exposition(node.status()), prometheus.CONTENT_TYPE),
            "/healthz": lambda: Response(b"ok\n", _PLAIN),
            "/readyz": self._ready,
        }
        self._acts: Mapping[str, Callable[[], Awaitable[None] | None]] = {
            "/api/pause": node.pause,
            "/api/resume": node.resume,
            "/api/leave": node.leave,
        }

    async def answer(self, request: Request) -> Response | None:
        """None: it is for the live events. Raises RefusedRequest."""
        check_host(request)
        reads, acts = request.path in self._reads or request.path == LIVE, request.path in self._acts
        if not reads and not acts:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "there is nothing here: the page is at /")
        if request.method not in (allowed := ("GET", "HEAD") if reads else ("POST",)):
            words = " or ".join(allowed)
            raise RefusedRequest(
                HTTPStatus.METHOD_NOT_ALLOWED, f"this path needs {words}", {"Allow": ", ".join(allowed)}
            )
        if acts:
            check_write(request, self._token)
            if waits := self._acts[request.path]():
                await waits
            return _json(self._node.status())
        return None if request.path == LIVE else self._reads[request.path]()

    def _ready(self) -> Response:
        why_not = prometheus.ready(self._node.status())
        if why_not is None:
            return Response(b"ready\n", _PLAIN)
        return Response(f"{why_not}\n".encode(), _PLAIN, HTTPStatus.SERVICE_UNAVAILABLE)


def _files() -> dict[str, Response]:
    """The page's files by path; they are small."""
    page = resources.files("noloco_node.web") / "page"
    found = {
        f"/{file.name}": Response(file.read_bytes(), _TYPES[kind])
        for file in page.iterdir()
        if (kind := file.name.rpartition(".")[2]) in _TYPES
    }
    return {**found, "/": found["/index.html"]}


def _seldom(build: Callable[[], Response]) -> Callable[[], Response]:
    built, last = -LARGE_S, Response(b"", _PLAIN)

    def answer() -> Response:
        nonlocal built, last
        if time.monotonic() - built >= LARGE_S:
            last = build()
            built = time.monotonic()
        return last

    return answer


def _json(view: View) -> Response:
    return Response(to_json(view).encode(), "application/json")
