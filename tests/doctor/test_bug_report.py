"""A bug report of a home full of secrets: it holds what helps, and none of the secrets."""

import json
import stat
import time
import zipfile
from pathlib import Path

import pytest

from noloco_node.base.identity import Identity
from noloco_node.doctor import bug_report
from noloco_node.doctor.bug_report import Mask
from noloco_node.errors import UsageError
from noloco_node.host.home import Home

PEER = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"
RUN = "3f9a2c81d0e4" + "0" * 52
SECRETS = {
    "web token": "Jq0wZ3vD8m",
    "invitation": "eyJpbnZpdGF0aW9uIjoxfQ",
    "hub token": "hf_abcdefghijklmnopqrstuvwx",
    "password of a proxy": "hunter2hunter2",
    "value of a variable": "AKIA-value-of-a-variable",
    "stranger's address": "203.0.113.77",
    "stranger's IPv6 address": "2001:db8:7::99",
    "mapped address": "::ffff:198.51.100.9",
    "stranger's host": "box7.example.org",
    "host of the settings": "relay.example.net",
    "host of the settings of last time": "meet.example.com",
    "run's invitation": "nn1DqFFR4hxy7b6nqGzJb9pKqrNwHfJrpxqYRyNNaDQ96ioYDFaZ2v9Sg7n8tFVmBPHznsQBPaSiR3YVGhTq",
}
LOG = f"""\
2026-11-21 12:31:07,123 INFO noloco_node.node.trainer: round 4 with calm-otter: loss 1.23
2026-11-21 12:31:08,000 WARNING noloco_node.x: /ip4/{SECRETS["stranger's address"]}/tcp/4001/p2p/{PEER} is silent
2026-11-21 12:31:08,100 WARNING noloco_node.x: [{SECRETS["stranger's IPv6 address"]}]:4001 refuses
2026-11-21 12:31:08,200 WARNING noloco_node.x: {SECRETS["mapped address"]} refuses; p2pd 0.32.1; 127.0.0.1:80 is ours
2026-11-21 12:31:09,000 ERROR noloco_node.x: /dns4/{SECRETS["stranger's host"]}/tcp/1: {SECRETS["stranger's host"]}:1
2026-11-21 12:31:09,001 ERROR noloco_node.x: cannot resolve {SECRETS["host of the settings"]}
2026-11-21 12:31:09,002 ERROR noloco_node.x: https://me:{SECRETS["password of a proxy"]}@a/ {SECRETS["hub token"]}
2026-11-21 12:31:09,003 ERROR noloco_node.x: GET /?token={SECRETS["web token"]} {SECRETS["value of a variable"]}
2026-11-21 12:31:09,004 ERROR noloco_node.x: invited by {SECRETS["invitation"]}
2026-11-21 12:31:09,005 ERROR noloco_node.x: cannot resolve {SECRETS["host of the settings of last time"]}
2026-11-21 12:31:09,006 INFO noloco_node.x: others join with: noloco-node join {SECRETS["run's invitation"]}
"""


@pytest.fixture
def home(tmp_path):
    """As a node leaves it, with a secret in every place."""
    home = Home(tmp_path / "home").create()
    Identity.load_or_create(home.identity)
    run = home.run(RUN)
    run.mkdir(parents=True)
    (home.root / "web.token").write_text(SECRETS["web token"] + "\n")
    (run / "invitation.token").write_text(SECRETS["invitation"])
    (home.root / "node.toml").write_text(f'bootstrap = ["/dns/{SECRETS["host of the settings"]}/tcp/1/p2p/{PEER}"]\n')
    address = f"/dns/{SECRETS['host of the settings of last time']}/tcp/1/p2p/{PEER}"
    home.remembered.write_text(json.dumps({"bootstrap": [address]}))
    (home.root / "peers.json").write_text(json.dumps({PEER: [SECRETS["stranger's address"]]}))
    home.log.write_text(LOG)
    (run / "noloco.json").write_text('{"schema": 1, "manifest": "{}"}')
    (run / "events.jsonl").write_text('{"at": 1.5, "event": "Evaluated", "round": 1}\n')
    return home


