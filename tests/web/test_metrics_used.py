"""The dashboard and the alert rules of deploy/: every metric they use exists, and each alert can fire."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_metrics import FULL, RENDEZVOUS, scraped

from noloco_node.views.status import StatusView
from noloco_node.web import prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}

KINDS = {family.name: family.kind for family in prometheus.EVERY_NODE + prometheus.WHO_TRAINS}
LABELS = {family.name: family.label for family in prometheus.EVERY_NODE + prometheus.WHO_TRAINS}
OF_PROMETHEUS = {"job", "instance"}
"""Labels that it adds to every series."""
FIXED = {"state", "level", "account"}
"""Labels whose values are all there from the start."""
SERIES = scraped(FULL).keys() | scraped(RENDEZVOUS).keys()


def texts(value, key: str) -> Iterator[str]:
    """All that stands under a key, however deep."""
    if isinstance(value, dict):
        yield from ([value[key]] if isinstance(value.get(key), str) else [])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from texts(item, key)


(ROW,) = [panel for panel in DASHBOARD["panels"] if panel.get("repeat")]
ALL_PANELS = [*DASHBOARD["panels"], *ROW["panels"]]
PANELS = sorted(set(texts(DASHBOARD["panels"], "expr")))
VARIABLES = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
EXPRESSIONS = [*PANELS, *VARIABLES, *(rule["expr"] for rule in RULES.values())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_asked_for_exists(expression):
    asked = re.findall(r"\b(noloco_\w+|up)\b(?:\{([^}]*)\})?", expression)
    assert asked, "a metric, at least"
    for name, matchers in asked:
        assert name == "up" or name in KINDS, name
        for label, sign, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            assert label in OF_PROMETHEUS | {LABELS.get(name)}, f"{name} has no {label}"
            if label in FIXED:
                assert sign in ("=", "=~")
                assert all((name, label, word) in SERIES for word in value.split("|")), f"{label} is never {value}"
    for label in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", label)) <= OF_PROMETHEUS | {LABELS.get(name) for name, _ in asked}


@pytest.mark.parametrize("state", ["paused", "finished"])
def test_who_makes_no_steps_takes_no_part_in_the_sum_of_rates(state):
    view = StatusView(peer_id="p", name="n", version="0", state=state, run_id="ab", tokens_per_s=100.0)
    assert not any(name == "noloco_tokens_per_second" for name, *_ in scraped(view))
    assert scraped(replace(view, state="training"))["noloco_tokens_per_second", None, None] == 100.0


def test_a_reason_that_an_alert_asks_for_is_there_from_the_start():
    """Else `increase` sees nothing of what the series begins with."""
    new = scraped(StatusView(peer_id="p", name="n", version="0", state="training", run_id="ab")).items()
    for rule in RULES.values():
        for name, value in re.findall(r'(noloco_\w+)\{reason="(\w+)"\}', rule["expr"]):
            assert ((name, "reason", value), 0.0) in new


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_are_not(expression):
    for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
        assert KINDS[name] == "counter"
    for name in re.findall(r"_over_time\((\w+)", expression):
        assert KINDS[name] == "gauge"


def test_every_metric_is_used_by_somebody():
    used = set(re.findall(r"noloco_\w+", " ".join(EXPRESSIONS)))
    for_tables = {"noloco_run_info", "noloco_device_info", "noloco_parameters", "noloco_step", "noloco_known_runs"}
    assert KINDS.keys() - used <= for_tables | {"noloco_tokens"}


def test_panels_lie_beside_each_other():
    assert len({panel["id"] for panel in ALL_PANELS}) == len(ALL_PANELS)
    taken = set()
    for place in (panel["gridPos"] for panel in ALL_PANELS):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("expression", PANELS)
def test_a_chosen_node_is_asked_for_as_grafana_writes_it(expression):
    """With several to choose from it escapes each as a regular expression, which only =~ undoes."""
    asked = re.findall(r'(\S+?)"\$instance"', expression)
    assert asked
    assert all(matcher.endswith("instance=~") for matcher in asked)


def test_the_table_names_all_its_columns():
    (table,) = [panel for panel in DASHBOARD["panels"] if panel["type"] == "table"]
    joined, kept, named = (change["options"] for change in table["transformations"])
    asked = {f"Value #{target['refId']}": target["expr"] for target in table["targets"]}
    metrics_of = {field: re.findall(r"noloco_\w+", expression)[0] for field, expression in asked.items()}
    values = {field for field in metrics_of if re.search(kept["include"]["pattern"], field)}
    labels = {LABELS[metrics_of[field]] for field in metrics_of.keys() - values}
    assert labels == {"state", "version"}, "of these metrics the label says it, and the value is always 1"
    assert all(re.search(kept["include"]["pattern"], field) for field in labels)
    assert named["renameByName"].keys() == values | {joined["byField"]}
    titles = labels | set(named["renameByName"].values())
    assert {override["matcher"]["options"] for override in table["fieldConfig"]["overrides"]} <= titles
    assert {column["displayName"] for column in table["options"]["sortBy"]} <= titles


def test_a_state_has_one_colour_everywhere():
    colours: dict[str, set[str]] = {}
    drawn = [panel for panel in ALL_PANELS if "{{state}}" in texts(panel.get("targets"), "legendFormat")]
    assert len(drawn) == 3
    for panel in drawn:
        (metric,) = re.findall(r"noloco_\w+", panel["targets"][0]["expr"])
        states = {value for name, _, value in SERIES if name == metric}
        overrides = [change for change in panel["fieldConfig"]["overrides"] if change["matcher"]["id"] == "byName"]
        for override in overrides:
            (colour,) = override["properties"]
            colours.setdefault(override["matcher"]["options"], set()).add(colour["value"]["fixedColor"])
        assert states - {"rendezvous"} <= {override["matcher"]["options"] for override in overrides} <= states
    assert all(len(found) == 1 for found in colours.values()), colours


def test_grafana_7_and_those_after_it_read_the_dashboard():
    """The older cannot read the newer form; the newer turn the older into theirs.

    They do below schema version 30. Below 29 Grafana 12 sets `refresh` to 1: no row for a new node until a reload.
    """
    assert DASHBOARD["schemaVersion"] == 29
    annotations, variables = DASHBOARD["annotations"]["list"], DASHBOARD["templating"]["list"]
    asked = [value["datasource"] for value in (*variables, *ALL_PANELS, *annotations) if "datasource" in value]
    assert set(asked) == {"${datasource}", "-- Grafana --"}
    assert all(isinstance(variable["query"], str) for variable in variables)
    for panel in ALL_PANELS:
        assert ("datasource" in panel) == ("targets" in panel), "its queries inherit it"
        assert not any("datasource" in target for target in panel.get("targets", []))
        assert "tooltip" not in panel.get("options", {}), "tooltipOptions, in Grafana 7"
        changes = {change["id"] for change in panel.get("transformations", [])}
        assert changes <= {"seriesToColumns", "filterFieldsByName", "organize"}, "not joinByField"


def test_every_alert_says_what_to_do():
    for name, rule in RULES.items():
        assert name.startswith("Noloco")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert rule["annotations"]["remedy"].endswith(".")


def test_the_containers_are_wired_to_each_other():
    docker = DEPLOY.parent / "docker"
    services = yaml.safe_load((docker / "compose.yml").read_text())["services"]
    watched = {name: service for name, service in services.items() if "NOLOCO_WEB" in service.get("environment", {})}
    scraping = yaml.safe_load((DEPLOY / "prometheus/compose.yml").read_text())["scrape_configs"]
    (found,) = (source for job in scraping for source in job["dns_sd_configs"])
    assert set(found["names"]) == watched.keys()
    assert {service["environment"]["NOLOCO_WEB"] for service in watched.values()} == {f"0.0.0.0:{found['port']}"}

    mounted = {}
    for name in ("prometheus", "grafana"):
        places = [volume.split(":") for volume in services[name]["volumes"]]
        mounted |= {place[1]: docker / place[0] for place in places if place[0].startswith("..")}
    assert all(path.exists() for path in mounted.values())
    (config,) = (word for word in services["prometheus"]["command"] if word.startswith("--config.file="))
    assert (mounted["/etc/prometheus"] / Path(config).name).exists()
    providers, sources = (mounted[f"/etc/grafana/provisioning/{kind}"] for kind in ("dashboards", "datasources"))
    (provider,) = yaml.safe_load((providers / "noloco.yml").read_text())["providers"]
    assert f"{provider['options']['path']}/dashboard.json" in mounted
    (source,) = yaml.safe_load((sources / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


# ---- with Prometheus' own tools --------------------------------------------------------------------------------------
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool: Debian's package prometheus")


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_rules_and_configurations_load(tmp_path):
    folder = DEPLOY / "prometheus"
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(folder / "alerts.yml"))
    for name in ("prometheus.yml", "compose.yml"):
        assert "SUCCESS" in promtool("check", "config", str(folder / name))
    asked = [re.sub(r"\$window", "5m", re.sub(r"\$instance", ".*", expr)) for expr in PANELS]
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(PANELS)} rules found" in promtool("check", "rules", str(tmp_path / "panels.yml"))


STEP_MIN = 5
HOURS, LONG_HOURS = 4, 36
"""That each world below goes on for; the long one is for what lasts a day."""
HEALTHY = {
    "up": "1",
    'noloco_state{state="training"}': "1",
    'noloco_state{state="paused"}': "0",
    'noloco_state{state="joining"}': "0",
    'noloco_state{state="starting"}': "0",
    'noloco_peers{state="training"}': "3",
    'noloco_peers{state="solo"}': "0",
    "noloco_uptime_seconds": "0+300",
    "noloco_rounds_committed_total": "0+5",
    'noloco_rounds_solo_total{reason="no_peers"}': "0+1",
    'noloco_rounds_solo_total{reason="too_slow"}': "0",
    "noloco_rollbacks_total": "0",
    "noloco_eval_loss": "2",
    "noloco_busy_ratio": "0.97",
    'noloco_reachability{state="outgoing"}': "0",
    "noloco_disk_free_bytes": "1000",
    "noloco_checkpoint_bytes": "10",
    "noloco_round": "0+5",
    "noloco_checkpoint_round": "0+5",
    "noloco_p2pd_restarts_total": "0",
    "noloco_clock_skew_seconds": "0.2",
    'noloco_peer_faults_total{reason="bad_digest"}': "0",
    "noloco_taken_back_total": "0",
    'noloco_health_findings{level="error"}': "0",
}
"""One node's series, each by its value, or by where it begins and what it gains a step."""
ILL = [
    ("NolocoNodeDown", {"up": "0"}),
    ("NolocoNotYetTraining", {'noloco_state{state="joining"}': "1", 'noloco_state{state="training"}': "0"}),
    ("NolocoAlone", {'noloco_peers{state="training"}': "0"}),
    (
        "NolocoNoCommittedRound",
        {"noloco_rounds_committed_total": "7", 'noloco_rounds_solo_total{reason="no_peers"}': "0"},
    ),
    ("NolocoMostlySolo", {'noloco_rounds_solo_total{reason="no_peers"}': "0+10"}),
    ("NolocoSwapsTooSlow", {'noloco_rounds_solo_total{reason="too_slow"}': "0+0.5"}),
    ("NolocoRolledBack", {"noloco_rollbacks_total": "0+0.5"}),
    ("NolocoLossRises", {"noloco_eval_loss": "2+0.05"}),
    ("NolocoLossRises", {"noloco_eval_loss": "NaN"}),
    ("NolocoStarved", {"noloco_busy_ratio": "0.2"}),
    ("NolocoUnreachable", {'noloco_reachability{state="outgoing"}': "1"}),
    ("NolocoDiskNearlyFull", {"noloco_disk_free_bytes": "19"}),
    ("NolocoCheckpointOld", {"noloco_checkpoint_round": "0+4"}),
    ("NolocoCheckpointOld", {"noloco_checkpoint_round": None}),
    ("NolocoNetworkDaemonDies", {"noloco_p2pd_restarts_total": "0+2"}),
    ("NolocoClockOff", {"noloco_clock_skew_seconds": "-2"}),
    ("NolocoPeersBreakTheProtocol", {'noloco_peer_faults_total{reason="bad_digest"}': "0+2"}),
    ("NolocoCorrectionsTakenBack", {"noloco_taken_back_total": "0+0.5"}),
    ("NolocoUnhealthy", {'noloco_health_findings{level="error"}': "1"}),
    ("NolocoPausedLong", {'noloco_state{state="paused"}': "1"}),
]
"""Which alert is to fire, and what is different then; None: that is not there."""


