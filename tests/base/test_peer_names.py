"""Names for people: the same everywhere, and which peer is meant by one."""

import pytest

from noloco_node.base.peer_names import find, name_of, short_id
from noloco_node.errors import NotReached, UsageError

A = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
B = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"


@pytest.mark.parametrize("word", [A, name_of(A), name_of(A).upper(), name_of(A)[:3], A[:14], A[-4:], short_id(A)])
def test_a_peer_is_found_by_its_name_its_id_and_parts_of_that(word):
    assert find(word, [A, B, A]) == A


def test_what_fits_several_names_them():
    with pytest.raises(UsageError, match="may be any of 2 peers") as raised:
        find("12D3KooW", [A, B])
    assert A in str(raised.value)
    assert name_of(B) in str(raised.value)


def test_the_beginning_of_two_names_names_both():
    first = {name_of(str(number))[:1]: str(number) for number in range(100)}
    one = next(str(n) for n in range(100) if first[name_of(str(n))[:1]] != str(n))
    other = first[name_of(one)[:1]]
    with pytest.raises(UsageError, match=f"may be any of 2 peers.*{name_of(other)}"):
        find(name_of(one)[:1], [one, other])


def test_two_peers_of_one_name_are_told_apart_by_their_ids():
    names: dict[str, str] = {}
    number = 0
    while (name := name_of(str(number))) not in names:
        names[name] = str(number)
        number += 1
    with pytest.raises(UsageError, match="may be any of 2 peers"):
        find(name, [names[name], str(number)])
    assert find(str(number), [names[name], str(number)]) == str(number)


def test_a_mistyped_name_is_corrected():
    with pytest.raises(NotReached, match=f"did you mean {name_of(A)}"):
        find(name_of(A)[1:], [A, B])
    with pytest.raises(NotReached, match="`noloco-node peers`"):
        find("x" * 20, [A, B])
    with pytest.raises(NotReached, match="no other peer is known"):
        find("x", [])
    with pytest.raises(NotReached, match="no peer is called ''"):
        find("", [A])


def test_three_letters_are_no_id():
    with pytest.raises(NotReached):
        find(A[:3], [A])
