from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.core import fragments


@given(st.integers(0, 10_000), st.integers(1, 3_000))
def test_the_cuts_cover_every_element_once(elements: int, per_fragment: int) -> None:
    cut = fragments.Cut(elements, per_fragment)
    cuts = [cut.bounds(k) for k in range(cut.count)]
    assert [i for start, end in cuts for i in range(start, end)] == list(range(elements))
    assert all(end - start <= per_fragment for start, end in cuts)
    assert cut.sizes() == [end - start for start, end in cuts]


@pytest.mark.parametrize(
    ("parameters", "elements"),
    [(0, 20), (10**8, 20), (2**28 - 1, 20), (2**28, 21), (2**29 - 1, 21), (2**29, 22), (10**12, 22)],
)
def test_a_large_vector_has_larger_fragments(parameters: int, elements: int) -> None:
    assert fragments.Cut.of(parameters, 1 << 20).each == 1 << elements


@given(st.integers(1, 500), st.binary(min_size=16, max_size=16))
def test_an_order_is_every_fragment_once_and_both_sides_agree(count: int, exchange_id: bytes) -> None:
    order = fragments.order(count, exchange_id)
    assert sorted(order) == list(range(count))
    assert order == fragments.order(count, exchange_id)


def test_the_beginning_is_drawn_evenly() -> None:
    import random

    rng = random.Random(0)
    firsts = [fragments.order(8, rng.randbytes(16))[0] for _ in range(8000)]
    assert all(900 < firsts.count(k) < 1100 for k in range(8))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(0, 40), st.integers(1, 20))
def test_the_places_touched_are_those_with_an_element_in_common(sizes: list[int], start: int, size: int) -> None:
    places = list(pairwise(accumulate(sizes, initial=0)))
    end = min(start + size, places[-1][1])
    expected = [at for at, (first, last) in enumerate(places) if {*range(first, last)} & {*range(start, end)}]
    assert list(fragments.touched(places, start, end)) == expected
