"""The verbs with which a run's author says who takes part, and changes the run later."""

import json
import threading
import time
from pathlib import Path

import pytest
from admissions import GUEST, STRANGER

from noloco_node.base.identity import Identity
from noloco_node.cli import main
from noloco_node.host.home import Home
from noloco_node.run import admission, amendment, invitation, manifest, signed_file
from noloco_node.run.schema import Manifest


def started(home: Home, **changes: object) -> Manifest:
    """As `start` leaves a run behind."""
    run = Manifest(name="mine", **changes)
    author = Identity.load_or_create(home.create().identity)
    home.run(run.run_id).mkdir(parents=True)
    signed_file.keep(home.run(run.run_id), manifest.sign(run, author))
    return run


def test_invite_makes_a_token_that_the_run_accepts(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    run = started(home, membership="invite")
    assert main(["invite", GUEST.peer_id, "--expires", "2d", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    token = invitation.read_token(made["token"])
    author = Identity.load_or_create(home.identity).peer_id
    rule = admission.rule(run, author)
    assert rule.refusal(GUEST.peer_id, token, time.time()) is None
    assert rule.refusal(GUEST.peer_id, token, time.time() + 2 * 86_400 + 1) == "expired"
    assert made["join"] is None, "no node runs here"
    assert main(["invite", GUEST.peer_id]) == 0
    said = capsys.readouterr().out
    assert "noloco-node join <invitation> --token" in said and "no node of this run runs here" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["invite", "somebody"], "noloco-node id"),
        (["invite", GUEST.peer_id, "--expires", "soon"], "--expires must be"),
        (["invite", GUEST.peer_id, "--run", "other"], "names no run"),
        (["run", "amend", "mine"], "name what changes"),
        (["run", "amend", "mine", "--rounds", "99"], "--rounds must be a whole number from 200"),
        (["run", "amend", "mine", "--swaps", "17"], "--swaps must be"),
        (["run", "amend", "mine", "--end-now", "--rounds", "400"], "name one of them"),
        (["run", "amend", "other", "--end-now"], "names no run"),
    ],
)
def test_a_mistake_is_named(home: Home, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    run = started(home, membership="invite")
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert not (home.run(run.run_id) / amendment.NAME).exists()


def test_an_open_run_needs_no_token_and_nobody_but_the_author_amends(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(home)
    assert main(["invite", GUEST.peer_id]) == 2
    assert "is open to all" in capsys.readouterr().err
    home.identity.unlink()
    assert main(["run", "amend", "mine", "--end-now"]) == 2
    assert "only its author" in capsys.readouterr().err
    assert not (home.run(run.run_id) / amendment.NAME).exists()


def test_who_was_taken_out_of_an_open_run_may_come_back(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home.run(started(home).run_id)
    for words, revoked in (["revoke", GUEST.peer_id], (GUEST.peer_id,)), (["invite", GUEST.peer_id, "--json"], ()):
        assert main(words) == 0, capsys.readouterr().err
        found = signed_file.read(folder)
        assert found.amendment and found.amendment.revoked == revoked
        said = capsys.readouterr().out
    assert json.loads(said)["peer_id"] == GUEST.peer_id


def test_each_change_is_a_version_more_and_keeps_those_before(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    run = started(home, membership="invite")
    folder = home.run(run.run_id)
    for words in (
        ["run", "amend", "mine", "--rounds", "200"],
        ["revoke", GUEST.peer_id],
        ["revoke", STRANGER.peer_id],
        ["run", "amend", run.run_id[:12], "--end-now"],
        ["run", "amend", "mine", "--rounds", "300", "--swaps", "auto"],
        ["invite", GUEST.peer_id],
    ):
        assert main(words) == 0, capsys.readouterr().err
    found = signed_file.read(folder)
    assert found.amendment and found.amendment.version == 6
    assert (found.run.rounds, found.run.outer.swaps_per_round, found.amendment.ended) == (300, "auto", False)
    assert found.amendment.revoked == (STRANGER.peer_id,), "who is invited again is no longer taken out"
    capsys.readouterr()
    assert main(["runs"]) == 0
    assert "amended (6): 300 rounds, swaps auto, 1 taken out" in capsys.readouterr().out


def test_of_two_commands_at_once_one_waits_for_the_other(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both would sign a first version, and one of the two changes would be lost."""
    folder, sign = home.run(started(home).run_id), amendment.sign
    other = threading.Thread(target=main, args=(["revoke", STRANGER.peer_id],))

    def interrupted(newer: amendment.Amendment, author: Identity) -> amendment.SignedAmendment:
        if other.ident is None:
            other.start()
            other.join(0.3)  # without waiting it is done by then
        return sign(newer, author)

    monkeypatch.setattr(amendment, "sign", interrupted)
    assert main(["revoke", GUEST.peer_id]) == 0
    other.join()
    found = signed_file.read(folder).amendment
    assert found and found.version == 2 and set(found.revoked) == {GUEST.peer_id, STRANGER.peer_id}


def test_one_that_does_not_end_is_not_waited_for_forever(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started(home)
    monkeypatch.setattr("noloco_node.host.home._TRY_S", 0.0)
    with home.changing():
        assert main(["revoke", GUEST.peer_id]) == 1
    assert "another command is changing a run" in capsys.readouterr().err


def test_what_a_newer_version_amended_is_not_amended_by_this_one(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(home)
    path = home.run(run.run_id) / amendment.NAME
    document = amendment.Amendment(run=run.run_id, version=7).canonical().replace(b"{", b'{"later":1,')
    author = Identity.load_or_create(home.identity)
    amendment.write(path.parent, amendment.SignedAmendment(document, author.sign(b"noloco amendment v1\n" + document)))
    before = path.read_bytes()
    for words in (["revoke", GUEST.peer_id], ["invite", GUEST.peer_id], ["run", "amend", "mine", "--end-now"]):
        assert main(words) == 12
        assert "cannot read: update noloco-node" in capsys.readouterr().err
    assert main(["runs"]) == 0 and path.read_bytes() == before


def test_join_takes_the_token_from_the_line_or_by_itself(tmp_path: Path) -> None:
    from noloco_node.host import config

    token = b"t" * admission.TOKEN_BYTES
    word = invitation.token_word(token)
    assert config.resolve({"home": str(tmp_path), "token": word}, {}, {}).token == token
    with pytest.raises(Exception, match="--token must be what"):
        config.resolve({"home": str(tmp_path), "token": word[:-1]}, {}, {})
