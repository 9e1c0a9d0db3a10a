"""Where a text is cut, and which part is held out, follows from the text alone."""

from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.data.parts import HELD_OUT, LINE, PART_BYTES, is_held_out, lines_of, parts

WORDS = np.array([f"{n}ä" for n in range(1000)])


def cut(text: str) -> list[str]:
    return list(parts(lines_of(StringIO(text, newline="\n"))))


def prose(lines: int, seed: int = 0, longest: int = 15) -> str:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, longest, lines).cumsum()
    words = rng.choice(WORDS, ends[-1])  # at once, which takes a tenth of the time
    return "".join(" ".join(line) + "\n" for line in np.split(words, ends[:-1]))


@given(st.text(alphabet=st.sampled_from("ab\n\r\u2028é"), max_size=3 * LINE))
def test_the_parts_put_together_are_the_text(text: str) -> None:
    assert "".join(cut(text)) == text and all(cut(text))


PROSE = prose(400)


@given(st.text(max_size=300), st.integers(0, len(PROSE) // 2))
def test_what_stands_before_a_text_changes_its_first_two_parts_at_most(before: str, start: int) -> None:
    found = cut(PROSE[start:])
    assert cut(before + "\n" + PROSE[start:])[-len(found) + 2 :] == found[2:]


@pytest.mark.parametrize("longest", [3, 15, 300])
def test_parts_have_the_same_size_whatever_the_lines(longest: int) -> None:
    text = prose(300_000 // longest, longest=longest)
    found = [len(part.encode()) for part in cut(text)]
    assert 0.8 * PART_BYTES < np.mean(found) < 1.25 * PART_BYTES and max(found) < 20 * PART_BYTES


def test_a_text_without_lines_and_one_of_the_same_lines_are_cut_too() -> None:
    assert [len(part) for part in cut("x" * (3 * LINE + 1))] == [LINE, LINE, LINE, 1]
    assert max(map(len, cut("a line of text\n" * 20_000))) < 33 * PART_BYTES


def test_one_part_in_16_is_held_out() -> None:
    found = [is_held_out(part.encode()) for part in cut(prose(50_000))]
    assert len(found) > 800 and 0.75 < sum(found) / len(found) * HELD_OUT < 1.25
