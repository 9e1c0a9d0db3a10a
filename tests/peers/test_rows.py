"""A run and its peers as seen by a node that is no member of it."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.base.identity import Identity
from noloco_node.base.peer_names import name_of
from noloco_node.peers import rows
from noloco_node.peers.record import MAX_WHOLE, Presence, accept, signed_record
from noloco_node.run import manifest
from noloco_node.run.schema import Manifest

NOW = 1_800_000_000.0
PEERS = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32), Path("nowhere")) for n in range(3)]
SIGNED = manifest.sign(Manifest(name="tiny", seed=1, rounds=100), PEERS[0])
RUN = manifest.verify(SIGNED)


def record(peer: Identity, state: str, round_: int, age_s: float = 0.0):
    standing = Presence(state, round_, 0, 0.0, 9e3 if state == "training" else 0.0, ())
    written = signed_record(peer, standing, run_id=RUN.run_id, boot=b"b" * 16, now=NOW - age_s)
    return accept(peer.peer_id, written, RUN.run_id, NOW - age_s, ttl_s=60)


def test_lag_counts_from_the_middle_round_of_those_that_train_and_they_are_counted():
    seen = {
        p.peer_id: record(p, state, n)
        for p, (state, n) in zip(PEERS, (("training", 9), ("paused", 4), ("solo", 8)), strict=True)
    }
    view = rows.run_seen(SIGNED, seen, NOW + 5)
    assert (view.run.run, view.run.rounds, view.run.author) == (RUN.label, 100, PEERS[0].peer_id)
    assert (view.run.peers, view.run.training, view.run.round) == (3, 2, 8)
    assert [(row.state, row.lag, row.run) for row in view.peers] == [
        ("training", -1, RUN.label),
        ("paused", 4, RUN.label),
        ("solo", 0, RUN.label),
    ]
    assert view.peers[0].name == name_of(PEERS[0].peer_id)
    assert view.peers[0].last_seen_s == pytest.approx(5)
    assert view.peers[0].loss is None, "a record without one says 0"
    assert [row.tokens_per_s for row in view.peers] == [9e3, None, None]


def test_one_peer_that_says_any_round_moves_no_others_lag():
    rounds = (41, 42, MAX_WHOLE)
    view = rows.run_seen(SIGNED, {p.peer_id: record(p, "training", n) for p, n in zip(PEERS, rounds, strict=True)}, NOW)
    assert (view.run.round, [row.lag for row in view.peers[:2]]) == (42, [1, 0])


def test_where_nobody_trains_the_middle_round_of_all_counts():
    seen = {p.peer_id: record(p, "finished", n) for p, n in zip(PEERS, (99, 100, 100), strict=True)}
    assert rows.run_seen(SIGNED, seen, NOW).run.round == 100


def test_a_peer_whose_record_expired_is_gone():
    view = rows.run_seen(SIGNED, {PEERS[0].peer_id: record(PEERS[0], "training", 9, age_s=59)}, NOW + 2)
    assert (view.run.peers, view.run.round, view.peers) == (0, 0, ())
    assert rows.peers_view([view]).runs == (view.run,)
