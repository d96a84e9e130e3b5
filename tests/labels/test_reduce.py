"""Reductions, scans and ranking: the values of torch, and the labels of the remaining axes."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import COMPLEX, FLOATS, LOW, as_mapping, attempt, check, labelled, reordered

# torch warns of variances with fewer elements than the correction.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

REDUCTIONS = ("sum", "mean", "prod", "std", "var", "amin", "amax", "any", "all", "logsumexp", "nansum", "nanmean")
tensors = labelled(dtypes=st.sampled_from((*FLOATS, *LOW, *COMPLEX, torch.int64, torch.bool)), named=False)


def reduce_raw(name, data, dims, keepdim):
    """Reduce with torch; an empty tuple reduces no axis, which torch does not do for all functions.

    Args:
        name: The reduction.
        data: The data.
        dims: The axes.
        keepdim: Whether axes are kept.
    """
    if not dims:
        data, dims, keepdim = data.unsqueeze(0), (0,), False
    if name == "norm":
        return torch.linalg.vector_norm(data, 2, dims, keepdim)
    if name == "prod":
        for dim in sorted(dims, reverse=True):
            data = data.prod(dim, keepdim)
        return data
    return getattr(torch, name)(data, dim=dims, keepdim=keepdim)


@st.composite
def chosen(draw, t):
    """Draw some axes in one of the accepted forms, and their positions."""
    some = tuple(draw(st.permutations(range(t.ndim)))[: draw(st.integers(0, t.ndim))])
    if draw(st.integers(0, 4)) == 0:
        return None, tuple(range(t.ndim))
    axes = [
        t.names[i] if t.names[i] is not None and draw(st.booleans()) else i - t.ndim * draw(st.integers(0, 1))
        for i in some
    ]
    if some and all(isinstance(each, str) for each in axes) and draw(st.booleans()):
        return draw(st.sampled_from([" ", ", ", ","])).join(axes), some
    if len(axes) == 1 and draw(st.booleans()):
        return axes[0], some
    return draw(st.sampled_from([tuple, list]))(axes), some


@pytest.mark.parametrize("name", [*REDUCTIONS, "norm"])
@settings(max_examples=20)
@given(data=st.data(), t=tensors, keepdim=st.booleans())
def test_reductions_equal_torch_and_drop_the_reduced_axes(name, data, t, keepdim):
    dim, gone = data.draw(chosen(t))
    expected, raw_error = attempt(reduce_raw, name, t.data, gone, keepdim)
    call = (lambda f: f(dim=dim, keepdim=keepdim)) if name == "norm" else (lambda f: f(dim, keepdim))
    result, error = attempt(call, getattr(t, name))
    assert (error is None) == (raw_error is None), (error, raw_error)
    if raw_error is not None:
        return
    if keepdim:
        dims = [mo.BROADCAST.rename(s.name) if i in gone else s for i, s in enumerate(t.dims)]
    else:
        dims = [space for i, space in enumerate(t.dims) if i not in gone]
    check(result, expected, dims)
    function = getattr(mo, name)
    again = function(t, dim=dim, keepdim=keepdim)
    check(again, expected, dims)
    if name != "norm" and gone:
        check(getattr(torch, name)(t, dim=gone, keepdim=keepdim) if name != "prod" else again, expected, dims)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_torch_functions_over_everything_and_one_axis(name):
    t = mo.tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 3.0]], y=["a", "b"], x=["p", "q", "r"])
    function = getattr(torch, name)
    if name != "logsumexp":
        check(function(t), function(t.data), [])
    check(function(t, 1), function(t.data, 1), t.dims[:1])
    check(function(t, dim=0), function(t.data, dim=0), t.dims[1:])


@settings(max_examples=40)
@given(data=st.data(), t=labelled(dtypes=st.sampled_from((torch.float64, torch.int64)), sizes=st.integers(1, 3)))
def test_reductions_do_not_depend_on_the_order_of_labels(data, t):
    other = data.draw(reordered(t))
    over = data.draw(st.permutations(t.names))[: data.draw(st.integers(0, t.ndim))]
    for name in ("sum", "amax", "amin", "any", "all"):
        assert as_mapping(getattr(other, name)(over)) == as_mapping(getattr(t, name)(over))


def test_options_of_reductions_equal_those_of_torch():
    t = mo.tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 3.0]], "y x")
    check(t.sum("x", dtype=torch.float64), t.data.sum(1, dtype=torch.float64), t.dims[:1])
    check(t.to(torch.int64).mean("x", dtype=torch.float32), t.data.mean(1), t.dims[:1])
    check(t.std("x", correction=0), t.data.std(1, correction=0), t.dims[:1])
    check(torch.var(t, 1, unbiased=False), t.data.var(1, unbiased=False), t.dims[:1])
    check(torch.std(t, False), t.data.std(unbiased=False), [])
    for order in (0, 1, 2, 3, math.inf, -math.inf):
        check(t.norm(order, "x"), torch.linalg.vector_norm(t.data, order, 1), t.dims[:1])
    check(torch.norm(t, 1, 1), torch.norm(t.data, 1, 1), t.dims[:1])
    check(torch.linalg.vector_norm(t), torch.linalg.vector_norm(t.data), [])
    check(t.count_nonzero("x"), t.data.count_nonzero(1), t.dims[:1])
    check(t.count_nonzero(()), (t.data != 0).long(), t.dims)
    check(torch.count_nonzero(t), t.data.count_nonzero(), [])


def test_empty_tensors_and_empty_tuples_of_axes():
    t = mo.tensor(torch.zeros(0, 2), "y x")
    assert t.sum("y").tolist() == [0.0, 0.0]
    assert t.prod("y").tolist() == [1.0, 1.0]
    assert t.all().item() is True
    with pytest.raises((IndexError, RuntimeError)):
        t.amax("y")
    for name in ("sum", "mean", "prod", "amax", "amin", "logsumexp", "nansum", "nanmean", "norm"):
        one = getattr(mo.tensor(2.5), name)()
        assert one.item() == 2.5
        check(getattr(t + 1, name)(dim=()), t.data, t.dims)


# -- along one axis ----------------------------------------------------------------------------------------------------

along = labelled(st.integers(1, 3), st.integers(1, 4), st.sampled_from((torch.float64, torch.int64)), named=False)


def positions_only(t, at):
    return [mo.Space(len(s), s.name) if i == at else s for i, s in enumerate(t.dims)]


@given(data=st.data(), t=along, keepdim=st.booleans(), torch_form=st.booleans())
def test_extremes_equal_torch_and_have_labels(data, t, keepdim, torch_form):
    at = data.draw(st.integers(0, t.ndim - 1))
    dim = t.names[at] if t.names[at] is not None and not torch_form else at
    dims = [s for i, s in enumerate(t.dims) if i != at or keepdim]
    if keepdim:
        dims[at] = mo.BROADCAST.rename(t.names[at])
    for name in ("argmax", "argmin"):
        expected = getattr(torch, name)(t.data, at, keepdim)
        result = getattr(torch, name)(t, dim, keepdim) if torch_form else getattr(t, name)(dim, keepdim)
        check(result, expected, dims)
        labels = getattr(t, name)(dim, keepdim, labels=True)
        labels_of_axis = list(t.dims[at])
        if expected.ndim:
            assert labels.shape == tuple(expected.shape)
            assert [*labels.flat] == [labels_of_axis[i] for i in expected.flatten().tolist()]
        else:
            assert labels == labels_of_axis[int(expected)]
        place = np.unravel_index(int(getattr(torch, name)(t.data)), tuple(t.shape))
        whole = tuple(list(space)[i] for space, i in zip(t.dims, place, strict=True))
        assert getattr(t, name)(labels=True) == whole
        check(getattr(t, name)(), getattr(torch, name)(t.data), [])
    for name in ("max", "min"):
        expected = getattr(torch, name)(t.data, at, keepdim)
        result = getattr(torch, name)(t, dim, keepdim) if torch_form else getattr(t, name)(dim, keepdim)
        check(result.values, expected.values, dims)
        check(result.indices, expected.indices, dims)
        check(getattr(t, name)(), getattr(t.data, name)(), [])
        check(getattr(torch, name)(t, t), t.data, t.dims)


@given(data=st.data(), t=along, descending=st.booleans())
def test_sort_argsort_and_topk_equal_torch(data, t, descending):
    at = data.draw(st.integers(0, t.ndim - 1))
    dim = t.names[at] if t.names[at] is not None else at - t.ndim
    dims = positions_only(t, at)
    expected = torch.sort(t.data, dim=at, descending=descending, stable=True)
    result = t.sort(dim, descending, stable=True)
    check(result.values, expected.values, dims)
    check(result.indices, expected.indices, dims)
    check(t.argsort(dim, descending, stable=True), expected.indices, dims)
    check(torch.sort(t, at, descending).values, expected.values, dims)
    k = data.draw(st.integers(0, t.shape[at]))
    dims[at] = mo.Space(k, t.names[at])
    check(t.topk(k, dim, largest=descending).values, expected.values.narrow(at, 0, k), dims)


@given(data=st.data(), t=along)
def test_scans_and_softmax_keep_the_labels(data, t):
    at = data.draw(st.integers(0, t.ndim - 1))
    dim = t.names[at] if t.names[at] is not None else at
    check(t.cumsum(dim), t.data.cumsum(at), t.dims)
    check(t.cumprod(dim), t.data.cumprod(at), t.dims)
    check(torch.cumsum(t, at), t.data.cumsum(at), t.dims)
    x = t.to(torch.float64)
    for share in (x.softmax(dim), mo.softmax(x, dim), F.softmax(x, dim=dim), torch.softmax(x, at)):
        check(share, torch.softmax(x.data, at), x.dims)
    for share in (x.log_softmax(dim), F.log_softmax(x, dim=dim), torch.log_softmax(x, at)):
        check(share, torch.log_softmax(x.data, at), x.dims)
    check(F.softmin(x, dim=dim), F.softmin(x.data, dim=at), x.dims)
    check(F.normalize(x, dim=dim), F.normalize(x.data, dim=at), x.dims)


def test_axes_kept_by_reductions_broadcast():
    t = mo.tensor([[1.0, 2.0], [3.0, 5.0]], y=["a", "b"], x=["p", "q"])
    centred = t - t.mean("x", keepdim=True)
    check(centred, t.data - t.data.mean(1, True), t.dims)
    check(t / t.sum(keepdim=True), t.data / t.data.sum(), t.dims)
    assert t.sum("x", keepdim=True).squeeze().dims == t.dims[:1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                                  "binary_cross_entropy_with_logits"])  # fmt: skip
def test_losses_pair_by_label_and_equal_torch(name, reduction):
    a = mo.tensor([[0.25, 0.5], [0.125, 0.75]], y=["a", "b"], x=["p", "q"])
    b = mo.tensor([[1.0, 0.0], [0.25, 0.5]], x=["q", "p"], y=["b", "a"])
    raw_b = b.data.flip(0).flip(1).T
    loss = getattr(F, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of sizes that would be stretched
        result = loss(a, b, reduction=reduction)
    check(result, loss(a.data, raw_b, reduction=reduction), a.dims if reduction == "none" else [])
