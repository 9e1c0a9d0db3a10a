"""The files and pictures that a README names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "noloco_node/", "noloco_node/*/", "proto/", "docker/", "deploy/")
READMES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}README.md")]
FILE = re.compile(r"(?<![\w/.-])[\w.-]+/[\w./-]+\.(?:py|js|md|proto|sh|yml|yaml)\b")
ELSEWHERE = {"base/bootstrap.yaml"}
"""In deploy/kubernetes, which its paragraph is about."""


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_readme_names_exists(readme: Path) -> None:
    text = readme.read_text()
    named = set(FILE.findall(text)) - ELSEWHERE
    places = (ROOT, ROOT / "noloco_node", readme.parent)
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert not [link for link in links if not (readme.parent / link).exists()]
