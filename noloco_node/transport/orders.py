"""What is said to p2pd over its control socket: who are you, connect, open a stream, hand me the streams that come in.

Each order is one connection to that socket; the one that opens a stream becomes the stream. Every method may raise
`OSError`, whatever went wrong; deadlines are the caller's. The messages are hivemind's (`p2pd_pb2`), handed in so that
this module does not import hivemind.
Protocol: https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md
"""

import asyncio
from pathlib import Path
from typing import Any

import base58
from google.protobuf.message import DecodeError

from noloco_node.transport.bridge import BUFFER_BYTES, Streams

_MAX_LENGTH_BITS = 14  # a length in three groups of 7 bits, so 2 MiB: its answers are a few addresses


class Orders:
    def __init__(self, socket: Path, messages: Any) -> None:
        self._socket = socket
        self._messages = messages

    async def identify(self) -> list[bytes]:
        """The addresses it can be reached at, in binary form."""
        answer, stream = await self._ask(type=self._messages.Request.IDENTIFY)
        stream[1].close()
        return list(answer.identify.addrs)

    async def connect(self, peer: str) -> None:
        order = self._messages.ConnectRequest(peer=base58.b58decode(peer))
        _, stream = await self._ask(type=self._messages.Request.CONNECT, connect=order)
        stream[1].close()

    async def open_stream(self, peer: str, protocol: str) -> Streams:
        order = self._messages.StreamOpenRequest(peer=base58.b58decode(peer), proto=[protocol])
        _, stream = await self._ask(type=self._messages.Request.STREAM_OPEN, streamOpen=order)
        return stream

    async def hand_over_streams(self, protocol: str, listener: bytes) -> None:
        """From now on p2pd connects to `listener`, a binary multiaddr, for each stream of this protocol."""
        order = self._messages.StreamHandlerRequest(addr=listener, proto=[protocol], balanced=False)
        _, stream = await self._ask(type=self._messages.Request.STREAM_HANDLER, streamHandler=order)
        stream[1].close()

    async def read_caller(self, reader: asyncio.StreamReader) -> str:
        """The first words of a stream that is handed over: the peer id that libp2p has proved."""
        about = self._messages.StreamInfo()
        await _read(reader, about)
        return str(base58.b58encode(about.peer), "ascii")

    async def _ask(self, **order: Any) -> tuple[Any, Streams]:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=BUFFER_BYTES)
        try:
            _write(writer, self._messages.Request(**order))
            answer = self._messages.Response()
            await _read(reader, answer)
            if answer.type == self._messages.Response.ERROR:
                raise ConnectionError(answer.error.msg)
        except BaseException:
            writer.transport.abort()
            raise
        return answer, (reader, writer)


def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    body = message.SerializeToString()
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    writer.write(bytes(prefix) + body)


async def _read(reader: asyncio.StreamReader, message: Any) -> None:
    length = shift = 0
    try:
        while shift <= _MAX_LENGTH_BITS:
            (byte,) = await reader.readexactly(1)
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                message.ParseFromString(await reader.readexactly(length))
                return
    except (asyncio.IncompleteReadError, DecodeError) as error:
        raise ConnectionError("p2pd broke off") from error
    raise ConnectionError("p2pd announced a message beyond all measure")
