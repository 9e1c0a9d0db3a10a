"""The weights that a run begins with: what run.toml says of them, and the digest that the manifest has."""

import json

import pytest

from noloco_node.errors import UsageError
from noloco_node.run import first_weights, manifest, toml
from noloco_node.run.schema import Manifest, ModelSpec, StagesSpec

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16}


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "mine"
    found.mkdir()
    for number in (1, 2):
        (found / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 100)
    (found / "config.json").write_text(json.dumps(CONFIG))
    return found


def load(folder, text, say=lambda line: None):
    path = folder.parent / "run.toml"
    path.write_text(text)
    return toml.load(path, say)


def test_a_folder_says_what_the_model_is_and_its_digest_stands_in_the_manifest(folder):
    run = load(folder, 'name = "x"\n[model]\nweights = "mine"')
    assert run.model.weights == first_weights.digest(folder)
    assert (run.model.architecture, run.model.config) == ("LlamaConfig", {"vocab_size": 256, "hidden_size": 16})
    assert toml.weights(folder.parent / "run.toml") == str(folder)
    assert manifest.parse(run.canonical()) == run


def test_what_takes_long_is_told(folder):
    told = []
    load(folder, 'name = "x"\n[model]\nweights = "mine"', told.append)
    assert told == [f"reading the weights in {folder}: the run is known by their digest"]
    load(folder, 'name = "x"', told.append)
    assert len(told) == 1


def test_without_weights_a_run_keeps_its_bytes():
    assert b"weights" not in Manifest(name="x").canonical()


def test_the_digest_is_of_the_weights_alone(folder):
    before = first_weights.digest(folder)
    (folder / "README.md").write_text("hello")
    assert first_weights.digest(folder) == before
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder / "model-00003-of-00002.safetensors")
    assert first_weights.digest(folder) != before
    (folder / "model-00003-of-00002.safetensors").rename(shard)
    shard.write_bytes(bytes(100))
    assert first_weights.digest(folder) != before


def test_only_those_that_the_manifest_names_are_taken(folder):
    named = first_weights.digest(folder)
    assert first_weights.check(folder, named) == folder
    with pytest.raises(UsageError, match="give their folder with --weights"):
        first_weights.check(None, named)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"other")
    with pytest.raises(UsageError, match="are not those that the run begins with"):
        first_weights.check(folder, named)


def test_an_index_names_files_of_its_folder_alone(folder):
    before, index = first_weights.digest(folder), folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert first_weights.digest(folder) != before
    for wrong in ({"weight_map": {"a": "../other/x.safetensors"}}, {"weight_map": {"a": 3}}, [], {}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="index"):
            first_weights.digest(folder)


def test_weights_say_what_the_model_is_and_no_preset(folder):
    with pytest.raises(UsageError, match="takes no preset with weights"):
        load(folder, 'name = "x"\n[model]\npreset = "tiny"\nweights = "mine"')


def test_keys_of_older_versions_that_say_nothing_are_left_out(folder):
    old = {"n_ctx": 64, "n_positions": 64, "task_specific_params": {"text-generation": {}}, "rope_interleaved": False}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **old, "transformers.js_config": {"x": 1}}))
    run = load(folder, 'name = "x"\n[model]\nweights = "mine"')
    assert run.model.config == {"vocab_size": 256, "hidden_size": 16, "n_positions": 64}


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_without_weights_is_one_sentence(folder, name):
    (folder.parent / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{name}"):
        load(folder, f'name = "x"\n[model]\nweights = "{name}"')


def test_what_is_no_table_beside_weights_is_named(folder):
    with pytest.raises(UsageError, match=r"run\.toml: data must be a table, not 'stdlib'"):
        load(folder, 'name = "x"\ndata = "stdlib"\n[model]\nweights = "mine"')


def test_weights_of_words_need_their_tokenizer(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 50257}))
    text = 'name = "x"\n[model]\nweights = "mine"\n[data]\n'
    for said in ("", 'tokenizer = "bytes"'):  # as the template of `init` has it
        with pytest.raises(UsageError, match=r"data\.tokenizer is not theirs: these weights know 50257 tokens"):
            load(folder, text + said)


def test_the_text_part_of_a_model_that_also_sees_has_a_class_of_its_own(folder):
    said = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    (folder / "config.json").write_text(json.dumps(said))
    document = {"name": "x", "model": {"weights": "mine"}}
    assert toml._with_files(document, folder.parent, lambda _: None)["model"]["architecture"] == "Gemma3TextConfig"
    named = {"name": "x", "model": {"weights": "mine", "architecture": "LlamaConfig"}}
    found = toml._with_files(named, folder.parent, lambda _: None)["model"]
    assert found["architecture"] == "LlamaConfig" and found["config"], "the author's class, and the folder's values"


def test_a_manifest_names_no_path_and_no_weights_that_a_run_cannot_begin_with():
    named = "sha256:" + "0" * 64
    for wrong in ({"preset": "tiny", "weights": "/etc"}, {"task": "x", "weights": named}):
        with pytest.raises(ValueError):
            ModelSpec(**wrong)
    with pytest.raises(ValueError, match="a run with stages begins with random weights"):
        Manifest(name="x", model=ModelSpec(preset="tiny", weights=named), stages=StagesSpec(count=2))
