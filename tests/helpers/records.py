"""Presence records for tests: a usual one, with changes."""

from noloco_node.base.addresses import Address
from noloco_node.peers.record import Presence, signed_record

RUN, OTHER_RUN = "a1" * 32, "b2" * 32
NOW = 1_800_000_000.0


def presence(identity, **changes):
    address = Address("ip4", "127.0.0.1", 4001, identity.peer_id)
    usual = {"state": "training", "round": 3, "step": 150, "loss": 2.5, "tokens_per_s": 9e3}
    return Presence(**{**usual, "addresses": (address,), **changes})


def record(identity, run_id=RUN, boot=b"b" * 16, now=NOW, *, peers=0, **changes):
    shown = presence(identity, **changes)
    return signed_record(identity, shown, run_id=run_id, boot=boot, now=now, peers=peers)
