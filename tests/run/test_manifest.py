"""The manifest: its canonical form, its signature, and what a stranger's bytes can do (nothing)."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_node.base.identity import Identity
from noloco_node.base.validation import plain_table
from noloco_node.errors import Incompatible, NolocoError, NotAdmitted
from noloco_node.run import manifest, schema
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec, OuterSpec, SampleSpec, StagesSpec

GOLDEN = Path(__file__).parents[1] / "wire" / "golden" / "runs"

shares = st.floats(0, 1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.floats(-1e6, 1e6) | st.text("abc é", max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: _depth(value) < 4)
models = st.just(ModelSpec(preset="tiny")) | st.builds(
    ModelSpec,
    architecture=st.from_regex(r"[A-Z][A-Za-z0-9]{0,20}Config", fullmatch=True),
    config=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), plain, max_size=6),
)
inners = st.builds(
    InnerSpec,
    steps=st.integers(1, 100_000),
    batch_tokens=st.integers(1, 1000).map(lambda n: n * 128),
    learning_rate=st.floats(0, 1, exclude_min=True),
    warmup=shares,
    final_learning_rate=shares,
    weight_decay=shares,
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    clip=st.floats(0, 1000, exclude_min=True),
)
outers = st.builds(
    OuterSpec,
    alpha=st.floats(0, 0.5),
    beta=st.floats(0.1, 1.4),
    gamma=st.floats(0.1, 1.4),
    overlap=st.sampled_from(["eager", "blocking"]),
    codec=st.sampled_from(schema.CODECS),
)
manifests = st.builds(
    Manifest,
    name=st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True),
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 10_000_000),
    model=models,
    inner=inners,
    outer=outers,
    sample=st.none() | st.builds(SampleSpec, prompt=st.text(min_size=1, max_size=20), every=st.integers(1, 100)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _depth(value: object) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0)


@given(manifests)
def test_canonical_form_reads_back(written):
    assert manifest.parse(written.canonical()) == written
    assert manifest.parse(written.canonical()).run_id == written.run_id


@given(st.binary(max_size=300))
def test_garbage_raises_ours_only(raw):
    with pytest.raises(Incompatible):
        manifest.parse(raw)


@given(manifests, st.lists(st.sampled_from(["model", "data", "inner", "outer", "config"]), max_size=2), json_values)
def test_a_foreign_value_anywhere_raises_ours_or_is_valid(written, path, value):
    document = json.loads(written.canonical())
    at = document
    for key in path:
        at = at[key] if isinstance(at.get(key), dict) else at
    for key in [*at] or ["x"]:
        at[key] = value
        try:
            manifest.parse(json.dumps(document, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass"))
        except Incompatible as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 60_000,
        b'{"name":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"rounds":' + b"9" * 5000 + b"}",
        b'{"name":NaN}',
        b'{"name":"\\ud800"}',
        b"{}",
        b"null",
        b" " * (manifest.MAX_BYTES + 1),
    ],
)
def test_hostile_documents(raw):
    with pytest.raises(Incompatible):
        manifest.parse(raw)


def test_only_the_canonical_form_is_taken():
    document = json.loads(Manifest(name="tiny").canonical())
    with pytest.raises(Incompatible, match="canonical"):
        manifest.parse(json.dumps(document).encode())


def test_canonical_form_is_fixed():
    """These bytes are every run's identity: if this fails, all runs out there have become other runs."""
    outer = {"alpha": 0.1, "beta": 1.0, "codec": "lattice:4"}
    fixed = Manifest(name="tiny", seed=1, rounds=100, inner={"steps": 50}, outer=outer)
    assert fixed.canonical() == (
        b'{"data":{"dataset":null,"field":"text","sequence_length":128,"source":"stdlib","split":"train",'
        b'"subset":null,"tokenizer":"bytes"},'
        b'"inner":{"batch_tokens":1024,"betas":[0.9,0.95],"checkpoint_activations":false,"clip":1.0,"cooldown":0.2,'
        b'"final_learning_rate":0.1,"learning_rate":0.003,"precision":"bf16","schedule":"cosine","seconds":null,'
        b'"steps":50,"warmup":0.05,"weight_decay":0.1},'
        b'"model":{"architecture":null,"config":{},"options":{},"preset":"tiny","task":null},"name":"tiny",'
        b'"outer":{"alpha":0.1,"beta":1.0,"codec":"lattice:4","gamma":1.0,"keep_norm":true,"overlap":"eager",'
        b'"swaps_per_round":1},'
        b'"rounds":100,"seed":1}'
    )
    assert fixed.label == f"tiny-{fixed.run_id[:12]}"
    assert len(fixed.run_id) == 64


