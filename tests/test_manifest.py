"""The manifest: what run.toml may say, its canonical form, and what a stranger's bytes can do (nothing)."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node import manifest
from noloco_node.errors import Incompatible, NolocoError, NotAdmitted, UsageError
from noloco_node.identity import Identity
from noloco_node.manifest import DataSpec, InnerSpec, Manifest, ModelSpec, OuterSpec, Signed

GOLDEN = Path(__file__).with_name("wire") / "golden" / "runs"

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
    codec=st.sampled_from(manifest.CODECS),
)
manifests = st.builds(
    Manifest,
    name=st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True),
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 10_000_000),
    model=models,
    inner=inners,
    outer=outers,
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
    fixed = Manifest(name="tiny", seed=1, rounds=100)
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


class _Nest(manifest._Table):
    """A table that a later version added, and one that a still later version added to."""

    depth: int = 7
    lining: str = manifest._added("a word", "none", default="moss")


class _Later(Manifest):
    """The next version's: a key, a table, and other defaults for new runs than what older runs mean."""

    swing: int = manifest._added("a number", 3, default=5)
    nest: _Nest = manifest._added("a table", {"depth": 2}, default_factory=_Nest)


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


@pytest.fixture
def run_toml(tmp_path):
    """A function that replaces one piece of the template and gives the path."""

    def written(old: str = "", new: str = ""):
        text = manifest.template()
        assert old in text
        path = tmp_path / "run.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    return written


def test_the_template_holds_every_default(run_toml):
    assert manifest.load(run_toml()) == Manifest(name="tiny")
    written = tomllib.loads(manifest.template())
    assert set(written) == set(Manifest.model_fields)
    for section, spec in (("data", DataSpec), ("inner", InnerSpec), ("outer", OuterSpec)):
        commented = {"seconds", "dataset", "revision", "subset"}
        assert set(written[section]) == set(spec.model_fields) - commented
        assert all(f"# {key} =" in manifest.template() for key in commented)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"source": "hub"}, 'data needs a dataset with source = "hub"'),
        ({"dataset": "owner/name"}, 'data takes a dataset, its subset and its revision only with source = "hub"'),
        ({"source": "files", "subset": "en"}, "data takes a dataset, its subset and its revision only"),
        ({"source": "web"}, "data.source must be stdlib, files or hub, not 'web'"),
        ({"source": "hub", "dataset": "parquet"}, "data.dataset must be a data set's name on the hub"),
        ({"source": "hub", "dataset": "../private"}, "data.dataset must be"),
        ({"source": "hub", "dataset": "/etc/passwd"}, "data.dataset must be"),
        (
            {"source": "hub", "dataset": "owner/name", "revision": "main"},
            "data.revision must be a commit of the data set",
        ),
        ({"source": "hub", "dataset": "owner/name\n"}, "data.dataset must be"),
        ({"source": "hub", "dataset": "owner/name", "split": "train[:10]"}, "data.split must be the name of a split"),
        ({"tokenizer": "gpt2"}, "data.tokenizer must be bytes, hub:<owner>/<name>@<commit> or sha256:"),
        ({"tokenizer": "hub:owner/name@main"}, "data.tokenizer must be"),
        ({"tokenizer": "sha256:/home/me/tokenizer.json"}, "data.tokenizer must be"),
        ({"field": "a b"}, "data.field must be the name of a field"),
    ],
)
def test_data_is_named_and_never_a_path(tmp_path, given, sentence):
    path = tmp_path / "run.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    path.write_text("\n".join(['name = "tiny"', "[data]", *lines]))
    with pytest.raises(UsageError) as raised:
        manifest.load(path)
    assert sentence in str(raised.value)


