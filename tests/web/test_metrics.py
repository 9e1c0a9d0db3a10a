"""`/metrics`: the format, each figure, a number of series that does not grow with the swarm; and `/readyz`."""

import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from fake_node import STATUS
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.training.time_accounts import ACCOUNTS
from noloco_node.views.status import Checkpoints, GpuView, Health, MemoryView, StageView, StatusView, Today
from noloco_node.web import prometheus

FULL = replace(
    STATUS,
    state="training",
    busy_fraction_minute=0.991,
    time_s=dict.fromkeys(ACCOUNTS, 1.5),
    stall_ms=7.0,
    learning_rate=3e-4,
    gradient_norm=0.82,
    mfu=0.412,
    memory=MemoryView(3_210_000_000, 80_000_000_000, 812_000_000, 16_000_000_000),
    gpu=GpuView(412.3, 0.97),
    today=Today(512, 515, 20_000, 30_000),
    relative_error=0.27,
    checkpoint=Checkpoints(4_000_000, 3_100_000_000, 40, 20),
    one_sided_fragments=1,
    faults={"bad_digest": 2},
    rolled_back=1,
    taken_back=2,
    peers_quarantined=3,
    peers_by_state={"training": 15, "solo": 2},
    skew_s=-0.25,
    network_restarts=3,
    stage=StageView(
        number=2,
        stages=3,
        nodes=(4, 2, 1),
        micro_batches_per_s=3.5,
        passed=700,
        under_way=3,
        queued=2,
        lost=5,
        retried=6,
        sent=8_000_000,
        received=9_000_000,
    ),
)
RENDEZVOUS = StatusView(peer_id="p", name="n", version="0.1.0", state="rendezvous", reachable="directly", uptime_s=9.0)
NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf'({NAME})(?:{{({NAME})="((?:[^"\\\n]|\\["\\n])*)"}})? (\S+)')


def scraped(status):
    """Each series as (name, label, value of the label), with its number; every line must be in the format."""
    found, typed = {}, set()
    text = prometheus.exposition(status).decode()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("#"):
            heading = re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line)
            assert heading, line
            if heading[1] == "TYPE":
                assert heading[3] in ("counter", "gauge")
                assert heading[2] not in typed, "once a family"
                typed.add(heading[2])
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        name, label, value, number = sample.groups()
        plain = None if value is None else re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)
        assert name in typed
        assert (name, label, plain) not in found, "each series once"
        found[name, label, plain] = float(number)
    return found


def names(status):
    return {name for name, _, _ in scraped(status)}


def test_what_a_node_that_trains_shows():
    found = scraped(FULL)
    expected = {
        ("noloco_build_info", "version", "0.1.0"): 1,
        ("noloco_run_info", "run", "tiny-3f9a2c81d0e4"): 1,
        ("noloco_state", "state", "training"): 1,
        ("noloco_state", "state", "paused"): 0,
        ("noloco_rounds_committed_total", None, None): 39,
        ("noloco_rounds_solo_total", "reason", "no_partner"): 2,
        ("noloco_tokens", None, None): 2_112_512,
        ("noloco_loss", None, None): 1.87,
        ("noloco_stall_seconds", None, None): 0.007,
        ("noloco_learning_rate", None, None): 3e-4,
        ("noloco_gradient_norm", None, None): 0.82,
        ("noloco_mfu_ratio", None, None): 0.412,
        ("noloco_device_memory_bytes", None, None): 3_210_000_000,
        ("noloco_device_watts", None, None): 412.3,
        ("noloco_device_utilization_ratio", None, None): 0.97,
        ("noloco_busy_ratio", None, None): 0.991,
        ("noloco_exchange_sent_bytes_total", None, None): 512_000_000,
        ("noloco_today_received_limit_bytes", None, None): 30_000,
        ("noloco_checkpoint_round", None, None): 40,
        ("noloco_peers", "state", "training"): 15,
        ("noloco_health_findings", "level", "warning"): 1,
        ("noloco_health_findings", "level", "error"): 0,
        ("noloco_reachability", "state", "directly"): 1,
        ("noloco_clock_skew_seconds", None, None): -0.25,
        ("noloco_p2pd_restarts_total", None, None): 3,
        ("noloco_peer_faults_total", "reason", "bad_digest"): 2,
        ("noloco_taken_back_total", None, None): 2,
        ("noloco_quarantined_peers", None, None): 3,
        ("noloco_stage_info", "stage", "2"): 1,
        ("noloco_stage_nodes", "stage", "1"): 4,
        ("noloco_stage_nodes", "stage", "3"): 1,
        ("noloco_micro_batches_passed_total", None, None): 700,
        ("noloco_micro_batches_lost_total", None, None): 5,
        ("noloco_micro_batches_retried_total", None, None): 6,
        ("noloco_micro_batches_under_way", None, None): 3,
        ("noloco_micro_batches_queued", None, None): 2,
        ("noloco_stage_sent_bytes_total", None, None): 8_000_000,
        ("noloco_stage_received_bytes_total", None, None): 9_000_000,
    }
    assert {series: found.get(series) for series in expected} == expected
    assert {account for name, _, account in found if name == "noloco_training_seconds_total"} == set(ACCOUNTS)


