"""What was given last time: kept in the home, and used by `join`."""

import errno
import json
from pathlib import Path

import pytest
from faults import fail_at

from noloco_node.base.addresses import parse
from noloco_node.cli import parser
from noloco_node.errors import UsageError
from noloco_node.host import config, remembered
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.run import invitation
from noloco_node.run.invitation import Invitation

PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"
RUN, OTHER_RUN = 32 * "ab", 32 * "cd"
GIVEN = {"bootstrap": [ADDRESS], "max_upload": "5MB", "data": ["mine/*.txt"], "tokenizer": "t.json", "rounds": "3"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path / "home").create()


def load(home: Home, environ: dict[str, str] | None = None, *, back: bool = True, **flags: object) -> NodeConfig:
    return config.load({"home": str(home.root), **flags}, environ or {}, coming_back=back)


def test_join_alone_goes_on_with_it(home: Home, tmp_path: Path) -> None:
    first = load(home, **GIVEN, back=False)
    assert (first.rounds, first.max_upload) == (3, 5e6)
    remembered.keep(home, first.given, RUN, PEER)
    again = load(home)
    assert (again.run, again.trust, again.bootstrap, again.max_upload) == (RUN, PEER, (parse(ADDRESS),), 5e6)
    assert again.data == (str(tmp_path / "mine/*.txt"),), "from any folder"
    assert again.tokenizer == tmp_path / "t.json"
    assert again.rounds is None, "that was about one time"
    assert load(home, back=False).max_upload is None, "`start` and `bootstrap` do as they are told"


