"""Join policies compared with dictionaries: missing entries are filled, dropped or refused, label by label."""

import itertools
import operator
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import as_mapping, check, key_of, numbers, reordered, seeds
from moduli.labels._join import policy

POOL = ("a", "b", "c", "d", "e")
HOWS = ("outer", "inner", "left")


@st.composite
def overlapping(draw, dtype=torch.float64, count=2):
    """Draw tensors with some of two labelled axes, whose labels overlap in part.

    Args:
        draw: Given by hypothesis.
        dtype: The dtype.
        count: The number of tensors.
    """
    tensors = []
    for _ in range(count):
        names = [name for name in draw(st.permutations(("x", "y"))) if draw(st.booleans())]
        dims = [mo.Space(draw(st.permutations(POOL))[: draw(st.integers(0, 4))], name) for name in names]
        tensors.append(mo.Tensor(numbers(map(len, dims), dtype, draw(seeds), 1, 5), dims))
    # Two operators with their axes in different orders are refused.
    operators = [t.dims for t in tensors if t.ndim == 2 and len(t.dims[0]) > 1 and set(t.dims[0]) == set(t.dims[1])]
    assume(len({dims[0].name for dims in operators}) < 2)
    return tensors


def join_labels(spaces, how):
    """Return the labels of one axis under a policy."""
    labels = list(spaces[0])
    for space in spaces[1:]:
        if how == "outer":
            labels += [label for label in space if label not in labels]
        elif how == "inner":
            labels = [label for label in labels if label in list(space)]
    return labels


def compute_join(function, tensors, how, fill):
    """Return the Spaces of the result, and its value for every choice of labels.

    Args:
        function: A function of numbers.
        tensors: The operands.
        how: The policy.
        fill: The value of missing entries.
    """
    names = list(dict.fromkeys(name for t in tensors for name in t.names))
    dims = [
        mo.Space(join_labels([t.dims[t.names.index(name)] for t in tensors if name in t.names], how), name)
        for name in names
    ]
    maps = [as_mapping(t) for t in tensors]
    values = {}
    for place in itertools.product(*(range(len(space)) for space in dims)):
        key = key_of(dims, place)
        parts = [
            mapping.get(frozenset(part for part in key if part[0] in t.names), fill)
            for mapping, t in zip(maps, tensors, strict=True)
        ]
        values[key] = function(*parts)
    return dims, values


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex128], ids=str)
@given(data=st.data(), fill=st.sampled_from([0, 0.0, 1, 1.0, -2, 7.0]))
def test_joined_operations_equal_those_of_dictionaries(how, dtype, data, fill):
    a, b = data.draw(overlapping(dtype))
    for function in (operator.add, operator.sub, operator.mul):
        dims, values = compute_join(function, (a, b), how, fill)
        with mo.join(how, fill=fill):
            result = function(a, b)
        assert result.dims == tuple(dims)
        assert as_mapping(result) == values
        assert result.dtype == dtype
        per_call = {operator.add: mo.add, operator.sub: mo.sub, operator.mul: mo.mul}[function]
        assert as_mapping(per_call(a, b, join=how, fill=fill)) == values


@pytest.mark.parametrize("how", HOWS)
@given(data=st.data())
def test_joined_operations_of_three_operands_equal_those_of_dictionaries(how, data):
    tensors = data.draw(overlapping(count=3))
    tensors[0] = tensors[0] > 2
    dims, values = compute_join(lambda c, x, y: x if c else y, tensors, how, 0.0)
    with mo.join(how, fill=0.0):
        result = mo.where(*tensors)
    assert result.dims == tuple(dims)
    assert as_mapping(result) == values


@given(data=st.data())
def test_the_order_of_labels_only_affects_the_order_of_the_result(data):
    a, b = data.draw(overlapping())
    with mo.join("outer", fill=0.0):
        expected = as_mapping(a + b)
        assert as_mapping(data.draw(reordered(a)) + data.draw(reordered(b))) == expected
        assert as_mapping(b + a) == expected
    with mo.join("inner"):
        assert as_mapping(b + a) == as_mapping(a + b)


@given(data=st.data())
def test_exact_refuses_different_labels_and_policies_agree_on_equal_ones(data):
    a, b = data.draw(overlapping())
    shared = set(a.names) & set(b.names)
    same = all(set(a.dims[a.names.index(n)]) == set(b.dims[b.names.index(n)]) for n in shared)
    if not same:
        with pytest.raises(ValueError, match=r"the labels of axis '[xy]' differ"):
            a + b
        return
    expected = as_mapping(a + b)
    for how in (*HOWS, "exact"):
        with mo.join(how, fill=99.0):
            assert as_mapping(a + b) == expected


def test_integers_stay_exact_and_fractional_fills_promote():
    a = mo.tensor([1, 2**53 + 1], x=["a", "b"])
    b = mo.tensor([10, 20], x=["b", "c"])
    check(mo.add(a, b, join="outer", fill=0), torch.tensor([1, 2**53 + 11, 20]), [mo.Space(["a", "b", "c"], "x")])
    half = mo.add(a, b, join="outer", fill=0.5)
    assert half.dtype.is_floating_point
    assert half.sel(x="c").item() == 20.5
    assert mo.add(a, b, join="outer", fill=float("nan")).isnan().tolist() == [True, False, True]
    truth = mo.logical_or(a > 1, b > 10, join="outer", fill=0)
    assert truth.dtype is torch.bool
    assert truth.tolist() == [False, True, True]
    empty = mo.add(a[:1], b[:0], join="outer", fill=0.5)
    assert empty.tolist() == [1.5]


