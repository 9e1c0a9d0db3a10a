"""A hostile peer, written against proto/ alone: it shares the messages and the transport with a node, and no logic.

As a program it carries out one attack until it is killed: `hostile_peer.py '{"attack": ...}'`. It reads its victims'
addresses from stdin, a JSON list in one line, and after `ready` in its log waits for a line more.

What it sends is made by hand. A plain codec's vector is what the victim sent, changed. Of a lattice fragment it needs
neither the victim's weights nor the dither: the victim sends its ranges, its sample and its codes first, so a payload
that echoes them and adds d to each code is a correction of d half steps, with checksums that fit. And whoever sends a
wrong digest is asked for all of k: 24 bits an element that it may choose. Its log is one JSON document a line.
"""

import asyncio
import hashlib
import json
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from grpc import RpcError
from grpc.aio import EOF, Channel

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import Identity
from noloco_node.transport.grpc_bridge import Outbound
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import peer_pb2_grpc as services

PROTOCOL = 1
BLOCK = 256
FRAGMENT = 1 << 20
PIECE_BYTES = 128 << 10
TTL_S = 60.0
OUTBOX = 64
WEIGHTS_ORDER = (0x2C1B3, 0x1A85D, 0x3AD45)
LOWEST, WIDER = (127 - 90) * 4, 24
"""The smallest range's code; and by how many quarter octaves an agreed range may exceed the smaller wish."""
DOWN = 8
"""Quarter octaves that a sample equal to the victim's own takes off the larger wish."""
HALF, LOUDEST = 8, 7
"""Steps in half a range of four bits; and the largest d whose sign is certain."""

BROKEN = (RpcError, OSError, asyncio.InvalidStateError)
"""How a call ends that the other side ended."""

