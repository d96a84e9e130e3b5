"""Behaviour of `Tensor`: hashing, indexing, dtypes, sizes, BROADCAST axes, and plain arrays and numbers."""

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch

import moduli as mo
from labels.strategies import check
from moduli import BROADCAST, Space

AB, BA = Space(["a", "b"], "x"), Space(["b", "a"], "x")


def test_tensors_hash_by_identity_and_compare_by_element():
    a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([1.0, 3.0], x=["a", "b"])
    assert len({a, b, a}) == 2
    assert {a: 1}.get(b) is None
    assert hash(a) != hash(b)
    check(a == b, torch.tensor([True, False]), [AB])
    check(a != b, torch.tensor([False, True]), [AB])
    with pytest.raises(mo.labels.AmbiguousTruthError, match="2 elements is ambiguous"):
        bool(a == b)
    with pytest.raises(RuntimeError):
        bool(a != b)
    with pytest.raises(ValueError):
        a in [b]  # noqa: B015
    assert a in [a]
    calls = []

    @functools.lru_cache
    def total(t):
        calls.append(t)
        return t.sum().item()

    assert (total(a), total(b), total(a)) == (3.0, 4.0, 3.0)
    assert len(calls) == 2
    assert (a == None) is False  # noqa: E711
    assert (a != None) is True  # noqa: E711
    assert (a == "a") is False
    assert bool(mo.tensor([1.0], "x") == 1.0)
    assert [a] == [a]


def test_an_integer_between_index_tensors_keeps_labels_with_their_entries():
    t = mo.tensor(torch.arange(2 * 3 * 4 * 3).reshape(2, 3, 4, 3), "p q r s", p=["a", "b"])
    i, j = mo.tensor([0, 2], n=["u", "v"]), mo.tensor([1, 0], n=["u", "v"])
    check(t[:, i, 0, j], t.data[:, i.data, 0, j.data], [t.dims[0], i.dims[0]])
    check(t[:, i, :, j], t.data[:, i.data, :, j.data], [i.dims[0], t.dims[0], t.dims[2]])
    # The sizes are equal, so exchanged labels would not raise.
    square = t[:, i, 0, j]
    for label, row in zip("ab", (0, 1), strict=True):
        for name, k in zip("uv", (0, 1), strict=True):
            assert square.sel(p=label, n=name).item() == t.data[row, i.data[k], 0, j.data[k]]


def test_tensors_without_axes_are_added():
    one, two = mo.tensor(1.0), mo.tensor(2.0)
    check(one + two, torch.tensor(3.0), [])
    v = mo.tensor([1.0, 2.0], x=["a", "b"])
    check(sum([v, v, v]), v.data * 3, [AB])
    check(v + one, v.data + 1, [AB])
    assert float(sum([one, two])) == 3.0


def test_isclose_and_allclose_accept_every_dtype():
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.complex64):
        t = mo.tensor([1, 2], "x").to(dtype)
        assert t.isclose(1.0).tolist() == [True, False]
        assert mo.allclose(t, mo.tensor([1.0, 2.0], "x", dtype=torch.float64))
        assert mo.allclose(mo.tensor([1.0, 2.0], "x", dtype=torch.float64), t)
        assert mo.equal(t, mo.tensor([1.0, 2.0], "x"))


def test_factories_use_the_default_dtype():
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            for created in (
                mo.zeros(2),
                mo.ones(2),
                mo.eye(2),
                mo.eye(["a"]),
                mo.full((2,), 0.5),
                mo.rand(2),
                mo.tensor(1.5),
            ):
                assert created.dtype == dtype
            assert (mo.tensor(1.5) + mo.zeros(2)).dtype == dtype
            assert (1.5 * mo.zeros(2)).dtype == dtype
    finally:
        torch.set_default_dtype(default)


def test_identity_and_diagonal_pair_by_label():
    dims = [AB, BA.rename("y")]
    matrix = mo.Tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dims)
    check(matrix.diagonal(), torch.tensor([2.0, 3.0]), [AB])
    check(mo.einsum("ii->i", matrix), torch.tensor([2.0, 3.0]), [AB])
    check(mo.eye(*dims), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), dims)
    check(mo.add_identity(matrix, 10.0).align_to(dims), torch.tensor([[1.0, 12.0], [13.0, 4.0]]), dims)
    check(matrix + 1, matrix.data + 1, dims)
    assert mo.trace(matrix).item() == 5.0


def test_a_number_does_not_change_the_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8):
        t = mo.tensor([1, 2], "x").to(dtype)
        assert (t + 1).dtype == (1 + t).dtype == (t * 2).dtype == (t - 1).dtype == dtype
    assert (mo.tensor([1], "x") + 0.5).dtype is torch.float32


def test_division_equals_torch():
    t = mo.tensor([1.0, -1.0, 0.0], "x")
    assert (t / 0).tolist()[:2] == [float("inf"), float("-inf")]
    values = mo.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal((values / 3).data, values.data / 3)
    assert torch.equal((3 / values).data, 3 / values.data)


