"""The part of HTTP/1.1 that one page needs: parses a request's head strictly, writes a response's head.

Pure: bytes in, values out. Any request that is not plainly correct is refused with one sentence and the connection is
closed, so no proxy can read the same bytes as another request. No chunked bodies, no ranges, no compression.

Not a library's, measured: h11 saves 3 of 112 lines and accepts folded fields, bare line feeds and HTTP/2.0, which are
refused here; aiohttp saves about 110 lines of this file and server.py, costs 0.16 s at the start, has no deadline for a
slow head, and refuses malformed requests in its own way (20 of 70 tests fail).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

MAX_HEAD_BYTES = 8 << 10
"""A browser's is below 1 kB, but it may add cookies of other servers on this machine."""
MAX_BODY_BYTES = 1 << 10
"""A request's meaning is in its head: a body is read and ignored."""

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,2000}) HTTP/1\.([01])")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):([\x21-\x7e\x80-\xff \t]*)")
_MAX_FIELDS = 64
_ONCE = {"host", "origin", "authorization", "content-length", "connection"}
_GUARDED = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every response: load nothing from other sites, forbid framing and embedding, store nothing."""


class RefusedRequest(Exception):
    """A request that is answered with an error status and one sentence."""

    def __init__(self, status: HTTPStatus, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without the query, which is ignored."""
    headers: Mapping[str, str]
    """By their names in lower case."""
    keep_alive: bool
    """Whether the connection may serve another request after this one."""
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


def request_of(head: bytes) -> Request:
    """A head up to and with its empty line. Raises RefusedRequest."""
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
    if len(rest) > _MAX_FIELDS:
        raise RefusedRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_FIELDS} header fields")
    headers = _fields(rest)
    keep_alive = line[3] == "1" and headers.get("connection", "").lower() != "close"
    return Request(line[1], line[2].partition("?")[0], headers, keep_alive, _body_bytes(headers))


def _fields(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "a header field is malformed")
        name = match[1].lower()
        if name in found and name in _ONCE:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, f"the header field {name} is given twice")
        found[name] = match[2].strip()
    if "transfer-encoding" in found:
        raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "a chunked body is not accepted here")
    return found


def _body_bytes(headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,18}", length):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
    if int(length) > MAX_BODY_BYTES:
        raise RefusedRequest(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have at most {MAX_BODY_BYTES} bytes here"
        )
    return int(length)


def head_of(response: Response, *, keep_alive: bool, length: int | None) -> bytes:
    """`length` None: the body ends with the connection."""
    lines = [
        f"HTTP/1.1 {response.status.value} {response.status.phrase}",
        f"Content-Type: {response.content_type}",
        *([] if length is None else [f"Content-Length: {length}"]),
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
        *(f"{name}: {value}" for name, value in {**_GUARDED, **response.headers}.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
