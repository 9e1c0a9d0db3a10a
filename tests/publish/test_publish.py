"""`export`, `eval` and `sample` over homes as nodes leave them: real small models on the real text."""

import asyncio
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_node import OTHER, STATUS, FakeNode
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from texts import jsonl, texts, tokenizer_json
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_node.base.identity import Identity
from noloco_node.base.validation import printable
from noloco_node.checkpoints import checkpoint
from noloco_node.cli import main
from noloco_node.control import socket_server
from noloco_node.data.corpus import NOTHING
from noloco_node.data.sources import Sources
from noloco_node.errors import Incompatible, UsageError
from noloco_node.host import remembered
from noloco_node.host.home import Home
from noloco_node.publish import hf_folder
from noloco_node.publish.model_card import history
from noloco_node.publish.weights import Fetched
from noloco_node.run import manifest, signed_file
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica
from noloco_node.views.gather import GatheredState, GatherView

SHAPES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen2Config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "RobertaConfig": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 40,
        "is_decoder": True,
    },
    "GPT2Config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
}
STEPS = 2


def module_of(run: Manifest) -> nn.Module:
    return model.build(run.model, 256, run.seed, run.data.sequence_length)


def run_of(architecture: str = "LlamaConfig", seed: int = 1) -> Manifest:
    return Manifest(
        name="small",
        seed=seed,
        rounds=8,
        model=ModelSpec(architecture=architecture, config=SHAPES[architecture]),
        data=DataSpec(sequence_length=32),
        inner=InnerSpec(steps=STEPS, batch_tokens=64, warmup=0.0),
    )


@dataclass
class Left:
    """What a node left behind, and what it knew."""

    home: Home
    run: Manifest
    phi: list[Tensor]
    """At each checkpoint, the last one last."""
    eval_loss: float
    """At the last one."""
    layout: bytes

    @property
    def folder(self) -> Path:
        return self.home.run(self.run.run_id)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def a_node_was_here(root: Path, run: Manifest, rounds: int = 2, sources: Sources = NOTHING) -> Left:
    """A checkpoint at each boundary; the last one a step later, where the fast weights are ahead of the slow ones."""
    home = Home(root).create()
    identity = Identity.load_or_create(home.identity)
    inner = build_replica(run, identity.peer_id, device="cpu", threads=1, sources=sources)
    left = Left(home, run, [], 0.0, inner.layout)
    signed_file.keep(left.folder, manifest.sign(run, identity))
    for _ in range(rounds):
        for _ in range(STEPS):
            inner.step()
        inner.boundary()
        _save(left, inner)
    left.eval_loss = inner.evaluate()
    inner.step()
    _save(left, inner)
    return left


def _save(left: Left, inner: Replica) -> None:
    checkpoint.save(left.checkpoints, inner.state(), left.run.run_id, inner.layout)
    left.phi.append(inner.phi.clone())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return a_node_was_here(tmp_path_factory.mktemp("homes") / "one", run_of())


@pytest.fixture(scope="module")
def exported(made: Left, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("exports") / "model"
    assert main(["export", "--to", str(to), "--home", str(made.home.root)]) == 0
    return to


@pytest.fixture
def left(made: Left, tmp_path: Path) -> Left:
    """A copy, to be spoiled."""
    root = tmp_path / "home"
    shutil.copytree(made.home.root, root)
    return Left(Home(root), made.run, made.phi, made.eval_loss, made.layout)


@pytest.fixture(autouse=True)
def _no_settings_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "nobody-lives-here"))
    monkeypatch.setenv("NOLOCO_DEVICE", "cpu")
    monkeypatch.setenv("NOLOCO_THREADS", "1")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a verb says with --json."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    return document


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) in (2, 3, 12)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and shown.out == ""
    return shown.err


def flat(folder: Path) -> Tensor:
    from noloco_node.training import model

    return torch.cat([p.detach().flatten() for _, p in model.parameters(AutoModelForCausalLM.from_pretrained(folder))])