@pytest.mark.parametrize("kept", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_run_of_each_version_is_the_same_run(kept):
    """Signed by an earlier version: read, believed, and with the id and the meaning it had. Files never change."""
    document = json.loads(kept.read_text())
    text = document["manifest"].encode()
    signed = Signed(text, document["author"], bytes.fromhex(document["signature"]))
    read = manifest.verify(signed)
    assert read.run_id == document["run_id"] and read.canonical() == text
    assert _part_of(document["means"], read.model_dump(mode="json"))


def _part_of(meant, read):
    """`read` may say more: keys that came later."""
    if isinstance(meant, dict):
        return all(key in read and _part_of(value, read[key]) for key, value in meant.items())
    return meant == read


class _Nest(schema.Table):
    """A table that a later version added, and one that a still later version added to."""

    depth: int = 7
    lining: str = schema._added("a word", "none", default="moss")


class _Later(Manifest):
    """The next version's: a key, a table, and other defaults for new runs than what older runs mean."""

    swing: int = schema._added("a number", 3, default=5)
    nest: _Nest = schema._added("a table", {"depth": 2}, default_factory=_Nest)


def test_a_later_version_reads_a_run_of_this_one_as_it_was_meant(monkeypatch):
    old = Manifest(name="tiny", rounds=7)
    monkeypatch.setattr(manifest, "Manifest", _Later)
    read = manifest.parse(old.canonical())
    assert (read.swing, read.nest.depth, read.nest.lining) == (3, 2, "none"), "not the defaults of new runs"
    assert (read.canonical(), read.run_id, read.rounds) == (old.canonical(), old.run_id, 7)
    new = _Later(name="tiny", rounds=7)
    assert (new.swing, new.nest.lining) == (5, "moss") and new.run_id != old.run_id
    assert manifest.parse(new.canonical()) == new
    half = _Later(name="tiny", nest=_Nest(depth=9, lining="none"))
    assert b'"nest":{"depth":9}' in half.canonical() and manifest.parse(half.canonical()) == half
    spelled = json.loads(old.canonical()) | {"swing": 3}
    with pytest.raises(Incompatible, match="canonical"):  # two ways to write a run would be two runs
        manifest.parse(json.dumps(spelled, sort_keys=True, separators=(",", ":")).encode())


def test_this_version_reads_a_later_ones_run_unless_it_uses_what_came_later():
    same = _Later(name="tiny", swing=3, nest=_Nest(depth=2, lining="none"))
    assert manifest.parse(same.canonical()) == Manifest(name="tiny")
    with pytest.raises(Incompatible, match=r"made by a newer version of noloco-node, which knows nest: update"):
        manifest.parse(_Later(name="tiny", swing=3).canonical())
    inner = json.loads(Manifest(name="tiny").canonical())
    inner["inner"]["wings\n"] = 2
    with pytest.raises(Incompatible, match=r"knows inner\.wings\\n: update this one"):
        manifest.parse(json.dumps(inner).encode())


def test_a_key_of_the_first_version_is_always_written():
    cut = json.loads(Manifest(name="tiny").canonical())
    del cut["inner"]["clip"]
    with pytest.raises(Incompatible, match="canonical"):
        manifest.parse(json.dumps(cut, sort_keys=True, separators=(",", ":")).encode())


def test_minus_zero_is_zero():
    assert InnerSpec(warmup=-0.0).model_dump_json() == InnerSpec(warmup=0.0).model_dump_json()


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {"AutoModel": "x.Y"}},
        {"nested": {"trust_remote_code": True}},
        {"_name_or_path": "x"},
        {"tokenizer_name_or_path": "x"},
        {"attn_implementation": "someone"},
        {"a": "kernels-community/flash"},
        {"a": "..\\x"},
        {"a": "x" * 129},
        {"a": "two\nlines"},
        {"a": float("inf")},
        {"a": 10**400},
        {"a": b"bytes"},
        {"a b": 1},
        {"a": [[[[[1]]]]]},
        {"a": list(range(300))},
        {"num_hidden_layers": 2_000_000_000},
        {"num_hidden_layers": 2e9},
        {"n_layer": 1025},
        {"text": {"encoder_layers": 1 << 31}},
        {"num_local_experts": 5000},
        {"num_labels": 1 << 31},
        {"attention_types": [[["global", "local"], 1 << 31]]},
        {"num_hidden_layers": 1000, "num_experts": 1000},
        {"encoder_layers": 1000, "decoder_layers": 1000, "n_routed_experts": 33},
    ],
)
def test_a_config_loads_nothing_and_stays_small(config):
    with pytest.raises(ValueError, match="config"):
        ModelSpec(architecture="LlamaConfig", config=config)


@pytest.mark.parametrize("part", [0, [], {}], ids=str)
def test_a_long_config_is_not_gone_through_to_its_end(part):
    long = [part] * 10_000_000
    began = time.process_time()
    with pytest.raises(ValueError, match="must not hold more than"):
        plain_table({"a": long})
    assert time.process_time() - began < 0.1


