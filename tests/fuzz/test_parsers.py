"""Everything that reads the network or a file gets bytes that it was not written for.

Only the project's own errors may come out, each call ends within a second, and none takes much memory. By default each
parser gets its examples, what was found earlier (`corpus/<parser>/`) and a few mutations, 2 s in all;
`FUZZ_MINUTES=10 pytest tests/fuzz` goes on for ten minutes and adds what it finds to the corpus.

Elsewhere: the codecs' payloads in tests/core/codecs, a checkpoint's tensors in tests/checkpoints/test_saved_state.py.
"""

import asyncio
import gzip
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import base58
import numpy as np
import pytest
from canned_node import busy
from certificates import certificate
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.utils import CryptographyDeprecationWarning
from fake_node import FakeNode
from mutations import mutated
from records import NOW, RUN, record

from noloco_node.base import addresses, identity, places
from noloco_node.base.identity import Identity
from noloco_node.checkpoints import listing
from noloco_node.control.socket_server import ControlServicer
from noloco_node.data import documents, token_file
from noloco_node.data.tokens import BYTES
from noloco_node.errors import NolocoError
from noloco_node.host import config, memory, remembered, traffic
from noloco_node.host.home import Home
from noloco_node.observe import jsonl
from noloco_node.peers import dht_messages, run_registry
from noloco_node.peers import record as presence
from noloco_node.peers.cache import PeerCache
from noloco_node.rounds.pieces import Assembly
from noloco_node.run import amendment, invitation, manifest, signed_file, toml
from noloco_node.run.amendment import Amendment, SignedAmendment
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors
from noloco_node.transport import relayed_places, self_view
from noloco_node.transport.base import lenient
from noloco_node.transport.p2pd import control
from noloco_node.transport.probe import is_of_this_machine
from noloco_node.views.documents import from_json, to_json
from noloco_node.views.gather import GatherView
from noloco_node.views.peers import PingView
from noloco_node.web.access import token_in
from noloco_node.web.http import RefusedRequest, request_of
from noloco_node.web.routes import Site
from noloco_node.wire import circuit_pb2, control_pb2, mirror_pb2, stage_messages, stage_pb2, state_format
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
CORPUS = Path(__file__).parent / "corpus"
CALL_S = 1.0
"""Of CPU."""
MORE_BYTES = 64 << 20
"""A parser's whole turn may raise the process's peak by so much."""

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ME = Identity(KEY, Path("nowhere"))
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{ME.peer_id}"
SIGNED = manifest.sign(Manifest(name="tiny"), ME)

AMENDS = Amendment(run=manifest.verify(SIGNED).run_id, version=2, rounds=200, revoked=(ME.peer_id,))
AMENDED = amendment.sign(AMENDS, ME)

Reads = Callable[[bytes, Path], object]


@dataclass(frozen=True)
class Parser:
    name: str
    read: Reads
    examples: list[bytes]
    errors: tuple[type[Exception], ...] = (NolocoError,)
    """Beside those, what this one says in its docstring."""


# ---- what peers send ----
def message(kind: Any, decode: Callable[[Any], object]) -> Reads:
    return lambda data, _: decode(lenient(kind.FromString)(data))


def frames(*each: wire.Frame) -> list[bytes]:
    return [wire.encode(frame).SerializeToString() for frame in each]


