"""run.toml: the template, what an author may write, and the sentence that each mistake is answered with."""

import json
import tomllib

import pytest

from noloco_node.errors import Incompatible, UsageError
from noloco_node.run import manifest, toml
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec, OuterSpec, SampleSpec


@pytest.fixture
def run_toml(tmp_path):
    """A function that replaces one piece of the template and gives the path."""

    def written(old: str = "", new: str = ""):
        text = toml.template()
        assert old in text
        path = tmp_path / "run.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    return written


def test_the_template_holds_every_default(run_toml):
    assert toml.load(run_toml()) == Manifest(name="tiny")
    written = tomllib.loads(toml.template())
    assert set(written) == set(Manifest.model_fields) - {"sample", "stages"}
    for section, spec in (("data", DataSpec), ("inner", InnerSpec), ("outer", OuterSpec)):
        commented = {"seconds", "dataset", "revision", "subset", "where"}
        assert set(written[section]) == set(spec.model_fields) - commented
        assert all(f"# {key} =" in toml.template() for key in commented)


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
        ({"where": "a\x1b[31m"}, "data.where must be up to 200 plain characters"),
    ],
)
def test_data_is_named_and_never_a_path(tmp_path, given, sentence):
    path = tmp_path / "run.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    path.write_text("\n".join(['name = "tiny"', "[data]", *lines]))
    with pytest.raises(UsageError) as raised:
        toml.load(path)
    assert sentence in str(raised.value)


SAMPLE = '\n[sample]\nprompt = "Once"'


def test_a_sample_text_is_asked_for(run_toml):
    path = run_toml()
    without = toml.load(path)
    uncommented = path.read_text().replace("# [sample]", "[sample]").replace("# prompt =", "prompt =")
    path.write_text(uncommented)
    run = toml.load(path)
    assert run.sample == SampleSpec(prompt="def main(", every=10, tokens=64)
    assert manifest.parse(run.canonical()) == run
    assert b"sample" not in without.canonical(), "a run without it is the run that it was"
    assert run.run_id != without.run_id


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("every = 0", "sample.every must be a whole number from 1 to 1000000, not 0"),
        ("evry = 3", "sample.evry is not known, did you mean every?"),
        ('tokens = "all"', "sample.tokens must be a whole number from 1 to 512, not 'all'"),
    ],
)
def test_a_wrong_sample_is_named(run_toml, lines, sentence):
    path = run_toml()
    path.write_text(f"{path.read_text()}{SAMPLE}\n{lines}")
    with pytest.raises(UsageError) as raised:
        toml.load(path)
    assert str(raised.value) == f"run.toml: {sentence}"
    path.write_text(f"{toml.template()}\n[sample]\nevery = 3")
    with pytest.raises(UsageError, match=r"sample\.prompt is missing: it must be a text of 1 to 500 characters"):
        toml.load(path)


def test_a_task_without_text_has_no_sample(run_toml):
    path = run_toml('preset = "tiny"', 'task = "blobs"')
    path.write_text(path.read_text() + SAMPLE)
    with pytest.raises(UsageError, match=r"run.toml: sample: only a language model continues a text; leave"):
        toml.load(path)