def test_no_secret_gets_out(home, tmp_path):
    status = json.dumps({"addresses": ["/ip4/" + SECRETS["stranger's address"] + "/tcp/1"]})
    contents = {"status.json": status, **bug_report.files(home)}
    environ = {"MY_API_KEY": SECRETS["value of a variable"], "HOME": "/root", "NOLOCO_BOOTSTRAP": ""}
    to = tmp_path / "report.zip"
    bug_report.write(to, contents, bug_report.mask(home, environ))
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
    with zipfile.ZipFile(to) as pack:
        found = {name: pack.read(name).decode() for name in pack.namelist()}
    everything = "\n".join([*found, *found.values()])
    for what, secret in SECRETS.items():
        assert secret not in everything, what
    assert home.identity.read_bytes()[4:36] not in to.read_bytes()
    assert not any("identity" in name or "token" in name or "node.toml" in name for name in found)

    assert "round 4 with calm-otter: loss 1.23" in found["node.log"]
    assert all(word in found["node.log"] for word in ("12:31:07,123", PEER, "127.0.0.1:80", "p2pd 0.32.1"))
    assert f"runs/{RUN[:12]}/noloco.json" in found
    assert '"Evaluated"' in found[f"runs/{RUN[:12]}/events.jsonl"]


def test_one_address_has_one_mask_throughout():
    mask = Mask([], {"/home/alice": "~"})
    assert mask.hide("203.0.113.7 and 203.0.113.8, 203.0.113.7") == "<ip-1> and <ip-2>, <ip-1>"
    assert mask.hide("/ip4/203.0.113.8/tcp/1 in /home/alice/x") == "/ip4/<ip-2>/tcp/1 in ~/x"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("dial tcp: lookup meet.example.org: no such host", "dial tcp: lookup <host-1>: no such host"),
        ("lookup meet.example.org on 127.0.0.53:53", "lookup <host-1> on 127.0.0.53:53"),
        ("lookup nas: no such host, says the nas", "lookup <host>: no such host, says the nas"),
        ("gpu-17.lab.example.org:4001 refuses; gpu-17.lab.example.org", "<host-1>:4001 refuses; <host-1>"),
        ("the name box.example.org is not known", "the name <host-1> is not known"),
        ("GET https://hub.example.org/x, http://nas/y", "GET https://<host-1>/x, http://<host>/y"),
        ("ip-203-0-113-7.ec2.internal went", "<host-1> went"),
        ("http://localhost:8090, 127.0.0.1:80", "http://localhost:8090, 127.0.0.1:80"),
        ("the name of the lookup failed", "the name of the lookup failed"),
        ("daemon.go:198 failed, outer.py:12", "daemon.go:198 failed, outer.py:12"),
    ],
)
def test_a_host_is_masked_where_addresses_and_errors_name_it(said, shown):
    mask = Mask([], {})
    mask.learn(said)
    assert mask.hide(said) == shown


def test_a_directory_is_masked_at_its_borders():
    mask = Mask([], {"/home/al": "~", "/home/al/.noloco": "<home>"})
    said = "/home/al/x, /home/al. (/home/al) file:///home/al/.noloco/run /home/alice /home/al.old /mnt/home/al"
    assert mask.hide(said) == "~/x, ~. (~) file://<home>/run /home/<user> /home/<user> /mnt/home/al"