def test_a_full_disk_ends_no_start(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remembered.keep(home, GIVEN, RUN, PEER, 4001)
    with fail_at(monkeypatch, 1, OSError(errno.ENOSPC, "full")):
        remembered.keep(home, GIVEN, RUN, PEER, 4001)
        assert not caplog.text, "nothing new is to be written"
        remembered.keep(home, GIVEN, RUN, PEER, 4002)
    assert remembered.port(home) == 4001 and "is forgotten at the next start: the disk is full" in caplog.text


def test_the_port_of_last_time_is_no_setting(home: Home) -> None:
    assert remembered.port(home) == 0
    remembered.keep(home, GIVEN, RUN, PEER, 4001)
    assert remembered.port(home) == 4001
    assert str(load(home).listen) == "/ip4/0.0.0.0/tcp/0" and "port" not in remembered.read(home)


def test_a_flag_wins_and_is_kept_for_the_next_time(home: Home) -> None:
    remembered.keep(home, GIVEN, RUN, PEER)
    second = load(home, max_upload="1MB", web="127.0.0.1:8090")
    assert (second.max_upload, second.web, second.run) == (1e6, "127.0.0.1:8090", RUN)
    remembered.keep(home, second.given, RUN, PEER)
    third = load(home)
    assert (third.max_upload, third.web) == (1e6, "127.0.0.1:8090")


def test_flag_beats_environment_beats_node_toml_beats_remembered(home: Home) -> None:
    remembered.keep(home, {**GIVEN, "threads": "1", "device": "cpu", "hours": "1-2"}, RUN, PEER)
    (home.root / "node.toml").write_text('threads = 2\ndevice = "cuda:2"\nhours = "2-3"\n')
    found = load(home, {"NOLOCO_THREADS": "3", "NOLOCO_DEVICE": "cuda:3"}, threads="4")
    assert (found.threads, found.device, str(found.hours), found.max_upload) == (4, "cuda:3", "02:00-03:00", 5e6)


def test_limits_hold_when_the_invitation_is_typed_again(home: Home) -> None:
    remembered.keep(home, GIVEN, RUN, PEER)
    again = invitation.write(Invitation((parse(ADDRESS),), RUN, PEER))
    for found in (load(home, invitation=again, threads="2"), load(home, {"NOLOCO_INVITATION": again}, threads="2")):
        assert (found.max_upload, found.threads, len(found.data)) == (5e6, 2, 1)
        assert RUN.startswith(str(found.run)) and found.given["data"], "and are kept for the next time"


def test_an_address_alone_may_lead_to_another_run(home: Home) -> None:
    remembered.keep(home, GIVEN, RUN, PEER)
    other = ADDRESS.replace("203.0.113.7", "203.0.113.8")
    for found in (load(home, bootstrap=[other]), load(home, {"NOLOCO_BOOTSTRAP": other})):
        assert (found.run, found.trust, found.data, found.max_upload) == (None, None, (), 5e6)
        assert found.bootstrap == (parse(other),)


def test_none_takes_back_what_is_remembered(home: Home) -> None:
    remembered.keep(home, {**GIVEN, "web": "127.0.0.1:8090", "announce": [ADDRESS]}, RUN, PEER)
    second = load(home, max_upload="none", announce=["none"], data=["none"], tokenizer="none")
    assert (second.max_upload, second.announce, second.web) == (None, (), "127.0.0.1:8090")
    assert (second.data, second.tokenizer) == ((), None)
    remembered.keep(home, second.given, RUN, PEER)
    third = load(home)
    assert third.max_upload is None
    assert (third.data, third.tokenizer) == ((), None), "and is no file of this folder that is called so"


def test_what_is_on_or_off_can_be_taken_back(home: Home) -> None:
    _, given = parser.parse(["join", "--no-compile"])
    remembered.keep(home, {"compile": True}, RUN, PEER)
    assert load(home).compile and not load(home, compile=given.compile).compile


def test_another_run_gets_none_of_the_files_that_were_for_this_one(home: Home) -> None:
    remembered.keep(home, GIVEN, RUN, PEER)
    found = load(home, run=OTHER_RUN)
    assert (found.run, found.trust, found.data, found.tokenizer, found.max_upload) == (OTHER_RUN, None, (), None, 5e6)
    assert load(home, run=RUN[:32]).trust == PEER, "the same run"


def test_a_home_of_an_older_version_knows_its_last_run(home: Home) -> None:
    assert remembered.read(home) == {}
    home.run(RUN).mkdir(parents=True)
    assert load(home).run == RUN


def test_a_damaged_file_is_set_aside_and_a_wrong_value_named(home: Home) -> None:
    path = home.remembered
    path.write_text("[")
    assert load(home).run is None
    assert path.with_name("remembered.json.damaged").exists()
    path.write_text(json.dumps({"threads": "two"}))
    with pytest.raises(UsageError, match=r"remembered\.json: threads must be a whole number.*Give this setting again"):
        load(home)
    assert load(home, threads="2").threads == 2 and load(home, threads="none").threads is None


def test_a_folder_whose_name_cannot_be_typed_locks_nobody_out(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting's value has to be printable, and there the whole path is not."""
    (folder := tmp_path / "of an old disk\udcfc").mkdir()
    (folder / "corpus.txt").write_text("text")
    monkeypatch.chdir(folder)
    remembered.keep(home, load(home, data=["corpus.txt"]).given, RUN, PEER)
    assert load(home).data == ("corpus.txt",)


def test_what_a_newer_version_remembered_is_left_out(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    remembered.keep(home, {**GIVEN, "priority": "low"}, RUN, PEER)
    assert (load(home).max_upload, "priority" in load(home).given) == (5e6, False)
    assert "does not know 'priority'" in caplog.text
    assert {s.origin for s in config.explained(home, {}) if s.name == "max_upload"} == {"remembered"}


def test_each_setting_says_where_it_comes_from(home: Home) -> None:
    remembered.keep(home, GIVEN, RUN, PEER)
    (home.root / "node.toml").write_text('device = "cpu"\nmax_upload = "2MB"\n')
    rows = {s.name: (s.value, s.origin) for s in config.explained(home, {"NOLOCO_MAX_UPLOAD": "1MB"})}
    assert rows["max_upload"] == ("1MB", "environment")
    assert rows["device"] == ("cpu", "node.toml")
    assert rows["bootstrap"] == ([ADDRESS], "remembered") and rows["run"] == (RUN, "remembered")
    assert rows["log_level"] == ("info", "default") and rows["threads"] == (None, "default")
    assert rows["compile"] == (False, "default")
    environ = {"NOLOCO_THREADS": "2", "NOLOCO_COMPILE": "yes", "NOLOCO_SINKS": "wandb", "NOLOCO_DEVICE": "none"}
    again = {s.name: s.value for s in config.explained(home, environ)}
    assert (again["threads"], again["compile"], again["sinks"], again["device"]) == (2, True, ["wandb"], "auto")
    environ = {"NOLOCO_MAX_UPLOAD": "5000000", "NOLOCO_GPU_MEMORY_FRACTION": "0.5", "NOLOCO_MICRO_BATCH": "auto"}
    again = {s.name: s.value for s in config.explained(home, environ)}
    assert (again["max_upload"], again["gpu_memory_fraction"], again["micro_batch"]) == (5_000_000, 0.5, "auto")
    assert rows["listen"] == ("/ip4/0.0.0.0/tcp/0", "default") and rows["sinks"] == ([], "default")
