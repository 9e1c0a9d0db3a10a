"""Codes in plain words, in the terminal and on the page alike."""

import re
from pathlib import Path

import noloco_node
from noloco_node.base.reasons import _WORDS, in_words


def test_a_code_is_read_as_words():
    assert in_words("no_peers") == "no peers"
    assert in_words("taken_back") == "taken back"
    assert in_words("backing_off") == "waiting to call again"
    assert in_words("partner_diverged") == "partner says diverged"


def test_the_page_has_the_same_words():
    text = (Path(noloco_node.__file__).parent / "web/page/words.js").read_text()
    (table,) = re.findall(r"REASONS = \{(.+?)\};", text, re.DOTALL)
    assert dict(re.findall(r'(\w+): "([^"]+)"', table)) == _WORDS