def test_a_phase_by_time(run_toml):
    run = manifest.load(run_toml("steps = 50", "seconds = 30"))
    assert (run.inner.steps, run.inner.seconds) == (None, 30.0)
    assert manifest.parse(run.canonical()) == run
    assert b'"seconds":30.0,"steps":null' in run.canonical()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("steps = 50", "steps = 'many'", "inner.steps must be a whole number from 1 to 100000, not 'many'"),
        ("steps = 50", "steps = 0", "inner.steps must be a whole number from 1 to 100000, not 0"),
        ("steps = 50", "steps = true", "inner.steps must be a whole number from 1 to 100000, not true"),
        ("steps = 50", "step = 50", "inner.step is not known, did you mean steps?"),
        ("steps = 50", "steps = 50\nseconds = 30", "inner needs either steps or seconds"),
        ("steps = 50", "seconds = 0", "inner.seconds must be a number from 0.01 to 86400, not 0"),
        ("round = 1", "round = 0", "outer.swaps_per_round must be a whole number from 1 to 16, or auto, not 0"),
        ("round = 1", "round = 'all'", "outer.swaps_per_round must be a whole number from 1 to 16, or auto, not 'all'"),
        ("seed", "sed", "sed is not known, did you mean seed?"),
        ('name = "tiny"', "", "name is missing: it must be 1 to 32 of the characters a-z, 0-9 and -"),
        ('"tiny"', '"Tiny"', "name must be 1 to 32 of the characters a-z, 0-9 and -, not 'Tiny'"),
        ("learning_rate = 0.003", "learning_rate = nan", "inner.learning_rate must be a number above 0 and at most 1"),
        ("[0.9, 0.95]", "[0.9, 1.0]", "inner.betas must be two numbers, each from 0 to below 1, not [0.9, 1.0]"),
        ("[0.9, 0.95]", "[0.9]", "inner.betas must be two numbers, each from 0 to below 1"),
        ("1024", "1000", "inner.batch_tokens must be a multiple of data.sequence_length (128), not 1000"),
        ('preset = "tiny"', 'preset = "huge"', "model.preset must be tiny, 125m, 350m, 1b or 7b, not 'huge'"),
        ('preset = "tiny"', "", "model needs either a preset, an architecture or a task"),
        ('"cosine"', '"linear"', "inner.schedule must be cosine or wsd, not 'linear'"),
        ('"bf16"  ', '"fp16"  ', "inner.precision must be bf16 or fp32, not 'fp16'"),
        ('codec = "lattice:4"', 'codec = "zip"', "outer.codec must be lattice:4, bf16, fp32,"),
        ('"eager"', '"lazy"', "outer.overlap must be eager or blocking, not 'lazy'"),
        ("alpha = 0.1", "alpha = 1.0", "outer.alpha must be a number from 0 to below 1, not 1.0"),
        ("[outer]", "[outer", "is not valid TOML"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(run_toml, old, new, sentence):
    with pytest.raises(UsageError) as raised:
        manifest.load(run_toml(old, new))
    assert str(raised.value).startswith("run.toml")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_who_waits_for_one_partner_waits_for_no_further_one(run_toml):
    path = run_toml("swaps_per_round = 1", "swaps_per_round = 'auto'")
    assert manifest.load(path).outer.swaps_per_round == "auto"
    path.write_text(path.read_text().replace('"eager"', '"blocking"'))
    with pytest.raises(UsageError, match="only with eager overlap"):
        manifest.load(path)


def test_an_unstable_outer_step_is_refused(run_toml):
    path = run_toml("alpha = 0.1", "alpha = 0.9")
    with pytest.raises(UsageError, match="outer is not stable"):
        manifest.load(path)


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
    ],
)
def test_a_config_loads_nothing_and_stays_small(config):
    with pytest.raises(ValueError, match="config"):
        ModelSpec(architecture="LlamaConfig", config=config)


def test_missing_and_oversized_files(tmp_path):
    with pytest.raises(UsageError, match="noloco-node init"):
        manifest.load(tmp_path / "run.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (manifest.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="no manifest"):
        manifest.load(tmp_path / "big.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="UTF-8"):
        manifest.load(tmp_path / "latin.toml")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "_name_or_path": "somewhere/model",
    "hidden_size": 64,
    "model_type": "llama",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.0.0",
}


@pytest.fixture
def with_config(tmp_path):
    """A function that writes a config.json and a run.toml which names it, and loads that."""

    def loaded(config, line='config = "config.json"'):
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "run.toml").write_text(f'name = "a"\n[model]\n{line}\n')
        return manifest.load(tmp_path / "run.toml")

    return loaded


def test_a_config_file_becomes_part_of_the_run(with_config):
    run = with_config(CONFIG)
    values = {"hidden_size": 64, "rms_norm_eps": 1e-06, "rope_scaling": None}
    assert run.model == ModelSpec(architecture="LlamaConfig", config=values)
    assert manifest.parse(run.canonical()) == run
    named = with_config({"hidden_size": 64}, 'architecture = "GPTNeoXConfig"\nconfig = "config.json"')
    assert named.model.architecture == "GPTNeoXConfig"
    assert with_config({"architectures": ["GPT2LMHeadModel"]}).model.architecture == "GPT2Config"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hidden_size": 64}, "config.json does not say it: add one"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not say it"),
        ({**CONFIG, "auto_map": {"AutoModel": "x.Y"}}, "may not hold auto_map"),
        ("[1, 2]", "is not a table in JSON"),
        ("{", "is not a table in JSON"),
        ("[" * 60_000, "is not a table in JSON"),
        (" " * (70 << 10), "larger than"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_one_sentence(with_config, config, sentence):
    with pytest.raises(UsageError, match=sentence) as raised:
        with_config(config)
    assert "\n" not in str(raised.value)


def test_no_file_is_read_for_a_stranger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    document = json.loads(Manifest(name="a", model=ModelSpec(architecture="LlamaConfig")).canonical())
    document["model"]["config"] = "config.json"
    with pytest.raises(Incompatible, match=r"model.config must be a table"):
        manifest.parse(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(UsageError, match="cannot read"):
        (tmp_path / "run.toml").write_text('name = "a"\n[model]\nconfig = "absent.json"\n')
        manifest.load(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"task": "blobs", "preset": "tiny"}, "needs either"),
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
        "import sys, noloco_node.manifest as m; m.Manifest(name='a');"
        "sys.exit(bool({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_manifest_may_name_is_there():
    from noloco_node.core.codec import codec
    from noloco_node.training import data, model

    assert all(codec(name) for name in manifest.CODECS)
    assert set(manifest.PRESETS) <= set(model.PRESETS)
    assert data.load(DataSpec())
