"""A peer that sends a real node what no node sends: `garbage_peer.py '{"what": ...}'`, an address of the node in it.

`garbage`: random and mutated messages to each method of each service, so many each. `tebibyte`: raw bytes in place of
gRPC, which claim more than there is. `trickle`: a stream that says one byte a second. `streams`: many streams at once.
It prints one JSON document: how the calls ended.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import raw_http2 as http2

from noloco_node.base.addresses import ANY_LOCAL_PORT, parse
from noloco_node.base.identity import Identity
from noloco_node.rounds.service import EXCHANGE, SWAP
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.wire import mirror_pb2 as mirror
from noloco_node.wire import peer_pb2 as pb

WITHIN_S = 10.0
AT_ONCE = 8
LIMIT_S = 90.0
"""After which a stream that nobody closes is given up."""
BEGINNING = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.SETTINGS, http2.ACK, 0)
BYTES = bytes(32)
MADE_HERE, ENDED_BEFORE = "Internal error from Core", "ended before all was sent"
FRAME_HEADER, RESET, GO_AWAY = 9, 3, 7
"""Of HTTP/2."""


def seeds(run_id: bytes, layout: bytes) -> dict[str, list[bytes]]:
    """Each method, with messages that it would understand."""
    terms = {"protocol": 1, "run_id": run_id, "layout": layout}
    offer = pb.Offer(**terms, exchange_id=BYTES[:16], fragments=1, patience_s=1.0)
    frames = [
        pb.SwapFrame(offer=offer),
        pb.SwapFrame(fragment=pb.Fragment(index=0, payload=BYTES)),
        pb.SwapFrame(piece=pb.Piece(data=BYTES, more=True)),
        pb.SwapFrame(ack=pb.Ack(index=0, scale=1.0)),
        pb.SwapFrame(alive=pb.Alive()),
    ]
    state = pb.StateRequest(**terms)
    by_service = {
        "Exchange/Swap": [frame.SerializeToString() for frame in frames],
        "State/Fetch": [state.SerializeToString()],
        "State/Progress": [state.SerializeToString()],
        "State/Sample": [pb.SampleRequest(**terms, blocks=[0, 1]).SerializeToString()],
        "Runs/List": [pb.RunsRequest().SerializeToString()],
        "Runs/Announce": [pb.SignedManifest(manifest=BYTES, author="a" * 52).SerializeToString()],
        "Mirror/Look": [mirror.LookRequest().SerializeToString()],
        "Mirror/Whence": [mirror.WhenceRequest().SerializeToString()],
        "HolePunching/Arrange": [mirror.ArrangeRequest(peer="a" * 52).SerializeToString()],
        "HolePunching/Dial": [
            mirror.DialRequest(peer="a" * 52, address="/ip4/127.0.0.1/udp/1/quic-v1").SerializeToString()
        ],
    }
    known = {**pb.DESCRIPTOR.services_by_name, **mirror.DESCRIPTOR.services_by_name}
    return {
        f"/{known[name.partition('/')[0]].full_name}/{name.partition('/')[2]}": said
        for name, said in by_service.items()
    }


def garbage(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Random bytes, or a message with some bytes changed, left out, or put in twice."""
    if not (said := bytearray(chance.choice(seeds))) or chance.random() < 0.3:
        return chance.randbytes(chance.choice([0, 1, 5, 40, 300]))
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(said) + 1)
        match chance.randrange(4):
            case 0 if place < len(said):
                said[place] = chance.randrange(256)
            case 1:
                del said[place : place + chance.randint(1, 8)]
            case 2:
                said[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                said[place:place] = said[max(0, place - 20) : place]
        if not said:
            break
    return bytes(said)


async def send(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> str:
    """One call, with these messages; how it ended."""
    try:
        if method.endswith("Swap"):
            call: Any = channel.stream_stream(method)(aiter_of(messages), timeout=WITHIN_S)
            async for _ in call:
                pass
        elif method.endswith("Fetch"):
            async for _ in channel.unary_stream(method)(messages[0], timeout=WITHIN_S):
                pass
        else:
            await channel.unary_unary(method)(messages[0], timeout=WITHIN_S)
    except grpc.aio.AioRpcError as error:
        # For a call that the node ended before all was sent, grpc.aio may make a status of its own.
        return ENDED_BEFORE if error.details() == MADE_HERE else error.code().name
    return "answered"


async def aiter_of(messages: list[bytes]) -> Any:
    for message in messages:
        yield message


async def flood(transport: Libp2pTransport, peer: str, told: dict[str, Any]) -> dict[str, Any]:
    channel, chance = transport.channel(peer), random.Random(told["seed"])
    known = seeds(bytes.fromhex(told["run_id"]), bytes.fromhex(told["layout"]))
    ended: dict[str, Counter[str]] = {}
    for method, right in known.items():
        counter = ended[method.rpartition(".")[2].lstrip("/")] = Counter()
        messages = [garbage(chance, right) for _ in range(told["count"])]
        each = 4 if len(right) > 1 else 1
        calls = [messages[at : at + each] for at in range(0, len(messages), each)]
        waiting = asyncio.Semaphore(AT_ONCE)

        async def one(call: list[bytes], method: str = method, counter: Counter[str] = counter) -> None:
            async with waiting:  # noqa: B023 - of this method, whose calls are all awaited below
                counter[await send(channel, method, call)] += len(call)

        await asyncio.gather(*map(one, calls))
    return {name: dict(counter) for name, counter in ended.items()}


async def ended_after(transport: Libp2pTransport, peer: str, first: bytes, then: bytes = b"") -> float:
    """A raw stream: these bytes, then `then` each second. How long until the other end ended the call or the stream."""
    reader, writer = await transport._dial(peer)
    began, said = time.monotonic(), b""
    with suppress(OSError):
        writer.write(first)
        await writer.drain()
        while not call_ended(said) and time.monotonic() - began < LIMIT_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    if not (more := await reader.read(1 << 16)):
                        break
                    said += more
                    continue
            writer.write(then)
            await writer.drain()
    writer.transport.abort()
    return time.monotonic() - began


def call_ended(said: bytes) -> bool:
    """Whether these HTTP/2 frames have the trailers of the call, its reset, or the connection's end."""
    while len(said) >= FRAME_HEADER:
        length, kind, flags = int.from_bytes(said[:3], "big"), said[3], said[4]
        if kind in (RESET, GO_AWAY) or (kind == http2.HEADERS and flags & http2.END_OF_STREAM):
            return True
        said = said[FRAME_HEADER + length :]
    return False


async def raw(transport: Libp2pTransport, peer: str, told: dict[str, Any]) -> dict[str, Any]:
    """What claims too much: an HTTP/2 frame of 16 MiB, a gRPC message of 4 GiB, a protobuf field of 1 TiB, garbage."""
    about = {**http2.REQUEST, ":path": f"/{EXCHANGE}/{SWAP}", **http2.GRPC}
    call = BEGINNING + http2.headers(1, http2.fields(about.items()))
    tebibyte = b"\x12" + b"\x80\x80\x80\x80\x80\x20"  # a length-delimited field of 2**40 bytes
    message = b"\x00" + len(tebibyte).to_bytes(4, "big") + tebibyte
    claims = {
        "garbage": random.Random(told["seed"]).randbytes(200),
        "a frame of 16 MiB": BEGINNING + b"\xff\xff\xff\x00\x00" + (1).to_bytes(4, "big"),
        "a message of 4 GiB": call + http2.frame(http2.DATA, 0, 1, b"\x00\xff\xff\xff\xff"),
        "a field of 1 TiB": call + http2.frame(http2.DATA, 0, 1, message),
    }
    found = {name: await ended_after(transport, peer, said) for name, said in claims.items()}
    found["nothing"] = await ended_after(transport, peer, b"")
    found["one byte a second"] = await ended_after(transport, peer, b"P", b"R")
    return found


async def streams(transport: Libp2pTransport, peer: str, told: dict[str, Any]) -> dict[str, Any]:
    """So many, one after another without closing any."""
    kept, refused = [], 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    began = time.monotonic()
    for _ in range(told["count"]):
        try:
            async with asyncio.timeout(WITHIN_S):
                kept.append(await transport._dial(peer))
        except (OSError, TimeoutError):
            refused += 1
    seconds = time.monotonic() - began
    for _, writer in kept:
        writer.transport.abort()
    return {"opened": len(kept), "refused": refused, "seconds": seconds}


WHAT = {"garbage": flood, "raw": raw, "streams": streams}


async def main(told: dict[str, Any]) -> None:
    address = parse(told["door"])
    transport = Libp2pTransport(Identity.load_or_create(Path(told["key"])), ANY_LOCAL_PORT, bootstrap=[address])
    await transport.start()
    try:
        found = await WHAT[told["what"]](transport, address.peer, told)
        print(json.dumps(found), flush=True)  # noqa: T201
    finally:
        await transport.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
