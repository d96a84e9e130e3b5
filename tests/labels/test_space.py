"""`Space`: its set algebra compared with lists, equality, copies, and constant cost for ranges."""

import copy
import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import POOLS, spaces
from moduli import BROADCAST, Space

labels = st.lists(st.sampled_from([label for pool in POOLS for label in pool if label is not None]), unique=True)
names = st.sampled_from([None, "x", "channel"])
kinds = ("positional", "labelled", "broadcast")


@given(chosen=labels, name=names)
def test_a_space_is_an_ordered_set(chosen, name):
    space = Space(chosen, name)
    assert len(space) == space.size == len(chosen)
    assert list(space) == list(space.labels) == chosen
    assert space.name == name
    assert space.labelled
    assert not space.positional
    assert not space.broadcast
    for at, label in enumerate(chosen):
        assert space.index(label) == at
        assert space[at] == space[at - len(chosen)] == label
        assert label in space
    assert "absent" not in space
    assert [] not in space


@given(a=labels, b=labels)
def test_set_operations_equal_those_of_lists(a, b):
    x, y = Space(a, "x"), Space(b)
    assert x | y == Space([*a, *(label for label in b if label not in a)], "x")
    assert x & y == Space([label for label in a if label in b], "x")
    assert x - y == Space([label for label in a if label not in b], "x")
    assert y | x == Space([*b, *(label for label in a if label not in b)], "x")
    assert x | x == x & x == x
    assert len(x - x) == 0


@given(m=st.integers(0, 5), n=st.integers(0, 5))
def test_algebra_of_positional_spaces(m, n):
    assert Space(m) | Space(n) == Space(max(m, n))
    assert Space(m) & Space(n) == Space(min(m, n))
    assert list(Space(m) - Space(n)) == list(range(n, m))


@given(chosen=labels, data=st.data())
def test_selection_equals_that_of_lists(chosen, data):
    space = Space(chosen, "x")
    edges = st.one_of(st.none(), st.integers(-7, 7))
    cut = slice(data.draw(edges), data.draw(edges), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    assert space[cut] == Space(chosen[cut], "x")
    assert Space(len(chosen), "x")[cut] == Space(len(chosen[cut]), "x")
    some = data.draw(st.permutations(range(len(chosen))))[: data.draw(st.integers(0, len(chosen)))]
    assert (
        space[some] == space[tuple(some)] == space[np.array(some, dtype=int)] == Space([chosen[i] for i in some], "x")
    )


@given(a=spaces("x", kinds=kinds), b=spaces("x", kinds=kinds), c=spaces(kinds=kinds))
def test_equality_and_hash(a, b, c):
    for one in (a, b, c):
        for other in (a, b, c):
            same = (
                one.name == other.name
                and list(one) == list(other)
                and (one.positional, one.broadcast) == (other.positional, other.broadcast)
            )
            assert (one == other) is same
            assert (one != other) is not same
            if same:
                assert hash(one) == hash(other)
    assert a != "x"
    assert a != list(a)


@given(space=spaces("x", kinds=kinds), bare=spaces(kinds=kinds))
def test_copies_are_equal(space, bare):
    for one in (space, bare):
        assert copy.copy(one) is copy.deepcopy(one) is one
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(one, protocol))
            assert again == one
            assert hash(again) == hash(one)
            assert list(again) == list(one)
        assert eval(repr(one), {"Space": Space, "BROADCAST": BROADCAST}) == one
    assert pickle.loads(pickle.dumps(BROADCAST)) is BROADCAST


def test_the_same_integers_in_any_form_are_one_space():
    forms = [range(3), [0, 1, 2], (0, 1, 2), np.arange(3), torch.arange(3), iter([0, 1, 2]), {0: "a", 1: "b", 2: "c"}]
    assert len({Space(form) for form in forms}) == 1
    assert Space(range(0, 5, 2)) == Space([0, 2, 4]) == Space(range(0, 6, 2))
    assert Space(range(2, -1, -1)) == Space([2, 1, 0])
    assert Space(range(4, 4)) == Space([]) != Space(0)
    assert all(type(label) is int for label in Space(np.array([3, 1])))
    assert all(type(label) is str for label in Space(np.array(["a", "b"])))
    assert Space(Space([1, 2], "x")) == Space([1, 2], "x")
    assert Space(Space([1, 2], "x"), "y") == Space([1, 2], "y")
    assert Space(np.int64(3)) == Space(torch.tensor(3)) == Space(3)


@pytest.mark.parametrize("chosen", [range(3), [0, 1, 2, 5]], ids=["range", "tuple"])
def test_labels_are_found_by_equality(chosen):
    space = Space(chosen)
    for one in (1, 1.0, True, Fraction(1), np.int64(1), np.float64(1.0), 1 + 0j):
        assert one in space
        assert space.index(one) == 1
    for other in (1.5, "1", None, float("nan"), float("inf"), Fraction(1, 2), 1j, (1,), -1, torch.zeros(2)):
        assert other not in space


def test_large_ranges_are_not_expanded():
    space = Space(10**12, "x")  # a loop over its labels would not end
    sub = space[5:-5:3]
    assert len(space) == 10**12
    assert space[-1] == 10**12 - 1
    assert len(sub) == (10**12 - 10 + 2) // 3
    assert 10**11 in space
    assert -1 not in space
    assert "a" not in space
    assert space.index(7) == 7
    assert hash(space) == hash(Space(10**12, "x"))
    assert space == Space(10**12, "x") != Space(10**12 + 1, "x")
    ranged = Space(range(10**12))
    assert ranged[10:20] == Space(range(10, 20))
    assert 0.5 not in ranged
    assert 10**12 not in ranged
    assert repr(ranged)
    assert sys.getsizeof(space.labels) < 100


