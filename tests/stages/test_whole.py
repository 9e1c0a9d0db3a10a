"""The parts of a model put together again, as `export` does it."""

from pathlib import Path

import pytest
import torch
from stage_pairs import StageInTest, staged_run

from noloco_node.base.identity import Identity
from noloco_node.data.corpus import NOTHING
from noloco_node.data.tokens import BYTES
from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.host import memory
from noloco_node.publish import weights
from noloco_node.publish.weights import Fetched
from noloco_node.run import manifest
from noloco_node.run.schema import Manifest
from noloco_node.run.signed_file import RunFile
from noloco_node.stages.part import Position, part_layout, part_model
from noloco_node.training import model

RUN = staged_run(2)


def fetched(run: Manifest, stage: int, folder: Path, shift: float = 0.0) -> Fetched:
    """The weights of a node of this stage, its first ones and so much."""
    module = part_model(run, BYTES.vocabulary, Position(stage, 2))
    phi = model.flatten(module) + shift
    path = folder / f"{stage}{shift}.f32"
    phi.numpy().tofile(path)
    signed = manifest.sign(run, Identity.load_or_create(folder / "key"))
    return Fetched(RunFile(signed, run, {}), path, model.layout_digest(module), "peer", 3, 15)


def test_the_whole_is_made_of_a_mean_of_each_stage(tmp_path: Path) -> None:
    places = [fetched(RUN, 0, tmp_path, 0.2), fetched(RUN, 1, tmp_path), fetched(RUN, 0, tmp_path, 0.4)]
    trained = weights.load(places, NOTHING)
    first, last = (part_model(RUN, BYTES.vocabulary, Position(stage, 2)) for stage in range(2))
    found = trained.module.state_dict()
    for name, p in first.named_parameters():
        torch.testing.assert_close(found[name], p + 0.3)
    assert torch.equal(found["lm_head.weight"], last.lm_head.weight)
    assert torch.equal(found["model.layers.2.mlp.up_proj.weight"], last.model.layers[0].mlp.up_proj.weight)
    assert [(state.round, state.step) for state in trained.states] == [(3, 15)] * 3
    ids = torch.arange(6)[None]
    with torch.no_grad():
        shifted = {name: p + 0.3 for name, p in first.named_parameters()}
        first.load_state_dict(shifted)
        activations = first.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = last(inputs_embeds=activations, use_cache=False).logits
        torch.testing.assert_close(trained.module(input_ids=ids).logits, expected)


def test_without_one_stage_there_is_no_whole(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing here holds stage 2 of 2"):
        weights.load([fetched(RUN, 0, tmp_path)], NOTHING)


def test_a_layout_is_known_without_making_the_part() -> None:
    run = staged_run(4)
    for stage in range(4):
        replica = StageInTest(run, stage).replica
        module = replica.module
        assert part_layout(run, 256, Position(stage, 4)) == (replica.layout, replica.parameters), module.part


def test_a_part_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 400_000)
    monkeypatch.setattr(model, "build", lambda *_: pytest.fail("it was made"))
    with pytest.raises(OutOfMemory, match="slow weights and momentum"):
        StageInTest(staged_run(2), 1)
