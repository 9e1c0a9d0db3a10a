"""`simulate` and `simulate network` as they are typed."""

import argparse
import json
import sys

import pytest
import torch

from noloco_node.cli import simulate
from noloco_node.errors import DiskFull, UsageError
from noloco_node.simulate import experiment

QUICK = ["--replicas", "2", "--inner-steps", "1", "--rounds", "2", "--batch-tokens", "128", "--held-out", "2"]


def simulated(*words):
    parser = argparse.ArgumentParser()
    simulate.options(parser)
    return simulate.run(parser.parse_args(words))


def test_json_has_the_promised_fields_and_the_picture_is_drawn(capsys, tmp_path):
    picture = tmp_path / "out.png"
    words = ["--algorithms", "noloco,local", "--seed", "3,4", "--json", "--plot", str(picture)]
    assert simulated(*QUICK, *words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["settings"]["seed"]) == (1, 3)
    assert [(c["algorithm"], c["seed"]) for c in document["curves"]] == [
        ("noloco", 3), ("local", 3), ("noloco", 4), ("local", 4)
    ]  # fmt: skip
    promised = {"algorithm", "replica_mean_loss", "averaged_model_loss", "steps", "replica_std", "bytes_per_param"}
    assert all(promised <= curve.keys() and curve["steps"] == [0, 1, 2] for curve in document["curves"])
    assert [result["seeds"] for result in document["results"]] == [2, 2]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sweep_prints_every_cell_and_the_best(capsys):
    assert (
        simulated(*QUICK, "--algorithms", "diloco", "--sweep", "--sweep-alphas", "0.2,0.4", "--sweep-betas", "1") == 0
    )
    printed = capsys.readouterr().out
    assert "diloco:alpha=0.2:beta=1" in printed
    assert "diloco:alpha=0.4:beta=1" in printed
    assert "best:" in printed


def test_attacks_with_and_without_defences_beside_an_honest_swarm(capsys):
    words = [*QUICK, "--replicas", "3", "--attack", "nan,hold", "--sweep"]
    assert simulated(*words, "--json") == 0
    names = [result["algorithm"] for result in json.loads(capsys.readouterr().out)["results"]]
    assert names == [
        f"noloco {who}{how}"
        for who in ("nobody attacks", "nan by 1", "hold by 1")
        for how in (", no defences", "")
    ]  # fmt: skip


def test_one_attack_prints_a_row(capsys):
    assert simulated(*QUICK, "--replicas", "3", "--attack", "scale", "--no-defences") == 0
    printed = capsys.readouterr().out
    assert "scale" in printed
    assert "without" in printed and "defended" not in printed


def test_stages_beside_the_whole_model_in_each_routing_and_codec(capsys):
    words = [*QUICK, "--algorithms", "noloco", "--no-defences", "--stages", "1,2"]
    words += ["--routing", "random,fixed", "--activations", "fp32,int8"]
    assert simulated(*words) == 0
    printed = capsys.readouterr().out
    for way in ("whole", "random fp32", "random int8", "fixed fp32", "fixed int8"):
        assert way in printed
    assert "1024" in printed and "260" in printed  # bytes of a token