# ---- the folder ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", SHAPES)
def test_transformers_loads_it_and_measures_the_same(
    tmp_path: Path, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = a_node_was_here(tmp_path / "home", run_of(architecture), rounds=1)
    to = tmp_path / "model"
    written = told(capsys, "export", "--to", str(to), "--home", str(left.home.root))
    module, about = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(about.values()), about
    assert module(torch.tensor([[104, 105, 1, 0]])).logits.isfinite().all(), (
        "some count positions by the config's pad id"
    )
    assert torch.equal(flat(to), left.phi[-1]), "the slow weights, to the bit"
    assert written["eval_loss"] == pytest.approx(left.eval_loss, abs=1e-6)
    measured = told(capsys, "eval", str(to))
    assert measured["eval_loss"] == pytest.approx(left.eval_loss, abs=1e-6)
    assert (measured["round"], measured["step"], measured["tokens"]) == (1, STEPS + 1, 1024)
    assert measured["bits_per_byte"] == pytest.approx(measured["eval_loss"] / 0.6931471805599453)
    assert module.generation_config.eos_token_id == 0, "the token between two documents"


def test_its_files_and_what_they_say(exported: Path, made: Left) -> None:
    assert {path.name for path in exported.iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "README.md", "noloco.json"),
    }
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in exported.iterdir()), "to be handed on"
    assert list(exported.parent.iterdir()) == [exported], "nothing is left beside it"
    card = (exported / "README.md").read_text()
    author = Identity.load_or_create(made.home.identity).peer_id
    about = "round 2 of 8", "AdamW", "lattice:3", "| update's length | kept |", f"{made.eval_loss:.4f}"
    for word in (made.run.run_id, made.run.label, author, *about):
        assert word in card
    file = signed_file.read(exported)
    assert (file.run, file.signed.author) == (made.run, author)
    assert file.trained["round"] == 2 and file.trained["eval_loss"] == pytest.approx(made.eval_loss, abs=1e-6)


def test_an_evaluation_says_on_stderr_that_it_goes_on(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(exported)]) == 0
    assert re.fullmatch(r"evaluating: 0 of \d+ done\n", capsys.readouterr().err), "in a log too, before it begins"


