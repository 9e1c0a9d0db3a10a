"""Weights from a folder in Hugging Face's format become a replica's own."""

import pytest
import torch

from noloco_node.data.corpus import Sources
from noloco_node.errors import UsageError
from noloco_node.run import first_weights
from noloco_node.run.schema import Manifest, ModelSpec
from noloco_node.training import model, tasks

SPEC = ModelSpec(preset="tiny")


def written(folder, change=lambda module: None, dtype=torch.float32, spec=SPEC):
    module = model.build(spec, 256, seed=7)
    change(module)
    with model.without_bars():
        module.to(dtype).save_pretrained(folder)
    return module


def built(folder, weights=None):
    spec = SPEC.model_copy(update={"weights": weights or first_weights.digest(folder)})
    return tasks.load(Manifest(name="x", model=spec), Sources(weights=folder)).model()


def test_a_run_begins_with_them(tmp_path):
    theirs = dict(written(tmp_path).named_parameters())
    ours = dict(built(tmp_path).named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())


def test_they_may_be_in_bf16(tmp_path):
    theirs = dict(written(tmp_path, dtype=torch.bfloat16).named_parameters())
    ours = dict(built(tmp_path).named_parameters())
    assert all(p.dtype is torch.float32 and torch.equal(p, theirs[name].float()) for name, p in ours.items())


def test_who_gets_later_ones_does_without():
    spec = SPEC.model_copy(update={"weights": "sha256:" + "0" * 64})
    tasks.load(Manifest(name="x", model=spec)).model()


def test_other_weights_than_the_manifest_names_are_refused(tmp_path):
    written(tmp_path)
    with pytest.raises(UsageError, match="are not those that the run begins with"):
        built(tmp_path, "sha256:" + "0" * 64)


def test_weights_of_another_model_are_refused(tmp_path):
    small = ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["tiny"], "hidden_size": 64})
    written(tmp_path, spec=small)
    with pytest.raises(UsageError, match="holds no model that can be loaded"):
        built(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    def spoil(module):
        with torch.no_grad():
            next(module.parameters())[3, 5] = float("nan")

    written(tmp_path, spoil)
    with pytest.raises(UsageError, match="is not finite"):
        built(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    written(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="holds no model that can be loaded"):
        built(tmp_path)
