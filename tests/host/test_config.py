"""This machine's settings: where they come from, which place wins, and what a wrong one says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base.addresses import parse
from noloco_node.errors import UsageError
from noloco_node.host import config, home
from noloco_node.host.config import NodeConfig, resolve
from noloco_node.host.limits import Hours
from noloco_node.run import invitation
from noloco_node.run.invitation import Invitation

PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"


def test_home(tmp_path):
    assert home.default_home({"NOLOCO_HOME": str(tmp_path), "HOME": "/h"}) == tmp_path
    assert home.default_home({"XDG_STATE_HOME": "/state", "HOME": "/h"}) == Path("/state/noloco-node")
    assert home.default_home({"XDG_STATE_HOME": "state", "HOME": "/h"}) == Path("/h/.local/state/noloco-node")
    assert home.default_home({"HOME": "/h"}) == Path("/h/.local/state/noloco-node")


def test_a_user_without_a_home_directory_is_no_crash(monkeypatch):
    """As one that only a container's --user names, without HOME."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert home.default_home({}) == Path("/.local/state/noloco-node")


def test_flag_beats_environment_beats_file_beats_default():
    environ, file = {"NOLOCO_HOME": "/h", "NOLOCO_THREADS": "2", "NOLOCO_DEVICE": "cuda:1"}, {"threads": 1, "rounds": 7}
    assert resolve({}, {"NOLOCO_HOME": "/h"}, {}) == NodeConfig(home=Path("/h"))
    assert resolve({}, {}, file).threads == 1
    assert resolve({}, environ, file).threads == 2
    found = resolve({"threads": 3, "rounds": None}, environ, file)
    assert (found.threads, found.device, found.rounds) == (3, "cuda:1", 7)


def test_home_flag_decides_which_file_is_read(tmp_path):
    (tmp_path / "node.toml").write_text('device = "cpu"\n', encoding="utf-8-sig")  # as some editors begin a file
    assert config.load({"home": str(tmp_path)}, {"NOLOCO_HOME": "/nowhere"}).device == "cpu"
    assert config.load({}, {"NOLOCO_HOME": str(tmp_path)}).home == tmp_path
    assert config.load({}, {"NOLOCO_HOME": str(tmp_path / "none")}).device == "auto"


def test_lists_of_addresses():
    from_environment = resolve({}, {"NOLOCO_HOME": "/h", "NOLOCO_BOOTSTRAP": f"{ADDRESS}, {ADDRESS}"}, {})
    assert from_environment.bootstrap == (parse(ADDRESS),)
    by_name = f"/dns4/seed.example.org/tcp/4001/p2p/{PEER}"
    assert resolve({"bootstrap": [by_name]}, {"HOME": "/h"}, {}).bootstrap == (parse(by_name),)
    assert resolve({}, {"HOME": "/h", "NOLOCO_BOOTSTRAP": ""}, {}).bootstrap == ()


def test_an_invitation_stands_for_address_run_and_author_in_each_place():
    word = invitation.write(Invitation((parse(ADDRESS),), 32 * "ab", PEER))
    other = ADDRESS.replace("203.0.113.7", "203.0.113.8")
    for found in (
        resolve({"invitation": f"{word[:40]}\n {word[40:]}"}, {"HOME": "/h"}, {}),
        resolve({}, {"HOME": "/h", "NOLOCO_INVITATION": word, "NOLOCO_BOOTSTRAP": ""}, {}),
        resolve({}, {"HOME": "/h"}, {"invitation": word}),
        resolve({"bootstrap": [word]}, {"HOME": "/h"}, {}),
        resolve({}, {"HOME": "/h", "NOLOCO_BOOTSTRAP": word}, {}),
    ):
        assert (found.bootstrap, found.run, found.trust) == ((parse(ADDRESS),), 16 * "ab", PEER)
    found = resolve({"run": 32 * "cd"}, {"HOME": "/h", "NOLOCO_INVITATION": word, "NOLOCO_BOOTSTRAP": other}, {})
    assert (found.bootstrap, found.run, found.trust) == ((parse(ADDRESS), parse(other)), 32 * "cd", PEER)
    with pytest.raises(UsageError, match="the invitation is damaged"):
        resolve({}, {"HOME": "/h", "NOLOCO_INVITATION": word[:-1]}, {})


def test_what_a_volunteer_gives():
    found = resolve({"data": ["a b/*.txt", "c"]}, {"HOME": "/h", "NOLOCO_DATA": "d"}, {"tokenizer": "t/tokenizer.json"})
    assert (found.data, found.tokenizer) == (("a b/*.txt", "c"), Path("t/tokenizer.json"))
    assert resolve({}, {"HOME": "/h", "NOLOCO_DATA": "a b/*.txt, c,c"}, {}).data == ("a b/*.txt", "c")


def test_what_a_volunteer_allows():
    environ = {"HOME": "/h", "NOLOCO_DAILY_UPLOAD": "20GB", "NOLOCO_MAX_UPLOAD": "1MB"}
    found = resolve(
        {"max_upload": "40Mbit", "hours": "22-08"}, environ, {"gpu_memory_fraction": 0.5, "daily_upload": 10**7}
    )
    assert (found.max_upload, found.daily_upload, found.gpu_memory_fraction) == (5e6, 20 * 10**9, 0.5)
    assert found.hours == Hours(22 * 60, 8 * 60)
    assert (found.max_download, found.daily_download) == (None, None)