def test_a_space_is_immutable():
    chosen = ["a", "b"]
    space = Space(chosen, "x")
    chosen.append("c")
    assert list(space) == ["a", "b"]
    for attribute in ("name", "labels", "_labels", "size", "new"):
        with pytest.raises(AttributeError):
            setattr(space, attribute, 1)
    with pytest.raises(AttributeError):
        del space.labels
    with pytest.raises(TypeError):
        space.labels[0] = "z"


def test_rename_and_map():
    space = Space(["a", "b"], "x")
    assert space.rename("x") is space
    assert space.rename("y") == Space(["a", "b"], "y")
    assert space.rename(None) == Space(["a", "b"])
    assert space.map(str.upper) == Space(["A", "B"], "x")
    assert Space(3).map(lambda i: i * i) == Space([0, 1, 4])
    assert BROADCAST.rename("x").rename(None) is BROADCAST
    with pytest.raises(ValueError, match="more than once"):
        space.map(lambda label: 0)
    with pytest.raises(ValueError, match="BROADCAST"):
        BROADCAST.map(str)


def test_broadcast_is_the_only_one_of_its_kind():
    assert BROADCAST != Space(1) != Space([0])
    assert len(BROADCAST) == 1
    assert BROADCAST.broadcast
    assert not BROADCAST.positional
    assert not BROADCAST.labelled
    assert BROADCAST[:] is BROADCAST[[0]] is BROADCAST
    assert BROADCAST[:0] == Space(0)
    for combine in (lambda: BROADCAST | Space(2), lambda: Space(2) & BROADCAST, lambda: BROADCAST - BROADCAST):
        with pytest.raises(ValueError, match="BROADCAST"):
            combine()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Space(["a", "b", "a"]), ValueError, "'a' occurs more than once"),
        (lambda: Space([1, True]), ValueError, "more than once"),
        (lambda: Space(["a", ["b"]]), TypeError, r"hashable"),
        (lambda: Space([float("nan")]), ValueError, "not equal to itself"),
        (lambda: Space("abc"), TypeError, r"Space\(list\('abc'\)\)"),
        (lambda: Space(b"abc"), TypeError, "not from b'abc'"),
        (lambda: Space(True), TypeError, "not from True"),
        (lambda: Space(None), TypeError, "NoneType"),
        (lambda: Space(2.0), TypeError, "float"),
        (lambda: Space({"a", "b"}), TypeError, "a set has no order"),
        (lambda: Space(-1), ValueError, "negative"),
        (lambda: Space(3, ""), ValueError, "can't name an axis"),
        (lambda: Space(3, "a b"), ValueError, "can't name an axis"),
        (lambda: Space(3, "a,b"), ValueError, "can't name an axis"),
        (lambda: Space(3, 7), TypeError, "string, not 7"),
        (lambda: Space(3).rename("a b"), ValueError, "can't name an axis"),
        (lambda: Space(["a"], "x").index("z"), KeyError, "has no label 'z'; its labels are"),
        (lambda: Space(["a"], "x").index("z"), IndexError, "no label 'z'"),
        (lambda: Space(["a"], "x").index([1]), ValueError, "no label"),
        (lambda: Space(["a"], "x")[1], IndexError, "position 1 is out of range"),
        (lambda: Space(["a"], "x")["a"], TypeError, "space.index"),
        (lambda: Space(["a", "b"])[[0, 0]], ValueError, "more than once"),
        (lambda: Space(2, "x") | Space(2, "y"), ValueError, "names differ"),
        (lambda: Space(2) | [1], TypeError, "unsupported operand"),
    ],
)
def test_invalid_spaces_and_operations_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_unknown_label_errors_are_key_index_and_value_errors():
    assert issubclass(mo.UnknownLabelError, (KeyError, IndexError, ValueError))
    try:
        Space(["a"]).index("b")
    except KeyError as error:
        text = str(error)
    assert text.startswith("Space(['a']) has no label 'b'")


@given(
    st.lists(st.integers(-50, 50) | st.text(max_size=2), unique=True),
    st.lists(st.integers(-50, 50) | st.text(max_size=2)),
)
def test_locate_finds_many_labels_like_index_finds_one(labels, wanted):
    space = Space(labels)
    expected = [labels.index(label) if label in labels else -1 for label in wanted]
    assert space.locate(wanted).tolist() == expected
    assert Space(space.rename("x")).locate(wanted).tolist() == expected


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_has_labels_of_ignores_the_order(left, right):
    assert Space(left).has_labels_of(Space(right)) == (set(left) == set(right))


def test_numbers_that_equal_integers_are_found_in_ranges_too():
    assert Space(range(3)).locate([2.0, True, "a", 1.5, 7]).tolist() == [2, 1, -1, -1, -1]
    assert Space([5, 7]).locate([7.0, 5]).tolist() == [1, 0]


def test_tensors_with_many_labels_are_paired():
    n = 100_000
    labels = [f"g{i}" for i in range(n)]
    data = torch.arange(n)
    a, b = mo.Tensor(data, Space(labels, "gene")), mo.Tensor(data.flip(0), Space(labels[::-1], "gene"))
    assert torch.equal((a + b).data, 2 * data)
    assert torch.equal((a + mo.Tensor(data, Space(range(n), "gene")).relabel(gene=labels)).data, 2 * data)
