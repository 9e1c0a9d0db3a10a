"""The settings that deploy/ and docker/ write: a node knows each of them and takes its value."""

import re
from pathlib import Path

import pytest

from noloco_node.host.config import resolve
from noloco_node.run import toml

ROOT = Path(__file__).parents[1]
PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
WRITTEN = re.compile(r"""(NOLOCO_[A-Z_]+)(?:=|: )"?([^\s"'`,\]]*)""")
NO_SETTINGS = {"NOLOCO_HOME", "NOLOCO_IMAGE"}


def settings():
    for folder in ("deploy", "docker"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "wheels" not in path.parts:
                for name, value in WRITTEN.findall(path.read_text()):
                    if name not in NO_SETTINGS:
                        yield str(path.relative_to(ROOT)), name, re.sub(r"12D3KooW(\.\.\.|…)", PEER, value)


SETTINGS = sorted(set(settings()))


@pytest.mark.parametrize(("where", "name", "value"), SETTINGS)
def test_a_setting_is_known_and_takes_its_value(where, name, value):
    found = resolve({}, {"HOME": "/h", name: value}, {})
    assert hasattr(found, name.removeprefix("NOLOCO_").lower()) or (name == "NOLOCO_INVITATION" and found.bootstrap)


@pytest.mark.parametrize("path", [*ROOT.glob("d*/**/run.toml"), *ROOT.glob("docker/*.toml")], ids=str)
def test_a_run_is_valid(path):
    run = toml.load(path)
    assert (run.stages.count if run.stages else 1) == (2 if path.name == "stages.toml" else 1)


def test_all_kinds_of_files_are_read():
    assert {Path(where).suffix for where, *_ in SETTINGS} >= {".env", ".yaml", ".yml", ".service", ".md"}
