"""A real Prometheus, with the configuration and the rules of deploy/, scrapes real nodes.

Needs `prometheus`, Debian's package, and says so where it is missing. No service of it is used: each run starts its
own, on loopback, which is gone afterwards.
"""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import quiet_port
from real_nodes import ROOT, Node, RealNodes, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus: Debian's package of that name"),
]

DEPLOY = ROOT / "deploy" / "prometheus"
LATER = {"noloco_clock_skew_seconds"}
"""Series that appear with time, however many peers a node has."""


class Prometheus:
    """Set up as in deploy/, but it scrapes and evaluates alerts once a second."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(DEPLOY, folder)
        config = folder / "prometheus.yml"
        config.write_text(config.read_text().replace("15s", "1s"))
        self._nodes = folder / "nodes.yml"
        self._nodes.write_text("[]")
        self._at = f"127.0.0.1:{quiet_port()}"
        flags = {"config.file": config, "storage.tsdb.path": folder / "data", "web.listen-address": self._at}
        words = [f"--{name}={value}" for name, value in flags.items()]
        self._process = subprocess.Popen(["prometheus", *words, "--log.level=warn"], stdin=subprocess.DEVNULL)
        until(self._answers, "Prometheus answers", 20)

    def looks_at(self, *targets: str) -> None:
        self._nodes.write_text(json.dumps([{"targets": targets}]))

    def asked(self, path: str, **arguments: str) -> Any:
        url = f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def now(self, query: str) -> dict[str, float]:
        """By instance."""
        found = self.asked("query", query=query)["result"]
        return {series["metric"]["instance"]: float(series["value"][1]) for series in found}

    def series(self, instance: str) -> set[str]:
        """Of one node; how many reasons it has seen for going alone is not a matter of peers."""
        query = f'{{__name__=~"noloco_.+",reason="",instance="{instance}"}}'
        metrics = (found["metric"] for found in self.asked("query", query=query)["result"])
        return {metric.pop("__name__") + str(sorted(metric.items())) for metric in metrics}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def _answers(self) -> bool:
        try:
            return bool(self.asked("status/buildinfo"))
        except OSError:
            assert self._process.poll() is None, "it has ended"
            return False


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes(NOLOCO_WEB="127.0.0.1:0") as real_nodes:
        yield real_nodes


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path / "prometheus")
    yield prometheus
    prometheus.close()


def target(node: Node) -> str:
    return until(lambda: node.printed(r"web page: http://(\S+)/"), "the address of its page")


def test_it_scrapes_nodes_and_a_crowd_costs_no_series(
    real_nodes: RealNodes, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(seconds=0.5)))
    there = author.address()
    other = real_nodes.node("other", "join", "--bootstrap", there)
    two = [target(author), target(other)]
    prometheus.looks_at(*two)
    until(lambda: prometheus.now("noloco_rounds_committed_total > 0").keys() == set(two), "both have met")
    until(lambda: prometheus.now("noloco_checkpoint_round > 0").keys() == set(two), "each has shown all it can")
    assert prometheus.now("up") == dict.fromkeys(two, 1.0)
    assert all(seen["lastError"] == "" for seen in prometheus.asked("targets")["activeTargets"])
    shown, told = prometheus.now("noloco_round")[two[0]], author.ask("status")["round"]
    assert told - 5 <= shown <= told
    rules = [rule for group in prometheus.asked("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    assert {rule["health"] for rule in rules} == {"ok"}
    among_two = {instance: prometheus.series(instance) for instance in two}

    third = real_nodes.node("third", "join", "--bootstrap", there)
    prometheus.looks_at(*two, target(third))
    seen = 'noloco_peers{state="training"} == 2'
    until(lambda: prometheus.now(seen).keys() >= set(two), "the first two see two others")
    for instance in two:
        more = prometheus.series(instance) ^ among_two[instance]
        assert {series.partition("[")[0] for series in more} <= LATER

    third.kill()
    down = lambda: [alert["labels"] for alert in prometheus.asked("alerts")["alerts"]]  # noqa: E731
    until(lambda: "NolocoNodeDown" in {labels["alertname"] for labels in down()}, "it is noticed", 20)
    (labels,) = (labels for labels in down() if labels["alertname"] == "NolocoNodeDown")
    assert labels["instance"] == target(third)
    with capsys.disabled():
        counts = {len(series) for series in among_two.values()}
        print(f"\n  series of a node, those by reason left out: {counts} among two and among three")  # noqa: T201
