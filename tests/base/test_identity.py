"""A node's key, its peer id, its signatures, and the names people see."""

import subprocess
import tracemalloc
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base import peer_names
from noloco_node.base.identity import Identity, is_peer_id, verify
from noloco_node.errors import UsageError
from noloco_node.peers import record

# RFC 8032, section 7.1, test 1: seed, public key, signature of the empty message.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)


def key_file(path: Path, raw: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(raw)
    path.chmod(mode)
    return path


def test_a_known_key_has_the_known_id_and_signature(tmp_path):
    identity = Identity.load_or_create(key_file(tmp_path / "key", bytes.fromhex("08011240") + SEED + PUBLIC))
    assert identity.peer_id == base58.b58encode(bytes.fromhex("002408011220") + PUBLIC).decode()
    assert identity.peer_id.startswith("12D3KooW")
    assert identity.sign(b"") == SIGNATURE
    assert verify(identity.peer_id, b"", SIGNATURE)
    assert not verify(identity.peer_id, b"x", SIGNATURE)


def test_a_new_key_is_private_stays_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "home" / "identity.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    again = Identity.load_or_create(path)
    assert again.peer_id == first.peer_id
    assert verify(first.peer_id, b"hello", again.sign(b"hello"))
    assert Identity.load_or_create(tmp_path / "other").peer_id != first.peer_id


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes.fromhex("08011240") + SEED + PUBLIC[:-1],
        bytes.fromhex("08011240") + SEED + PUBLIC + b"x",
        bytes.fromhex("08001240") + SEED + PUBLIC,
        bytes.fromhex("08011240") + SEED + SEED,
    ],
    ids=["empty", "short", "long", "another type", "public half of another key"],
)
def test_a_damaged_key_is_refused_and_kept(tmp_path, raw):
    path = key_file(tmp_path / "key", raw)
    with pytest.raises(UsageError, match=r"damaged.*Restore"):
        Identity.load_or_create(path)
    assert path.read_bytes() == raw


def test_a_key_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path):
    path = tmp_path / "my home" / "key"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600") as refused:
        Identity.load_or_create(path)
    subprocess.run(str(refused.value).split("Run: ")[1], shell=True, check=True)
    Identity.load_or_create(path)


@given(peer_id=st.text(max_size=80), message=st.binary(max_size=64), signature=st.binary(max_size=80))
def test_garbage_is_not_a_signature_and_never_raises(peer_id, message, signature):
    assert not verify(peer_id, message, signature)
    assert not is_peer_id(peer_id)


def test_an_id_has_one_spelling(tmp_path):
    peer_id = Identity.load_or_create(tmp_path / "key").peer_id
    assert is_peer_id(peer_id)
    for other in (f" {peer_id}", f"{peer_id}\n", peer_id[:-1], peer_id[:-1] + "0", f"1{peer_id}", peer_id.lower()):
        assert not is_peer_id(other)
    assert not is_peer_id(base58.b58encode(bytes.fromhex("002408001220") + PUBLIC).decode())  # an RSA type byte


def test_a_long_id_or_record_of_a_stranger_is_not_kept(tmp_path):
    """4096 ids of a MiB took 4 GB, as in requests that anybody may send, and 2048 records 128 MB."""
    known = Identity.load_or_create(tmp_path / "key").peer_id
    tracemalloc.start()
    try:
        for number in range(100):
            assert not is_peer_id(f"{number:08}" * 2**13)
            assert record.read(known, f"{number:08}".encode() * 2**13) is None
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_are_stable_short_and_from_lists_without_bias():
    assert peer_names.name_of("12D3KooWExample") == peer_names.name_of("12D3KooWExample")
    for words in (peer_names._FIRST, peer_names._SECOND):
        assert len(words) == len(set(words)) == 128  # a power of two: one byte of a hash picks evenly
        assert all(word.isascii() and word.islower() and len(word) <= 8 for word in words)
    assert peer_names.short_id("12D3KooWabcdefghQmZT") == "12D3KooW…QmZT"
    assert peer_names.short_id("tiny") == "tiny"
