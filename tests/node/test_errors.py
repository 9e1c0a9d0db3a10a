"""Errors before a node runs, as a process: each is one sentence with the remedy and an exit code, soon.

Those that need no node: tests/cli, tests/run/test_toml.py.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from real_nodes import RealNodes

PEER = "12D3KooWGRVwVSREWSbDM8oTn6QGPdtZKEUVDj5jSzbnYeXiGzVf"


def fails(real_nodes: RealNodes, *words: str) -> tuple[int, str]:
    done = real_nodes.run(*words, "--home", str(real_nodes.root / "home"), within_s=60)
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


def test_a_bootstrap_that_refuses(real_nodes: RealNodes) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # and does not listen
        port = s.getsockname()[1]
        code, sentence = fails(real_nodes, "join", "--bootstrap", f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}")
    assert code == 10
    assert f"127.0.0.1:{port}" in sentence


def test_a_bootstrap_that_is_somebody_else(real_nodes: RealNodes) -> None:
    """Something listens there, but it is no libp2p node."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"/ip4/127.0.0.1/tcp/{s.getsockname()[1]}/p2p/{PEER}"
        code, sentence = fails(real_nodes, "join", "--bootstrap", address)
    assert code == 10
    assert "cannot reach the swarm" in sentence


SHORT = {"architecture": "BertConfig", "config": {"max_position_embeddings": 32}}
TASK = {"task": "paced", "options": {"fails": 1}}
WIDE = {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_hidden_layers": 80, "num_attention_heads": 128}
HUGE = {"architecture": "LlamaConfig", "config": WIDE}
"""3 T parameters, for which no machine has memory."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tables", "code", "says"),
    [
        pytest.param(
            {"model": SHORT, "data": {"sequence_length": 64}}, 2, "data.sequence_length", marks=pytest.mark.slow
        ),
        ({"model": TASK, "inner": {"batch_tokens": 8}}, 2, "model.options"),
        pytest.param(
            {"model": {"task": "nowhere"}}, 12, "nowhere, which is not installed here", marks=pytest.mark.slow
        ),
        ({"model": HUGE}, 21, "memory"),
    ],
)
def test_what_is_found_when_the_model_is_built(
    real_nodes: RealNodes, tmp_path: Path, tables: dict[str, Mapping[str, Any]], code: int, says: str
) -> None:
    """Nobody is invited, and the home has nothing but what a node needs to say so."""
    path = real_nodes.tables(**tables)
    home, listen = tmp_path / "home", ("--listen", "/ip4/127.0.0.1/tcp/0")
    checked = real_nodes.run("check", str(path), "--home", str(home), "--json", within_s=140)
    assert json.loads(checked.stdout)["error"]["code"] == checked.returncode == code
    assert not home.exists()
    done = real_nodes.run("start", str(path), "--home", str(home), *listen, within_s=140)
    assert (done.returncode, "Traceback" in done.stderr, "join" in done.stdout) == (code, False, False)
    sentence = done.stderr.splitlines()[-1]
    assert says in sentence
    assert sentence == checked.stderr.splitlines()[-1]
    assert f"ended with exit code {code}: {sentence}" in (home / "node.log").read_text()
    assert {path.name for path in home.iterdir()} == {"identity.key", "node.lock", "node.log"}


def test_a_port_in_use(real_nodes: RealNodes) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        code, sentence = fails(
            real_nodes, "start", str(real_nodes.manifest()), "--listen", f"/ip4/127.0.0.1/tcp/{port}"
        )
    assert code == 5
    assert str(port) in sentence
