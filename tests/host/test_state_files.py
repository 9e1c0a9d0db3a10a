"""Every small state file of a home, truncated at a hundred lengths and killed in the middle of its write."""

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import fail_at

from noloco_node.base.addresses import parse
from noloco_node.base.identity import Identity
from noloco_node.errors import DiskFull, UsageError
from noloco_node.host.config import read_home_toml, resolve
from noloco_node.host.home import Home
from noloco_node.host.limits import Used
from noloco_node.host.policy import Policy
from noloco_node.host.traffic import read_day, write_day
from noloco_node.peers.cache import PeerCache
from noloco_node.run import manifest, signed_file
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors
from noloco_node.web.access import token_in

AUTHOR = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


@dataclass(frozen=True)
class Seen:
    peer_id: str
    time: float
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class StateFile:
    """`write` makes a content of a number, 1 or 2; `read` gives what a new start finds."""

    name: str
    write: Callable[[Path, int], object]
    read: Callable[[Path], Any]
    empty: Any = None
    """What a start goes on with that found it damaged; None: it ends the start, with a sentence."""
    lost: str = ""
    """What the log says that is."""
    remedy: str = ""
    is_made_once: bool = False


def signed(folder: Path, number: int) -> manifest.Signed:
    return manifest.sign(Manifest(name="tiny", seed=number), Identity.load_or_create(folder / "author.key"))


def friends(path: Path, number: int) -> None:
    PeerCache(path).keep([Seen(AUTHOR, float(number), (parse(f"/ip4/192.0.2.{number}/tcp/4001/p2p/{AUTHOR}"),))])


FILES = [
    StateFile(
        "authors.json",
        lambda path, number: TrustedAuthors(path).check(["rendezvous"], f"run-{number}", AUTHOR, None),
        lambda path: [TrustedAuthors(path).know(["rendezvous"], f"run-{number}", AUTHOR) for number in (1, 2)],
        remedy="restore it from a copy, or delete it, and the next author that signs a run is trusted",
    ),
    StateFile(
        "noloco.json",
        lambda path, number: signed_file.keep(path.parent, signed(path.parent, number)),
        lambda path: signed_file.read(path.parent).run.seed,
        remedy="restore it from a copy. In a home, a node that joins the run writes a new one",
    ),
    StateFile(
        "traffic.json",
        lambda path, number: write_day(path, Used("2031-12-24", number, 7)),
        read_day,
        Used(),
        "today's traffic count restarts at 0",
    ),
    StateFile(
        "peers.json", friends, lambda path: PeerCache(path).peers(), {}, "peers seen before this start are forgotten"
    ),
    StateFile(
        "identity.key",
        lambda path, _: Identity.load_or_create(path),
        lambda path: Identity.load_or_create(path).peer_id,
        remedy="Restore it from a copy, or move it away",
        is_made_once=True,
    ),
    StateFile("web.token", lambda path, _: token_in(path), token_in, remedy="remove it", is_made_once=True),
]
each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@each
def test_it_outlives_a_restart_and_nothing_lies_beside_it(file: StateFile, tmp_path: Path) -> None:
    path = tmp_path / "home" / file.name
    path.parent.mkdir()
    file.write(path, 1)
    first = file.read(path)
    assert first == file.read(path) and first not in (None, file.empty)
    file.write(path, 2)
    assert (file.read(path) == first) is file.is_made_once
    assert {found.name for found in path.parent.iterdir()} <= {file.name, "author.key"}