def test_a_strangers_manifest_is_refused_at_its_first_mistake_of_thousands():
    document = json.loads(Manifest(name="a").canonical())
    mistakes = ({"a": 0, **{f"a{n}": 0 for n in range(6000)}}, {"stages": {"count": 2, "cut": ["a"] * 15_000}})
    for mistake in (*mistakes, {"inner": document["inner"] | mistakes[0]}):
        with pytest.raises(Incompatible) as refused:
            manifest.parse(json.dumps(document | mistake, sort_keys=True, separators=(",", ":")).encode())
        found = refused.value.__context__
        assert not isinstance(found, ValidationError) or found.error_count() == 1


def test_a_long_list_of_layers_is_not_repeated_in_whole():
    with pytest.raises(ValidationError) as refused:
        StagesSpec(count=2, cut=range(1, 10_000))
    assert len(str(refused.value)) < 1000


def test_a_strangers_manifest_of_endless_layers_is_refused_at_once():
    document = json.loads(Manifest(name="a", model=ModelSpec(architecture="LlamaConfig")).canonical())
    document["model"]["config"] = {"num_hidden_layers": 2_000_000_000}
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    began = time.process_time()
    with pytest.raises(Incompatible, match="config has a number in num_hidden_layers above 1024") as refused:
        manifest.parse(raw)
    assert time.process_time() - began < 1 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 126, "hidden_size": 16_384, "vocab_size": 128_256, "layer_norm_eps": 1e-5},
        {"num_hidden_layers": 61, "n_routed_experts": 256, "moe_intermediate_size": 2048},
        {"shared_expert_intermediate_size": 5632, "vocab_size_per_layer_input": 262_144, "rope_theta": 1e9},
        {"layer_types": ["full_attention"] * 64, "attention_types": [[["global", "local"], 12]]},
    ],
)
def test_models_that_are_there_fit(config):
    ModelSpec(architecture="LlamaConfig", config=config)


def test_a_batch_has_no_endless_number_of_sequences():
    most = {"data": DataSpec(sequence_length=2), "inner": InnerSpec(batch_tokens=2 << 20)}
    assert manifest.parse(Manifest(name="a", **most).canonical())
    with pytest.raises(ValueError, match=r"must be at most 1048576 times data\.sequence_length \(2\), not 2097154"):
        Manifest(name="a", **{**most, "inner": InnerSpec(batch_tokens=(2 << 20) + 2)})
    Manifest(name="a", model=ModelSpec(task="blobs"), data=most["data"], inner=InnerSpec(batch_tokens=100_000_000))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"task": "blobs", "preset": "tiny"}, "needs one of"),
        ({"task": "blobs", "config": {"a": 1}}, "only with an architecture"),
        ({"preset": "tiny", "options": {"a": 1}}, "options only with a task"),
        ({"task": "../x"}, "the name of a task"),
        ({"task": "blobs", "options": {"path": "/etc/passwd"}}, "path"),
    ],
)
def test_a_task_is_named_and_given_plain_options(model, sentence):
    with pytest.raises(Incompatible, match=sentence):
        manifest.parse(json.dumps({"name": "a", "model": model}).encode())
    assert Manifest(name="a", model=ModelSpec(task="blobs", options={"noise": 0.5}), inner=InnerSpec(batch_tokens=7))


def test_a_schedule_rises_before_it_falls():
    with pytest.raises(ValueError, match="at most 1 together"):
        InnerSpec(schedule="wsd", warmup=0.5, cooldown=0.6)
    assert InnerSpec(warmup=0.5, cooldown=0.6).schedule == "cosine"


def test_signatures(tmp_path):
    author = Identity.load_or_create(tmp_path / "identity.key")
    written = Manifest(name="tiny")
    signed = manifest.sign(written, author)
    assert manifest.verify(signed) == written
    other = Manifest(name="tiny", seed=2).canonical()
    with pytest.raises(NotAdmitted):
        manifest.verify(replace(signed, manifest=other))
    with pytest.raises(NotAdmitted):
        manifest.verify(replace(signed, signature=author.sign(signed.manifest)))  # signed, but not as a manifest
    for broken in (replace(signed, author="nobody"), replace(signed, manifest=b" " * (manifest.MAX_BYTES + 1))):
        with pytest.raises(NolocoError):
            manifest.verify(broken)


def test_reading_a_manifest_imports_nothing_heavy():
    code = (
        "import sys, noloco_node.run.manifest as m; m.Manifest(name='a');"
        "sys.exit(bool({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_manifest_may_name_is_there():
    from noloco_node.core.codecs.by_name import codec
    from noloco_node.data import corpus
    from noloco_node.training import model

    assert all(codec(name) for name in schema.CODECS)
    assert set(schema.PRESETS) <= set(model.PRESETS)
    assert corpus.load(DataSpec())
