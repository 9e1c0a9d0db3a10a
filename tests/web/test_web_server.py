"""The page's server, tested with raw bytes: its answers, its refusals, and its limits."""

import asyncio
import gc
import json
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from canned_node import ME, bare, busy
from fake_node import FakeNode
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import quiet_port
from served_page import served as serving

from noloco_node.errors import PortInUse, UsageError
from noloco_node.host import config
from noloco_node.views.documents import document
from noloco_node.views.history import HistoryView, Point
from noloco_node.views.peers import PeersView
from noloco_node.web import http, live, routes, server
from noloco_node.web.access import names_here, token_in
from noloco_node.web.live import PageState, changes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "noloco_node" / "web" / "page"


class Server:
    """A running server, and the node behind it."""

    def __init__(self, url: str, node: FakeNode, token: str) -> None:
        self.url, self.node, self.token = url, node, token
        self.port = int(url.rstrip("/").rpartition(":")[2])
        self.host = f"127.0.0.1:{self.port}"
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.writers), return_exceptions=True)

    async def raw(self, sent: bytes, *, ends: bool = True) -> bytes:
        """All that comes back until the server hangs up."""
        reader, writer = await self.open()
        writer.write(sent)
        if ends:
            writer.write_eof()
        try:
            async with asyncio.timeout(60):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def ask(self, path: str, method: str = "GET", **fields: str) -> tuple[int, dict[str, str], bytes]:
        """Status, header fields and body. `Host` is the right one, unless it is given."""
        given = {"Host": self.host, "Connection": "close"} | {key.replace("_", "-"): v for key, v in fields.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
        head, _, body = (await self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())).partition(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in rest), body


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Server]:
    with serving(busy(), tmp_path) as page:
        asked = Server(page.url, page.node, page.token_file.read_text().strip())
        yield asked
        await asked.close()


# ---- what it answers ----


async def test_the_page_and_its_parts_are_served_with_their_types(served: Server) -> None:
    """Every file of the tree; where the package is installed, this is what says that the wheel carries them."""
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    files = sorted(PAGE.iterdir())
    assert {"index.html", "app.js", "style.css", "favicon.svg"} <= {file.name for file in files}
    for file in files:
        status, fields, body = await served.ask(f"/{file.name}")
        assert (status, body) == (200, file.read_bytes())
        assert fields["Content-Type"].startswith(types[file.suffix[1:]])
    status, fields, body = await served.ask("/?from=anywhere")
    assert (status, body) == (200, (PAGE / "index.html").read_bytes())
    assert int(fields["Content-Length"]) == len(body)


