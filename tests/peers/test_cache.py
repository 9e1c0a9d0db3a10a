"""The peer cache: kept over restarts, small, and never trusted."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.peers.cache import MAX_FILE_BYTES, MAX_PEERS, PeerCache
from noloco_node.peers.record import MAX_ADDRESS_LETTERS, MAX_ADDRESSES


@dataclass(frozen=True)
class Seen:
    peer_id: str
    time: float
    addresses: tuple[Address, ...]


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(directory / str(number)).peer_id for number in range(MAX_PEERS + 6)]


def seen(peer_id: str, time: float) -> Seen:
    return Seen(peer_id, time, (Address("ip4", "192.0.2.1", 4001, peer_id),))


def test_peers_are_known_after_a_restart_the_latest_first(tmp_path: Path, ids: list[str]) -> None:
    path = tmp_path / "peers.json"
    assert PeerCache(path).peers() == {}
    cache = PeerCache(path)
    cache.keep([seen(ids[0], 5.0), seen(ids[1], 7.0), Seen(ids[2], 9.0, ())])
    cache.keep([seen(ids[3], 6.0)])
    again = PeerCache(path).peers()
    assert list(again) == [ids[1], ids[3], ids[0]]
    assert again[ids[0]] == seen(ids[0], 0).addresses
    assert [file.name for file in tmp_path.iterdir()] == ["peers.json"]


def test_it_stays_small_and_keeps_the_latest(tmp_path: Path, ids: list[str]) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    for number, peer in enumerate(ids):
        cache.keep([seen(peer, float(number))])
    assert set(PeerCache(tmp_path / "peers.json").peers()) == set(ids[-MAX_PEERS:])
    assert MAX_PEERS * MAX_ADDRESSES * (MAX_ADDRESS_LETTERS + 8) + 128 * MAX_PEERS <= MAX_FILE_BYTES


def test_many_peers_of_one_place_leave_those_of_other_places_in(tmp_path: Path, ids: list[str]) -> None:
    cache, elsewhere = PeerCache(tmp_path / "peers.json"), Address("ip4", "192.0.2.9", 4001, ids[0])
    cache.keep([Seen(ids[0], 1.0, (elsewhere,)), *(seen(peer, 5.0 + n) for n, peer in enumerate(ids[1:]))])
    assert ids[0] in PeerCache(tmp_path / "peers.json").peers()


def test_nothing_is_written_where_nothing_has_changed_but_times(tmp_path: Path, ids: list[str]) -> None:
    path = tmp_path / "peers.json"
    cache = PeerCache(path)
    cache.keep([seen(ids[0], 5.0)])
    path.unlink()
    cache.keep([seen(ids[0], 6.0)])
    assert not path.exists()


def test_who_says_a_later_time_or_another_place_is_not_first_for_it(tmp_path: Path, ids: list[str]) -> None:
    path, late = tmp_path / "peers.json", time.time() + 50
    cache = PeerCache(path)
    cache.keep([seen(ids[0], late), seen(ids[1], time.time() - 1)])
    assert cache._read()[ids[0]][0] <= time.time()
    crowd = [Seen(peer, time.time(), (Address("ip4", f"9.9.{n}.9", 1, peer),)) for n, peer in enumerate(ids[2:])]
    cache.keep([*crowd, seen(ids[1], time.time() - 1)], dict.fromkeys(ids[2:], "one host"))
    assert ids[1] in [*PeerCache(path).peers()][:MAX_PEERS]


def test_whom_a_clock_saw_that_was_ahead_makes_room_for_others(tmp_path: Path, ids: list[str]) -> None:
    path, ahead = tmp_path / "peers.json", time.time() + 1e8
    there = {peer: [f"/ip4/9.9.{n}.9/tcp/4001/p2p/{peer}"] for n, peer in enumerate(ids[:MAX_PEERS])}
    path.write_text(json.dumps({peer: {"seen": ahead, "addresses": at} for peer, at in there.items()}))
    assert list(PeerCache(path).peers()) == list(there), "they may be there"
    PeerCache(path).keep([seen(ids[-1], time.time())])
    assert next(iter(PeerCache(path).peers())) == ids[-1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", "[" * 100_000, '{"a": 1}', "\xff", '{"a": {"seen": 1, "addresses": ["x"]}}']
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str, ids: list[str]) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(text.encode("latin-1"))
    cache = PeerCache(path)
    assert cache.peers() == {}
    cache.keep([seen(ids[0], 5.0)])
    assert list(PeerCache(path).peers()) == [ids[0]]


@pytest.mark.parametrize(
    "entry",
    [
        {"seen": 1.0, "addresses": ["/ip4/192.0.2.1/tcp/4001"]},
        {"seen": 1.0, "addresses": []},
        {"seen": 1.0, "addresses": [5]},
        {"seen": 1.0},
        {"seen": "now", "addresses": ["good"]},
        {"seen": float("nan"), "addresses": ["good"]},
        {"seen": float("inf"), "addresses": ["good"]},
        {"seen": 1e300, "addresses": ["good"]},
        {"seen": 10**400, "addresses": ["good"]},
        {"seen": -5, "addresses": ["good"]},
    ],
    ids=lambda entry: str(entry)[:40],
)
def test_an_entry_that_could_not_have_been_written_is_ignored(
    tmp_path: Path, entry: dict[str, object], ids: list[str]
) -> None:
    good, bad = seen(ids[0], 1).addresses, ids[1]
    if entry.get("addresses") == ["good"]:
        entry = {**entry, "addresses": list(map(str, seen(bad, 1).addresses))}
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({bad: entry, ids[0]: {"seen": 1, "addresses": list(map(str, good))}}))
    assert PeerCache(path).peers() == {ids[0]: good}