CREDENTIALS = {
    "a key of AWS": ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    "a secret of AWS": ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "K7MDENG"),
    "a key's id": ("AWS_ACCESS_KEY_ID=abcd1234", "abcd1234"),
    "a URL's query": ("https://bucket/x?access_token=s3cr3t&n=1", "s3cr3t"),
    "a form": ("client_secret=s3cr3t;grant=x", "s3cr3t"),
    "JSON": ('{"refresh_token": "s3cr3t"}', "s3cr3t"),
    "JSON in JSON": (r'"{\"password\":\"s3cr3t\"}"', "s3cr3t"),
    "a short password": ("password=ab1", "ab1"),
    "a password after a colon": ("Password: s3cr3t", "s3cr3t"),
    "Python": ("login(passwd='s3cr3t')", "s3cr3t"),
    "a header": ("Authorization: Bearer s3cr3t.s3cr3t", "s3cr3t"),
    "a basic header": ("'authorization': 'Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
    "a header in JSON": ('{"Proxy-Authorization": "Digest s3cr3t"}', "s3cr3t"),
    "a scheme alone": ("sent bearer s3cr3ts3cr3t", "s3cr3ts3cr3t"),
    "a cookie": ("Set-Cookie: session=s3cr3t; path=/", "s3cr3t"),
    "a header of an API": ("x-api-key: s3cr3t", "s3cr3t"),
    "GitHub": ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "16C7e42F"),
    "GitHub's new form": ("github_pat_11ABCDEFG0_abcdefgh", "11ABCDEFG0"),
    "GitLab": ("glpat-abcdefgh12345678", "abcdefgh12345678"),
    "Hugging Face": ("hf_abcdefghijklmnop", "abcdefghijklmnop"),
    "OpenAI": ("sk-proj-abcdefghijklmnop", "abcdefghijklmnop"),
    "Slack": ("xoxb-123456789012-abcdefgh", "abcdefgh"),
    "Google": ("AIzaSyA-1234567890abcdefghijklmnopqrstu", "1234567890abcdef"),
    "a JWT": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
    "a key block": (
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1r",
    ),
    "a key block in JSON": (r"-----BEGIN PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END PRIVATE KEY-----", "b3BlbnNzaC1r"),
    "a key block's begin": ("-----BEGIN RSA PRIVATE KEY-----\nb3BlbnNzaC1r", "b3BlbnNzaC1r"),
    "a key block's end": ("3: b3BlbnNzaC1r\n-----END RSA PRIVATE KEY-----\n", "b3BlbnNzaC1r"),
    "a URL with a password": ("postgres://me:s3cr3t@db/x", "s3cr3t"),
    "a URL, hard to read": ("https://me:s3/cr@3t@db/x", "cr@3t"),
    "long and random": ("got Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg", "Zm9vYmFy"),
    "the user": ("permission denied for gerda", "gerda"),
    "the user in a path": ("/mnt/data/gerda/corpus.txt", "gerda"),
    "another home": ("/home/hilde/corpus.txt", "hilde"),
    "this machine": ("fuchsbau refuses", "fuchsbau"),
}


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_a_credential_in_any_file_is_masked(home, tmp_path, monkeypatch, kind):
    said, secret = CREDENTIALS[kind]
    monkeypatch.setattr(bug_report.socket, "gethostname", lambda: "fuchsbau.lan")
    for path in (home.log, home.run(RUN) / "events.jsonl", home.run(RUN) / "noloco.json"):
        path.write_text(f"before\n{said}\n")
    views = dict.fromkeys(("status.json", "rounds.log", "doctor.json", "versions.txt"), f"x {said}")
    to = tmp_path / "report.zip"
    bug_report.write(to, {**views, **bug_report.files(home)}, bug_report.mask(home, {"USER": "gerda"}))
    with zipfile.ZipFile(to) as pack:
        found = {name: pack.read(name).decode() for name in pack.namelist()}
    assert len(found) == 7
    assert {name for name, text in found.items() if secret in text} == set()
    assert all("<" in text for text in found.values())


@pytest.mark.parametrize(
    "harmless",
    [
        "at 12:31:07",
        "version 2.13.0",
        "1.2.3",
        "0.0.0.0",
        "127.0.0.1",
        "::1",
        "300.1.1.1",
        "a::thing",
        "loss 1.25",
        '{"tokens_per_s": 812.5, "tokens": 1024, "batch_tokens": 64, "bos_token_id": 1}',
        '"token": null',
        "tokenizer: bytes, sha256:" + "3f9a2c81" * 8,
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "the secret of swaps, and a password that is missing",
        "round 4 of 3f9a2c81d0e4, exchange 00ff00ff00ff00ff00ff00ff00ff00ff",
        PEER,
        "x: y",
    ],
)
def test_what_is_no_address_stays(harmless):
    assert Mask([], {}).hide(harmless) == harmless


@pytest.mark.parametrize("text", ["a", "aB1", "token", "a ", "=", "://", "-----BEGIN PRIVATE KEY-----", "/home/", "1:"])
def test_masking_takes_seconds_whatever_the_text(text):
    began = time.process_time()
    mask = Mask([], {"/home/alice": "~"}, {"alice": "<user>"})
    line = text * (30_000 // len(text))
    mask.learn(line)
    mask.hide(line)
    assert time.process_time() - began < 10


def test_a_user_without_a_home_directory_gets_a_report(home, tmp_path, monkeypatch):
    """As one that only a container's --user names, without HOME."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    masked = bug_report.mask(home, {})
    assert masked.hide(f"{home.log} and /srv/x") == "<home>/node.log and /srv/x"


def test_short_secrets_do_not_eat_words():
    assert Mask(["on"], {}).hide("round") == "round"


def test_long_logs_are_cut_at_a_line(home):
    home.log.write_text("".join(f"line {number}\n" for number in range(200_000)))
    tail = bug_report.files(home)["node.log"]
    assert len(tail) <= bug_report.TAIL_BYTES
    assert tail.startswith("line ")
    assert tail.endswith("line 199999\n")


def test_a_file_that_is_there_is_not_replaced(home, tmp_path):
    (tmp_path / "x.zip").write_text("precious")
    with pytest.raises(UsageError, match="--to"):
        bug_report.write(tmp_path / "x.zip", {}, Mask([], {}))
    assert (tmp_path / "x.zip").read_text() == "precious"
    for wrong in (tmp_path / "none" / "x.zip", tmp_path / "x.zip" / "y.zip", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=r"cannot write .*another file with --to"):
            bug_report.write(wrong, {}, Mask([], {}))