def test_a_phase_by_time(run_toml):
    run = toml.load(run_toml("steps = 25", "seconds = 30"))
    assert (run.inner.steps, run.inner.seconds) == (None, 30.0)
    assert manifest.parse(run.canonical()) == run
    assert b'"seconds":30.0,"steps":null' in run.canonical()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("steps = 25", "steps = 'many'", "inner.steps must be a whole number from 1 to 100000, not 'many'"),
        ("steps = 25", "steps = 0", "inner.steps must be a whole number from 1 to 100000, not 0"),
        ("steps = 25", "steps = true", "inner.steps must be a whole number from 1 to 100000, not true"),
        ("steps = 25", "step = 24", "inner.step is not known, did you mean steps?"),
        ("steps = 25", "steps = 25\nseconds = 30", "inner needs one of steps and seconds, and not both"),
        ("steps = 25", "seconds = 0", "inner.seconds must be a number from 0.01 to 86400, not 0"),
        ("round = 1", "round = 0", "outer.swaps_per_round must be a whole number from 1 to 16, or auto, not 0"),
        ("round = 1", "round = 'all'", "outer.swaps_per_round must be a whole number from 1 to 16, or auto, not 'all'"),
        ("seed", "sed", "sed is not known, did you mean seed?"),
        ('name = "tiny"', "", "name is missing: it must be 1 to 32 of the characters a-z, 0-9 and -"),
        ('"tiny"', '"Tiny"', "name must be 1 to 32 of the characters a-z, 0-9 and -, not 'Tiny'"),
        ("learning_rate = 0.003", "learning_rate = nan", "inner.learning_rate must be a number above 0 and at most 1"),
        ("[0.9, 0.95]", "[0.9, 1.0]", "inner.betas must be two numbers, each from 0 to below 1, not [0.9, 1.0]"),
        ("[0.9, 0.95]", "[0.9]", "inner.betas must be two numbers, each from 0 to below 1, not [0.9]"),
        ("[outer]", "[stages]\ncont = 2\n[outer]", "stages.cont is not known, did you mean count?"),
        ("[outer]", "[stages]\ncount = 3\ncut = [1]\n[outer]", "stages needs 2 layer numbers that grow as cut"),
        ("1024", "1000", "inner.batch_tokens must be a multiple of data.sequence_length (128), not 1000"),
        ('preset = "tiny"', 'preset = "huge"', "model.preset must be tiny, 125m, 350m, 1b or 7b, not 'huge'"),
        ('preset = "tiny"', "", "model needs one of preset, architecture, weights and task"),
        ('"cosine"', '"linear"', "inner.schedule must be cosine or wsd, not 'linear'"),
        ('"bf16"  ', '"fp16"  ', "inner.precision must be bf16 or fp32, not 'fp16'"),
        ('codec = "lattice:3"', 'codec = "zip"', "outer.codec must be lattice:3, bf16, fp32,"),
        ('"eager"', '"lazy"', "outer.overlap must be eager or blocking, not 'lazy'"),
        ("alpha = 0.3", "alpha = 1.0", "outer.alpha must be a number from 0 to below 1, not 1.0"),
        ("[outer]", "[outer", "is not valid TOML"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(run_toml, old, new, sentence):
    with pytest.raises(UsageError) as raised:
        toml.load(run_toml(old, new))
    assert str(raised.value).startswith("run.toml")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_of_an_editor_that_marks_its_encoding(run_toml):
    plain = toml.load(path := run_toml())
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert toml.load(path) == plain


def test_who_waits_for_one_partner_waits_for_no_further_one(run_toml):
    path = run_toml("swaps_per_round = 1", "swaps_per_round = 'auto'")
    assert toml.load(path).outer.swaps_per_round == "auto"
    path.write_text(path.read_text().replace('"eager"', '"blocking"'))
    with pytest.raises(UsageError, match="only with eager overlap"):
        toml.load(path)


def test_an_unstable_outer_step_is_refused(run_toml):
    path = run_toml("alpha = 0.3", "alpha = 0.9")
    with pytest.raises(UsageError, match="outer is not stable"):
        toml.load(path)


def test_missing_and_oversized_files(tmp_path):
    with pytest.raises(UsageError, match=f"`noloco-node init '{tmp_path}/my run.toml'`"):
        toml.load(tmp_path / "my run.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (manifest.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="a manifest could not hold it"):
        toml.load(tmp_path / "big.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="UTF-8"):
        toml.load(tmp_path / "latin.toml")


def test_a_run_that_nobody_could_read_is_refused(tmp_path):
    """`start` would end with the advice to update."""
    text = 'name = "a"\n[model]\ntask = "mine"\noptions.words = {}\n'
    path = tmp_path / "run.toml"
    path.write_text(text.format(["é" * 100] * 100), encoding="utf-8")
    assert len(toml.load(path).canonical()) > 6 * 10_000
    path.write_text(text.format(["é" * 100] * 110), encoding="utf-8")
    with pytest.raises(UsageError, match=r"run.toml makes a manifest of 6\d{4} bytes, and 65536 are possible: shorten"):
        toml.load(path)


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
        return toml.load(tmp_path / "run.toml")

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
        toml.load(tmp_path / "run.toml")
