"""docker/compose.yml run for real: four nodes in containers, one killed, one frozen, and nothing left of them.

Needs a Docker engine and the image; `docker/test.sh` provides both and runs this. Everything is done and seen as a user
would: by compose, docker and the nodes' own `status`.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from real_nodes import ROOT, until

NODES = 4
START_S = 400  # each compiles its kernels first, and the cores may be few and busy
FROZEN_S = 30
LOST_ROUNDS = 10  # a checkpoint is written so often
PROJECT = f"noloco-test-{os.getpid()}"
Environ = dict[str, str] | None
LABEL = f"label=com.docker.compose.project={PROJECT}"


def why_not() -> str | None:
    if not shutil.which("docker"):
        return "needs docker"
    if run("docker", "info").returncode:
        return "needs a Docker engine that answers"
    if compose_command() is None:
        return "needs Docker's compose plugin or docker-compose"
    if run("docker", "image", "inspect", image()).returncode:
        return f"needs the image {image()}: docker/test.sh builds it"
    return None


def image() -> str:
    return os.environ.get("NOLOCO_IMAGE", "noloco-node")


def compose_command() -> list[str] | None:
    forms = (["docker", "compose"], ["docker-compose"])
    return next((form for form in forms if shutil.which(form[0]) and run(*form, "version").returncode == 0), None)


def run(*words: str, within_s: float = 120, environ: Environ = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=within_s, check=False, env=environ)


def out(*words: str, within_s: float = 120, environ: Environ = None) -> str:
    done = run(*words, within_s=within_s, environ=environ)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Swarm:
    def __init__(self, run_toml: str = "run.toml") -> None:
        self._compose = [*(compose_command() or []), "-p", PROJECT, "-f", str(ROOT / "docker/compose.yml")]
        self._environ = {**os.environ, "RUN": run_toml}

    def compose(self, *words: str) -> str:
        return out(*self._compose, *words, within_s=START_S, environ=self._environ)

    def containers(self, service: str) -> list[str]:
        return out("docker", "ps", "-aq", "--filter", LABEL, "--filter", service_label(service)).split()

    @property
    def trainers(self) -> list[str]:
        return [*self.containers("first"), *self.containers("node")]

    def left_over(self) -> list[str]:
        kinds = (["ps", "-aq"], ["volume", "ls", "-q"], ["network", "ls", "-q"])
        return [name for kind in kinds for name in out("docker", *kind, "--filter", LABEL).split()]


def service_label(service: str) -> str:
    return f"label=com.docker.compose.service={service}"


def status(container: str) -> dict[str, Any]:
    """Empty while no node answers."""
    done = run("docker", "exec", container, "noloco-node", "status", "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def committed(container: str) -> int:
    return status(container).get("rounds", {}).get("committed", 0)


def met_all_others(containers: list[str]) -> bool:
    views = [view for container in containers if (view := status(container))]
    ids = {view["peer_id"] for view in views}
    return len(ids) == NODES and all(ids - {view["peer_id"]} <= view["partners"].keys() for view in views)


@pytest.fixture
def swarm(request: pytest.FixtureRequest) -> Iterator[Swarm]:
    """Of run.toml, or of the file that the test names."""
    if why := why_not():
        pytest.skip(why)
    swarm = Swarm(getattr(request, "param", "run.toml"))
    try:
        swarm.compose("up", "--detach", "--scale", f"node={NODES - 1}")
        yield swarm
    finally:
        volumes = [name for node in swarm.trainers for name in out("docker", "inspect", "-f", ANONYMOUS, node).split()]
        swarm.compose("down", "--volumes")
    assert not swarm.left_over()
    assert not set(volumes) & set(out("docker", "volume", "ls", "-q").split())


ANONYMOUS = '{{range .Mounts}}{{if eq .Type "volume"}}{{.Name}} {{end}}{{end}}'
"""Names of a container's volumes: those that nobody named do not bear the project's label."""


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_containers_meet_and_survive_a_kill_and_a_freeze(swarm: Swarm) -> None:
    nodes = swarm.trainers
    assert len(nodes) == NODES
    until(lambda: met_all_others(nodes), "each has committed a round with each other", START_S)
    for node in nodes:
        assert out("docker", "exec", node, "id", "-u").strip() != "0"
        assert run("docker", "exec", node, "touch", "/etc/written").returncode != 0

    *others, frozen, killed = nodes
    peer_id, round_before = (status(killed)[key] for key in ("peer_id", "round"))
    out("docker", "kill", killed)
    until(lambda: run("docker", "pause", frozen).returncode == 0, "the engine freezes a busy container")
    thaws = time.monotonic() + FROZEN_S
    before = {node: committed(node) for node in others}
    until(lambda: all(committed(node) > before[node] + 1 for node in others), "the rest goes on", FROZEN_S)
    until(lambda: time.monotonic() >= thaws, "the freeze to last as long as it should", FROZEN_S + 1)
    out("docker", "unpause", frozen)
    out("docker", "start", killed)

    went = committed(frozen)
    until(lambda: committed(frozen) > went, "the frozen one is back", START_S)
    until(lambda: committed(killed) > 0, "the killed one is back", START_S)
    again = status(killed)
    assert again["peer_id"] == peer_id, "its volume has its identity"
    assert again["round"] > round_before - LOST_ROUNDS, "it has the others' state, or its own"

    swarm.compose("stop", "--timeout", "30")
    codes = out("docker", "inspect", "-f", "{{.State.ExitCode}}", *nodes, *swarm.containers("bootstrap"))
    assert codes.split() == ["0"] * (NODES + 1), "each took its leave"


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("swarm", ["stages.toml"], indirect=True)
def test_four_containers_hold_two_stages(swarm: Swarm) -> None:
    nodes = swarm.trainers
    until(lambda: all(committed(node) > 0 for node in nodes), "a round with the other of its stage", START_S)
    held = {view["peer_id"]: view["stage"]["number"] for view in map(status, nodes)}
    assert sorted(held.values()) == [1, 1, 2, 2]
    for node in nodes:
        view = status(node)
        assert {held[partner] for partner in view["partners"]} == {view["stage"]["number"]}
        assert view["stage"]["passed"] > 0