@each
def test_cut_anywhere_it_is_named(file: StateFile, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / file.name
    file.write(path, 1)
    whole = path.read_bytes().rstrip(b"\n")  # without its last newline it says the same
    before, mode = file.read(path), path.stat().st_mode
    shortest = 32 if file.name == "web.token" else len(whole)  # a shorter token is another one, of so many letters
    for length in {*range(0, shortest, max(1, shortest // 100)), shortest - 1}:
        path.write_bytes(whole[:length])
        path.chmod(mode)
        caplog.clear()
        if file.empty is None:
            with pytest.raises(UsageError, match=file.remedy) as raised:
                file.read(path)
            assert str(path) in str(raised.value) and raised.value.exit_code == 2
            assert path.read_bytes() == whole[:length], "it is kept"
        else:
            assert file.read(path) == file.empty
            assert str(path) in caplog.text and file.lost in caplog.text
            assert (tmp_path / f"{file.name}.damaged").read_bytes() == whole[:length]
            file.write(path, 1)
            assert file.read(path) == before, "and a new one begins"


WRONG: list[tuple[str, str]] = [
    *[("traffic.json", f'{{"day": "2031-12-24", "sent": {sent}, "received": 7}}') for sent in ("-1", "true", '"5"')],
    *[("traffic.json", f'{{"day": "2031-12-24", "sent": {sent}, "received": 7}}') for sent in ("1e308", "NaN", "[]")],
    ("traffic.json", '{"day": "2031-12-24", "sent": 1, "received": ' + "9" * 300 + "}"),
    ("traffic.json", '{"day": 5, "sent": 1, "received": 1}'),
    *[("authors.json", f'{{"a/b": {author}}}') for author in ("5", "null", "{}", '"somebody"', '"two\\nlines"')],
    ("authors.json", "[]"),
    *[("noloco.json", content) for content in ('{"schema": 1}', '{"schema": 1, "manifest": 5}', "[]")],
    ("noloco.json", '{"schema": 1, "manifest": "\\ud800", "author": "a", "signature": "00"}'),
    ("noloco.json", '{"schema": 1, "manifest": "{}", "author": "a", "signature": "zz"}'),
    ("peers.json", "[]"),
]


@pytest.mark.parametrize(("name", "content"), WRONG)
def test_well_formed_and_wrong(name: str, content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = (file for file in FILES if file.name == name)
    path = tmp_path / name
    path.write_text(content)
    if file.empty is None:
        with pytest.raises(UsageError, match=file.remedy) as raised:
            file.read(path)
        assert "\n" not in str(raised.value) and path.read_text() == content
    else:
        assert file.read(path) == file.empty and file.lost in caplog.text


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop_of_links(path: Path) -> None:
    path.symlink_to(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@each
@pytest.mark.parametrize("other", [fifo, endless_device, loop_of_links, unix_socket, Path.mkdir])
def test_what_is_no_file_is_refused_at_once(
    file: StateFile, other: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / file.name
    other(path)
    began = time.process_time()
    if file.empty is None:
        with pytest.raises(UsageError) as raised:
            file.read(path)
        assert str(path) in str(raised.value)
    else:
        assert file.read(path) == file.empty and str(path) in caplog.text
    assert time.process_time() - began < 1


@pytest.mark.parametrize("other", [fifo, endless_device, loop_of_links, unix_socket, Path.mkdir])
def test_nor_do_settings_and_the_lock_wait_for_it(other: Callable[[Path], None], tmp_path: Path) -> None:
    other(tmp_path / "node.toml")
    other(tmp_path / "node.lock")
    with pytest.raises(UsageError, match=r"node\.toml"):
        read_home_toml(tmp_path)
    home = Home(tmp_path)
    with pytest.raises(UsageError, match=r"node\.lock"), home.lock():
        pass
    assert home.holder() is None


@each
@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["killed", "disk full"])
def test_a_write_that_ends_in_the_middle(
    file: StateFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    path = tmp_path / "home" / file.name
    path.parent.mkdir()
    signed(path.parent, 1)  # its author's key is there before
    for place in range(1, 6):
        path.unlink(missing_ok=True)
        if not file.is_made_once:
            file.write(path, 1)
            old = file.read(path)
        with fail_at(monkeypatch, place, fault), pytest.raises((KeyboardInterrupt, DiskFull)):
            file.write(path, 2)
        if file.is_made_once:
            assert not path.exists() or len(path.read_bytes()) > 32, "whole"
        else:
            assert (file.read(path) == old) is (place <= 3), "the old one, until the new one has its name"
        assert {found.name for found in path.parent.iterdir()} <= {file.name, "author.key"}


def test_a_pause_is_a_mark_that_a_restart_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home, config = Home(tmp_path), resolve({"home": str(tmp_path)}, {}, {})

    def start() -> Policy:
        return Policy(config, home, lambda: None)

    node = start()
    with fail_at(monkeypatch, 2, OSError(errno.ENOSPC, "full")), caplog.at_level(logging.WARNING):
        node.pause()
        asyncio.run(node.keep_mark())
    assert node.held_back() == "paused" and "this pause will not outlive the node: the disk is full" in caplog.text
    assert start().held_back() is None and not list(tmp_path.iterdir())
    node.pause()
    asyncio.run(node.keep_mark())
    again = start()
    assert again.held_back() == "paused" and (tmp_path / "paused").stat().st_mode & 0o777 == 0o600
    assert node.pause_ends() == "`noloco-node resume`"
    assert again.pause_ends() == "`noloco-node resume` (paused before this start)"
    again.resume()
    asyncio.run(again.keep_mark())
    assert again.held_back() is start().held_back() is None and not list(tmp_path.iterdir())