def test_the_model_and_phases_of_a_run(capsys, tmp_path):
    config = "{ hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2 }"
    text = f"""
        name = "mine"
        model = {{ architecture = "LlamaConfig", config = {config} }}
        data = {{ sequence_length = 32 }}
        inner = {{ seconds = 60.0, batch_tokens = 64 }}
        outer = {{ codec = "fp32" }}
    """
    (path := tmp_path / "run.toml").write_text(text)
    words = "--run", str(path), "--replicas", "2", "--rounds", "1", "--held-out", "2", "--threads", "1", "--no-defences"
    assert simulated(*words, "--inner-steps", "2", "--algorithms", "noloco", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    settings = document["settings"]
    assert settings["model"]["config"]["hidden_size"] == 16 and settings["data"]["sequence_length"] == 32
    assert settings["inner"]["steps"] == 2 and settings["inner"]["batch_tokens"] == 64
    assert document["curves"][0]["bytes_per_param"] == 4
    with pytest.raises(UsageError, match="add --inner-steps"):
        simulated(*words, "--algorithms", "noloco")


def test_network_table_json_and_picture(capsys, tmp_path):
    picture = tmp_path / "network.png"
    assert simulated("network", "--sizes", "2,8", "--json", "--plot", str(picture)) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in document["rows"]} >= {"pair", "ring", "tree", "server"}
    assert all(
        row.keys() == {"method", "n", "sync_seconds", "idle_seconds", "bytes_per_node"} for row in document["rows"]
    )
    assert document["network"]["bandwidth_bytes_s"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert simulated("network", "--sizes", "2,8", "--bandwidth", "100") == 0
    printed = capsys.readouterr().out
    assert "waiting for slower nodes" in printed
    assert "assuming that a pair which trains on waits for nobody" in printed


def test_the_figures_are_printed_where_the_picture_cannot_be_written(capsys, tmp_path):
    (tmp_path / "full.png").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"cannot write .*full.png. Free some space, or name another file with --plot"):
        simulated("network", "--sizes", "2", "--plot", str(tmp_path / "full.png"))
    assert "waiting for slower nodes" in capsys.readouterr().out


