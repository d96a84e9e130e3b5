"""Texts of values in error messages are bounded for values of any size."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moduli._texts import cut, shorten

plain = st.none() | st.booleans() | st.integers(-(2**500), 2**500) | st.floats() | st.text() | st.binary()
hashable = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(plain, max_size=0))
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(plain, min_size=1, max_size=4)
    ),
)


@given(trees, st.integers(0, 60))
def test_a_short_text_is_the_representation_and_a_long_one_its_beginning(value, most):
    whole = repr(value).replace("frozenset()", "set()")
    text = shorten(value, most)
    if len(whole) <= most:
        assert text == whole
    else:
        assert text.endswith("...")
        assert len(text) == most + 3
        if not isinstance(value, str | bytes) and "'" not in whole and '"' not in whole:
            assert whole.startswith(text[:-3])


def double(levels):
    value = ["lol"] * 9
    for _ in range(levels):
        value = [value] * 9
    return value


def test_recursive_and_repeated_containers_have_a_bounded_text():
    for value in (double(60), {"a": double(60)}, (double(60),), OrderedDict(a=double(60))):
        assert len(shorten(value)) == 203
    value = []
    value.append(value)
    assert shorten(value, 5) == "[[[[[..."
    mapping = {}
    mapping["x"] = mapping
    assert shorten(mapping, 8) == "{'x': {'..."
    assert shorten(10**5000) == "an integer of 16610 bits"
    assert shorten([0] * 10**6, 7) == "[0, 0, ..."


def test_only_the_items_in_the_text_are_read():
    class Watched(list):
        def __iter__(self):
            for each in super().__iter__():
                reads.append(each)
                yield each

    reads = []
    shorten(Watched(range(10**5)), 30)
    assert len(reads) < 35


def test_a_repr_that_raises_gives_the_class():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    assert shorten([Odd()]) == "[<Odd object>]"


@pytest.mark.parametrize(("text", "most", "result"), [("", 3, ""), ("abc", 3, "abc"), ("abcd", 3, "abc...")])
def test_cut_shortens_long_texts(text, most, result):
    assert cut(text, most) == result
