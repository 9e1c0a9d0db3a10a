"""What is said to p2pd over its control socket: who are you, connect, open a stream, hand me the streams that come in.

Each order is one connection to that socket; the one that opens a stream becomes the stream. Every method may raise
`OSError`, whatever went wrong; deadlines are the caller's. The messages are hivemind's (`p2pd_pb2`), handed in so that
this module does not import hivemind; so is `multiaddr`, which knows the binary form of addresses.
Protocol: https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import base58
from google.protobuf.message import DecodeError

from noloco_node.transport.grpc_bridge import BUFFER_BYTES, FarEnd, Streams

_MAX_LENGTH_BITS = 14  # a length in three groups of 7 bits, so 2 MiB: its answers are a few addresses


_P2P, _CIRCUIT = b"\xa5\x03", b"\xa2\x02"  # the codes 421 and 290 of multiaddr's table, as varints
_RELAYED = re.compile(rb"(.*?)\xa5\x03[\x20-\x40].{32,64}\xa2\x02", re.DOTALL)


class P2pdControl:
    def __init__(self, socket: Path, messages: Any, multiaddr: Any) -> None:
        self._socket = socket
        self._messages = messages
        self._multiaddr = multiaddr

    async def identify(self) -> list[str]:
        """The addresses it can be reached at, as far as it knows."""
        answer, stream = await self._ask(type=self._messages.Request.IDENTIFY)
        stream[1].close()
        return [str(self._multiaddr(address)) for address in answer.identify.addrs]

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> None:
        """Be connected to a peer, which may be at these addresses; without any, p2pd looks for it."""
        order = self._messages.ConnectRequest(
            peer=base58.b58decode(peer), addrs=[self._binary(address) for address in addresses]
        )
        _, stream = await self._ask(type=self._messages.Request.CONNECT, connect=order)
        stream[1].close()

    async def open_stream(self, peer: str, protocol: str) -> tuple[Streams, FarEnd]:
        order = self._messages.StreamOpenRequest(peer=base58.b58decode(peer), proto=[protocol])
        answer, stream = await self._ask(type=self._messages.Request.STREAM_OPEN, streamOpen=order)
        return stream, self._about(answer.streamInfo)

    async def hand_over_streams(self, protocol: str, listener: Path) -> None:
        """From now on p2pd connects to `listener`, a unix socket, for each stream of this protocol."""
        address = self._multiaddr(f"/unix{listener}").to_bytes()
        order = self._messages.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        _, stream = await self._ask(type=self._messages.Request.STREAM_HANDLER, streamHandler=order)
        stream[1].close()

    async def read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        """The first words of a stream that is handed over: who sends it."""
        about = self._messages.StreamInfo()
        await read(reader, about)
        return self._about(about)

    def _about(self, info: Any) -> FarEnd:
        relayed = _RELAYED.fullmatch(info.addr)
        address = str(self._multiaddr(relayed[1] if relayed else info.addr))
        return FarEnd(str(base58.b58encode(info.peer), "ascii"), address.split("/")[2], relayed is not None)

    def _binary(self, address: str) -> bytes:
        """Without the last peer's id. hivemind writes that of a relay as a CID, but p2pd wants the multihash."""
        way, *ids = address.split("/p2p/")
        binary = bytes(self._multiaddr(way).to_bytes())
        if len(ids) > 1:
            relay = base58.b58decode(ids[0].removesuffix("/p2p-circuit"))
            binary += _P2P + bytes([len(relay)]) + relay + _CIRCUIT
        return binary

    async def _ask(self, **order: Any) -> tuple[Any, Streams]:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=BUFFER_BYTES)
        try:
            write(writer, self._messages.Request(**order))
            answer = self._messages.Response()
            await read(reader, answer)
            if answer.type == self._messages.Response.ERROR:
                raise ConnectionError(answer.error.msg)
        except BaseException:
            writer.transport.abort()
            raise
        return answer, (reader, writer)


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    """A message behind its length, as libp2p writes them everywhere."""
    body = message.SerializeToString()
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    writer.write(bytes(prefix) + body)


async def read(reader: asyncio.StreamReader, message: Any) -> None:
    """Fill `message` with the next one; anything else than a whole one is a ConnectionError."""
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
        raise ConnectionError("broken off") from error
    raise ConnectionError("a message beyond all measure was announced")