def test_on_a_terminal_each_wait_says_what_for(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for one
    assert main(["eval", str(exported)]) == 0
    shown = capsys.readouterr().err
    waits = "loading the model", "reading the text", "evaluating"
    assert tuple(dict.fromkeys(re.findall("|".join(waits), shown))) == waits, "each is drawn ten times a second"


def test_where_a_node_fills_the_gpu_only_the_loss_is_missing(
    made: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("noloco_node.cli.publish.measure", measure)
    to, home = tmp_path / "model", ("--home", str(made.home.root))
    assert main(["export", "--to", str(to), *home]) == 0
    assert "exported without its loss" in capsys.readouterr().err and (to / "config.json").exists()
    assert main(["eval", *home]) == 21
    assert "use --device cpu" in capsys.readouterr().err


def test_a_token_is_a_byte(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    everything = "".join(map(chr, [*range(0x300), 0x20AC, 0x65E5, 0x1F600])) + "  \r\n\t <s> def f(x):\n    return"
    for text in (everything, "", " ", "\0", "ĀĠ"):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256
    assert hf_folder.byte_tokenizer() == (exported / "tokenizer.json").read_bytes()
    letters = json.loads(hf_folder.byte_tokenizer())["model"]["vocab"]
    assert list(letters.values()) == list(range(256))
    assert hashlib.sha256(" ".join(letters).encode()).hexdigest()[:16] == "675b1e113e8e7d78", "of each export"


def test_it_takes_the_place_of_an_earlier_export_and_of_nothing_else(
    made: Left, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(to: Path) -> list[str]:
        return ["export", "--to", str(to), "--home", str(made.home.root)]

    earlier = tmp_path / "model"
    shutil.copytree(exported, earlier)
    (earlier / "README.md").write_text("of long ago")
    assert told(capsys, *export(earlier))["to"] == str(earlier)
    assert run_of().run_id in (earlier / "README.md").read_text()
    (earlier / ".git").mkdir()
    assert "it has .git" in refused(capsys, *export(earlier))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert "is not empty and not an export" in refused(capsys, *export(mine))
    assert "cannot write an export into" in refused(capsys, *export(mine / "config.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_an_earlier_export_may_be_in_several_files(name: str, tmp_path: Path) -> None:
    for each in ("noloco.json", name):
        (tmp_path / each).touch()
    hf_folder.check(tmp_path)


@pytest.mark.parametrize("name", ["model-finetuned.safetensors", "model.fp16.safetensors", "model-00001.safetensors"])
def test_weights_that_no_export_writes_are_not_replaced(name: str, tmp_path: Path) -> None:
    for each in ("noloco.json", "model.safetensors", name):
        (tmp_path / each).touch()
    with pytest.raises(UsageError, match=f"not an export .it has {re.escape(name)}"):
        hf_folder.check(tmp_path)


def test_it_does_not_take_the_place_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell would stay in a folder that is gone."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder in (here, Path()):
        with pytest.raises(UsageError, match="is the folder you are in"):
            hf_folder.check(folder)


def test_it_removes_what_a_killed_export_to_the_same_place_left(
    made: Left, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", ".model.0-4194305.part", ".model.1-4194305.part", ".other.0-4194305.part", ".model-mine"):
        shutil.copytree(exported, tmp_path / name)
    told(capsys, "export", "--to", str(tmp_path / "model"), "--home", str(made.home.root))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".model-mine", ".other.0-4194305.part", "model"]


def test_what_was_there_outlives_an_export_that_is_killed_as_it_takes_its_place(
    made: Left, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, killed = tmp_path / "before" / "model", tmp_path / "killed" / "model"
    shutil.copytree(exported, before)
    (before / "README.md").write_text("of long ago")
    rename, seen = Path.rename, list[Path]()

    def renames(path: Path, to: Path) -> Path:
        seen.append(to)
        if len(seen) == 2:
            shutil.copytree(before.parent, killed.parent)  # what a kill at this instant leaves
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", renames)
    assert main(["export", "--to", str(before), "--home", str(made.home.root)]) == 2
    assert seen[1] == before and not killed.exists()
    monkeypatch.undo()
    with monkeypatch.context() as full:
        full.setattr("noloco_node.base.atomic_files.free_bytes", lambda _: 0)
        assert main(["export", "--to", str(killed), "--home", str(made.home.root)]) == 20
    capsys.readouterr()
    for folder in (before, killed):
        assert (folder / "README.md").read_text() == "of long ago"
        told(capsys, "export", "--to", str(folder), "--home", str(made.home.root))
        assert "of long ago" not in [card.read_text() for card in folder.parent.glob("*/README.md")]


@pytest.mark.parametrize("name", [".model.0-4194305.part", ".model.earlier.part"])
def test_what_a_killed_export_left_does_not_count_as_a_full_disk(  # noqa: PLR0917 (fixtures)
    name: str,
    made: Left,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the export before, where a kill came after the new one was in its place."""
    shutil.copytree(exported, tmp_path / "model")
    left = tmp_path / name
    left.mkdir()
    monkeypatch.setattr("noloco_node.base.atomic_files.free_bytes", lambda _: 0 if left.exists() else 1 << 40)
    told(capsys, "export", "--to", str(tmp_path / "model"), "--home", str(made.home.root))


def test_where_a_link_leads_the_export_lies_there(
    made: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As to a larger disk."""
    there, link = tmp_path / "large" / "model", tmp_path / "model"
    there.mkdir(parents=True)
    link.symlink_to(there)
    for _ in "first", "again":
        told(capsys, "export", "--to", str(link), "--home", str(made.home.root))
        assert link.is_symlink() and (there / "model.safetensors").exists()
    assert sorted(path.name for path in (*tmp_path.iterdir(), *there.parent.iterdir())) == ["large", "model", "model"]


@pytest.mark.parametrize(
    "case",
    [
        (SafetensorError("No space left on device (os error 28)"), "the disk is full: cannot write an export into"),
        (SafetensorError("odd"), "cannot write an export into"),
        (OSError(errno.ENOSPC, "No space left on device"), "Free some space, or name another place with --to"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied. Name another place with --to"),
    ],
    ids=str,
)
def test_an_export_that_cannot_be_written_leaves_nothing(
    made: Left,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[Exception, str],
) -> None:
    fault, sentence = case

    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fails)
    to = tmp_path / "model"
    full = "No space" in str(fault)
    assert main(["export", "--to", str(to), "--home", str(made.home.root)]) == (20 if full else 2)
    assert sentence in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_node_may_run_meanwhile_and_its_home_is_only_read(
    left: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def everything() -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in left.home.root.rglob("*")}
        return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}

    with left.home.lock():
        before = everything()
        told(capsys, "export", "--to", str(tmp_path / "model"), "--home", str(left.home.root))
        assert everything() == before


# ---- which weights ---------------------------------------------------------------------------------------------------
def test_the_mean_of_several(tmp_path: Path, made: Left, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = a_node_was_here(tmp_path / "other", run_of(), rounds=1)
    to = tmp_path / "mean"
    places = f"{other.home.root},{exported}"
    written = told(capsys, "export", "--to", str(to), "--home", str(made.home.root), "--average", places)
    assert [state["round"] for state in written["states"]] == [2, 1, 2]
    mean = (made.phi[-1] + other.phi[-1] + made.phi[-1]) / 3
    assert not torch.equal(other.phi[-1], made.phi[-1])
    assert torch.allclose(flat(to), mean, atol=1e-7)
    assert (
        "the mean of the slow weights of 3 replicas, at rounds 2, 1 and 2, exported" in (to / "README.md").read_text()
    )
    stranger = a_node_was_here(tmp_path / "stranger", run_of(seed=2), rounds=1)
    places = str(stranger.home.root)
    said = refused(capsys, "export", "--to", str(to), "--home", str(made.home.root), "--average", places)
    assert f"'{made.run.run_id}' names no run in {stranger.home.root}" in said
    places = str(stranger.folder)
    said = refused(capsys, "export", "--to", str(to), "--home", str(made.home.root), "--average", places)
    assert said.startswith(f"{places} is of {stranger.run.label}, not of ")


def test_a_mean_of_live_peers_wants_a_running_node(
    made: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", "--to", str(tmp_path / "mean"), "--home", str(made.home.root), "--average")
    assert "no node is running" in refused(capsys, *words, "2")
    assert "--average takes 1 to 64 peers, not 0" in refused(capsys, *words, "0")
    assert "leave --run and --checkpoint out" in refused(capsys, *words, "2", "--checkpoint", "2")
    assert not (tmp_path / "mean").exists()


def test_a_mean_of_live_peers_says_whose_the_states_are(
    left: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gathers(FakeNode):
        async def gather(self, _peers):
            folder = tmp_path / "gathered"
            folder.mkdir()
            own, other = (folder / f"{at}.f32" for at in range(2))
            for place in (own, other):
                place.write_bytes(left.phi[-1].numpy().tobytes())
            states = (GatheredState(str(own), STATUS.peer_id, 3, 6), GatheredState(str(other), OTHER, 4, None))
            yield GatherView(run_id=left.run.run_id, layout=left.layout.hex(), states=states, done=True)

    async def story(to: Path) -> int:
        async with socket_server.serving(left.home, Gathers()):
            words = ["export", "--to", str(to), "--home", str(left.home.root), "--average", "1", "--json"]
            return await asyncio.to_thread(main, words)

    capsys.readouterr()
    assert asyncio.run(story(tmp_path / "mean")) == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    assert (said["round"], said["step"]) == (4, 6)
    assert said["states"] == [
        {"peer_id": STATUS.peer_id, "round": 3, "step": 6},
        {"peer_id": OTHER, "round": 4, "step": None},
    ]
    assert not (tmp_path / "gathered").exists()
    assert told(capsys, "eval", str(tmp_path / "mean"))["step"] == 6


def test_an_export_may_say_no_step(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With phases by time that of a peer is not always known."""
    folder, to = tmp_path / "model", tmp_path / "again"
    shutil.copytree(exported, folder)
    about = json.loads((folder / signed_file.NAME).read_text())
    about["trained"]["step"] = None
    (folder / signed_file.NAME).write_text(json.dumps(about))
    assert told(capsys, "export", "--to", str(to), "--home", str(folder))["step"] is None
    assert "| how far | round 2 of 8 |" in (to / "README.md").read_text()


def test_what_was_fetched_is_of_this_model_and_there(left: Left, tmp_path: Path) -> None:
    file, place = signed_file.read(left.folder), tmp_path / "0.f32"
    place.write_bytes(left.phi[-1].numpy().tobytes())
    fetched = Fetched(file, place, left.layout, "peer", 2, 5)
    assert torch.equal(fetched.slow(module_of(left.run)).phi, left.phi[-1])
    with pytest.raises(Incompatible, match="restart the node"):
        replace(fetched, layout=bytes(32)).slow(module_of(left.run))
    place.unlink()
    with pytest.raises(UsageError, match="what was fetched is gone"):
        fetched.slow(module_of(left.run))


def test_one_checkpoint_by_its_name_or_path(
    made: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ["--home", str(made.home.root)]
    assert told(capsys, "eval", *home, "--checkpoint", str(STEPS))["round"] == 1
    assert told(capsys, "eval", str(made.checkpoints / str(STEPS)))["round"] == 1
    assert told(capsys, "eval", str(made.folder))["round"] == 2
    monkeypatch.chdir(made.checkpoints)
    assert told(capsys, "eval", str(STEPS))["round"] == 1, "where it lies"
    assert "there is no checkpoint 7: there are 5, 4, 2" in refused(capsys, "eval", *home, "--checkpoint", "7")


def test_what_chooses_in_a_home_is_not_ignored_elsewhere(
    made: Left, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = exported, made.checkpoints / str(STEPS)
    for place in map(str, (*states, made.folder)):
        for run in (made.run.name, made.run.label, made.run.run_id[:6]):
            assert told(capsys, "eval", place, "--run", run)["run_id"] == made.run.run_id
        said = refused(capsys, "eval", place, "--run", "nope")
        assert said == f"{place} is of {made.run.label}, not of 'nope': name another place\n"
    for place in map(str, states):
        assert "leave --checkpoint out" in refused(capsys, "sample", "Once", place, "--checkpoint", str(STEPS))
    assert told(capsys, "eval", str(made.folder), "--checkpoint", str(STEPS))["round"] == 1


def test_of_several_runs_one_is_named_else_the_one_that_trained_last(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "eval", "--home", str(left.home.root), "--run", "small")["run_id"] == left.run.run_id
    other = a_node_was_here(left.home.root, run_of(seed=2), rounds=1)
    joined = run_of(seed=3)
    signed_file.keep(left.home.run(joined.run_id), manifest.sign(joined, Identity.load_or_create(left.home.identity)))
    assert main(["eval", "--home", str(left.home.root), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["run_id"] == other.run.run_id
    first = shown.err.splitlines()[0]
    assert first == f"{other.run.label}, which was trained last here: another one of 3 runs is named with --run"
    said = refused(capsys, "eval", "--home", str(left.home.root), "--run", "small")
    assert "names several runs" in said and left.run.label in said and other.run.label in said
    for named in (other.run.run_id, other.run.run_id[:6], other.run.label):
        assert told(capsys, "eval", "--home", str(left.home.root), "--run", named)["run_id"] == other.run.run_id
    assert "'nobody' names no run in" in refused(capsys, "eval", "--home", str(left.home.root), "--run", "nobody")


def test_a_damaged_checkpoint_is_passed_over(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(left.home.root)]
    for name in ("5", "4"):
        path = left.checkpoints / name / "outer.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    assert told(capsys, "eval", *home)["step"] == STEPS
    assert "5 is skipped: outer.safetensors" in refused(capsys, "eval", str(left.checkpoints / "5"))
    shutil.rmtree(left.checkpoints)
    left.checkpoints.mkdir()
    assert "has no checkpoint yet" in refused(capsys, "eval", *home)


def test_a_folder_that_is_none(tmp_path: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused(capsys, "eval", str(tmp_path / "nowhere"))
    said = refused(capsys, "eval", str(tmp_path))
    assert f"there is no run in {tmp_path}: name a home in which a node has trained, a checkpoint or an" in said
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "config.json").symlink_to(300 * "a")  # an error of the system, as in a folder of others
    assert f"cannot read {tmp_path / 'closed'}: " in refused(capsys, "eval", str(tmp_path / "closed"))
    nameless = tmp_path / "nameless"
    shutil.copytree(exported, nameless)
    (nameless / "noloco.json").unlink()
    assert "has no noloco.json" in refused(capsys, "eval", str(nameless))
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    weights = load_file(other / "model.safetensors")
    for change in ({"model.norm.weight": torch.ones(64)}, {"model.norm.weight": None}):
        changed = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        save_file(changed, other / "model.safetensors", {"format": "pt"})
        assert "holds no model that can be loaded" in refused(capsys, "eval", str(other))


def test_a_config_that_nobody_signed_is_not_believed(
    tmp_path: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    assert told(capsys, "eval", str(folder))["eval_loss"] == told(capsys, "eval", str(exported))["eval_loss"]


def test_a_run_of_a_task_is_its_packages_to_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path / "home").create()
    run = Manifest(name="pictures", model=ModelSpec(task="blobs"))
    folder = home.run(run.run_id)
    signed_file.keep(folder, manifest.sign(run, Identity.load_or_create(home.identity)))
    (folder / "checkpoints" / "5").mkdir(parents=True)
    for verb in (["eval"], ["export", "--to", str(tmp_path / "model")]):
        assert "trains the task blobs, which is no language model" in refused(capsys, *verb, "--home", str(home.root))


def test_no_pickle_is_run(tmp_path: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(), protocol=2))
    assert "holds no model that can be loaded" in refused(capsys, "eval", str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rounds", "runds"), "is not valid"),
        (('"schema": 1', '"schema": 2'), "is damaged"),
        (("12D3", "12D4"), "is not valid"),
        (("{", "["), "is damaged"),
    ],
)
def test_a_manifest_that_nobody_signed_is_not_believed(
    tmp_path: Path, exported: Path, change: tuple[str, str], sentence: str
) -> None:
    (tmp_path / "noloco.json").write_text((exported / "noloco.json").read_text().replace(*change, 1))
    with pytest.raises(UsageError, match=sentence):
        signed_file.read(tmp_path)


def test_the_run_file_of_a_home_is_written_once_and_mended(left: Left) -> None:
    path = left.folder / "noloco.json"
    signed, written = signed_file.read(left.folder).signed, path.stat().st_mtime_ns
    signed_file.keep(left.folder, signed)
    assert path.stat().st_mtime_ns == written
    path.write_text("half")
    signed_file.keep(left.folder, signed)
    assert signed_file.read(left.folder).signed == signed


# ---- a look ----------------------------------------------------------------------------------------------------------
def test_a_sample_is_of_its_seed(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        return str(told(capsys, "sample", "def f(", str(exported), "--tokens", "60", *words)["continuation"])

    assert said() == said("--seed", "1") != said("--seed", "2")
    assert said("--temperature", "0", "--seed", "3") == said("--temperature", "0", "--seed", "4")
    assert main(["sample", "def f(", str(exported), "--tokens", "60"]) == 0
    assert capsys.readouterr().out == f"def f({printable(said())}\n", "the same, as it comes"


@pytest.fixture
def of_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """An export of a run with a tokenizer of its own, whose file is gone."""
    path, to, data = tmp_path / "words.json", tmp_path / "model", jsonl(tmp_path / "set.jsonl", texts(3000))
    path.write_bytes(tokenizer_json())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = DataSpec(source="files", sequence_length=32, tokenizer=f"sha256:{digest}")
    run, where = run_of().model_copy(update={"data": spec}), Sources((str(data),), path, tmp_path)
    left = a_node_was_here(tmp_path / "home", run, rounds=1, sources=where)
    told(capsys, *f"export --to {to} --home {left.home.root} --tokenizer {path} --data {data}".split())
    path.unlink()
    return to


@pytest.mark.parametrize("words", ["sample --tokens 2 def", "eval"])
def test_threads_are_set(words: str, exported: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert main([*words.split(), str(exported), "--threads", str(before + 1)]) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_an_export_brings_its_tokenizer(of_words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = signed_file.read(of_words).trained["eval_loss"]
    data = str(of_words.parent / "set.jsonl")
    assert told(capsys, "eval", str(of_words), "--data", data)["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert told(capsys, "sample", "a peer", str(of_words), "--tokens", "5")["continuation"]
    (of_words / "tokenizer.json").write_bytes(tokenizer_json(301))
    assert "tokenizer.json is not the run's tokenizer" in refused(capsys, "sample", "a peer", str(of_words))
    (of_words / "tokenizer.json").unlink()
    assert "with --tokenizer" in refused(capsys, "sample", "a peer", str(of_words))


def test_files_that_a_node_was_given_for_its_run_need_not_be_named_again(
    of_words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the node says at its end, as `noloco-node export --to my-model`, works as it stands."""
    home, exported = Home(of_words.parent / "home"), signed_file.read(of_words)
    shutil.copy(of_words / "tokenizer.json", words := of_words.parent / "words.json")
    named, to = ("--home", str(home.root)), of_words.parent / "again"
    assert "with --tokenizer" in refused(capsys, "eval", *named)
    given = {"tokenizer": str(words), "data": [str(of_words.parent / "set.jsonl")]}
    remembered.keep(home, given, exported.run.run_id, exported.signed.author)
    assert told(capsys, "sample", "a peer", "--tokens", "5", *named)["continuation"]
    measured = told(capsys, "export", "--to", str(to), *named)["eval_loss"]
    assert measured == pytest.approx(exported.trained["eval_loss"], abs=1e-6)
    words.unlink()
    assert told(capsys, "eval", str(to), *named)["eval_loss"] == pytest.approx(measured, abs=1e-6)
    remembered.keep(home, given, "0" * 64, exported.signed.author)
    assert "name yours" in refused(capsys, "eval", str(to), *named), "files for another run"


def test_an_export_brings_a_tokenizer_of_the_hub(
    of_words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = signed_file.read(of_words).run
    data = run.data.model_copy(update={"tokenizer": f"hub:owner/words@{'0' * 40}"})
    identity = Identity.load_or_create(of_words.parent / "key")
    signed = manifest.sign(run.model_copy(update={"data": data}), identity)
    (of_words / "noloco.json").write_text(signed_file.text(signed, {}))
    assert told(capsys, "sample", "a peer", str(of_words), "--tokens", "5")["continuation"]
    assert told(capsys, "eval", str(of_words), "--data", str(of_words.parent / "set.jsonl"))["eval_loss"] > 0


@pytest.mark.parametrize("wrong", [("--tokens", "0"), ("--temperature", "-1"), ("--seed", "-1"), ("--tokens", "few")])
def test_a_sample_that_cannot_be(exported: Path, wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong[0] in refused(capsys, "sample", "x", str(exported), *wrong)


def test_a_sample_of_a_text_that_was_cut_within_a_letter(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = os.fsdecode("caf\u00e9".encode()[:-1])
    assert told(capsys, "sample", cut, str(exported), "--tokens", "5")["text"] == "caf\N{REPLACEMENT CHARACTER}"
    assert main(["sample", cut, str(exported), "--tokens", "5"]) == 0


def test_a_file_in_place_of_a_folder_is_said(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json is no folder: name" in refused(capsys, "eval", str(exported / "config.json"))


def test_the_losses_of_a_run_are_read_leniently(tmp_path: Path) -> None:
    assert history(tmp_path / "events.jsonl", 9) == ()
    lines = [json.dumps({"event": "PhaseDone", "round": n, "loss": 9.5 - n}) for n in range(1, 10)]
    lines += ['{"event": "Evaluated", "round": 0, "eval_loss": 9.5}', "{half", "[1]", '{"event": "PhaseDone"}', "\xff"]
    (tmp_path / "events.jsonl").write_text("\n".join(lines), encoding="latin-1")
    rows = history(tmp_path / "events.jsonl", 5)
    assert [(row.round, row.loss, row.eval_loss) for row in rows[:2]] == [(0, None, 9.5), (1, 8.5, None)]
    assert rows[-1].round == 5
