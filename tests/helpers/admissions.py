"""A run by invitation for tests: its author, a guest with a token, and a stranger."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.base.identity import Identity
from noloco_node.run import admission
from noloco_node.run.schema import Manifest

AT = 1_800_000_000


def identity(number: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32), Path("nowhere"))


AUTHOR, GUEST, STRANGER = map(identity, (1, 2, 3))
RUN = Manifest(name="closed", membership="invite")
RULE = admission.rule(RUN, AUTHOR.peer_id)
TOKEN = admission.sign(RUN.run_id, GUEST.peer_id, AT, AUTHOR)
"""The guest's, until AT."""
