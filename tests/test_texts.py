"""Texts for errors have an end, whatever they tell about."""

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


def test_what_refers_to_itself_or_to_others_many_times_ends():
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


def test_only_what_is_shown_is_looked_at():
    class Watched(list):
        def __iter__(self):
            for each in super().__iter__():
                looked.append(each)
                yield each

    looked = []
    shorten(Watched(range(10**5)), 30)
    assert len(looked) < 35


def test_a_representation_that_fails_does_not_hide_the_error():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    assert shorten([Odd()]) == "[<Odd object>]"


@pytest.mark.parametrize(("text", "most", "result"), [("", 3, ""), ("abc", 3, "abc"), ("abcd", 3, "abc...")])
def test_cut(text, most, result):
    assert cut(text, most) == result
