"""`check`: what a run costs and needs, and its author's mistakes with the exit codes that a start has."""

import json
from pathlib import Path

import pytest
from replicas import small_replica, timed_run

from noloco_node.cli import main
from noloco_node.errors import OutOfMemory
from noloco_node.host import memory
from noloco_node.node import check_run
from noloco_node.run import toml
from noloco_node.training import memory_budget

pytestmark = pytest.mark.usefixtures("home")

LLAMA = """
[model]
architecture = "{architecture}"
config = {{ {config} }}
[data]
sequence_length = {length}
[inner]
steps = 2
batch_tokens = 256
"""
SMALL = "hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(check_run, "TRIAL_STEPS", 3)
    monkeypatch.setenv("NOLOCO_DEVICE", "cpu")


def llama(tmp_path: Path, architecture: str = "LlamaConfig", config: str = SMALL, length: int = 64) -> str:
    path = tmp_path / "run.toml"
    path.write_text('name = "small"\nrounds = 10\n' + LLAMA.format(**locals()))
    return str(path)


def test_what_it_costs_and_needs(home, tmp_path, capsys):
    assert main(["check", llama(tmp_path), "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = toml.load(tmp_path / "run.toml")
    assert (found["schema"], found["run"], found["run_id"]) == (1, run.label, run.run_id)
    assert found["device"] == "cpu"
    assert found["disk"]["checkpoint"] == 20 * found["parameters"]
    assert found["disk"]["needed"] == 4 * found["disk"]["checkpoint"]
    memory, each = found["memory"], found["parameters"]
    items = memory["plan"]["host"]
    assert memory["host"] == sum(items.values()) and not memory["plan"]["device"] and memory["copy"] == 8 * each
    assert (items["weights"], items["moments"], items["checkpoint being written"]) == (4 * each, 8 * each, 20 * each)
    assert found["memory"]["host_taken"] > 10**8, "torch alone takes more"
    untried = sum(items[what] for what in check_run._UNTRIED)
    assert memory["host"] >= memory["host_taken"] + untried + items["network"], "it is the most"
    assert (found["memory"]["device"], found["memory"]["device_taken"]) == (None, None)
    assert 0.38 < found["swap"] / found["parameters"] < 0.43
    trial = found["trial"]
    assert trial["steps"] == 3
    assert trial["tokens_per_s"] == pytest.approx(256 / trial["step_s"])
    assert trial["loss_first"] == pytest.approx(5.5, abs=0.3), "of 256 bytes, each as likely"
    assert (found["round_s"], found["run_s"]) == pytest.approx((2 * trial["step_s"], 20 * trial["step_s"]))
    assert not home.root.exists(), "nothing is kept"
    assert main(["check", llama(tmp_path), "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"run         {run.label}: 0.0")
    assert "none: Python's own library" in said.out
    assert said.err == "building the model, reading the data ...\ntraining for 10 s at most ...\n"


def test_what_a_volunteer_brings_of_files(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of the text\n" for number in range(100_000)))
    path = llama(tmp_path)
    Path(path).write_text(Path(path).read_text().replace("[data]", '[data]\nsource = "files"'))
    assert main(["check", path, "--json"]) == 2
    assert "--data" in json.loads(capsys.readouterr().out)["error"]["sentence"]
    assert main(["check", path, "--data", str(text), "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert needs["data"].startswith("own files with --data")
    assert "pip install 'datasets>=" in needs["packages"]
    assert "noloco-node[" not in needs["packages"], "it is on no index"
    text.write_text(f"caf\xe9\n{text.read_text()}", encoding="latin-1")
    assert main(["check", path, "--data", str(text)]) == 2
    assert "is not UTF-8 text: byte 3 is 0xe9" in capsys.readouterr().err
    assert main(["check", path, "--data", str(text), "--encoding", "latin-1"]) == 0


def test_with_phases_by_time_the_learning_rate_rises_too() -> None:
    replica = small_replica(run=timed_run(60.0))
    before = replica.position.learning_rate
    check_run._trial(replica)
    assert replica.position.learning_rate > before, "it follows the time, of which a trial takes some"


def test_a_step_that_takes_too_long_is_estimated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_run, "LONGEST_STEP_S", 0.0)
    assert main(["check", llama(tmp_path), "--json"]) == 0
    trial = json.loads(capsys.readouterr().out)["trial"]
    assert (trial["steps"], trial["loss_first"], trial["loss_last"]) == (0, None, None)
    assert trial["step_s"] > 0


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"architecture": "NoSuchConfig"}, 2, "model.architecture: NoSuchConfig is not a causal language model"),
        ({"config": SMALL.replace("hidden_size = 16", "hiden_size = 16")}, 2, "does not know hiden_size"),
        ({"config": f"{SMALL}, max_position_embeddings = 32"}, 2, "data.sequence_length: LlamaConfig with this config"),
        ({"config": f"{SMALL}, vocab_size = 100"}, 2, "vocab_size must be at least 256"),
        (
            {"architecture": "GPT2Config", "config": "n_embd = 16, n_layer = 1, n_head = 3"},
            2,
            "model.config: GPT2Config cannot be built from it",
        ),
        ({"config": f"{SMALL}, hidden_act = 'nothing'"}, 2, "model.config: LlamaConfig cannot be built from it"),
    ],
)
def test_an_authors_mistakes(changes, code, says, tmp_path, capsys):
    assert main(["check", llama(tmp_path, **changes)]) == code
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_device_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["check", llama(tmp_path), "--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_files_that_the_run_does_not_read_are_named(tmp_path, capsys):
    words = "--threads", "1", "--data", "nowhere", "--tokenizer", "nowhere"
    assert main(["check", llama(tmp_path), *words]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in said if line.startswith("warning")] == [
        "this run reads the sources of Python's standard library: --data is not used",
        "this run's tokenizer is bytes: --tokenizer is not used",
    ]


def test_a_model_that_does_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: 100_000)
    assert main(["check", llama(tmp_path)]) == OutOfMemory.exit_code
    said = capsys.readouterr().err
    assert "there are 100 kB here (weights 43.2 kB, gradient" in said
    assert "checkpoint" not in said, "its copy may go to the disk"


def test_where_the_copy_for_a_checkpoint_goes_to_the_disk_that_needs_more(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory_budget, "SPILL_ROOM", 1 << 60)
    assert main(["check", llama(tmp_path), "--threads", "1", "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    assert disk["needed"] == 5 * disk["checkpoint"]