def test_different_sizes_raise():
    with pytest.raises(ValueError, match=r"sizes of paired axes differ: 2 .* and 3"):
        mo.zeros(2) + mo.zeros(3)
    with pytest.raises(ValueError, match="only BROADCAST stretches"):
        mo.zeros(1) + mo.zeros(3)
    x = mo.tensor([1.0, 4.0, 9.0], "t")
    check(x[1:] - x[:-1], torch.tensor([3.0, 5.0]), [Space(2, "t")])
    matrix = mo.zeros(p=["a", "b"], q=["c", "d"])
    with pytest.raises(ValueError, match="differ"):
        matrix.rename([None, None]) + matrix.T.rename([None, None])
    assert (matrix + matrix.T.clone()).dims == matrix.dims


def test_broadcast_is_symmetric_in_products_and_in_cat():
    full = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["p", "q"], k=["a", "b"])
    wide = full.sum("k", keepdim=True)
    check(wide @ full.T.rename("k c"), wide.data.expand(2, 2) @ full.data.T, [full.dims[0], full.dims[0].rename("c")])
    check(full @ wide.T.rename("k c"), full.data @ wide.data.expand(2, 2).T, [full.dims[0], full.dims[0].rename("c")])
    other = full.relabel(row=["r", "s"])
    dims = [Space(["r", "s", "p", "q"], "row"), full.dims[1]]
    check(mo.cat([other, wide], "row"), torch.cat([full.data, wide.data.expand(2, 2)]), dims)
    dims[0] = Space(["p", "q", "r", "s"], "row")
    check(mo.cat([wide, other], "row"), torch.cat([wide.data.expand(2, 2), full.data]), dims)


def test_equal_is_symmetric():
    full = mo.tensor([2.0, 2.0], x=["a", "b"])
    wide = mo.Tensor(torch.tensor([2.0]), BROADCAST.rename("x"))
    assert mo.equal(full, wide) == mo.equal(wide, full) == torch.equal(full, wide) is False
    one = full[:1]
    assert mo.equal(one, wide) == mo.equal(wide, one)
    assert not mo.equal(mo.zeros(x=2), mo.zeros(y=2))
    assert not mo.equal(mo.zeros(x=2, y=1), mo.zeros(x=1, y=2))


@pytest.mark.parametrize("function", ["eigh", "eigvalsh", "eig", "inv", "det", "cholesky", "matrix_exp"])
def test_linear_algebra_refuses_broadcast_axes(function):
    t = mo.Tensor(torch.ones(2, 1), [AB, BROADCAST])
    with pytest.raises(ValueError, match="BROADCAST"):
        getattr(mo, function)(t)


def test_empty_tuples_truth_values_and_ellipsis_are_accepted():
    t = mo.tensor([1.0, 2.0], x=["a", "b"])
    for name in ("mean", "sum", "amax", "amin", "prod", "logsumexp", "nansum"):
        check(getattr(t, name)(()), t.data, t.dims)
    check(t[True], t.data[True], [Space(1), *t.dims])
    check(t[()], t.data, t.dims)
    check(t[...], t.data, t.dims)
    with pytest.raises(IndexError, match="only one is BROADCAST"):
        t[BROADCAST]
    with pytest.raises(IndexError):
        t[:1].sum("x", keepdim=True)[AB]


def test_labels_are_copied_from_their_source():
    mapping = {"a": 0, "b": 1}
    space = Space(mapping, "x")
    t = mo.Tensor(torch.zeros(2), space)
    mapping["c"] = 2
    labels = ["a", "b"]
    u = mo.tensor([0.0, 0.0], x=labels)
    labels.reverse()
    assert t.dims == u.dims == (AB,)
    with pytest.raises(AttributeError):
        t.dims[0].labels.append("d")
    with pytest.raises(AttributeError):
        t.dims = ()
    with pytest.raises(AttributeError):
        t.data = torch.zeros(3)


def test_arithmetic_with_arrays_fractions_and_numpy_numbers():
    t = mo.tensor([1.0, 2.0], x=["a", "b"])
    array = np.array([10.0, 20.0])
    check(array * t, torch.tensor([10.0, 40.0], dtype=torch.float64), [AB])
    check(t * array, torch.tensor([10.0, 40.0], dtype=torch.float64), [AB])
    check(Fraction(1, 2) * t, t.data / 2, [AB])
    check(t + Fraction(1, 2), t.data + 0.5, [AB])
    check(np.float64(2) * t, t.data * 2, [AB])
    created = mo.Tensor(array, AB)
    assert isinstance(created.data, torch.Tensor)
    check(created + 1, torch.tensor([11.0, 21.0], dtype=torch.float64), [AB])
    assert np.asarray(t).tolist() == [1.0, 2.0]
    assert np.asarray(t, dtype=np.int64).tolist() == [1, 2]


def test_operations_work_on_meta_tensors():
    a = mo.zeros(x=["a", "b"], y=3, device="meta")
    b = mo.zeros(y=3, x=["b", "a"], device="meta")
    for t in (
        a + b,
        a * 2,
        (a @ a.T.rename("y z")).rename(z="q"),
        a.sum("x"),
        a[0],
        a.sel(x="b"),
        mo.cat([a, b.relabel(x=["c", "d"])], "x"),
    ):
        assert t.device == torch.device("meta")
        assert t.data.is_meta
    assert repr(a)
