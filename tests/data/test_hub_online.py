"""The whole way of a run with data and tokenizer of a hub: the real libraries, against a hub on loopback."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pretend_hub import COMMIT, DATASET, TOKENIZER, serving
from texts import parquet, texts, tokenizer_json

from noloco_node.base.identity import Identity
from noloco_node.data import sources, tokens
from noloco_node.data.pin_commit import pinned
from noloco_node.data.tokens import FileTokenizer
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host.home import Home
from noloco_node.run import manifest, signed_file
from noloco_node.run.schema import DataSpec, Manifest

READ = f"""
import json, logging
from noloco_node.run.schema import DataSpec
from noloco_node.data import corpus, hub

logging.basicConfig(format="%(message)s")
hub.FIRST_WAIT_S, hub.BLOCK_RECORDS = 0.05, 16
tokenizer = "hub:{TOKENIZER}@{COMMIT}"
text = corpus.load(DataSpec(source="hub", dataset="{DATASET}", revision="{COMMIT}", tokenizer=tokenizer))

def read(position, batches):
    stream = text.stream(16, 1, "a")
    if position:
        stream.seek(position)
    rows = [row for _ in range(batches) for row in stream.next(8)[0].tolist()]
    stream.close()
    vocabulary = text.tokenizer.vocabulary
    print(json.dumps({{"rows": rows, "position": stream.position, "vocabulary": vocabulary}}), flush=True)

read(None, 20)
read(json.loads(input()), 120)
"""


def test_records_arrive_through_failures_and_a_resume(tmp_path: Path) -> None:
    content = [texts(120, seed=shard) for shard in range(3)]
    paths = [parquet(tmp_path / f"train-{i}.parquet", part) for i, part in enumerate(content)]
    paths.append(parquet(tmp_path / "validation-0.parquet", texts(50, seed=9)))
    files = {path.name: path.read_bytes() for path in paths}
    files["tokenizer.json"] = tokenizer_json()
    tokenizer = FileTokenizer(files["tokenizer.json"])
    with serving(files) as hub:
        environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        with (tmp_path / "log").open("w+") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", READ],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            with child:
                assert child.stdin and child.stdout
                first = json.loads(child.stdout.readline() or "null")
                hub.fails = [403, 0, 404]  # a link that ran out, a connection that broke, a file gone for a moment
                said, _ = child.communicate(json.dumps(first and first["position"]), timeout=110)
            assert child.returncode == 0, (tmp_path / "log").read_text()
        assert not hub.fails
    second = json.loads(said)
    assert (tmp_path / "log").read_text().count("waiting for the data set owner/texts (") >= 2
    assert first["vocabulary"] == tokenizer.vocabulary
    rows = first["rows"] + second["rows"]
    assert all(one[-1] == other[0] for one, other in pairwise(rows))
    tokens = [rows[0][0], *(token for row in rows for token in row[1:])]
    documents = [tokenizer.decode(part) for part in split(tokens, tokenizer.end)[:-1]]
    assert len(documents) > 360 and set(documents) == {text for part in content for text in part}
    assert len(set(documents[:360])) == 360, "an epoch, each once"


READ_BY_EIGHT = f"""
import json
from noloco_node.run.schema import DataSpec
from noloco_node.data import corpus, hub

hub.BLOCK_RECORDS = 100
text = corpus.load(DataSpec(source="hub", dataset="{DATASET}", revision="{COMMIT}"))
assert text.tokenizer.vocabulary == 256
for peer in range(8):
    stream = text.stream(16, 1, f"peer {{peer}}")
    row, read = [], []
    while len(read) < 500:
        row += stream.next(64)[0][:, 1:].flatten().tolist()
        read = bytes(row).decode().split(chr(0))[1:-1]
    stream.close()
    print(json.dumps(read[:500]))
"""


@pytest.mark.parametrize(("row_group", "least"), [(100, 2300), (4000, 1900)])
def test_eight_replicas_of_a_set_of_unknown_size_read_as_much_of_it_as_chance_allows(
    row_group: int, least: int, tmp_path: Path
) -> None:
    """4000 records in one Parquet file, without a word of how many; each replica reads 500. Replicas that do not know
    of each other read at best 4000 (1 - (7/8)^8) = 2626 distinct ones, in the mean over their names: with row groups of
    100 that is 2620 with a standard deviation of 140, with a single one 2520 and 340."""
    records = [f"record {i}" for i in range(4000)]
    table = pyarrow.table({"text": records})
    pyarrow.parquet.write_table(table, tmp_path / "train-0.parquet", row_group_size=row_group)
    pyarrow.parquet.write_table(table.slice(0, 9), tmp_path / "validation-0.parquet")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with serving(files) as hub:
        environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        run = [sys.executable, "-c", READ_BY_EIGHT]
        said = subprocess.run(run, env=environ, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    read = [json.loads(line) for line in said.stdout.splitlines()]
    assert [len(set(each)) for each in read] == [500] * 8, "none twice in an epoch"
    distinct = {record for each in read for record in each}
    assert distinct <= set(records) and len(distinct) > least


def test_a_run_is_pinned_to_a_commit_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, hf_api

    home, run = Home(tmp_path).create(), Manifest(name="a", data=DataSpec(source="hub", dataset=DATASET))
    with serving({}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hf_api.constants, "ENDPOINT", hub.url)
        made = pinned(run, home)
        assert made.data.revision == COMMIT and made.run_id != run.run_id
        asked = len(hub.asked)
        assert manifest.parse(made.canonical()) == made
        assert pinned(made, home) == made and pinned(Manifest(name="b"), home).data.revision is None
        assert len(hub.asked) == asked, "who names a commit asks nobody"
        signed_file.keep(home.run(made.run_id), manifest.sign(made, Identity.load_or_create(home.identity)))
    assert pinned(run, home) == made, "a restart is the same run, without the network"
    with pytest.raises(NolocoError, match=r"commit of the data set owner/texts: .* write its commit into run.toml"):
        pinned(run.model_copy(update={"rounds": 7}), home)


def test_a_tokenizer_that_is_refused_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    name, cache = f"hub:{TOKENIZER}@{COMMIT}", tmp_path / "hf"
    monkeypatch.setattr(sources, "MAX_TOKENIZER_BYTES", len(tokenizer_json()))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with serving({"tokenizer.json": tokenizer_json() + b" "}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        with pytest.raises(
            UsageError, match=r"the tokenizer of owner/words is larger than .*: that is no tokenizer\.json"
        ):
            tokens.load(name, None)
        assert len([path for path in hub.asked if "/resolve/" in path]) == 1, "only its size"
        hub.files["tokenizer.json"] = b"{}"
        with pytest.raises(UsageError, match=r"is not a tokenizer\.json"):
            tokens.load(name, None)
        assert not [path for path in cache.rglob("*") if path.is_symlink() or path.name == "1"], "its ETag is 1"
        hub.files["tokenizer.json"] = tokenizer_json()
        assert tokens.load(name, None).vocabulary == 300
        asked = len(hub.asked)
        assert tokens.load(name, None).vocabulary == 300 and len(hub.asked) == asked, "what is kept needs no network"
        (damaged,) = cache.rglob("blobs/1")
        damaged.write_bytes(tokenizer_json()[:100])
        with pytest.raises(UsageError, match=re.escape(f"If {damaged} is damaged, delete it")):
            tokens.load(name, None)
        damaged.unlink()
        assert tokens.load(name, None).vocabulary == 300


def split(tokens: list[int], end: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