def test_every_family_can_be_seen():
    families = prometheus.EVERY_NODE + prometheus.WHO_TRAINS
    assert names(FULL) | names(RENDEZVOUS) == {family.name for family in families}
    for status in (FULL, RENDEZVOUS):
        for name, kind in re.findall(r"# TYPE (\w+) (\w+)", prometheus.exposition(status).decode()):
            assert kind == ("counter" if name.endswith("_total") else "gauge"), name


def test_a_rendezvous_does_not_look_like_a_node_that_fails_to_train():
    found = names(RENDEZVOUS)
    assert found == names(replace(RENDEZVOUS, state="starting")) | {"noloco_known_runs"}
    assert not any(re.search("round|loss|busy|tokens|disk", name) for name in found)


def test_a_run_without_stages_shows_none():
    assert not [name for name in names(replace(FULL, stage=None)) if "stage" in name or "micro_batch" in name]


def test_what_is_not_known_yet_is_left_out():
    found = names(StatusView(peer_id="p", name="n", version="0", state="joining", run_id="ab", run="a-ab"))
    assert "noloco_rounds_committed_total" in found
    unknown = "loss", "busy_ratio", "disk_free_bytes", "mfu_ratio", "device_watts"
    assert not found & {f"noloco_{name}" for name in unknown}


def test_the_number_of_series_does_not_grow_with_the_swarm():
    crowd = replace(
        FULL,
        partners={f"12D3KooW{n}": n for n in range(5000)},
        peers_seen=5000,
        peers_by_state={"training": 4000, **dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 10)},
        health=FULL.health * 50,
    )
    assert scraped(crowd).keys() == scraped(FULL).keys()
    assert scraped(crowd)["noloco_peers", "state", "other"] == 260
    assert len(scraped(FULL)) < 100


@given(st.text(max_size=40), st.floats())
def test_any_word_and_any_number_survives(word, number):
    found = scraped(replace(FULL, device=word or "cpu", loss=number))
    assert found["noloco_device_info", "device", word or "cpu"] == 1
    loss = found["noloco_loss", None, None]
    assert loss == number or (math.isnan(loss) and math.isnan(number))


@pytest.mark.parametrize("status", [FULL, RENDEZVOUS], ids=["trains", "rendezvous"])
def test_promtool_finds_no_fault(status):
    if not shutil.which("promtool"):
        pytest.skip("needs promtool: Debian's package prometheus")
    text = prometheus.exposition(status)
    said = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b"")


def test_ready():
    told = {state: prometheus.ready(replace(FULL, state=state, waiting_for="a peer")) for state in prometheus.STATES}
    assert {state for state, why_not in told.items() if why_not} == {"starting", "joining", "leaving"}
    assert told["joining"] == "joining, waiting for a peer"
    assert prometheus.ready(replace(FULL, health=(Health("error", "disk: full", "free some"),))) is None, "it trains on"
