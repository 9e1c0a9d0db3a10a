"""The web page's server, on asyncio: one page for a few people, off unless its owner names an address.

Every wait has a deadline and every buffer a bound, so no client can use memory or descriptors without limit. routes.py
decides what is answered, http.py and access.py what is refused. http.py says why this is not a library's.
"""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

from noloco_node.errors import PortInUse, UsageError
from noloco_node.web.access import token_in
from noloco_node.web.http import MAX_HEAD_BYTES, RefusedRequest, Request, Response, head_of, request_of
from noloco_node.web.live import MAX_LISTENERS, Live
from noloco_node.web.routes import Node, Site

MAX_CONNECTIONS = 32
"""A browser opens up to six, and a live page keeps one. As many more are answered with 503; beyond that, connections
are closed."""
REQUEST_S = 15.0
"""For a whole request to arrive, counted from the end of the previous one; an idle client connects again."""
SEND_S = 15.0
"""For a client to read what it was sent."""
HANG_UP_S = 1.0
"""For a refused client to read the reason: closing at once, while it still sends, would reset the connection."""
_READS_AFTER_REFUSAL = 64
_TOO_MANY = RefusedRequest(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: try again in a moment")


@asynccontextmanager
async def page(address: str, node: Node, token_file: Path) -> AsyncIterator[str]:
    """Serve at `host:port` while the context lasts; its value is the page's address. Raises PortInUse, UsageError."""
    token = token_in(token_file)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    connections = _Connections(Site(node, token), Live(node))
    try:
        server = await asyncio.start_server(connections.accept, host, int(port), limit=MAX_HEAD_BYTES)
    except OSError as error:
        raise _cannot_listen(address, error) from error
    bound = server.sockets[0].getsockname()[1]
    try:
        yield _url(host, bound)
    finally:
        for listening in server.sockets:  # a data loader's forked worker has it too, and would keep the port
            with socket.fromfd(listening.fileno(), listening.family, listening.type) as here:
                here.shutdown(socket.SHUT_RDWR)
        server.close()
        await connections.close()
        await server.wait_closed()


class _Connections:
    def __init__(self, site: Site, live: Live) -> None:
        self._site, self._live = site, live
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= 2 * MAX_CONNECTIONS:  # beyond this, close without an answer
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        writer.transport.set_write_buffer_limits(high=0)  # after drain(), nothing is left in this process
        try:
            if len(self._open) > MAX_CONNECTIONS:
                await _refuse(reader, writer, _TOO_MANY)
            else:
                while await self._serve_one(reader, writer):
                    pass
        except (OSError, EOFError):  # the client is gone, or too slow (a TimeoutError is an OSError)
            writer.transport.abort()
        finally:
            writer.close()

    async def close(self) -> None:
        await self._live.end()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may serve another request."""
        try:
            request = await _next_request(reader)
            response = await self._site.answer(request)
            if response is None and self._live.listeners >= MAX_LISTENERS:
                raise RefusedRequest(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_LISTENERS} pages are open already: close one"
                )
        except RefusedRequest as refused:
            await _refuse(reader, writer, refused)
            return False
        if response is None:
            await self._send_events(writer, request)
            return False
        await _send(writer, response, keep_alive=request.keep_alive, body=request.method != "HEAD")
        return request.keep_alive

    async def _send_events(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """Until the client stops reading."""
        head = head_of(Response(b"", "text/event-stream"), keep_alive=False, length=None)
        await _write(writer, head)
        if request.method == "HEAD":
            return
        async with aclosing(self._live.events()) as events:
            async for event in events:
                await _write(writer, event)


async def _next_request(reader: asyncio.StreamReader) -> Request:
    """Raises RefusedRequest; OSError, EOFError or TimeoutError if no whole request arrives."""
    async with asyncio.timeout(REQUEST_S):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise RefusedRequest(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is longer than {MAX_HEAD_BYTES} bytes"
            ) from None
        request = request_of(head)
        await reader.readexactly(request.body_bytes)
        return request


async def _send(writer: asyncio.StreamWriter, response: Response, *, keep_alive: bool, body: bool = True) -> None:
    head = head_of(response, keep_alive=keep_alive, length=len(response.body))
    await _write(writer, head + response.body if body else head)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if writer.transport.is_closing():  # the connection was reset; uvloop's write would raise RuntimeError
        raise ConnectionResetError
    writer.write(data)
    async with asyncio.timeout(SEND_S):
        await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: RefusedRequest) -> None:
    """Send the reason, and close without resetting the connection while the client still reads."""
    response = Response(f"{why}\n".encode(), "text/plain; charset=utf-8", why.status, why.headers)
    await _send(writer, response, keep_alive=False)
    writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            for _ in range(_READS_AFTER_REFUSAL):
                if not await reader.read(MAX_HEAD_BYTES):
                    return


def _url(host: str, port: int) -> str:
    address = ipaddress.ip_address(host)
    if address.is_unspecified:  # all interfaces, so loopback too
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _cannot_listen(address: str, error: OSError) -> PortInUse | UsageError:
    page, another = f"the web page cannot be served at {address}", "choose another address or port with --web"
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"{page}, its port is in use by another program: {another}")
    if error.errno == errno.EADDRNOTAVAIL:  # which may come: of a VPN, as the machine starts
        return PortInUse(f"{page}, which is no address of this machine at this moment: {another}")
    return UsageError(f"{page} ({os.strerror(error.errno or 0).lower()}): {another}")
