"""Selection by label, interpolation and groups, compared with pandas, NumPy and loops."""

import datetime

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import moduli as mo
from moduli import Space, UnknownLabelError

numbers = st.lists(st.integers(-20, 20), min_size=1, max_size=8, unique=True)
ends = st.none() | st.integers(-25, 25)


def series(labels):
    return mo.Tensor(torch.arange(len(labels), dtype=torch.float64), Space(labels, "x"))


@given(numbers, ends, ends, st.booleans(), st.sampled_from([None, 1, 2]))
def test_slices_of_labels_equal_those_of_pandas(labels, start, stop, falls, step):
    pandas = pytest.importorskip("pandas")
    labels = sorted(labels, reverse=falls)
    expected = pandas.Series(np.arange(len(labels), dtype=float), index=labels).loc[start:stop:step]
    result = series(labels).sel(x=slice(start, stop, step))
    assert list(result.dims[0].labels) == list(expected.index)
    assert result.data.tolist() == expected.tolist()


def test_slices_of_unordered_labels_go_by_position():
    t = series(["r", "g", "b", "k"])
    assert t.sel(x=slice("g", "b")).dims[0] == Space(["g", "b"], "x")
    assert t.sel(x=slice("b", "r")).shape == (0,)
    assert t.sel({0: slice(None, "g")}).data.tolist() == [0.0, 1.0]
    with pytest.raises(UnknownLabelError, match="'q'.*not in order"):
        t.sel(x=slice("q", None))
    with pytest.raises(TypeError, match="positional; use isel"):
        mo.ones(3).sel({0: slice(0, 1)})
    with pytest.raises(ValueError, match="step"):
        t.sel(x=slice(None, None, -1))
    with pytest.raises(TypeError, match="compared"):
        series([1, 2]).sel(x=slice("a", None))


@given(numbers, st.integers(-25, 25), st.sampled_from(["nearest", "pad", "backfill"]), st.none() | st.integers(0, 4))
def test_nearest_labels_equal_those_of_pandas(labels, wanted, method, tolerance):
    pandas = pytest.importorskip("pandas")
    t, index = series(labels), pandas.Index(sorted(labels))
    expected = index.get_indexer([wanted], method=method, tolerance=tolerance)[0]
    if expected < 0:
        with pytest.raises(UnknownLabelError, match="axis 'x' has no label for"):
            t.sel(x=wanted, method=method, tolerance=tolerance)
    else:
        assert t.sel(x=wanted, method=method, tolerance=tolerance).item() == labels.index(index[expected])


def test_nearest_labels_of_lists_and_dates():
    t = series([0.0, 1.0, 2.0])
    assert t.sel(x=[0.9, 1.8], method="nearest").dims[0] == Space([1.0, 2.0], "x")
    assert t.sel(x=torch.tensor([0.1]), method="ffill").dims[0] == Space([0.0], "x")
    with pytest.raises(ValueError, match="more than once"):
        t.sel(x=[0.9, 1.1], method="nearest")
    days = [datetime.date(2024, 1, day) for day in (1, 5)]
    near = series(days).sel(x=datetime.date(2024, 1, 4), method="nearest", tolerance=datetime.timedelta(1))
    assert near.item() == 1.0
    with pytest.raises(ValueError, match="method"):
        t.sel(x=1.0, method="closest")
    with pytest.raises(ValueError, match="tolerance"):
        t.sel(x=1.0, tolerance=1.0)
    with pytest.raises(TypeError, match="needs an order"):
        series(["a", 1]).sel(x=1, method="pad")
    with pytest.raises(TypeError, match="positional"):
        mo.ones(3).sel({0: 1}, method="nearest")


@given(numbers, st.lists(st.floats(-20, 20), min_size=1, max_size=5, unique=True), st.randoms())
def test_interpolation_equals_that_of_numpy(labels, points, random):
    points = [point for point in points if min(labels) <= point <= max(labels)]
    assume(points)
    random.shuffle(labels)
    data = torch.randn(2, len(labels), dtype=torch.float64)
    t = mo.Tensor(data, (Space(2, "row"), Space(labels, "x")))
    result = t.interp(x=points)
    order = np.argsort(labels)
    for row in range(2):
        expected = np.interp(points, np.array(labels)[order], data[row].numpy()[order])
        assert np.allclose(result.data[row], expected)
    assert result.dims == (Space(2, "row"), Space(points, "x"))
    assert torch.allclose(t.interp(x=points[0]).data, result.data[:, 0])


@pytest.mark.compiles_labels
def test_interpolation_has_gradients_compiles_and_refuses_points_outside():
    t = mo.tensor([0.0, 10.0, float("nan")], x=[0, 1, 2])
    assert t.interp(x=1).item() == 10.0
    with pytest.raises(ValueError, match=r"2\.5 is outside of the labels of axis 'x', from 0 to 2"):
        t.interp(x=[0.5, 2.5])
    assert t.interp(x=[0.5, 2.5], fill=-1.0).data.tolist() == [5.0, -1.0]
    assert mo.tensor([0, 1], x=[0, 1]).interp(x=0.25).item() == 0.25
    assert mo.tensor([0j, 2j], x=[0, 1]).interp(x=0.5).item() == 1j
    with pytest.raises(TypeError, match="numbers"):
        mo.tensor([0.0], x=["a"]).interp(x=0.5)
    with pytest.raises(TypeError, match="positional"):
        mo.ones(3).interp({0: 0.5})
    grid = mo.Tensor(
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True), (Space(range(3), "y"), Space(range(4), "x"))
    )
    assert torch.autograd.gradcheck(lambda d: mo.Tensor(d, grid.dims).interp(y=0.5, x=[0.25, 2.0]).data, grid.data)
    compiled = torch.compile(lambda t: t.interp(y=0.5, x=[0.25, 2.0]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(grid).data, grid.interp(y=0.5, x=[0.25, 2.0]).data)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_reductions_of_groups_equal_loops(groups):
    data = torch.randn(2, len(groups), 3, dtype=torch.float64)
    t = mo.Tensor(data, (Space(2, "p"), Space([f"i{at}" for at in range(len(groups))], "item"), Space(3, "q")))
    grouped = t.groupby(item=dict(zip(t.dims[1], groups, strict=True)))
    names = list(dict.fromkeys(groups))
    for method in ("sum", "mean", "amax", "amin"):
        result = getattr(grouped, method)()
        assert result.dims == (t.dims[0], Space(names, "item"), t.dims[2])
        for at, name in enumerate(names):
            members = data[:, [i for i, group in enumerate(groups) if group == name]]
            assert torch.allclose(result.data[:, at], getattr(members, method)(1))
    assert list(grouped.sizes.items()) == [(name, groups.count(name)) for name in names]
    assert mo.equal(grouped.count(), mo.ones_like(t).groupby(1, groups).sum())
    assert mo.equal(t.groupby("item", lambda label: groups[int(label[1:])]).sum(), grouped.sum())
    assert mo.equal(t.groupby(1, groups).sum(), grouped.sum())


def test_invalid_groups_are_refused():
    t = series(["a", "b"])
    with pytest.raises(UnknownLabelError, match=r"no group: \['b'\]"):
        t.groupby(x={"a": 1})
    with pytest.raises(ValueError, match="size 2, but 3 groups"):
        t.groupby(x=[1, 2, 3])
    with pytest.raises(TypeError, match="one axis"):
        t.groupby()
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    mo.Tensor(weights, t.dims).groupby(x=[0, 0]).mean().sum().backward()
    assert weights.grad.tolist() == [0.5, 0.5]