@pytest.mark.parametrize("how", HOWS)
@given(data=st.data())
def test_missing_entries_are_nan_by_default_as_in_xarray(how, data):
    xr = pytest.importorskip("xarray")
    a, b = data.draw(overlapping())
    with xr.set_options(arithmetic_join=how), mo.join(how):
        for function in (operator.add, operator.mul, operator.truediv):
            theirs = function(a.to_xarray(), b.to_xarray())
            ours = mo.from_xarray(theirs)
            assert function(a, b).align_to(ours.dims).allclose(ours, equal_nan=True)


def test_only_another_square_tensor_is_taken_for_a_transpose():
    square = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["b", "c"], x=["b", "c"])
    with mo.join("outer"):
        other = mo.tensor([[10.0], [20.0]], x=["b", "c"], y=["c"])  # the transpose of no operator on these labels
        assert (square + other).nansum().item() == (3 + 10) + (4 + 20)
        with pytest.raises(mo.labels.OwnTransposeError):
            square + mo.tensor(torch.eye(3), x=["b", "c", "d"], y=["b", "c", "d"])


def test_integers_need_a_fill_because_they_have_no_nan():
    a, b = mo.tensor([1, 2], x=["a", "b"]), mo.tensor([10, 20], x=["b", "c"])
    for how in ("outer", "left"):
        with mo.join(how):
            for function in (operator.add, mo.dot, lambda a, b: a.to(torch.bool) | b.to(torch.bool)):
                with pytest.raises(TypeError, match=r"no NaN to put there: say what to take.*fill=0"):
                    function(a, b)
            assert (a + b.relabel(x=["b", "a"])).tolist() == [21, 12]
    with mo.join("inner"):
        assert (a + b).tolist() == [12]
    half = mo.add(a.half(), b.half(), join="outer")
    assert half.dtype is torch.float16
    assert half.isnan().tolist() == [True, False, True]


def test_scopes_nest_and_are_restored():
    a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([10.0, 20.0], x=["b", "c"])
    outer, inner, left = [1.0, 12.0, 20.0], [12.0], [1.0, 12.0]
    scope = mo.join("outer", fill=0.0)
    with scope:
        assert (a + b).tolist() == outer
        with mo.join("inner"):
            assert (a + b).tolist() == inner
            with mo.join("left", fill=0.0):
                assert (a + b).tolist() == left
                with scope, mo.join("exact"), pytest.raises(ValueError, match="differ"):
                    a + b
                assert (a + b).tolist() == left
            assert (a + b).tolist() == inner
        assert (a + b).tolist() == outer
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert policy.how == "exact"
    with pytest.raises(ValueError, match="differ"):
        a + b


def test_the_policy_belongs_to_the_thread():
    a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([10.0, 20.0], x=["b", "c"])
    ready = threading.Barrier(4)
    expected = {"outer": [1.0, 12.0, 20.0], "inner": [12.0], "left": [1.0, 12.0]}

    def work(how):
        if how == "exact":
            ready.wait()
            try:
                a + b
            except ValueError:
                return True
            return False
        with mo.join(how, fill=0.0):
            ready.wait()
            return all((a + b).tolist() == expected[how] for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, ["outer", "inner", "left", "exact"]))


def test_one_scope_object_may_be_used_by_several_threads():
    shared, step = mo.join("outer"), threading.Barrier(2)

    def work(how):
        with mo.join(how):
            if how == "inner":
                step.wait()
            shared.__enter__()
            if how == "left":
                step.wait()
            step.wait()
            shared.__exit__(None, None, None)
            return policy.how == how

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, ["inner", "left"]))


@settings(max_examples=30)
@given(data=st.data())
def test_positional_axes_are_not_joined(data):
    n = data.draw(st.integers(0, 4))
    a = mo.tensor(torch.zeros(n), "x")
    b = mo.tensor(torch.zeros(3), x=["a", "b", "c"])
    for how in HOWS:
        with mo.join(how):
            if n == 3:
                assert (a + b).dims == (b + a).dims == b.dims
            else:
                with pytest.raises(ValueError, match="sizes of paired axes differ"):
                    a + b


def test_products_are_joined():
    a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([10.0, 20.0], x=["b", "c"])
    with mo.join("outer", fill=1.0):
        assert mo.dot(a, b).item() == mo.matmul(a, b).item() == mo.einsum("x,x->", a, b).item() == 41.0
    with mo.join("inner"):
        assert mo.dot(a, b).item() == mo.matmul(a, b).item() == mo.einsum("i,i->", a, b).item() == 20.0
    with mo.join("left", fill=3.0):
        assert mo.dot(a, b).item() == mo.matmul(a, b).item() == 23.0


def test_index_tensors_are_not_joined():
    t = mo.tensor(torch.arange(12.0).reshape(3, 4), "y x")
    i, j = mo.tensor([0, 1], n=["a", "b"]), mo.tensor([2, 3], n=["b", "c"])
    with mo.join("outer"), pytest.raises(ValueError, match="differ"):
        t[i, j]


def test_equal_and_allclose_do_not_join():
    a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([2.0, 5.0], x=["b", "c"])
    with mo.join("inner"):
        assert (a == b).all()
        assert not mo.equal(a, b)
        assert not mo.allclose(a, b)


@pytest.mark.parametrize(("how", "fill", "error"), [("full", 0.0, ValueError), ("outer", "x", TypeError)])
def test_invalid_policies_are_refused(how, fill, error):
    with pytest.raises(error):
        mo.join(how, fill)