Bits = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    """What everybody may know of a run."""

    run_id: str
    layout: str
    parameters: int
    codec: str

    def bounds(self, index: int) -> tuple[int, int]:
        return index * FRAGMENT, min((index + 1) * FRAGMENT, self.parameters)

    @property
    def fragments(self) -> int:
        return max(1, -(-self.parameters // FRAGMENT))

    @property
    def terms(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "run_id": bytes.fromhex(self.run_id), "layout": bytes.fromhex(self.layout)}


# ---- what a fragment says ----
@dataclass
class Aim:
    """Where a victim's weights are to go. `kind`: one word of `vector`, `steps` or `away`."""

    kind: str
    size: float = 1.0
    known: Bits | None = None
    """The victim's φ as it sent it to whoever asked: its u is close by."""
    first: Bits | None = None
    """φ as it was when the attack began."""
    task: "Paced | None" = None

    def vector(self, u: Bits, start: int) -> Bits:  # noqa: PLR0911 - one for each kind
        """u', of what the victim is known or thought to have."""
        end, norm = start + len(u), float(np.linalg.norm(u))
        rng = np.random.default_rng([7, start])
        match self.kind:
            case "flip":
                return -u
            case "times":
                return self.size * u
            case "noise":
                return self.size * _of_norm(rng.normal(size=len(u)), norm)
            case "far":  # so far in every element
                return u + self.size * rng.choice([-1.0, 1.0], len(u))
            case "largest":
                return np.full(len(u), 1e30)
        if (away := self.away(start, end)) is not None:
            return u + 2 * (away if self.kind == "steer" else _of_norm(away, self.size * norm / 100))
        return u

    def away(self, start: int, end: int) -> Bits | None:
        """The direction of c; of `steer`, c itself."""
        part = slice(start, end)
        match self.kind:
            case "creep" if self.known is not None:
                return np.random.default_rng([7, start]).choice([-1.0, 1.0], len(self.known[part]))
            case "undo" if self.known is not None and self.first is not None:
                return (self.first - self.known)[part].astype(np.float64)
            case "steer" if self.known is not None and self.task is not None:
                return self.task.worse(self.known, self.size)[part]
            case "blind" if self.known is not None and self.task is not None:
                return self.task.unseen(self.known)[part]
            case "uphill" if self.known is not None and self.task is not None:
                return self.task.gradient(self.known)[part]
        return None

    def steps(self, step: Bits, usual: Bits, start: int) -> Bits | None:
        """d of each element, in steps of its block; None where the wrong digest is better. `usual`: the steps of the
        range that the victim wished for."""
        rng, shape = np.random.default_rng([7, start]), (len(step), BLOCK)
        if self.kind == "far":
            return LOUDEST * rng.choice([-1, 1], shape)
        if self.kind == "largest":
            return None
        if self.kind in ("zeros", "tiny", "honest") or self.known is None:
            return np.zeros(shape, np.int64)
        if (away := self.away(start, start + FRAGMENT)) is not None:
            c = (
                _padded(away)
                if self.kind == "steer"
                else _of_norm(_padded(away), self.size * _norm(usual[:, None], shape))
            )
            return np.clip(np.floor(2 * c / step[:, None] + rng.random(shape)), -LOUDEST, LOUDEST).astype(np.int64)
        return None


class Paced:
    """What everybody who has the task of tests/tasks/paced_task.py knows: the data that victims judge by."""

    def __init__(self, outputs: int, seed: int = 1) -> None:
        import paced_task

        task = paced_task.Paced({"outputs": outputs}, seed)
        self._inputs, self._targets = (part.double().numpy() for part in task._held_out)
        self._teacher = task._teacher.double().numpy()

    def loss(self, phi: Bits) -> float:
        weight, bias = self._parts(phi)
        return float(((self._inputs @ weight.T + bias - self._targets) ** 2).mean())

    def real_loss(self, phi: Bits) -> float:
        """On all inputs."""
        weight, bias = self._parts(phi)
        return float((((weight.T - self._teacher) ** 2).sum() + (bias**2).sum()) / len(bias))

    def worse(self, phi: Bits, factor: float) -> Bits:
        """The shortest way to a held-out loss that is `factor` of what it is."""
        up, low, high = self.gradient(phi), 0.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.loss(phi + middle * up) > factor * self.loss(phi) else (middle, high)
        return low * up

    def unseen(self, phi: Bits) -> Bits:
        """Away from the teacher, where no held-out example shows it."""
        weight, bias = self._parts(phi)
        away = weight - self._teacher.T
        seen = np.linalg.pinv(self._inputs) @ self._inputs
        return np.concatenate([(away - away @ seen).ravel(), 0 * bias])

    def gradient(self, phi: Bits) -> Bits:
        weight, bias = self._parts(phi)
        error = 2 * (self._inputs @ weight.T + bias - self._targets) / self._targets.size
        return np.concatenate([(error.T @ self._inputs).ravel(), error.sum(0)])

    def _parts(self, phi: Bits) -> tuple[Bits, Bits]:
        bias = len(phi) // (self._inputs.shape[1] + 1)
        return phi[:-bias].astype(np.float64).reshape(bias, -1), phi[-bias:].astype(np.float64)


class Plain:
    """A fragment in bf16, fp32 or int8: one payload each way."""

    turns = 1

    def __init__(self, codec: str, aim: Aim, start: int) -> None:
        self._codec, self._aim, self._start = codec, aim, start
        self.norm = 0.0
        """Of what the victim has sent."""

    def answer(self, payload: bytes) -> bytes:
        match self._codec:
            case "fp32":
                return self._wanted(np.frombuffer(payload, "<f4")).astype("<f4").tobytes()
            case "bf16":
                u = (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
                return (self._wanted(u).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
            case "int8":
                return self._int8(payload)
        raise ValueError(self._codec)

    def _wanted(self, u: Bits) -> Bits:
        self.norm = float(np.linalg.norm(u.astype(np.float64)))
        return self._aim.vector(u.astype(np.float64), self._start)

    def _int8(self, payload: bytes) -> bytes:
        size = len(payload) * BLOCK // (BLOCK + 1)
        while size + -(-size // BLOCK) < len(payload):
            size += 1
        blocks = -(-size // BLOCK)
        exponents = np.frombuffer(payload, np.int8, blocks).astype(np.int32)
        codes = np.frombuffer(payload, np.int8, size, blocks)
        wanted = _padded(self._wanted(codes * np.exp2(np.repeat(exponents, BLOCK)[:size].astype(np.float64))))
        peaks = np.maximum(np.abs(wanted).max(1), 2.0**-100)
        exponents = np.clip(np.ceil(np.log2(peaks / 127)), -107, 120).astype(np.int32)
        scaled = np.rint(wanted / np.exp2(exponents.astype(np.float64))[:, None]).astype(np.int8)
        return exponents.astype(np.int8).tobytes() + scaled.reshape(-1)[:size].tobytes()


class Lattice:
    """A fragment in lattice:4."""

    def __init__(self, aim: Aim, start: int, end: int, wider: int = 0) -> None:
        """`wider`: quarter octaves, up to WIDER, from the victim's wish to the range that is agreed."""
        self._aim, self._start, self._blocks, self._wider = aim, start, -(-(end - start) // BLOCK), wider
        self._answers = [self._ranges, self._codes, self._whole]
        self.turns = 2
        self.norm = 0.0 if aim.known is None else float(np.linalg.norm(aim.known[start:end].astype(np.float64)))
        """Of what the victim is known to have."""
        self.step_norm = 0.0
        """Of one step in every element: what ‖c‖ would be for d = 2."""

    def answer(self, payload: bytes) -> bytes:
        return self._answers.pop(0)(payload)

    def _ranges(self, payload: bytes) -> bytes:
        """Echo the victim's sample, which takes DOWN off the larger wish, so that the agreed range is what we want."""
        base, margin = struct.unpack_from("<HBx", payload)
        blocks = self._blocks
        wished = np.frombuffer(payload, np.uint8, blocks, 4).astype(np.int32) + base
        if self._aim.kind == "tiny":
            codes, agreed, sample = np.full(blocks, LOWEST), np.full(blocks, LOWEST), payload[4 + blocks :]
        else:
            codes, agreed, sample = wished + DOWN + self._wider, wished + self._wider, payload[4 + blocks :]
        self._wished = (wished << 21).astype(np.int32).view(np.float32).astype(np.float64)
        self._range = (agreed << 21).astype(np.int32).view(np.float32).astype(np.float64)
        self.step_norm = float(np.linalg.norm(self._range) / HALF * BLOCK**0.5)
        base = int(codes.min())
        return struct.pack("<HBx", base, margin) + (codes - base).astype(np.uint8).tobytes() + sample

    def _codes(self, payload: bytes) -> bytes:
        blocks = len(self._range)
        packed = np.frombuffer(payload, np.uint8, 128 * blocks).reshape(blocks, 128)
        low = np.concatenate([packed & 15, packed >> 4], 1).astype(np.int64)
        checks = np.frombuffer(payload, "<u2", blocks, 128 * blocks).astype(np.int64)
        (digest,) = struct.unpack_from("<I", payload, 130 * blocks)
        d = self._aim.steps(self._range / HALF, self._wished / HALF, self._start)
        if d is None:
            self.turns = 3
            self._all = self._k()
            sums, d = (self._all * _weights()).sum(1) % (1 << 32), np.zeros_like(low)
            theirs = int((sums * _odd(blocks)).sum() % (1 << 32))
        else:
            theirs = int((digest + ((d * _weights()).sum(1) * _odd(blocks)).sum()) % (1 << 32))
        known = (checks << 4) + (low * _weights()).sum(1) % 16  # the lowest 20 bits of the victim's sums
        moved = (known + (d * _weights()).sum(1)) % (1 << 20) >> 4
        codes = (low + d) % 16
        halves = (codes[:, :128] | codes[:, 128:] << 4).astype(np.uint8)
        return halves.tobytes() + moved.astype("<u2").tobytes() + struct.pack("<I", theirs)

    def _k(self) -> Bits:
        """24 bits of each element, as far as we want them to be from zero."""
        known = self._aim.known
        u = np.zeros(len(self._range) * BLOCK) if known is None else known[self._start : self._start + FRAGMENT]
        wanted = _padded(self._aim.vector(u.astype(np.float64), self._start))
        limit = (1 << 23) - (1 << 20)  # so that no difference from what the victim has needs a 25th bit
        return np.clip(np.rint(wanted * (HALF / self._range)[:, None]), -limit, limit).astype(np.int64)

    def _whole(self, payload: bytes) -> bytes:
        k = self._all & 0xFFFFFF
        return np.stack([k >> 8 * plane & 0xFF for plane in range(3)], 1).astype(np.uint8).tobytes()


def _weights() -> Bits:
    x = np.arange(1 << 14, dtype=np.int64)
    for odd in WEIGHTS_ORDER:
        x = (x * odd + 0x1B56C) & 0x3FFF
        x ^= x >> 7
    return 2 * x[:BLOCK] + 1


def _odd(blocks: int) -> Bits:
    return np.arange(1, 2 * blocks, 2, dtype=np.int64)


def _padded(x: Bits) -> Bits:
    return np.pad(x, (0, -len(x) % BLOCK)).reshape(-1, BLOCK)


def _norm(x: Bits, shape: tuple[int, ...]) -> float:
    return float(np.linalg.norm(np.broadcast_to(x, shape)))


def _of_norm(x: Bits, norm: float) -> Bits:
    return x * (norm / max(float(np.linalg.norm(x)), 1e-30))


# ---- the conversation ----
class Talk:
    """Frames to and from one victim, whichever side opened the stream."""

    def __init__(self, send: Callable[[pb.SwapFrame], Awaitable[Any]], receive: Callable[[], Awaitable[Any]]) -> None:
        self._send, self._receive = send, receive

    async def send(self, **frame: Any) -> None:
        message = pb.SwapFrame(**frame)
        whole = message.SerializeToString()
        if len(whole) <= PIECE_BYTES:
            await self._send(message)
            return
        for at in range(0, len(whole), PIECE_BYTES):
            end = at + PIECE_BYTES
            await self._send(pb.SwapFrame(piece=pb.Piece(data=whole[at:end], more=end < len(whole))))

    async def fragment(self, index: int, payload: bytes) -> None:
        await self.send(fragment=pb.Fragment(index=index, payload=payload))

    async def next(self) -> pb.SwapFrame:
        """The next frame but Alive."""
        whole = b""
        while True:
            message = await self._receive()
            if message is EOF:
                raise ConnectionError("the stream ended")
            if message.HasField("piece"):
                whole += message.piece.data
                if message.piece.more:
                    continue
                message, whole = pb.SwapFrame.FromString(whole), b""
            if not message.HasField("alive"):
                return message


@dataclass
class Told:
    """What it was told to do, and the log of what came of it."""

    path: Path

    async def ready(self) -> None:
        """Waits for the word."""
        self.say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        threading.Thread(target=_end_with_the_test, daemon=True).start()

    def say(self, event: str, **facts: Any) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")


class Servant(services.ExchangeServicer, services.StateServicer, services.RunsServicer):
    """Answers calls as the attack wants. `swap` is a coroutine function (talk, peer, offer)."""

    def __init__(self, swap: Callable[..., Awaitable[None]]) -> None:
        self._swap = swap
        self.caller: Callable[[Any], str] = str
        self.round, self.state, self.loss = 0, b"", 0.0

    async def Swap(self, requests: AsyncIterator[pb.SwapFrame], context: Any) -> AsyncIterator[pb.SwapFrame]:  # noqa: N802
        outbox: asyncio.Queue[pb.SwapFrame | None] = asyncio.Queue(OUTBOX)
        incoming = aiter(requests)
        talk = Talk(outbox.put, lambda: anext(incoming))
        answering = asyncio.create_task(self._answer(talk, self.caller(context), outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            answering.cancel()

    async def _answer(self, talk: Talk, peer: str, outbox: asyncio.Queue[Any]) -> None:
        with suppress(StopAsyncIteration, RpcError, OSError):
            await self._swap(talk, peer, (await talk.next()).offer)
        await outbox.put(None)

    async def List(self, request: Any, context: Any) -> pb.RunsReply:  # noqa: N802
        return pb.RunsReply()

    async def Progress(self, request: Any, context: Any) -> pb.StateProgress:  # noqa: N802
        return pb.StateProgress(round=self.round)

    async def Sample(self, request: pb.SampleRequest, context: Any) -> pb.StateSample:  # noqa: N802
        phi = np.frombuffer(self.state, "<f4")[: len(self.state) // 8]
        blocks = b"".join(phi[BLOCK * block : BLOCK * (block + 1)].tobytes() for block in request.blocks)
        return pb.StateSample(round=self.round, eval_loss=self.loss, blocks=blocks)

    async def Fetch(self, request: pb.StateRequest, context: Any) -> AsyncIterator[pb.StateFrame]:  # noqa: N802
        data, chunk = self.state, 128 << 10
        if request.coding == pb.BF16:
            data = (np.frombuffer(data, "<u4") >> 16).astype("<u2").tobytes()
        cut = chunk * max(1, -(-len(data) // (1024 * chunk)))
        digests = b"".join(hashlib.sha256(data[at : at + cut]).digest() for at in range(0, len(data), cut))
        sizes = self.round.to_bytes(8, "big") + len(data).to_bytes(8, "big")
        root = hashlib.sha256(b"noloco state v1\n" + sizes + digests).digest()
        header = pb.StateHeader(round=self.round, total_bytes=len(data), root=root, digests=digests)
        yield pb.StateFrame(header=header)
        for at in range(0, len(data), chunk):
            yield pb.StateFrame(chunk=pb.StateChunk(data=data[at : at + chunk]))


@dataclass
class Attacker:
    """One or more identities that attack a run together."""

    run: Run
    told: Told
    home: Path
    doors: list[Address]
    """Of honest nodes: bootstrap addresses."""
    aim: Aim
    wider: int = 0
    hold: str = ""
    """Instead of swapping, after the call was accepted: `silent`, `alive`, `trickle` or `promise`."""
    end_s: float = 0.0
    """So long it holds the last fragment of a swap, when all others have landed: then it only calls."""
    scale: float = 1.0
    at: str = "127.0.0.1"
    patience_s: float = 3600.0
    every_s: float = 0.0
    """At least so long between two calls."""
    most: int = 1 << 30
    """Swaps; then it only sits there."""
    identities: list[Libp2pTransport] = field(default_factory=list)
    servants: list[Servant] = field(default_factory=list)
    victims: set[str] = field(default_factory=set)
    swaps: int = 0
    dht: list[Any] = field(default_factory=list)

    async def open(self, count: int = 1) -> None:
        """So many identities of our own, each with a p2pd."""
        self.home.mkdir(parents=True, exist_ok=True)
        opening = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            servant = Servant(self._called)
            identity = Identity.load_or_create(self.home / f"{number}.key")
            transport = Libp2pTransport(identity, parse(f"/ip4/{self.at}/tcp/0"), bootstrap=self.doors, relay="off")
            for add in (
                services.add_ExchangeServicer_to_server,
                services.add_StateServicer_to_server,
                services.add_RunsServicer_to_server,
            ):
                transport.serve(lambda server, add=add, servant=servant: add(servant, server))
            async with opening:
                await transport.start()
            servant.caller = transport.caller
            transport.introduce({door.peer: [door] for door in self.doors})
            self.identities.append(transport)
            self.servants.append(servant)

        await asyncio.gather(*map(one, range(count)))
        self.victims |= {door.peer for door in self.doors}

    async def enter_dht(self, each: bool = False) -> None:
        from hivemind.dht.node import DHTNode

        for transport in self.identities if each else self.identities[:1]:
            self.dht.append(
                await DHTNode.create(
                    p2p=transport.p2p, initial_peers=list(map(str, self.doors)), strict=False, cache_locally=False
                )
            )

    async def look(self) -> None:
        """Every peer of the run that is none of us becomes a victim."""
        found = await self.dht[0].get(f"noloco/{self.run.run_id}/peers/", latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        ours = {transport.peer_id for transport in self.identities}
        for peer, entry in entries.items():
            presence = pb.Presence.FromString(pb.SignedPresence.FromString(entry.value).presence)
            if peer not in ours and presence.state == "training" and presence.version != "0.0.0":
                self.victims.add(peer)
                for transport in self.identities:
                    transport.introduce({peer: [parse(text) for text in presence.addresses]})

    async def publish(
        self, keys: list[Identity], addresses: list[list[str]], state: str = "training", **says: Any
    ) -> int:
        """Presence records of these identities. Returns how many were stored."""
        now = time.time()
        run_id = bytes.fromhex(self.run.run_id)
        usual = {"round": 1, "step": 1, "loss": 1.0, "tokens_per_s": 100.0, **says}
        stored = []
        for number, (key, where) in enumerate(zip(keys, addresses, strict=True)):
            body = pb.Presence(
                protocol=PROTOCOL,
                run_id=run_id,
                boot=bytes(16),
                state=state,
                addresses=where,
                time=now,
                version="0.0.0",
                **usual,
            ).SerializeToString()
            record = pb.SignedPresence(presence=body, signature=key.sign(b"noloco presence v1\n" + body))
            first = f"{hashlib.sha256(key.peer_id.encode()).digest()[0]:08b}"[0]
            for bucket in ("", first):
                name = f"noloco/{self.run.run_id}/peers/{bucket}"
                node = self.dht[number % len(self.dht)]
                stored.append(node.store(name, record.SerializeToString(), now + TTL_S, subkey=key.peer_id))
        return sum(map(bool, await asyncio.gather(*stored)))

    async def publish_ours(self, **says: Any) -> None:
        keys = [transport._identity for transport in self.identities]
        await self.publish(keys, [list(map(str, t.addresses())) for t in self.identities], **says)

    async def fetch(self, transport: Libp2pTransport, victim: str) -> tuple[int, Bits, Bits]:
        """A victim's round, φ and δ, which it gives to anybody."""
        data, round_ = b"", 0
        request = pb.StateRequest(**self.run.terms, coding=pb.FP32)
        async for frame in services.StateStub(transport.channel(victim)).Fetch(request):
            round_ = frame.header.round or round_
            data += frame.chunk.data
        numbers = np.frombuffer(data, "<f4")
        return round_, numbers[: self.run.parameters], numbers[self.run.parameters :]

    # ---- swaps ----
    async def call(self, transport: Libp2pTransport, victim: str) -> tuple[str, float]:
        """One swap as the caller. How it ended, and when to try again."""
        # a multiple of their number: the swap begins with the first fragment, so that the short one is the last
        exchange = (int.from_bytes(os.urandom(12)) * self.run.fragments).to_bytes(16)
        call = services.ExchangeStub(transport.channel(victim)).Swap()
        talk = Talk(call.write, call.read)
        offer = pb.Offer(
            **self.run.terms,
            exchange_id=exchange,
            fragments=self.run.fragments,
            patience_s=self.patience_s,
        )
        try:
            await talk.send(offer=offer)
            while True:
                frame = await talk.next()
                if not frame.HasField("refusal"):
                    break
                if frame.refusal.code != pb.APPOINTMENT:
                    return pb.RefusalCode.Name(frame.refusal.code), frame.refusal.retry_in_s
            return await self._swap(talk, victim, exchange, leads=True), 0.0
        except BROKEN as error:
            return f"broke ({type(error).__name__})", 0.2
        finally:
            call.cancel()

    async def _called(self, talk: Talk, peer: str, offer: pb.Offer) -> None:
        if self.swaps >= self.most or self.end_s:
            await talk.send(refusal=pb.Refusal(code=pb.BUSY, retry_in_s=1.0))
            return
        if self.hold == "promise":
            await talk.send(refusal=pb.Refusal(code=pb.APPOINTMENT, retry_in_s=offer.patience_s))
            await asyncio.sleep(3600)
        await talk.send(accept=pb.Accept())
        ended = await self._swap(talk, peer, offer.exchange_id, leads=False)
        self.told.say("called", peer=peer, ended=ended)

    async def _swap(self, talk: Talk, victim: str, exchange: bytes, *, leads: bool) -> str:
        began = time.monotonic()
        if self.hold:
            with suppress(RpcError, OSError, StopAsyncIteration):
                await self._hold(talk)
            self.told.say("held", peer=victim, leads=leads, seconds=time.monotonic() - began)
            return "held"
        order = self._order(exchange)
        lies = {index: self._lie(index) for index in order}
        left = {index: lie.turns for index, lie in lies.items()}
        applied = 0
        allowed: dict[int, float] = {}

        def we_lead(index: int) -> bool:
            return leads != ((len(order) - order.index(index)) % 2 == 0)

        kept: deque[pb.SwapFrame] = deque()
        """Of the last fragment, until all before have landed."""

        try:
            while applied < len(order):
                last = applied == len(order) - 1
                frame = kept.popleft() if kept and last else await talk.next()
                match frame.WhichOneof("frame"):
                    case "fragment" if self.end_s and frame.fragment.index == order[-1] and not last:
                        kept.append(frame)
                    case "fragment":
                        index = frame.fragment.index
                        await self._hold_end(lies[index], index == order[-1])
                        before = lies[index].turns
                        await talk.fragment(index, lies[index].answer(frame.fragment.payload))
                        left[index] += lies[index].turns - before - 1
                        if not left[index] and not we_lead(index):
                            await talk.send(ack=pb.Ack(index=index, scale=self.scale))
                    case "ack" if we_lead(frame.ack.index):
                        allowed[frame.ack.index] = min(frame.ack.scale, self.scale)
                    case "ack":
                        applied += 1
                    case other:
                        code = pb.RefusalCode.Name(frame.refusal.code) if other == "refusal" else ""
                        self.told.say("swap", peer=victim, leads=leads, ended=f"{other} {code}", applied=applied)
                        return str(other)
                if applied < len(order) and order[applied] in allowed:
                    await self._hold_end(lies[order[applied]], last)
                    await talk.send(ack=pb.Ack(index=order[applied], scale=allowed.pop(order[applied])))
                    applied += 1
            if leads:
                await talk.next()
            else:
                await talk.send(done=pb.Done())
        except (*BROKEN, StopAsyncIteration) as error:
            self.told.say("swap", peer=victim, leads=leads, ended=repr(error)[:200], applied=applied)
            raise
        self.swaps += 1
        norm = sum(lie.norm**2 for lie in lies.values()) ** 0.5
        self.told.say("swap", peer=victim, leads=leads, ended="whole", seconds=time.monotonic() - began, norm=norm)
        return "whole"

    def _order(self, exchange: bytes) -> list[int]:
        offset = int.from_bytes(exchange, "big") % self.run.fragments
        return [*range(offset, self.run.fragments), *range(offset)]

    async def _hold_end(self, lie: Plain | Lattice, last: bool) -> None:
        """Before each move: the victim sees all of them as progress."""
        if last:
            await asyncio.sleep(self.end_s / (lie.turns + 1))

    def _lie(self, index: int) -> Plain | Lattice:
        start, end = self.run.bounds(index)
        if self.run.codec == "lattice:4":
            return Lattice(self.aim, start, end, self.wider)
        return Plain(self.run.codec, self.aim, start)

    async def _hold(self, talk: Talk) -> None:
        async def read() -> None:
            while True:
                await talk.next()

        reading = asyncio.create_task(read())
        try:
            while not reading.done():
                match self.hold:
                    case "alive":
                        await talk.send(alive=pb.Alive())
                    case "trickle":
                        await talk.send(piece=pb.Piece(data=b"\x22", more=True))
                await asyncio.sleep(1.0)
        finally:
            reading.cancel()

    async def pester(self, transport: Libp2pTransport, victim: str) -> None:
        """Call again, always and at once."""
        while self.swaps < self.most:
            began = time.monotonic()
            if self.aim.kind not in ("zeros", "tiny", "honest", "far", "largest"):
                with suppress(RpcError, OSError):
                    self.aim.known = (await self.fetch(transport, victim))[1]
                if self.aim.first is None:
                    self.aim.first = self.aim.known
                if self.aim.task and self.aim.known is not None:
                    task, known = self.aim.task, self.aim.known
                    self.told.say("model", peer=victim, loss=task.loss(known), real_loss=task.real_loss(known))
            ended, again_s = await self.call(transport, victim)
            if ended != "whole":
                self.told.say("call", peer=victim, ended=ended, again_s=again_s)
            pause = 0.05 if ended == "whole" else min(max(again_s, 0.05), 0.2)
            await asyncio.sleep(max(pause, self.every_s - (time.monotonic() - began)))

    async def forever(self, *duties: Coroutine[Any, Any, None]) -> None:
        async def new_victims() -> None:
            calling: set[tuple[str, str]] = set()
            while True:
                with suppress(RpcError, OSError, TimeoutError):
                    await self.look()
                for transport in self.identities:
                    for victim in self.victims:
                        if (transport.peer_id, victim) not in calling:
                            calling.add((transport.peer_id, victim))
                            group.create_task(self.pester(transport, victim))
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as group:
            for duty in duties:
                group.create_task(duty)
            group.create_task(new_victims())

    async def stay_visible(self, **says: Any) -> None:
        while True:
            await self.publish_ours(**says)
            await asyncio.sleep(15.0)


# ---- the attacks ----
async def swaps(
    attacker: Attacker, *, identities: int = 1, made_up: int = 0, says: dict[str, Any] | None = None
) -> None:
    """Call every victim, always again; answer its calls with the same. `made_up`: so many presences more."""
    await attacker.open(identities)
    await attacker.enter_dht()
    says = {"round": 1, **(says or {})}
    await attacker.told.ready()
    await attacker.forever(attacker.stay_visible(**says), crowd(attacker, made_up, **says))


async def crowd(attacker: Attacker, count: int, state: str = "training", **says: Any) -> None:
    """Throw-away keys that say something, at an address where nobody answers for them."""
    keys = [Identity.load_or_create(attacker.home / f"made-up-{number}.key") for number in range(count)]
    dead = [[f"/ip4/{attacker.at}/tcp/9/p2p/{key.peer_id}"] for key in keys]
    while count:
        began = time.monotonic()
        stored = await attacker.publish(keys, dead, state, **says)
        attacker.told.say("crowd", stored=stored, of=count, seconds=time.monotonic() - began)
        await asyncio.sleep(20.0)


async def presences(attacker: Attacker, *, count: int = 500, says: dict[str, Any] | None = None, each: int = 1) -> None:
    """`each`: from so many callers."""
    await attacker.open(each)
    await attacker.enter_dht(each=True)
    await attacker.told.ready()
    await crowd(attacker, count, **(says or {}))


async def donors(
    attacker: Attacker,
    *,
    identities: int = 3,
    round: int = 4900,
    size: float = 1.0,
    honest: bool = False,
    loss: float = 1.0,
) -> None:
    """`honest`: the true state of a victim, moved by `size` of its norm, instead of random weights; told to all of us,
    so that our samples agree."""
    await attacker.open(identities)
    await attacker.enter_dht(each=True)
    await attacker.told.ready()
    rng = np.random.default_rng(3)
    while True:
        if honest:
            victim = sorted(attacker.victims)[0]
            round_, phi, delta = await attacker.fetch(attacker.identities[0], victim)
            phi = phi + size * _of_norm(rng.normal(size=len(phi)), float(np.linalg.norm(phi)))
        else:
            round_ = round
            phi = size * np.random.default_rng(5).normal(size=attacker.run.parameters)
            delta = 0 * phi
        for servant in attacker.servants:
            servant.round, servant.loss = round_, loss
            servant.state = np.concatenate([phi, delta]).astype("<f4").tobytes()
        await attacker.publish_ours(round=round_, loss=loss, eval_loss=loss)
        await asyncio.sleep(10.0)


async def connections(attacker: Attacker, *, identities: int = 33, each: int = 4) -> None:
    """Streams that stay: each identity opens so many, with a call in each that does not end."""
    await attacker.open(identities)
    await attacker.told.ready()

    async def keep(channel: Channel, victim: str) -> None:
        while True:
            with suppress(RpcError, OSError):
                call = services.ExchangeStub(channel).Swap()
                while await call.read() is not EOF:
                    pass
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for transport in attacker.identities:
            for extra in range(each):
                folder = transport._parts.runtime.path / f"again-{extra}"
                folder.mkdir()
                outbound = Outbound(folder, transport._dial)
                for victim in attacker.victims:
                    group.create_task(keep(outbound.channel(victim), victim))
        attacker.told.say("connected", connections=identities * each)


def _end_with_the_test() -> None:
    """Also where it was killed."""
    sys.stdin.read()
    os._exit(0)


ATTACKS = {"swaps": swaps, "presences": presences, "donors": donors, "connections": connections}


async def main(told: dict[str, Any]) -> None:
    import hivemind.dht.node  # noqa: F401 - it takes seconds, which pass while the victims start

    aim = Aim(told.pop("kind", "honest"), told.pop("size", 1.0))
    if outputs := told.pop("paced", 0):
        aim.task = Paced(outputs)
    attack, options = ATTACKS[told.pop("attack")], told.pop("options", {})
    attacker = Attacker(
        Run(**told.pop("run")),
        Told(Path(told.pop("log"))),
        Path(told.pop("home")),
        [parse(door) for door in json.loads(await asyncio.to_thread(sys.stdin.readline))],
        aim,
        **told,
    )
    await attack(attacker, **options)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