OFFER = wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, 3, 2.5)
FRAMES = frames(
    OFFER,
    wire.Accept(),
    wire.Refusal(wire.Code.APPOINTMENT, 1.5),
    wire.Fragment(5, b"abc"),
    wire.Ack(5, 0.5),
    wire.Done(),
    wire.Piece(b"abc", True),
    wire.Alive(),
    wire.Alive(0.25),
)
HEADER = wire.StateHeader(4, 800, state_format.root(4, 800, b"d" * 32), b"d" * 32, 1)
STAGE_FRAMES = [
    stage_messages.encode(frame).SerializeToString()
    for frame in (
        stage_messages.MicroBatch(1, b"r" * 32, 2, 4, 2.5, False, b""),
        stage_messages.Passed(1.5, 3),
        stage_messages.Part(b"abc"),
        wire.Refusal(wire.Code.BUSY, 1.5),
    )
]
BUCKETS = [
    dht_messages.written_bucket(
        [(ME.peer_id, b"\xc4\x03abc", NOW), (ME.peer_id, b"\xc5\x01\x00" + bytes(256), NOW + 1)]
    ),
]
STATE_REQUEST = wire.StateRequest(1, b"r" * 32, b"l" * 32, state_format.Coding.BF16, b"x" * 32, 7)
SAMPLE_REQUEST = wire.SampleRequest(1, b"r" * 32, b"l" * 32, (3, 0, 1 << 40))


def in_pieces(data: bytes, _: Path) -> None:
    """A frame of these bytes in two pieces, and the bytes themselves as a message after it."""
    assembly, cut = Assembly(least=0), len(data) // 2
    for part, more in ((data[:cut], True), (data[cut:], False)):
        assembly.add(wire.to_bytes(wire.Piece(part, more)))
    assembly.add(data)


def presence_body(data: bytes, _: Path) -> None:
    """Signed by its peer, so that every check after the signature is reached."""
    signed = pb.SignedPresence(presence=data, signature=ME.sign(presence._SIGNED + data))
    presence.accept(ME.peer_id, signed.SerializeToString(), RUN, NOW, 60.0)


def signed_manifest(data: bytes, _: Path) -> None:
    manifest.verify(Signed(data, ME.peer_id, ME.sign(manifest._SIGNING_CONTEXT + data)))


def signed_amendment(data: bytes, _: Path) -> None:
    signed = SignedAmendment(data, ME.sign(amendment._SIGNING_CONTEXT + data))
    amendment.verify(signed, AMENDS.run, ME.peer_id)


