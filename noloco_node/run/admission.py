"""Who may take part in a run: a token that the run's author signs for one peer, one run and a time.

    5 bytes    until when it holds, in seconds since 1970
    64 bytes   the author's signature over a context of its own, the run's id, the peer id and the time

Run and peer are not in the token: who checks it knows the run, and libp2p has proved which peer calls. So a token that
another peer shows, or that was made for another run, has a wrong signature. Its author needs none.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from noloco_node.base import identity
from noloco_node.base.identity import Identity
from noloco_node.run.schema import Manifest

NOT_ADMITTED, EXPIRED, REVOKED = WHY = ("not_admitted", "expired", "revoked")
"""Why a peer is refused; the codes travel."""
TIME_BYTES, TOKEN_BYTES = 5, 69

Refuses = Callable[[str, bytes], str | None]
"""Why a peer with this token is refused, one of WHY; None where it is not."""


def refuses_nobody(peer: str, token: bytes) -> None:
    """As in a run that is open to everybody."""


_SIGNING_CONTEXT = b"noloco admission v1\n"


def sign(run_id: str, peer: str, expires: int, author: Identity) -> bytes:
    """The token of a peer."""
    return _time(expires) + author.sign(_signed_part(run_id, peer, _time(expires)))


@dataclass(frozen=True, slots=True)
class Admission:
    """The rule of one run, as far as this node knows it."""

    run_id: str
    label: str
    author: str
    invite: bool
    """Whether a token is needed."""
    revoked: Collection[str] = frozenset()

    def refusal(self, peer: str, token: bytes, now: float) -> str | None:
        """Why this peer may not take part, one of WHY; None where it may."""
        if peer == self.author:
            return None
        if peer in self.revoked:
            return REVOKED
        if not self.invite:
            return None
        if len(token) != TOKEN_BYTES or not _is_signed(self.author, self.run_id, peer, token):
            return NOT_ADMITTED
        return None if now < int.from_bytes(token[:TIME_BYTES], "big") else EXPIRED

    def sentence(self, why: str, peer: str, token: bytes) -> str:
        """For the user of this node, `peer`, which is refused."""
        ask = f"send your peer id, {peer}, to its author, who makes a line to join with by `noloco-node invite`"
        match why:
            case "revoked":
                return f"the author of {self.label} has taken this node, {peer}, out of the run: join another one"
            case "expired":
                until = time.strftime("%Y-%m-%d %H:%M", time.localtime(int.from_bytes(token[:TIME_BYTES], "big")))
                return f"the token for {self.label} expired at {until}: {ask}"
            case _ if token:
                return f"the token is not for this node in {self.label}: {ask}"
            case _:
                return f"in {self.label} only those take part whom its author invites: {ask}"


def rule(run: Manifest, author: str, revoked: Collection[str] = ()) -> Admission:
    return Admission(run.run_id, run.label, author, run.membership == "invite", frozenset(revoked))


@lru_cache(maxsize=4096)  # a presence record is read every few seconds, and a signature takes 0.1 ms to check
def _is_signed(author: str, run_id: str, peer: str, token: bytes) -> bool:
    return identity.verify(author, _signed_part(run_id, peer, token[:TIME_BYTES]), token[TIME_BYTES:])


def _signed_part(run_id: str, peer: str, until: bytes) -> bytes:
    return _SIGNING_CONTEXT + bytes.fromhex(run_id) + peer.encode() + until


def _time(expires: int) -> bytes:
    return expires.to_bytes(TIME_BYTES, "big")