def test_how_a_machine_computes():
    found = resolve({"micro_batch": "auto", "compile": True}, {"HOME": "/h", "NOLOCO_MICRO_BATCH": "4"}, {})
    assert (found.micro_batch, found.compile) == (None, True)
    found = resolve({}, {"HOME": "/h", "NOLOCO_COMPILE": "1"}, {"micro_batch": 4, "compile": False})
    assert (found.micro_batch, found.compile) == (4, True)
    assert resolve({}, {"HOME": "/h"}, {}).checkpoint_activations is None
    assert resolve({}, {"HOME": "/h", "NOLOCO_CHECKPOINT_ACTIVATIONS": "no"}, {}).checkpoint_activations is False
    found = resolve({"checkpoint_activations": "yes"}, {"HOME": "/h"}, {"checkpoint_activations": False})
    assert found.checkpoint_activations is True


@pytest.mark.parametrize(
    ("flags", "environ", "file", "sentence"),
    [
        ({"threads": 0}, {}, {}, "--threads must be a whole number from 1 to 1024, not 0"),
        ({"linger": "x"}, {}, {}, "--linger must be a whole number from 0 to 2592000, not 'x'"),
        ({}, {"NOLOCO_THREADS": "two"}, {}, "NOLOCO_THREADS must be a whole number from 1 to 1024, not 'two'"),
        ({}, {"NOLOCO_TREADS": "2"}, {}, "NOLOCO_TREADS is not known, did you mean NOLOCO_THREADS?"),
        ({}, {}, {"thread": 2}, "node.toml: thread is not known, did you mean threads?"),
        ({}, {}, {"threads": True}, "node.toml: threads must be a whole number from 1 to 1024, not true"),
        (
            {"device": "gpu"},
            {},
            {},
            "--device must be auto, all, cpu, cuda, cuda:<number>, or several GPUs as cuda:0,cuda:1, not 'gpu'",
        ),
        ({"run": "tiny-3f9a2c81d0e4"}, {}, {}, "--run must be the run's id, 64 hex digits"),
        ({"trust": "me"}, {}, {}, "--trust must be the peer id"),
        ({"max_upload": "5Mb"}, {}, {}, "--max-upload must be a rate like 5MB or 40Mbit (a second), at least 32kB"),
        ({}, {"NOLOCO_MAX_DOWNLOAD": "1kB"}, {}, "NOLOCO_MAX_DOWNLOAD must be a rate like"),
        ({}, {}, {"daily_upload": "20"}, "node.toml: daily_upload must be an amount like 20GB"),
        ({"hours": "22"}, {}, {}, "--hours must be hours like 22-08 or 22:30-08:15, not '22'"),
        ({"micro_batch": "0"}, {}, {}, "--micro-batch must be a whole number from 1 to 1000000, or auto, not '0'"),
        ({}, {"NOLOCO_COMPILE": "please"}, {}, "NOLOCO_COMPILE must be yes or no, not 'please'"),
        ({"gpu_memory_fraction": "1.5"}, {}, {}, "--gpu-memory-fraction must be a share from 0.05 to 1, not '1.5'"),
        (
            {"data": [""]},
            {},
            {},
            "--data must be at most 64 names of files or folders, or patterns like corpus/*.parquet, not a list",
        ),
        ({}, {}, {"data": 3}, "node.toml: data must be at most 64 names of files"),
        ({}, {}, {"tokenizer": ["t"]}, "node.toml: tokenizer must be the name of a file"),
        ({"log_level": "loud"}, {}, {}, "--log-level must be debug, info, warning or error, not 'loud'"),
        ({"listen": "0.0.0.0:4001"}, {}, {}, "--listen must be an address like /ip4/0.0.0.0/tcp/4001"),
        ({"listen": "/ip4/0.0.0.300/tcp/1"}, {}, {}, "--listen must be"),
        ({"listen": "/ip4/0.0.0.0/tcp/70000"}, {}, {}, "--listen must be"),
        (
            {"bootstrap": ["/ip4/203.0.113.7/tcp/4001"]},
            {},
            {},
            "/p2p/12D3KooW…, or an invitation, nn1…, not '/ip4/203.0.113.7/tcp/4001'",
        ),
        ({"bootstrap": [ADDRESS[:-1]]}, {}, {}, f"{ADDRESS[:-1]!r} does not end in a whole peer id"),
        ({"bootstrap": [ADDRESS.replace("4001", "0")]}, {}, {}, "--bootstrap must be addresses like"),
        ({"bootstrap": [ADDRESS.replace("tcp", "udp")]}, {}, {}, "--bootstrap must be addresses like"),
        ({"listen": ADDRESS}, {}, {}, "--listen must be an address like"),
        ({"bootstrap": [ADDRESS] * 65}, {}, {}, "--bootstrap must be a list"),
        ({}, {}, {"announce": 3}, "node.toml: announce must be a list"),
        ({"sinks": "tensorboard,csv"}, {}, {}, "--sinks must be a list of tensorboard or wandb"),
    ],
)
def test_errors_name_the_place_and_what_is_allowed(flags, environ, file, sentence):
    with pytest.raises(UsageError) as raised:
        resolve(flags, {"HOME": "/h", **environ}, file)
    assert sentence in str(raised.value)


def test_a_broken_node_toml(tmp_path):
    (tmp_path / "node.toml").write_text("threads = ")
    with pytest.raises(UsageError, match="not valid TOML"):
        config.read_home_toml(tmp_path)


@given(
    st.sampled_from(list(config._PARSERS)),
    st.text() | st.integers() | st.floats() | st.lists(st.text()) | st.none() | st.dictionaries(st.text(), st.text()),
)
def test_no_value_raises_anything_but_ours(key, value):
    try:
        resolve({}, {"HOME": "/h"}, {key: value})
    except UsageError as error:
        assert "\n" not in str(error)
