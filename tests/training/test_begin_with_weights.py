"""Weights from a folder in Hugging Face's format become a replica's own."""

import pytest
import torch

from noloco_node.errors import UsageError
from noloco_node.run.schema import Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica

SPEC = ModelSpec(preset="tiny")


def written(folder, change=lambda module: None, dtype=torch.float32, spec=SPEC):
    module = model.build(spec, 256, seed=7)
    change(module)
    with model.without_bars():
        module.to(dtype).save_pretrained(folder)
    return module


def begun(folder, spec=SPEC):
    module = model.build(spec, 256, seed=1)
    model.begin_with(module, folder)
    return module


def test_a_run_begins_with_them(tmp_path):
    theirs = dict(written(tmp_path).named_parameters())
    ours = dict(begun(tmp_path).named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())


def test_they_may_be_in_bf16(tmp_path):
    theirs = dict(written(tmp_path, dtype=torch.bfloat16).named_parameters())
    ours = dict(begun(tmp_path).named_parameters())
    assert all(p.dtype is torch.float32 and torch.equal(p, theirs[name].float()) for name, p in ours.items())


def test_a_replica_has_them_as_slow_weights_too(tmp_path):
    theirs = model.flatten(written(tmp_path))
    replica = build_replica(Manifest(name="x"), "me", device="cpu", threads=1)
    replica.begin_with(tmp_path)
    assert torch.equal(replica.theta, theirs) and torch.equal(replica.phi, theirs)
    replica.close()


def test_weights_of_another_model_are_refused(tmp_path):
    small = ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["tiny"], "hidden_size": 64})
    written(tmp_path, spec=small)
    with pytest.raises(UsageError, match=r"embed_tokens.weight is \(256, 64\) there and \(256, 128\) in this model"):
        begun(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    def spoil(module):
        with torch.no_grad():
            next(module.parameters())[3, 5] = float("nan")

    written(tmp_path, spoil)
    with pytest.raises(UsageError, match="is not finite"):
        begun(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    written(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="holds no model that can be loaded"):
        begun(tmp_path)


def test_weights_that_the_model_has_no_place_for_are_refused(tmp_path):
    deeper = ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["tiny"], "num_hidden_layers": 3})
    written(tmp_path, spec=deeper)
    with pytest.raises(UsageError, match=r"this model has no model\.layers\.2"):
        begun(tmp_path)


def test_weights_that_are_not_tied_as_their_config_says_are_refused(tmp_path):
    untied = ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["tiny"], "tie_word_embeddings": False})
    written(tmp_path, spec=untied)
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        begun(tmp_path)
