"""`FrozenDict` compared with dict."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli.labels import Space, Tensor
from moduli.nn import FrozenDict

items = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=2) | st.tuples(st.integers()))


@given(items)
def test_reading_a_frozen_dict_equals_reading_a_dict(d):
    frozen = FrozenDict(d)
    assert list(frozen.items()) == list(d.items())
    assert len(frozen) == len(d)
    assert list(reversed(frozen)) == list(reversed(d))
    assert frozen == d
    assert d == frozen
    assert all(frozen[key] == frozen.get(key) == value and key in frozen for key, value in d.items())


@given(items, items)
def test_equality_and_hash_agree_and_ignore_order(a, b):
    fa, fb = FrozenDict(a), FrozenDict(b)
    assert (fa == fb) == (a == b)
    turned = FrozenDict(dict(reversed(a.items())))
    assert fa == turned
    assert hash(fa) == hash(turned)


@given(items, items)
def test_union_is_dict_union(a, b):
    assert FrozenDict(a) | b == a | b
    assert list(FrozenDict(a) | b) == list(a | b)
    assert b | FrozenDict(a) == b | a
    assert isinstance(FrozenDict(a) | b, FrozenDict)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
@given(d=items)
def test_copies_and_pickles_are_equal(copier, d):
    twin = copier(FrozenDict(d))
    assert twin == d
    assert list(twin) == list(d)
    assert hash(twin) == hash(FrozenDict(d))


def test_a_frozen_dict_is_immutable():
    frozen = FrozenDict(a=1)
    with pytest.raises(TypeError):
        frozen["b"] = 2
    with pytest.raises(AttributeError):
        frozen.x = 1
    assert frozen == {"a": 1}


def test_the_source_dict_is_copied():
    d = {"a": 1}
    frozen = FrozenDict(d)
    d["b"] = 2
    assert "b" not in frozen


def test_unhashable_values_raise_only_when_hashed():
    frozen = FrozenDict(a=[1])
    assert frozen["a"] == [1]
    with pytest.raises(TypeError, match="unhashable"):
        hash(frozen)
    with pytest.raises(TypeError, match="unhashable"):
        frozen[[1]]
    with pytest.raises(KeyError):
        frozen["z"]


def tensor(values, labels):
    return Tensor(torch.tensor(values), (Space(labels),))


def test_tensors_compare_by_value_dtype_and_labels():
    a = FrozenDict(w=tensor([1.0, 2.0], ["x", "y"]), p=torch.ones(2))
    b = FrozenDict(w=tensor([1.0, 2.0], ["x", "y"]), p=torch.ones(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != FrozenDict(w=tensor([1.0, 3.0], ["x", "y"]), p=torch.ones(2))
    assert a != FrozenDict(w=tensor([1.0, 2.0], ["x", "z"]), p=torch.ones(2))
    assert a != FrozenDict(w=tensor([1.0, 2.0], ["x", "y"]), p=torch.ones(2, dtype=torch.float64))
    assert a != FrozenDict(w=tensor([1.0, 2.0], ["x", "y"]), p=1)
    assert a != FrozenDict(w=tensor([1.0, 2.0], ["x", "y"]))
    assert a != 3


def test_repr_can_be_read_back():
    assert eval(repr(FrozenDict({"a": 1, "b": (2,)}))) == {"a": 1, "b": (2,)}
