"""The schema of what `status` and `peers` show."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from fake_node import PEERS, STATUS

import noloco_node
from noloco_node.errors import Incompatible
from noloco_node.views.documents import document, from_json, to_json
from noloco_node.views.peers import PeerRow, PeersView
from noloco_node.views.status import StatusView

PROMISED = """
schema peer_id run_id version state round step tokens tokens_per_s loss eval_loss device partner busy_fraction rounds
bytes resent_block_fraction peers_seen uptime_s addresses last_error
""".split()  # noqa: SIM905 (as the list is written elsewhere)


def test_status_reads_back():
    assert from_json(StatusView, to_json(STATUS)) == STATUS
    bare = StatusView(peer_id="a", name="b", version="c", state="starting")
    assert from_json(StatusView, to_json(bare)) == bare


def test_peers_read_back():
    assert from_json(PeersView, to_json(PEERS)) == PEERS
    assert from_json(PeersView, to_json(PeersView())) == PeersView()


def test_status_has_what_was_promised():
    written = document(STATUS)
    assert set(PROMISED) <= set(written)
    assert written["schema"] == 1
    assert set(written["rounds"]) == {"committed", "solo", "by_reason"}
    assert set(written["bytes"]) == {"sent", "received", "per_param_round"}


@pytest.mark.parametrize(("heading", "kind"), [("`status --json`:", StatusView), ("A row of `peers --json`:", PeerRow)])
def test_every_field_is_in_the_readme(heading, kind):
    """And no other is, in the table of noloco_node/views/README.md."""
    text = (Path(noloco_node.__file__).parent / "views" / "README.md").read_text()
    _, rows = text.split(f"\n{heading}\n")
    table = rows.strip().split("\n\n")[0].splitlines()[2:]
    told = [name for row in table for name in re.findall("`(.+?)`", row.split("|")[1])]
    assert sorted(told) == sorted(f.name for f in fields(kind))


def test_numbers_that_json_lacks_become_null():
    diverged = replace(STATUS, loss=float("nan"), eval_loss=float("inf"))
    assert json.loads(to_json(diverged), parse_constant=pytest.fail)["loss"] is None
    assert from_json(StatusView, to_json(diverged)).eval_loss is None


def test_fields_of_another_version_are_skipped():
    written = document(STATUS) | {"mood": "good", "rounds": {**asdict(STATUS.rounds), "planned": 9}}
    assert from_json(StatusView, json.dumps(written)) == STATUS


NESTED = '{"schema": 1, "rounds": ' + 2000 * "[" + 2000 * "]" + "}"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"schema": 2}', '{"schema": 1}', '{"schema":1,"rounds":3}', NESTED]
)
def test_another_schema_is_refused(text):
    with pytest.raises(Incompatible, match="restart"):
        from_json(StatusView, text)