@pytest.mark.parametrize("view", ["status", "peers", "history"])
async def test_the_views_are_the_documents_of_the_command_line(served: Server, view: str) -> None:
    status, fields, body = await served.ask(f"/api/{view}")
    assert (status, fields["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(json.dumps(document(getattr(served.node, view)())))
    assert json.loads(body)["schema"] == 1


@pytest.mark.parametrize("view", ["peers", "history"])
async def test_who_asks_for_a_large_view_all_the_time_has_it_built_seldom(
    served: Server, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = getattr(served.node, view)
    monkeypatch.setattr(served.node, view, lambda: built.append(time.monotonic()) or build())
    answers = {(await served.ask(f"/api/{view}"))[2] for _ in range(40)}
    assert len(answers) == 1
    assert all(later - earlier >= routes.LARGE_S for earlier, later in pairwise(built))
    monkeypatch.setattr(routes, "LARGE_S", 0.0)
    before = len(built)
    await served.ask(f"/api/{view}")
    assert len(built) == before + 1


async def test_head_is_get_without_the_body(served: Server) -> None:
    for path in ("/", "/api/status", "/healthz"):
        got, head = await served.ask(path), await served.ask(path, "HEAD")
        assert head == (*got[:2], b"")


async def test_metrics_health_and_readiness(served: Server) -> None:
    status, fields, body = await served.ask("/metrics")
    assert (status, fields["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert b"\n# HELP noloco_" in b"\n" + body
    assert (await served.ask("/healthz"))[0] == 200
    assert (await served.ask("/readyz"))[0] == 200
    served.node.now = replace(served.node.now, state="starting", waiting_for="the network daemon")
    status, _, body = await served.ask("/readyz")
    assert status == 503
    assert body.strip(), "it says why"


async def test_one_connection_serves_many_requests(served: Server) -> None:
    reader, writer = await served.open()
    for _ in range(3):
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"keep-alive" in head
        assert await reader.readexactly(3) == b"ok\n"
    writer.write(f"GET /healthz HTTP/1.0\r\nHost: {served.host}\r\n\r\n".encode())
    assert b"Connection: close" in await reader.read()
    writer.close()


async def test_every_answer_forbids_use_by_another_site(served: Server) -> None:
    for path, method in (("/", "GET"), ("/api/status", "GET"), ("/nowhere", "GET"), ("/api/leave", "POST")):
        _, fields, _ = await served.ask(path, method)
        policy = fields["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert fields["X-Content-Type-Options"] == "nosniff"
        assert fields["Referrer-Policy"] == "same-origin"
        assert fields["Cache-Control"] == "no-store"
        assert fields["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in fields


# ---- whom it refuses ----


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/../web.token", 404),
        ("GET", "/..%2f..%2fweb.token", 404),
        ("POST", "/", 405),
        ("GET", "/api/leave", 405),
        ("DELETE", "/api/status", 405),
        ("OPTIONS", "/api/leave", 405),
        ("GET", "http://127.0.0.1/", 400),
        ("get", "/", 400),
        ("GET", "/" + 3000 * "a", 400),
    ],
)
async def test_what_is_not_there_or_not_allowed(served: Server, method: str, path: str, status: int) -> None:
    found, fields, body = await served.ask(path, method)
    assert found == status
    assert fields["Connection"] == "close"
    assert body.count(b"\n") == 1, "one sentence"
    assert ("Allow" in fields) == (status == 405)
    assert served.node.done == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8090", "127.0.0.1.evil.example", "localhost.evil", "a b"]
)
async def test_a_foreign_host_is_refused(served: Server, host: str) -> None:
    for path in ("/", "/api/status", "/api/live", "/metrics"):
        status, _, body = await served.ask(path, Host=host)
        assert status == 421
        assert (
            body
            == b"this node answers to an address, to localhost and to this machine's name: open it by one of these\n"
        )
    assert served.node.asked == []


def test_names_of_this_machine() -> None:
    ours = "localhost", "LOCALHOST:80", "127.0.0.1", "192.168.1.7:8090", "[::1]:8090", "[fe80::1]", socket.gethostname()
    assert [name for name in ours if not names_here(name)] == []
    others = "", ":80", "example.org", "localhost.", "127.0.0.1:", "127.0.0.1:999999", "[::1", "1.2.3.4.5"
    assert [name for name in (*others, "user@localhost") if names_here(name)] == []


@pytest.mark.parametrize("act", ["pause", "resume", "leave"])
async def test_an_action_needs_the_token(served: Server, act: str) -> None:
    wrong = f"Basic {served.token}", f"Bearer {served.token}x", f"Bearer {served.token[:-1]}"
    for shown in ("", "Bearer", "Bearer x", "Bearer é", *wrong):
        status, fields, body = await served.ask(f"/api/{act}", "POST", Authorization=shown)
        assert (status, fields["WWW-Authenticate"]) == (401, "Bearer")
        assert b"web.token" in body
    status, _, body = await served.ask(f"/api/{act}?token={served.token}", "POST")
    assert status == 401, "an address is written down in many places: no token in it"
    assert served.node.done == []
    status, _, body = await served.ask(f"/api/{act}", "POST", Authorization=f"Bearer {served.token}")
    assert (status, served.node.done) == (200, [act])
    assert json.loads(body)["state"] == served.node.now.state


async def test_a_page_of_another_site_cannot_act_even_with_the_token(served: Server) -> None:
    right = f"Bearer {served.token}"
    for origin in ("http://evil.example", "https://evil.example:8090", "null", "file://"):
        status, _, _ = await served.ask("/api/leave", "POST", Authorization=right, Origin=origin)
        assert status == 421
    assert (await served.ask("/api/leave", "POST", Authorization=right, Host="evil.example"))[0] == 421
    assert served.node.done == []
    for origin in (f"http://{served.host}", "http://localhost:8090"):
        assert (await served.ask("/api/pause", "POST", Authorization=right, Origin=origin))[0] == 200


async def test_a_page_of_another_site_cannot_take_the_places_of_live_pages(served: Server) -> None:
    """It could not read them, but eight of its requests would leave none for the volunteer."""
    across = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert (await served.ask("/api/live", **across))[0] == 403
    assert (await served.ask("/", **across | {"Sec-Fetch-Mode": "navigate"}))[0] == 200, "a link"
    assert (await served.ask("/api/status", **across | {"Sec-Fetch-Site": "same-origin"}))[0] == 200


def test_the_token_is_made_once_and_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "web.token"
    token = token_in(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert token_in(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_in(tmp_path / "another") != token
    path.write_text("")
    with pytest.raises(UsageError, match="remove it"):
        token_in(path)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nHost", 400),
        (b"GET / HTTP/1.1\r\nHost : x", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n folded: x", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\nX: y", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\0b", 400),
        (b"GET / HTTP/2.0\r\nHost: 127.0.0.1", 400),
        (b"GET  / HTTP/1.1\r\nHost: 127.0.0.1", 400),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x", 400),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1", 400),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000", 413),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999999999", 413),
        (b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked", 501),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1" + b"\r\nX: y" * 100, 431),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * http.MAX_HEAD_BYTES, 431),
    ],
)
async def test_a_malformed_request_gets_a_sentence(served: Server, head: bytes, status: int) -> None:
    answer = await served.raw(head + b"\r\n\r\n", ends=False)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (await served.ask("/healthz"))[0] == 200


# ---- nothing wears it out ----

TOKENS = (
    *(b"GET", b"POST", b" ", b"/", b"HTTP/1.1", b"\r\n", b"\r\n\r\n", b":", b"\0", b"\xff"),
    *(b"Host: 127.0.0.1", b"Content-Length: 7"),
)
BYTES = st.lists(st.sampled_from(TOKENS) | st.binary(max_size=40), max_size=40).map(b"".join)


@given(BYTES | st.binary(max_size=300))
@settings(max_examples=500)
def test_any_head_is_parsed_or_refused(head: bytes) -> None:
    try:
        request = http.request_of(head + b"\r\n\r\n")
    except http.RefusedRequest as refused:
        assert 400 <= refused.status < 600
        assert "\n" not in str(refused)
    else:
        assert request.path.startswith("/")
        assert request.body_bytes <= http.MAX_BODY_BYTES
        assert all("\r" not in value and "\n" not in value for value in request.headers.values())


def test_a_field_of_spaces_is_refused_at_once() -> None:
    """Each such request of 8 kB took 0.2 s of the event loop."""
    began = time.process_time()
    for _ in range(20):
        with pytest.raises(http.RefusedRequest):
            http.request_of(b"GET / HTTP/1.1\r\na:" + b" " * 8000 + b"\x01\r\n\r\n")
    assert time.process_time() - began < 1.0


async def test_no_bytes_crash_or_hang_it(served: Server, caplog: pytest.LogCaptureFixture) -> None:
    @given(st.lists(BYTES, min_size=1, max_size=12))
    @settings(max_examples=40, database=None)
    def draw(batch: list[bytes]) -> None:
        drawn.extend(batch)

    drawn: list[bytes] = []
    draw()
    before = psutil.Process().memory_info().rss
    for at in range(0, len(drawn), 20):
        answers = await asyncio.gather(*(served.raw(data) for data in drawn[at : at + 20]))
        assert all(not answer or answer.startswith(b"HTTP/1.1 ") for answer in answers)
    assert (await served.ask("/healthz"))[0] == 200
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert caplog.records == []


async def test_an_endless_request_is_cut_off(served: Server) -> None:
    """A head that never ends, a body after a refusal: neither is buffered."""
    before = psutil.Process().memory_info().rss
    for beginning in (b"GET / HTTP/1.1\r\nX: ", b"POST /api/leave HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n"):
        _, writer = await served.open()
        with pytest.raises(ConnectionError):
            writer.write(beginning)
            async with asyncio.timeout(60):
                while True:
                    writer.write(bytes(64 << 10))
                    await writer.drain()
        writer.transport.abort()
    assert psutil.Process().memory_info().rss - before < 16 << 20


async def test_slow_and_silent_clients_are_disconnected(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    monkeypatch.setattr(server, "SEND_S", 0.2)
    for beginning in (b"", b"GET / HT", b"POST /api/leave HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nab"):
        assert await served.raw(beginning, ends=False) == b""
    served.node.past = busy(900, 60).past  # more than the buffers of a socket hold
    taken = socket.create_connection(("127.0.0.1", served.port))
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = f"GET /api/history HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode()
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began < 60:
            taken.send(request)  # asks again and again, and reads nothing
            await asyncio.sleep(0.02)
    taken.close()


async def test_too_many_connections_get_an_answer(served: Server) -> None:
    idle = [await served.open() for _ in range(server.MAX_CONNECTIONS)]
    assert (await served.ask("/healthz"))[0] == 503
    for _, writer in idle:
        writer.close()
    async with asyncio.timeout(60):
        while (await served.ask("/healthz"))[0] != 200:
            pass


# ---- what is live ----


async def listened(reader: asyncio.StreamReader) -> dict:
    while True:
        line = await asyncio.wait_for(reader.readline(), 60)
        if line.startswith(b"data: "):
            return json.loads(line[6:])


async def listen(served: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await served.open()
    writer.write(f"GET /api/live HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"Content-Type: text/event-stream" in head
    return reader, writer


async def test_live_events_hold_only_what_changed(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.2)
    reader, writer = await listen(served)
    first = await listened(reader)
    assert first["status"] == json.loads(json.dumps(document(served.node.now)))
    assert len(first["points"]["then"]) == len(served.node.past.points)
    assert first["names"][ME] == served.node.now.name
    assert await listened(reader) == {}, "a heartbeat: nothing has changed"
    served.node.now = replace(served.node.now, uptime_s=900.0)
    assert await listened(reader) == {}, "a page counts seconds by itself"
    past = served.node.past
    fresh = Point(time.time(), 41, 2050, 1.2)
    served.node.past = replace(past, points=(*past.points[3:], fresh))
    async with asyncio.timeout(60):
        while not (told := await listened(reader)):  # a heartbeat that was under way
            pass
    assert set(told) == {"points"}
    assert (told["points"]["gone"], told["points"]["stay"]) == (3, 37)
    assert [point["round"] for point in told["points"]["then"]] == [41]
    writer.close()


def test_a_page_counts_a_quarantine_down_by_itself() -> None:
    (row, *others) = busy().others.peers
    row = replace(row, last_seen_s=3.0, quarantined_s=60.0, quarantined_why="taken_back")

    def told(**later: object) -> bool:
        before, now = (PageState(peers=PeersView((each, *others))) for each in (row, replace(row, **later)))
        return "peers" in changes(before, now)

    assert not told(quarantined_s=59.0)
    assert not told(quarantined_s=59.0, last_seen_s=4.0)
    assert told(quarantined_s=0.0, quarantined_why="")
    assert told(quarantined_s=90.0)
    assert told(quarantined_s=59.0, quarantined_why="diverged")
    assert told(quarantined_s=59.0, refused=1)


async def test_an_event_is_built_once_for_all_that_know_the_same() -> None:
    node = busy()
    told = live.Live(node)
    early, late = told.events(), told.events()
    assert await anext(early) is await anext(late)
    node.now = replace(node.now, step=node.now.step + 1)
    one, other = await asyncio.gather(anext(early), anext(late))
    assert one is other and b'"step":' in one
    await early.aclose()
    await late.aclose()


async def test_no_view_is_built_while_no_page_listens(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    await asyncio.sleep(0.1)
    assert served.node.asked == []
    began = time.monotonic()
    listeners = [await listen(served) for _ in range(3)]
    for reader, _ in listeners:
        await listened(reader)
    looks = len(served.node.asked) / 3
    assert looks <= 1 + (time.monotonic() - began) / (live.PERIOD_S / 2), "one look is for all"
    for _, writer in listeners:
        writer.close()
    served.node.now = replace(served.node.now, state="paused")  # they are told, and are not there
    await no_page_listens(served)


async def no_page_listens(served: Server) -> None:
    """Until nothing is asked though something changes."""

    async def still_asked() -> bool:
        served.node.now = replace(served.node.now, step=served.node.now.step + 1)
        before = len(served.node.asked)
        await asyncio.sleep(0.1)
        return len(served.node.asked) > before

    async with asyncio.timeout(60):
        while await still_asked():
            pass


async def test_a_live_page_whose_connection_is_reset_is_no_error(
    served: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    reader, writer = await listen(served)
    await listened(reader)
    at_once = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    writer.transport.abort()
    await no_page_listens(served)
    gc.collect()  # asyncio says then what nobody has asked for
    assert caplog.records == []


async def test_the_number_of_live_pages_is_limited(served: Server) -> None:
    listeners = [await listen(served) for _ in range(live.MAX_LISTENERS)]
    for reader, _ in listeners:
        await listened(reader)
    status, _, body = await served.ask("/api/live")
    assert (status, body) == (503, b"8 pages are open already: close one\n")
    assert (await served.ask("/api/status"))[0] == 200
    for _, writer in listeners:
        writer.close()


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=6))
def test_applying_the_changes_gives_the_present_state(series: list[list[int]]) -> None:
    held: list[dict] = []
    before = PageState()
    for rounds in series:
        now = PageState(history=HistoryView(points=tuple(Point(1.0, number, 0) for number in rounds)))
        if event := changes(before, now).get("points"):
            held = [*held[event["gone"] : event["gone"] + event["stay"]], *event["then"]]
        assert [point["round"] for point in held] == rounds
        before = now


def test_an_event_costs_little() -> None:
    """The event loop's time for one second of a live page: a new point, piece and rate, 60 changed peers."""
    node = busy(500, 60)
    before, spent = PageState(node.now, node.others, node.past), []
    for number in range(20):
        past = node.past
        node.past = replace(
            past,
            points=(*past.points[1:], replace(past.points[-1], round=600 + number)),
            pieces=(*past.pieces[1:], replace(past.pieces[-1], round=600 + number)),
            rates=(*past.rates[1:], replace(past.rates[-1], at=past.rates[-1].at + 1)),
        )
        node.others = PeersView(tuple(replace(row, round=row.round + 1) for row in node.others.peers))
        now = PageState(replace(node.now, step=number), node.others, node.past)
        began = time.process_time()
        json.dumps(changes(before, now))
        spent.append(time.process_time() - began)
        before = now
    sys.stdout.write(f"a look among 60 peers: {1e3 * min(spent):.2f} ms\n")
    assert min(spent) < 0.01


# ---- where it is, and of what it is made ----


async def test_a_port_in_use_is_reported_at_once(served: Server, tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match=f"cannot be served at {served.host}, its port is in use by another program: "):
        async with server.page(served.host, bare(), tmp_path / "web.token"):
            pass


async def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    async with server.page("127.0.0.1:0", busy(), tmp_path / "web.token") as url:
        one = Server(url, busy(), "")
        reader, _ = await listen(one)
        await listened(reader)
        idle, _ = await one.open()
    await asyncio.wait_for(reader.read(), 60)
    assert await asyncio.wait_for(idle.read(), 60) == b""
    with pytest.raises(ConnectionError):
        await one.open()
    await one.close()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8090", "127.0.0.1:8090"),
        ("localhost:0", "127.0.0.1:0"),
        ("[::1]:8090", "[::1]:8090"),
        ("0.0.0.0:1", "0.0.0.0:1"),
    ],
)
def test_valid_addresses(given: str, meant: str) -> None:
    assert config.resolve({"web": given}, {}, {}).web == meant
    assert config.resolve({}, {"NOLOCO_WEB": given}, {}).web == meant


@pytest.mark.parametrize(
    "given",
    ["8090", ":8090", "127.0.0.1", "127.0.0.1:70000", "::1:80", "[127.0.0.1]:80", "example.org:80", "127.0.0.1:+1"],
)
def test_invalid_addresses(given: str) -> None:
    with pytest.raises(UsageError, match="--web must be an address and a port"):
        config.resolve({"web": given}, {}, {})


def test_its_port_is_free_at_its_end_though_a_forked_worker_has_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a data loader's worker has, which may stay."""
    copies, real = [], asyncio.start_server

    async def copied(*given: Any, **named: Any) -> asyncio.Server:
        made = await real(*given, **named)
        copies.append(os.dup(made.sockets[0].fileno()))
        return made

    monkeypatch.setattr(asyncio, "start_server", copied)
    port = quiet_port()
    for _ in range(2):
        with serving(bare(), tmp_path, port):
            pass
    for copy in copies:
        os.close(copy)
