"""The invitation that a run's nodes print for others: one word with addresses, run, author and a check sum.

It is `nn1` and base58 (letters and digits, none of them alike) of:

    1 byte     1: the node at the first address is the run's author; plus 2: a token follows
    16 bytes   the first half of the run's id
    17 bytes   unless that node is: of the author's peer id the 23 letters after those that all ids begin with
    69 bytes   if it follows: the token of one volunteer (run/admission.py)
    addresses  1 byte its kind, the host (4, 16, or 1 + length of its name), 2 the port, and 32 the key of its node
               unless it is the node before
    4 bytes    the first of a double SHA-256 of all before them

Half of a hash will do: to find another run or key with the same 128 bits takes 2^128 tries. One address always fits;
more are added while the whole command stays shorter than 160 characters (one with a token has 200). `nt1` begins a
token alone. The run's manifest comes from the swarm.
"""

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import base58

from noloco_node.base import addresses
from noloco_node.base.addresses import Address
from noloco_node.base.identity import peer_id_of, public_key
from noloco_node.errors import UsageError
from noloco_node.run.admission import TOKEN_BYTES

COMMAND = "noloco-node join"
MAX_LETTERS = 159 - len(f"{COMMAND} ")
"""So that the command fits into a short message and most terminals' two lines."""
RUN_DIGITS, AUTHOR_LETTERS = 32, 31
"""What an invitation holds of a run's id and of an author's peer id."""
_MARK, _FAMILY = "nn1", "nn"
_TOKEN_MARK = "nt1"
_BY_AUTHOR, _HAS_TOKEN = 1, 2
_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
_SAME_NODE = 0x80
_RUN_BYTES, _AUTHOR_BYTES, _KEY_BYTES, _PORT_BYTES = 16, 17, 32, 2
_ID_BEGINS = "12D3KooW"
"""Every peer id of an Ed25519 key."""
_DAMAGED = f"the invitation is damaged: copy it again, all of it, from the line `{COMMAND} {_MARK}...`"


@dataclass(frozen=True, slots=True)
class Invitation:
    addresses: tuple[Address, ...]
    run: str
    """The run's id, or its first RUN_DIGITS digits."""
    author: str
    """The author's peer id, or its first AUTHOR_LETTERS letters."""
    token: bytes = b""


def lines(ways_in: Sequence[Address], run_id: str, author: str) -> list[str]:
    """The command for others; none where there is no address."""
    return [f"{COMMAND} {write(Invitation(tuple(ways_in), run_id, author))}"] if ways_in else []


def write(invitation: Invitation) -> str:
    """The word, with as many of the addresses as fit. They are of TCP, without a relay, with the peer id."""
    by_author = invitation.addresses[0].peer == invitation.author
    head = bytes([by_author + _HAS_TOKEN * bool(invitation.token)]) + bytes.fromhex(invitation.run[:RUN_DIGITS])
    if not by_author:
        letters = invitation.author[len(_ID_BEGINS) : AUTHOR_LETTERS]
        head += base58.b58decode_int(letters).to_bytes(_AUTHOR_BYTES, "big")
    head += invitation.token
    word, there, before = "", b"", ""
    for address in invitation.addresses:
        there += _packed(address, before)
        before = address.peer
        longer = _MARK + base58.b58encode_check(head + there).decode()
        if word and len(longer) > MAX_LETTERS:
            break
        word = longer
    return word


def read(text: str) -> Invitation:
    """White space in it, as of a line that was broken, does not matter. Raises UsageError."""
    word = "".join(text.split())
    if word.startswith("/"):
        raise UsageError(f"{word!r} is an address, not an invitation: give it with --bootstrap")
    if not word.startswith(_FAMILY):
        raise UsageError(f"{word[:20]!r} is not an invitation: one begins with {_MARK}, as in `{COMMAND} {_MARK}...`")
    if not word.startswith(_MARK):
        raise UsageError("this version does not know such an invitation: copy it again, or update noloco-node")
    try:
        return _unpacked(_Bytes(base58.b58decode_check(word[len(_MARK) :])))
    except (ValueError, UsageError):
        raise UsageError(_DAMAGED) from None  # a new one: an exception keeps the frames of each time that it is raised


def token_word(token: bytes) -> str:
    return f"{_TOKEN_MARK}{base58.b58encode_check(token).decode()}"


def read_token(text: str) -> bytes:
    """Raises UsageError."""
    word = "".join(text.split())
    with suppress(ValueError):
        token: bytes = base58.b58decode_check(word.removeprefix(_TOKEN_MARK))
        if word.startswith(_TOKEN_MARK) and len(token) == TOKEN_BYTES:
            return token
    raise UsageError(f"the token is damaged: copy it again, all of it, from {_TOKEN_MARK} on")


def _packed(address: Address, before: str) -> bytes:
    host = address.ip.packed if address.ip else bytes([len(address.host)]) + address.host.encode()
    kind, port = _KINDS.index(address.kind), address.port.to_bytes(_PORT_BYTES, "big")
    if address.peer == before:
        return bytes([kind | _SAME_NODE]) + host + port
    return bytes([kind]) + host + port + (public_key(address.peer) or b"")


class _Bytes:
    """Read from the first to the last. Raises ValueError beyond the end."""

    def __init__(self, content: bytes) -> None:
        self._left = content

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, count: int) -> bytes:
        found, self._left = self._left[:count], self._left[count:]
        if len(found) < count:
            raise ValueError("it ends too early")
        return found

    def number(self, count: int = 1) -> int:
        return int.from_bytes(self.take(count), "big")


def _unpacked(content: _Bytes) -> Invitation:
    parts, run = content.number(), content.take(_RUN_BYTES).hex()
    if parts > _BY_AUTHOR + _HAS_TOKEN:
        raise ValueError("it has a part that this version does not know")
    by_author = parts & _BY_AUTHOR
    letters = "" if by_author else base58.b58encode_int(content.number(_AUTHOR_BYTES)).decode()
    token = content.take(TOKEN_BYTES) if parts & _HAS_TOKEN else b""
    there: list[Address] = []
    while content or not there:
        kind = content.number()
        name = _KINDS[kind & ~_SAME_NODE] if kind & ~_SAME_NODE < len(_KINDS) else ""
        host, port = _host(name, content), content.number(_PORT_BYTES)
        same = there and kind & _SAME_NODE
        peer = there[-1].peer if same else peer_id_of(content.take(_KEY_BYTES))
        there.append(addresses.parse(str(Address(name, host, port, peer))))
    author = there[0].peer if by_author else _ID_BEGINS + letters.rjust(AUTHOR_LETTERS - len(_ID_BEGINS), "1")
    return Invitation(tuple(there), run, author, token)


def _host(kind: str, content: _Bytes) -> str:
    match kind:
        case "ip4":
            return str(ipaddress.IPv4Address(content.take(4)))
        case "ip6":
            return str(ipaddress.IPv6Address(content.take(16)))
        case _:
            return content.take(content.number()).decode("ascii")
