"""A node's Ed25519 key: its peer id, its signatures, and how others verify them.

The peer id is libp2p's: base58 of the identity multihash of the public key. The key can be read from the id, so the id
is all that is needed to verify a signature. The file has the format that p2pd reads (a protobuf `PrivateKey`): 08 01 12
40, 32 bytes of seed, 32 bytes of public key.

Knows nothing of the network: libp2p proves, when it connects, that a peer *has* the key of its id.
Format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import os
import shlex
import stat
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_node.base import atomic_files
from noloco_node.errors import UsageError

_FILE_HEADER = bytes.fromhex("08011240")  # key type Ed25519, then 64 bytes of data
_ID_HEADER = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: key type Ed25519, then 32 bytes of data
_KEY_BYTES = 32
_MAX_FILE_BYTES = 1024  # the file has 68 bytes
_RESTORE = "Restore it from a copy, or move it away to start with a new identity."
_ID_LETTERS = 52  # base58 of 38 bytes that begin with 00 24: always this long, so longer text is not even decoded


class Identity:
    """An Ed25519 key in a file. Anyone who can read the file can act as this node, so only its user may."""

    def __init__(self, key: Ed25519PrivateKey, path: Path) -> None:
        self._key = key
        self.path = path
        self.peer_id = peer_id_of(key.public_key().public_bytes_raw())

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        if not path.exists():
            _create(path)
        return cls(_read(path), path)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether the key in `peer_id` signed `message`. False for garbage in any argument."""
    public = public_key(peer_id)
    if public is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_peer_id(text: str) -> bool:
    return public_key(text) is not None


def peer_id_of(public: bytes) -> str:
    return str(base58.b58encode(_ID_HEADER + public).decode())


def public_key(peer_id: str) -> bytes | None:
    """The key in a peer id; None where the text is none."""
    return _key_in(peer_id) if len(peer_id) == _ID_LETTERS else None  # a longer one, of a stranger, is not remembered


@lru_cache(maxsize=4096)  # a record has it in each of its addresses, and it takes 20 µs to decode
def _key_in(peer_id: str) -> bytes | None:
    try:
        raw: bytes = base58.b58decode(peer_id)
    except ValueError:
        return None
    # b58decode strips white space, so only the canonical spelling counts: two spellings would be two peers to a dict.
    if not is_raw_peer_id(raw) or base58.b58encode(raw) != peer_id.encode():
        return None
    return raw[len(_ID_HEADER) :]


def is_raw_peer_id(raw: bytes) -> bool:
    return raw.startswith(_ID_HEADER) and len(raw) == len(_ID_HEADER) + _KEY_BYTES


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    with atomic_files.writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = _FILE_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    atomic_files.create(path, content, mode=0o600)  # another process may have been faster: then its key is used


def _read(path: Path) -> Ed25519PrivateKey:
    try:
        with atomic_files.open_file(path) as file:
            mode, raw = os.fstat(file.fileno()).st_mode, file.read(_MAX_FILE_BYTES)
    except atomic_files.NotAFile:
        raise UsageError(f"the identity {path} is damaged: it is not a regular file. {_RESTORE}") from None
    except OSError as error:
        raise UsageError(
            f"cannot read the identity {path}: {error.strerror}. Make it readable for this user."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"others may read the identity {path}. Run: chmod 600 {shlex.quote(str(path))}")
    seed, public = raw[4:36], raw[36:]
    key = Ed25519PrivateKey.from_private_bytes(seed) if len(seed) == _KEY_BYTES else None
    if key is None or not raw.startswith(_FILE_HEADER) or key.public_key().public_bytes_raw() != public:
        raise UsageError(f"the identity {path} is damaged. {_RESTORE}")
    return key
