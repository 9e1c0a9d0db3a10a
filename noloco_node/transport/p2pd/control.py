"""Requests to p2pd over its control socket: identify, connect, open a stream, hand over the streams that come in.

Each request is one connection to that socket; one that opens a stream becomes the stream. Every method may raise
`OSError`, whatever went wrong; the caller sets the deadline. The messages are hivemind's (`p2pd_pb2`), handed in so
that this module does not import hivemind; so is `multiaddr`, which knows the binary form of addresses.
Protocol: https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md
"""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import base58
from google.protobuf.message import DecodeError

from noloco_node.base.addresses import Address, parse
from noloco_node.errors import UsageError
from noloco_node.transport.grpc_bridge import BUFFER_BYTES, FarEnd, Streams
from noloco_node.wire import varint

_MAX_LENGTH_BITS = 14  # a length in three groups of 7 bits, so 2 MiB: its answers are a few addresses
_CONNECT_S = 5.0  # for `try_connect`, where it knows the addresses
_CODES = {"ip4": 4, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55, "tcp": 6, "udp": 273, "quic-v1": 461}
_CODES |= {"ws": 477, "wss": 478}  # of multiaddr's table, as are 421 and 290 here, as varints:
_P2P, _CIRCUIT = b"\xa5\x03", b"\xa2\x02"
_IP_BYTES = {b"\x04": 5, b"\x29": 17}  # of an address by the code that it begins with, IPv4's or IPv6's
_RELAYED = re.compile(rb"(.*?)\xa5\x03[\x20-\x40](.{32,64})\xa2\x02", re.DOTALL)


class P2pdControl:
    def __init__(self, socket: Path, messages: Any, multiaddr: Any) -> None:
        self._socket = socket
        self._messages = messages
        self._multiaddr = multiaddr

    async def identify(self) -> list[Address]:
        """Where it can be reached over TCP, as far as it knows. QUIC is for ways through routers alone."""
        answer, stream = await self._ask(type=self._messages.Request.IDENTIFY)
        stream[1].close()
        found = []
        for binary in answer.identify.addrs:
            with suppress(UsageError, ValueError):  # a kind that it does not listen on; a name that it announces
                found.append(parse(str(self._multiaddr(binary))))
        return [address for address in found if address.transport == "tcp"]

    async def find_connected(self, peer: str) -> FarEnd | None:
        """Where a peer is that has a connection to p2pd."""
        answer, stream = await self._ask(type=self._messages.Request.LIST_PEERS)
        stream[1].close()
        wanted = base58.b58decode(peer)
        ways = (self._far_end(each.id, address) for each in answer.peers if each.id == wanted for address in each.addrs)
        return min(ways, key=lambda far_end: (far_end.relayed, far_end.quic is None), default=None)

    async def try_connect(self, peer: str, addresses: Sequence[Address]) -> None:
        """`connect`, where a peer that does not answer is no failure."""
        with suppress(OSError):
            async with asyncio.timeout(_CONNECT_S):
                await self.connect(peer, addresses)

    async def connect(self, peer: str, addresses: Sequence[Address] = (), within_s: int | None = None) -> None:
        """Be connected to a peer, which may be at these addresses; without any, p2pd looks for it. p2pd itself gives up
        after `within_s`: it tries on for a minute where it is not told when to stop."""
        addrs = list(map(self._binary, addresses))
        request = self._messages.ConnectRequest(peer=base58.b58decode(peer), addrs=addrs, timeout=within_s)
        _, stream = await self._ask(type=self._messages.Request.CONNECT, connect=request)
        stream[1].close()

    async def open_stream(self, peer: str, protocol: str, within_s: int | None = None) -> tuple[Streams, FarEnd]:
        request = self._messages.StreamOpenRequest(peer=base58.b58decode(peer), proto=[protocol], timeout=within_s)
        answer, stream = await self._ask(type=self._messages.Request.STREAM_OPEN, streamOpen=request)
        try:
            return stream, self._about(answer.streamInfo)
        except OSError:
            stream[1].transport.abort()
            raise

    async def hand_over_streams(self, protocol: str, listener: Path) -> None:
        """From now on p2pd connects to `listener`, a unix socket, for each stream of this protocol."""
        address = self._multiaddr(f"/unix{listener}").to_bytes()
        request = self._messages.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        _, stream = await self._ask(type=self._messages.Request.STREAM_HANDLER, streamHandler=request)
        stream[1].close()

    async def read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        """Who sends a stream that is handed over: the message at its beginning."""
        about = self._messages.StreamInfo()
        await read(reader, about)
        return self._about(about)

    def _about(self, info: Any) -> FarEnd:
        return self._far_end(info.peer, info.addr)

    def _far_end(self, peer: bytes, binary: bytes) -> FarEnd:
        relayed = _RELAYED.fullmatch(binary)
        text = self._words(relayed[1] if relayed else binary)
        quic = None
        if not relayed and text.endswith("/quic-v1"):
            with suppress(UsageError):  # with the name of a network interface
                quic = parse(text)
        return FarEnd(_text(peer), text.split("/")[2], _text(relayed[2]) if relayed else "", quic)

    def _words(self, binary: bytes) -> str:
        """p2pd knows transports that hivemind cannot name, as webtransport, and dials a peer over any at which the peer
        says that it listens. The IP address is at the beginning."""
        try:
            with suppress(ValueError):
                return str(self._multiaddr(binary))
            return str(self._multiaddr(binary[: _IP_BYTES.get(binary[:1])]))
        except ValueError as error:
            raise ConnectionError("it is not known where the peer is") from error

    def _binary(self, address: Address) -> bytes:
        """In binary, without its peer. hivemind writes a relay's id as a CID, but p2pd wants the multihash; and it
        refuses names that p2pd looks up, as one with an underscore."""
        ip, name, (base, *over) = address.ip, address.host.encode(), address.transport.split("/")
        host = ip.packed if ip else varint.to_bytes(len(name)) + name
        parts = _code(address.kind), host, _code(base), address.port.to_bytes(2), *map(_code, over)
        binary = b"".join(parts)
        if address.relay:
            relay = base58.b58decode(address.relay)
            binary += _P2P + bytes([len(relay)]) + relay + _CIRCUIT
        return binary

    async def _ask(self, **request: Any) -> tuple[Any, Streams]:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=BUFFER_BYTES)
        try:
            write(writer, self._messages.Request(**request))
            answer = self._messages.Response()
            await read(reader, answer)
            if answer.type == self._messages.Response.ERROR:
                raise ConnectionError(answer.error.msg)
        except BaseException:
            writer.transport.abort()
            raise
        return answer, (reader, writer)


def _code(protocol: str) -> bytes:
    return varint.to_bytes(_CODES[protocol])


def _text(peer: bytes) -> str:
    return str(base58.b58encode(peer), "ascii")


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    """A message after its length as a varint, as everywhere in libp2p."""
    body = message.SerializeToString()
    writer.write(varint.to_bytes(len(body)) + body)


async def read(reader: asyncio.StreamReader, message: Any) -> None:
    """Fill `message` with the next one. Raises ConnectionError where it is not whole."""
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
        raise ConnectionError("the message is cut off") from error
    raise ConnectionError("the message is too long")