def world(changes: dict[str, str | None], firing: list[str], hours: int = HOURS) -> dict:
    """As a test of promtool's: which alerts fire in the end, and no others."""
    steps = hours * 60 // STEP_MIN
    series = {name: value for name, value in {**HEALTHY, **changes}.items() if value is not None}
    return {
        "interval": f"{STEP_MIN}m",
        "input_series": [{"series": of_target(name), "values": values(v, steps)} for name, v in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{hours}h",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
            }
        ],
    }


def values(value: str, steps: int) -> str:
    return f"{value}x{steps}" if "+" in value else " ".join([value] * (steps + 1))


def of_target(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{job="noloco",instance="192.0.2.11:8090"{"," + labels if labels else ""}}}'


def hours(alert: str) -> int:
    return LONG_HOURS if RULES[alert].get("for") == "1d" else HOURS


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path):
    assert {alert for alert, _ in ILL} == RULES.keys()
    worlds = [world({}, []), *(world(changes, [alert], hours(alert)) for alert, changes in ILL)]
    tests = {
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "evaluation_interval": f"{STEP_MIN}m",
        "tests": worlds,
    }
    (tmp_path / "worlds.yml").write_text(json.dumps(tests))
    promtool("test", "rules", str(tmp_path / "worlds.yml"))