class Says:
    """A channel to a peer that answers every call with these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def unary_unary(self, _method: str, *, response_deserializer: Any, **_more: Any) -> Any:
        async def call(*_args: Any, **_options: Any) -> Any:
            return lenient(response_deserializer)(self._data)

        return call

    unary_stream = stream_stream = unary_unary


def answers(ask: Callable[[Any], Any]) -> Reads:
    return lambda data, _: RUNNER.run(ask(Says(data)))


async def looked_at(channel: Any) -> None:
    await self_view.skew(["peer"], lambda _: channel, str)
    if (view := await self_view.look(channel, [1, 4001])) and view.host:
        is_of_this_machine(view.host)
        places.place_of(view.host)
        str(addresses.ip_address(view.host, 1, ME.peer_id))


async def runs_asked(channel: Any) -> None:
    run_registry.choose(await run_registry.ask(channel), None, None)


def relay_answer(data: bytes, _: Path) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await control.read(reader, circuit_pb2.HopMessage())

    RUNNER.run(read())


class Context:
    async def abort(self, *_: Any) -> None:
        raise NolocoError("refused")


class Node(FakeNode):
    async def ping(self, peer: str, payload_bytes: int) -> PingView:
        assert identity.is_peer_id(peer) and payload_bytes <= 1 << 20
        return PingView(peer, peer)

    def log_level(self, level: str) -> None:
        assert level in config.LOG_LEVELS


def command(method: str, kind: Any) -> Reads:
    call = getattr(ControlServicer(Node()), method)
    return lambda data, _: RUNNER.run(call(lenient(kind.FromString)(data), Context()))


SITE = Site(busy(), "t" * 40)
HEAD = b"GET /api/status HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://localhost:1\r\nConnection: close\r\n\r\n"
POST = b"POST /api/pause HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\nAuthorization: Bearer %b\r\n\r\n" % (40 * b"t")


# ---- files ----
def file(name: str, read: Callable[[Path], object]) -> Reads:
    def written(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            return read(path)
        finally:
            for left in folder.glob(f"{name}*"):
                left.unlink()

    return written


def all_text(path: Path) -> None:
    for lines in documents.Documents(path, documents.Reading()):
        for _ in lines:
            pass


def table(of: Any) -> bytes:
    return json.dumps(of).encode()


def a_parquet(folder: Path) -> bytes:
    from texts import parquet  # brings pyarrow, which takes seconds

    parquet(folder / "a.parquet", ["one", "two"])
    return (folder / "a.parquet").read_bytes()


def a_token_file() -> bytes:
    body = np.arange(60, dtype=token_file.width(BYTES.vocabulary)).tobytes()
    size = len(body) // 60
    return (
        token_file._HEADER.pack(token_file.MAGIC, token_file.VERSION, size, BYTES.vocabulary, 50, 10, BYTES.digest)
        + body
    )


STATE = {
    "schema": listing.SCHEMA,
    "run_id": "a" * 64,
    "layout": "b" * 64,
    "round": 3,
    "step": 30,
    "loss": 2.5,
    "eval_loss": None,
    "measured_on": 16 * "d",
    "files": {name: {"sha256": "c" * 64, "bytes": 9} for name in listing.FILES},
}
NODE_TOML = f'''
listen = "/ip4/0.0.0.0/tcp/4001"
bootstrap = ["{ADDRESS}"]
hours = "22:00-06:00"
'''.encode()
KEPT = {"run": "a" * 32, "trust": ME.peer_id, "port": 4001, "bootstrap": [ADDRESS], "data": "x.txt"}


def configured(path: Path) -> None:
    config.resolve({}, {"NOLOCO_HOME": "/nowhere"}, config.read_home_toml(path.parent))


def came_back(path: Path) -> None:
    home = Home(path.parent)
    remembered.port(home)
    config.resolve({}, {"NOLOCO_HOME": "/nowhere"}, {}, remembered.read(home))


def parsers() -> Iterator[Parser]:
    yield Parser("swap frame", message(pb.SwapFrame, wire.decode), FRAMES)
    yield Parser("pieces", in_pieces, FRAMES[:5])
    state = [wire.encode_state(f) for f in (HEADER, wire.StateChunk(b"abc"), wire.StatePlace(3))]
    yield Parser("state frame", message(pb.StateFrame, wire.decode_state), [f.SerializeToString() for f in state])
    asked = wire.encode_state_request(STATE_REQUEST).SerializeToString()
    yield Parser("state request", message(pb.StateRequest, wire.decode_state_request), [asked])
    sample = wire.encode_sample_request(SAMPLE_REQUEST).SerializeToString()
    yield Parser("sample request", message(pb.SampleRequest, wire.decode_sample_request), [sample])
    blocks = wire.encode_sample(wire.StateSample(12, 2.5, b"abcd")).SerializeToString()
    yield Parser("sample", message(pb.StateSample, lambda m: wire.decode_sample(m, 4)), [blocks])
    yield Parser("progress", message(pb.StateProgress, wire.decode_progress), [b"\x08\x05"])
    whole = record(ME)
    yield Parser("stage frame", message(stage_pb2.StageFrame, stage_messages.decode), STAGE_FRAMES)
    yield Parser("bucket", lambda data, _: dht_messages.read_bucket(data), BUCKETS)
    yield Parser("presence", lambda data, _: presence.accept(ME.peer_id, data, RUN, NOW, 60.0), [whole])
    yield Parser("presence, signed", presence_body, [pb.SignedPresence.FromString(whole).presence])
    yield Parser("manifest", lambda data, _: manifest.parse(data), [SIGNED.manifest])
    yield Parser("amendment, signed", signed_amendment, [AMENDED.document])
    yield Parser("manifest, signed", signed_manifest, [SIGNED.manifest])
    runs = pb.RunsReply(runs=[run_registry._encode(SIGNED, None)], training=[3]).SerializeToString()
    yield Parser("runs", answers(runs_asked), [runs])
    look = mirror_pb2.LookReply(host="203.0.113.7", open=[4001], time=NOW)
    scoped = mirror_pb2.LookReply(host="fe80::1%eth0", open=[4001, 1], time=NOW)
    yield Parser("look", answers(looked_at), [look.SerializeToString(), scoped.SerializeToString()])
    whence = mirror_pb2.WhenceReply(place="203.0.113.0/24").SerializeToString()
    yield Parser("whence", answers(lambda c: relayed_places.whence(c, ME.peer_id)), [whence])
    proved = lambda data, _: self_view.proves(data, ME.peer_id)  # noqa: E731
    key = ec.derive_private_key(7, ec.SECP256R1())
    yield Parser("certificate", proved, [certificate(ME, key, key)], (CryptographyDeprecationWarning,))
    hop = circuit_pb2.HopMessage(type=circuit_pb2.HopMessage.STATUS, status=100).SerializeToString()
    yield Parser("relay", relay_answer, [bytes([len(hop)]) + hop], (ConnectionError,))

    # what people type, other programs ask, and a node answers its command line
    yield Parser("address", lambda data, _: addresses.parse(data.decode("latin-1")), [ADDRESS.encode()])
    word = invitation.write(invitation.Invitation((addresses.parse(ADDRESS),), RUN, ME.peer_id))
    other = invitation.write(invitation.Invitation((addresses.parse(ADDRESS),), RUN, identity.peer_id_of(b"a" * 32)))
    words = [word.encode(), other.encode()]
    yield Parser("invitation", lambda data, _: invitation.read(data.decode("latin-1")), words)
    inside = [base58.b58decode_check(each[3:]) for each in words]
    whole_word = lambda data, _: invitation.read("nn1" + base58.b58encode_check(data).decode())  # noqa: E731
    yield Parser("invitation, whole", whole_word, inside)
    yield Parser("web", lambda data, _: RUNNER.run(SITE.answer(request_of(data))), [HEAD, POST], (RefusedRequest,))
    ping, level = control_pb2.PingRequest(peer=ME.peer_id, payload_bytes=9), control_pb2.LogLevelRequest(level="debug")
    yield Parser("control ping", command("Ping", type(ping)), [ping.SerializeToString()])
    yield Parser("control log level", command("LogLevel", type(level)), [level.SerializeToString()])
    node = busy(rounds=3, peers=2)
    views = (node.status(), node.peers(), node.history(), PingView(ME.peer_id, "a-b"), GatherView())
    for view in views:
        kind = type(view)
        read = lambda data, _, kind=kind: from_json(kind, data.decode("latin-1"))  # noqa: E731
        yield Parser(kind.__name__, read, [to_json(view).encode()])


def file_parsers(folder: Path) -> Iterator[Parser]:
    peers = table({ME.peer_id: {"seen": int(NOW), "addresses": [ADDRESS]}})
    yield Parser("peers.json", file("peers.json", lambda p: PeerCache(p).peers()), [peers])
    day = table({"day": "2026-11-22", "sent": 5, "received": 6})
    yield Parser("traffic.json", file("traffic.json", traffic.read_day), [day])
    authors = table({f"{ME.peer_id}/tiny": ME.peer_id})
    known = file("authors.json", lambda p: TrustedAuthors(p).know([ME.peer_id], "tiny", ME.peer_id))
    yield Parser("authors.json", known, [authors])
    yield Parser("remembered.json", file("remembered.json", came_back), [table(KEPT)])
    run = signed_file.text(SIGNED, {"round": 3}).encode()
    yield Parser("noloco.json", file("noloco.json", lambda p: signed_file.read(p.parent)), [run])
    state = file(listing.STATE, lambda p: listing.about(p.parent))
    yield Parser("state.json", state, [table(STATE)], (listing.Damaged,))
    yield Parser("node.toml", file("node.toml", configured), [NODE_TOML])
    yield Parser("run.toml", file("run.toml", toml.load), [toml.template().encode()])
    model = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "rope": {"a": [1, 2]}, "dtype": "x"}
    yield Parser("config.json", file("config.json", toml._config), [table(model)])
    key = (
        b"\x08\x01\x12\x40"
        + bytes(32)
        + Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
    )
    yield Parser("identity.key", file("identity.key", Identity.load_or_create), [key])
    yield Parser("web.token", file("web.token", token_in), [b"t" * 43 + b"\n"])
    yield Parser("tokens", file("x.tokens", lambda p: token_file.load(p, BYTES)), [a_token_file()])
    line = table({"at": 1.5, "event": "RoundCommitted", "round": 3})
    yield Parser("events.jsonl", file("events.jsonl", lambda p: list(jsonl.records(p))), [line + b"\n" + line + b"\n"])
    text = "one\ntwo é\n".encode()
    yield Parser("data.txt", file("data.txt", all_text), [text])
    yield Parser("data.jsonl", file("data.jsonl", all_text), [table({"text": "one"}) + b"\n" + table({"text": "é"})])
    yield Parser("data.txt.gz", file("data.txt.gz", all_text), [gzip.compress(text)])
    if MINUTES:
        yield Parser("data.parquet", file("data.parquet", all_text), [a_parquet(folder)])


RUNNER: asyncio.Runner = asyncio.Runner()


@pytest.fixture(autouse=True, scope="module")
def loop() -> Iterator[None]:
    logging.disable()  # a line for each damaged file
    with RUNNER:
        yield
    logging.disable(logging.NOTSET)


NETWORK = list(parsers())


def shown(data: bytes) -> str:
    return f"{data[:300]!r}{'...' if len(data) > 300 else ''}"


def keep(parser: Parser, data: bytes) -> None:
    folder = CORPUS / parser.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def fuzz(parser: Parser, folder: Path, seconds: float, seed: int) -> int:
    """How many inputs it read. Fails with the first of each kind of unexpected exception."""
    folder.mkdir(exist_ok=True)
    kept = [path.read_bytes() for path in sorted((CORPUS / parser.name).glob("*"))]
    rng, began, calls, faults = Random(seed), time.monotonic(), 0, dict[str, str]()
    for example in parser.examples:
        parser.read(example, folder)
    before = memory.forget_peak() or 0  # of this process, which may have run other tests
    while calls < len(kept) or time.monotonic() - began < seconds:
        data = kept[calls] if calls < len(kept) else mutated(rng, [*parser.examples, *kept])
        calls += 1
        at = time.thread_time()
        wrong = ""
        try:
            parser.read(data, folder)
        except (NolocoError, *parser.errors):
            pass
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            wrong = f"{type(error).__name__} at {where(error)}"
        if time.thread_time() - at > CALL_S:
            wrong = f"it took more than {CALL_S} s"
        more = (memory.peak_bytes() or 0) - before
        if more > MORE_BYTES:
            wrong, before = f"it took {more >> 20} MiB", before + more
        if wrong and wrong not in faults:
            faults[wrong] = shown(data)
            if MINUTES:
                keep(parser, data)
    assert not faults, "\n".join(f"{wrong}: {data}" for wrong, data in faults.items())
    return calls


def where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""


PARSERS_OF_FILES = 17
SECONDS = MINUTES * 60 / (len(NETWORK) + PARSERS_OF_FILES) if MINUTES else 0.04
"""For each parser."""


@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("parser", NETWORK, ids=lambda parser: parser.name)
def test_what_others_send(parser: Parser, tmp_path: Path) -> None:
    report(parser, fuzz(parser, tmp_path, SECONDS, seed=int(MINUTES)))


@pytest.mark.timeout(120 + 2 * SECONDS * PARSERS_OF_FILES)
def test_files(tmp_path: Path) -> None:
    found = list(file_parsers(tmp_path))
    faults = []
    for parser in found:
        try:
            report(parser, fuzz(parser, tmp_path / "home", SECONDS, seed=int(MINUTES)))
        except (AssertionError, NolocoError, *parser.errors) as fault:
            faults.append(f"{parser.name}: {fault}")
    assert not faults, "\n".join(faults)


def report(parser: Parser, calls: int) -> None:
    if MINUTES:
        print(f"{parser.name}: {calls} inputs")  # noqa: T201