def test_links_between_stages(capsys):
    words = ["network", "--stages", "2", "--tflops", "10", "--bandwidth", "200"]
    assert simulated(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["activations"]) for row in document["rows"]][:2] == [("125m", "bf16"), ("125m", "int8")]
    assert document["link"] == {"bandwidth_bytes_s": 25e6, "latency_s": 0.03}
    assert all(list(row["busy"]) == ["1", "2", "4", "8"] for row in document["rows"])
    assert document["rows"][0]["bytes_per_token"] == 2 * 2 * 768
    assert simulated(*words) == 0
    assert "busy 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "x"], "--seed takes numbers"),
        (["--inner-steps", "0"], "steps"),
        (["--algorithms", "dilocco"], "did you mean diloco"),
        (["--codec", "fp17"], "no codec 'fp17', it may be bf16"),
        (["--links", "10", "--codec", "fp17"], "no codec"),
        (["--precision", "fp8"], "precision"),
        (["--threads", "0"], "--threads must be from 1 to"),
        (["--threads", "99999999999"], "--threads must be from 1 to"),
        (["--seed", "1,-1"], "--seed must be at least 0"),
        (["--seed", "99999999999999999999"], "--seed must be at least 0"),
        (["--routing", "fixed"], "--routing counts only with --stages: leave it out"),
        (["--activations", "int8"], "--activations counts only with --stages"),
        (["--sweep-alphas", "0.1"], "--sweep-alphas counts only with --sweep"),
        (["--modelled-step", "3"], "--modelled-step counts only with --links"),
        (["network", "--tflops", "10"], "--tflops counts only with --stages"),
        (["network", "--stages", "2", "--sizes", "2"], "--sizes counts only without --stages: leave it out"),
        (["network", "--stages", "99999999999"], "from 2 to 1024"),
        (["--replicas", "1"], "replicas must be 2 or more"),
        (["--sweep", "--sweep-alphas", "0.9", "--algorithms", "noloco"], "gamma must be"),
        (["--plot", "not/there/out.png"], "folder that exists"),
        (["--plot", "."], "ends in"),
        (["--plot", 300 * "a" + ".png"], "File name too long. Name another file with --plot"),
        (["--plot", "out.docx"], "ends in"),
        (["--attack", "scael"], "did you mean scale"),
        (["--attack", "scale", "--attackers", "7"], "two honest replicas of 8"),
        (["--attack", "scale", "--attackers", "0"], "1 attacker or more"),
        (["--attack", "scale", "--attackers", "x"], "--attackers takes numbers"),
        (["--attack", "scale", "--algorithms", "diloco"], "one noloco"),
        (["--attack", "scale", "--links", "10"], "neither --links"),
        (["--attackers", "2"], "--attackers needs --attack"),
        (["--stages", "2"], "--no-defences"),
        (["--stages", "2", "--no-defences", "--routing", "rnd"], "random or fixed"),
        (["--stages", "2", "--no-defences", "--activations", "int4"], "did you mean int8|it may be"),
        (["--stages", "2", "--no-defences", "--compile", "--activations", "int8"], "fp32 only"),
        (["--stages", "2", "--links", "10"], "neither --attack nor --links"),
        (["--run", "nowhere.toml"], "nowhere.toml does not exist"),
        (["network", "--plot", "not/there/out.png"], "folder that exists"),
        (["network", "--sizes", "1"], "from 2 to 16384"),
        (["network", "--sizes", "2,1000000"], "from 2 to 16384"),
        (["network", "--bandwidth", "-3"], "above 0"),
        (["network", "--bandwidth", "0"], "above 0"),
        (["network", "--vector", "-5"], "above 0"),
        (["network", "--latency", "nan"], "above 0"),
        (["network", "--jitter", "-1"], "from 0 to"),
        (["network", "--seed", "-1"], "at least 0"),
        (["network", "--stages", "1"], "from 2 to 1024"),
        (["network", "--stages", "2", "--tflops", "0"], "above 0"),
        (["network", "--stages", "2", "--activations", "int7"], "did you mean int8"),
        (["network", "--stages", "2", "--plot", "x.png"], "does not draw stages"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_any_work(words, says, monkeypatch):
    monkeypatch.setattr("noloco_node.simulate.experiment.run", None)
    monkeypatch.setattr("noloco_node.simulate.network.costs", None)
    with pytest.raises(UsageError, match=says):
        simulated(*words)


def test_what_is_named_twice_is_trained_once(capsys):
    again = ["--algorithms", "local,local", "--seed", "1,1", "--overlap", "eager,eager"]
    assert simulated(*QUICK, *again, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["curves"]) == 1


def interrupted(monkeypatch, after, *words):
    """In the training that comes after so many."""
    trained, train = [], experiment.run

    def run(*given):
        if len(trained) == after:
            raise KeyboardInterrupt
        trained.append(train(*given))
        return trained[-1]

    monkeypatch.setattr(experiment, "run", run)
    with pytest.raises(KeyboardInterrupt):
        simulated(*QUICK, *words)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("words", "after", "names"),
    [
        (["--algorithms", "noloco,local,ddp"], 0, []),
        (["--algorithms", "noloco,local,ddp"], 2, ["noloco", "local"]),
        (["--replicas", "3", "--attack", "nan,hold"], 1, ["noloco nan by 1"]),
        (["--links", "10", "--modelled-parameters", "1e6", "--codec", "fp32"], 1, ["noloco delay=2"]),
        (["--links", "10", "--algorithms", "local,ddp"], 1, ["local blocking"]),
    ],
)
def test_what_was_trained_before_an_interruption_is_printed(words, after, names, monkeypatch, capsys):
    interrupted(monkeypatch, after, *words, "--json")
    out = capsys.readouterr().out
    found = json.loads(out) if out else {"curves": []}
    assert [curve["algorithm"] for curve in found["curves"]] == names
    assert len(found.get("wall_clock") or found.get("results", [])) == after


def test_a_row_of_attacks_that_was_interrupted_has_gaps(monkeypatch, capsys):
    interrupted(monkeypatch, 3, "--replicas", "3", "--attack", "nan,hold", "--sweep")
    whole, half = capsys.readouterr().out.splitlines()[-2:]
    assert whole.split()[:2] == ["nobody", "0"] and "-" not in whole.split()
    assert half.split()[:2] == ["nan", "1"] and half.split()[4:] == ["-", "-"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(UsageError, match="--device cuda cannot be used"):
        simulated("--device", "cuda")


def test_a_missing_matplotlib_is_said_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("noloco_node.simulate.experiment.run", None)
    with pytest.raises(UsageError, match=r"-m pip install 'matplotlib>="):
        simulated("--plot", str(tmp_path / "out.png"))
