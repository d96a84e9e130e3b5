"""Labelled linear algebra: results do not depend on the order of labels, and equal torch on data aligned by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli.labels as la
from moduli.labels import BROADCAST, Space, Tensor, join
from moduli.labels._factories import tensor
from moduli.labels._tensor import wrap

F64 = torch.float64
ABC = ["a", "b", "c"]


def reordered(t: Tensor, axis: int, order: list[int]) -> Tensor:
    """Return an equal tensor whose labels of one axis are in another order.

    Args:
        t: The tensor.
        axis: The axis.
        order: The new order of positions.
    """
    dims = list(t.dims)
    dims[axis] = dims[axis][order]
    return Tensor(t.data.index_select(axis, torch.tensor(order)), dims)


def align_data(t: Tensor, like: Tensor) -> torch.Tensor:
    """Return the data of a tensor in the order of labels of another one with equal names and labels."""
    assert t.names == like.names
    data = t.data
    for axis, (mine, wanted) in enumerate(zip(t.dims, like.dims, strict=True)):
        assert mine.positional == wanted.positional
        assert len(mine) == len(wanted)
        if mine.labelled:
            data = data.index_select(axis, torch.tensor([mine.index(label) for label in wanted]))
    return data


def assert_same(t: Tensor, like: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(align_data(t, like), like.data, **tolerance)


def operators(batch: tuple[int, ...] = (), dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    """Return a Hermitian positive definite tensor, with rows and columns in the same order.

    Args:
        batch: The batch shape.
        dtype: The dtype.
        seed: The seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, 3, 3, dtype=dtype, generator=generator)
    data = x @ x.mH + torch.diag(torch.tensor([1.0, 3.0, 6.0], dtype=dtype))
    lead = [Space(size, f"batch{i}") for i, size in enumerate(batch)]
    return Tensor(data, (*lead, Space(ABC, "row"), Space(ABC, "column")))


def general(batch: tuple[int, ...] = (), dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    t = operators(batch, dtype, seed)
    noise = torch.randn(t.shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + 1))
    return Tensor(t.data + 0.3 * noise, t.dims)


orders = st.permutations(range(3)).map(list)
ONE_VALUED = {
    "inv": (la.inv, torch.linalg.inv),
    "det": (la.det, torch.linalg.det),
    "matrix_exp": (la.matrix_exp, torch.linalg.matrix_exp),
    "pinv": (la.pinv, torch.linalg.pinv),
    "trace": (la.trace, lambda x: x.diagonal(dim1=-2, dim2=-1).sum(-1)),
    "eigvalsh": (la.eigvalsh, torch.linalg.eigvalsh),
    "svdvals": (la.svdvals, torch.linalg.svdvals),
    "lowdin": (la.lowdin, lambda x: torch.linalg.svd(x)[0] @ torch.linalg.svd(x)[2]),
    "add_identity": (lambda t: la.add_identity(t, 2.5), lambda x: x + 2.5 * torch.eye(3, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", ONE_VALUED)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@given(rows=orders, columns=orders)
def test_results_do_not_depend_on_the_order_of_labels(
    name: str, batch: tuple[int, ...], rows: list[int], columns: list[int]
) -> None:
    ours, theirs = ONE_VALUED[name]
    t = operators(batch)
    reference = ours(t)
    torch.testing.assert_close(reference.data, theirs(t.data))
    shuffled = reordered(reordered(t, -2 % t.ndim, rows), -1 % t.ndim, columns)
    assert_same(ours(shuffled), reference)


@given(rows=orders, columns=orders)
def test_eigh_reconstructs_the_matrix(rows: list[int], columns: list[int]) -> None:
    t = reordered(reordered(operators((2,)), 1, rows), 2, columns)
    values, vectors = la.eigh(t)
    assert values.names == ("batch0", "spectrum")
    assert vectors.names == ("batch0", "row", "spectrum")
    assert vectors.dims[1] == t.dims[1]
    rebuilt = vectors.data @ torch.diag_embed(values.data) @ vectors.data.mH
    torch.testing.assert_close(rebuilt, align_data(t, Tensor(rebuilt, (*t.dims[:2], t.dims[1].rename("column")))))


@given(rows=orders, columns=orders, complex_=st.booleans())
def test_eig_is_ordered_and_reconstructs_the_matrix(rows: list[int], columns: list[int], complex_: bool) -> None:
    t = general((2,), torch.complex128 if complex_ else F64)
    shuffled = reordered(reordered(t, 1, rows), 2, columns)
    values, vectors = la.eig(shuffled)
    for line in values.data.tolist():
        keys = [(round(v.real, 9), round(v.imag, 9)) for v in line]
        assert keys == sorted(keys)
    torch.testing.assert_close(la.eigvals(t).data, values.data)
    aligned = align_data(shuffled, Tensor(shuffled.data, (*shuffled.dims[:2], shuffled.dims[1].rename("column"))))
    torch.testing.assert_close(aligned.to(vectors.dtype) @ vectors.data, vectors.data * values.data.unsqueeze(-2))


def test_eigenvalues_with_equal_real_parts_are_ordered_by_imaginary_part() -> None:
    t = tensor(torch.tensor([[0.0, -2.0, 0], [2.0, 0, 0], [0, 0, 0]]), "row column")
    values = la.eigvals(t).data
    assert [round(v.imag, 4) for v in values.tolist()] == [-2.0, 0.0, 2.0]
    assert la.eig(t).eigenvalues.names == ("spectrum",)
    assert la.eig(t).eigenvectors.names == ("row", "spectrum")


@given(rows=orders, columns=orders)
def test_svd_qr_and_cholesky_reconstruct_the_matrix(rows: list[int], columns: list[int]) -> None:
    square = reordered(reordered(general((2,)), 1, rows), 2, columns)
    tall = Tensor(square.data[..., :2], (*square.dims[:2], square.dims[2][:2]))
    for t in (square, tall):
        U, S, Vh = la.svd(t)
        torch.testing.assert_close(U.data @ torch.diag_embed(S.data) @ Vh.data, t.data)
        assert U.names == ("batch0", "row", "singular")
        assert (S.names, Vh.names) == (("batch0", "singular"), ("batch0", "singular", "column"))
        assert (U.dims[1], Vh.dims[2]) == (t.dims[1], t.dims[2])
        Q, R = la.qr(t)
        torch.testing.assert_close(Q.data @ R.data, t.data)
        assert (Q.dims[:2], R.dims[2]) == (t.dims[:2], t.dims[2])
        assert Q.names[-1] is None
    L = la.cholesky(reordered(operators(), 1, columns))
    torch.testing.assert_close(L.data @ L.data.mH, operators().data)
    assert L.dims == operators().dims
    torch.testing.assert_close(la.cholesky(operators(), upper=True).data, L.data.mH)


def test_factors_of_rectangular_matrices_have_the_right_axes() -> None:
    t = Tensor(torch.randn(4, 3, dtype=F64), (Space(4, "row"), Space(ABC, "column")))
    assert la.svd(t, full_matrices=True).U.shape == (4, 4)
    assert la.svd(t).U.shape == (4, 3)
    assert la.svdvals(t).shape == (3,)
    assert la.pinv(t).dims == (Space(ABC, "column"), Space(4, "row"))
    orthonormal = la.lowdin(t)
    assert orthonormal.dims == t.dims
    torch.testing.assert_close(orthonormal.data.mT @ orthonormal.data, torch.eye(3, dtype=F64))
    wide = la.lowdin(Tensor(t.data.mT, t.dims[::-1]))
    torch.testing.assert_close(wide.data, orthonormal.data.mT)


def test_the_new_axis_is_named_only_if_all_axes_are_and_the_name_is_free() -> None:
    x = torch.eye(2)
    assert la.eigvalsh(Tensor(x, (Space(2, "row"), Space(2)))).names == (None,)
    assert la.eigvalsh(Tensor(x, (Space(2, "spectrum"), Space(2, "column")))).names == (None,)
    assert la.svd(Tensor(x, (Space(2, "singular"), Space(2, "column")))).S.names == (None,)


def test_inverse_exchanges_axes_with_their_own_labels() -> None:
    t = reordered(general(), 1, [2, 0, 1])
    assert la.inv(t).dims == (t.dims[1], t.dims[0])
    product = la.inv(t).data @ t.data
    torch.testing.assert_close(product, torch.eye(3, dtype=F64))


# -- solve -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [(), (2,)])
@pytest.mark.parametrize("batch", [(), (2,)])
@given(rows=orders, columns=orders, right=orders)
def test_solve_pairs_rows_by_label(
    tail: tuple[int, ...], batch: tuple[int, ...], rows: list[int], columns: list[int], right: list[int]
) -> None:
    a = general(batch)
    lead = a.dims[: len(batch)]
    b = Tensor(torch.randn(*batch, 3, *tail, dtype=F64), (*lead, Space(ABC, "row"), *(Space(n, "rhs") for n in tail)))
    x = la.solve(a, b)
    assert x.names == (*(space.name for space in lead), "column", *("rhs" for _ in tail))
    back = a.data @ (x.data if tail else x.data.unsqueeze(-1))
    torch.testing.assert_close(back if tail else back.squeeze(-1), b.data)
    n = len(batch)
    shuffled = la.solve(reordered(reordered(a, n, rows), n + 1, columns), reordered(b, n, right))
    assert_same(shuffled, x)


def test_solve_pairs_batches_by_name_and_by_label() -> None:
    x = Space(["x", "y"], "x")
    a = Tensor(general((2,)).data, (x, Space(ABC, "row"), Space(["u", "v", "w"], "unknown")))
    b = Tensor(torch.randn(4, 2, 3, dtype=F64), (Space(4, "time"), x[[1, 0]], Space(ABC, "row")))
    with pytest.raises(ValueError, match="'row'"):  # three axes against three: b would be a matrix
        la.solve(a, b)
    result = la.solve(a, Tensor(b.data.unsqueeze(-1), (*b.dims, Space(1, "rhs"))))
    assert result.names == ("x", "time", "unknown", "rhs")
    assert result.dims[0] == x
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(a.data[i] @ result.data[i, j, :, 0], b.data[j, 1 - i])


def test_solve_broadcasts_absent_batches_only() -> None:
    a = general()
    b = Tensor(torch.randn(4, 3, 2, dtype=F64), (Space(4), Space(ABC, "row"), Space(2)))
    result = la.solve(a, b)
    torch.testing.assert_close(a.data @ result.data, b.data)
    stack = Tensor(general((1,)).data, (Space(1, "k"), *a.dims))
    many = Tensor(b.data, (Space(4, "k"), Space(ABC, "row"), Space(2, "rhs")))
    with pytest.raises(ValueError, match="sizes of paired axes differ"):
        la.solve(stack, many)
    stretched = Tensor(stack.data, (BROADCAST.rename("k"), *a.dims))
    assert la.solve(stretched, many).shape == (4, 3, 2)
    assert la.solve(stack, torch.ones(3, dtype=F64)).shape == (1, 3)


def test_solve_promotes_dtypes_and_takes_plain_tensors() -> None:
    a = general()
    assert la.solve(a, torch.ones(3)).dtype == F64
    assert la.solve(a, torch.ones(3, dtype=torch.complex64)).dtype == torch.complex128
    assert la.solve(a, torch.ones(3, dtype=torch.int64)).dims == (a.dims[1],)


def test_solve_under_a_join_policy() -> None:
    a = Tensor(general((2,)).data, (Space(["x", "y"], "k"), Space(ABC, "row"), Space(ABC, "column")))
    b = Tensor(torch.ones(2, 3, dtype=F64), (Space(["y", "z"], "k"), Space(ABC, "row")))
    with pytest.raises(ValueError, match="'x'"):
        la.solve(a, b)
    with join("inner"):
        result = la.solve(a, b)
    assert result.dims[0].labels == ("y",)
    torch.testing.assert_close(a.data[1] @ result.data[0], b.data[0])


def test_solve_refuses_operands_that_do_not_pair() -> None:
    a = general()
    with pytest.raises(ValueError, match=r"Space\(\['a', 'b', 'd'\].*only on the left: \['c'\].*right: \['d'\]"):
        la.solve(a, Tensor(torch.ones(3, dtype=F64), Space(["a", "b", "d"], "row")))
    with pytest.raises(ValueError, match="3 and 4"):
        la.solve(a, torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match="BROADCAST"):
        la.solve(a, Tensor(torch.ones(1, dtype=F64), BROADCAST))
    with pytest.raises(ValueError, match="at least one axis"):
        la.solve(a, tensor(1.0))
    with pytest.raises(ValueError, match="square"):
        la.solve(tensor(torch.ones(2, 3)), torch.ones(2))
    with pytest.raises(RuntimeError):
        la.solve(tensor(torch.zeros(2, 2)), torch.ones(2))


# -- refusals ----------------------------------------------------------------------------------------------------------

OPERATORS = {
    "eigh": la.eigh,
    "eigvalsh": la.eigvalsh,
    "eig": la.eig,
    "eigvals": la.eigvals,
    "inv": la.inv,
    "det": la.det,
    "slogdet": la.slogdet,
    "matrix_exp": la.matrix_exp,
    "cholesky": la.cholesky,
    "trace": la.trace,
    "add_identity": lambda t: la.add_identity(t, 1.0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_functions_of_operators_need_equal_labels_of_rows_and_columns(name: str) -> None:
    act = OPERATORS[name]
    x = torch.eye(2, dtype=F64)
    with pytest.raises(ValueError, match=rf"{name}.*'row'.*\['a', 'b'\].*\['b', 'c'\].*left: \['a'\].*right: \['c'\]"):
        act(Tensor(x, (Space(["a", "b"], "row"), Space(["b", "c"], "column"))))
    with pytest.raises(ValueError, match=r"square.*\['a', 'b'\], name='row'\) of size 2.*Space\(1, name='column'\)"):
        act(Tensor(x[:, :1], (Space(["a", "b"], "row"), Space(1, "column"))))
    with pytest.raises(ValueError, match="'column' is BROADCAST"):
        act(Tensor(x[:, :1], (Space(["a", "b"], "row"), BROADCAST.rename("column"))))
    with pytest.raises(ValueError, match="last two axes"):
        act(Tensor(x[0], Space(2, "row")))
    # A positional axis pairs by position with any axis of its size.
    act(Tensor(x, (Space(["a", "b"], "row"), Space(2, "column"))))
    act(Tensor(x, (Space(2), Space(2))))


@pytest.mark.parametrize("act", [la.svd, la.svdvals, la.qr, la.pinv, la.lowdin])
def test_factors_need_two_axes(act: object) -> None:
    with pytest.raises(ValueError, match="last two axes"):
        act(tensor([1.0]))  # type: ignore[operator]


def test_lowdin_refuses_rank_deficiency() -> None:
    t = tensor(torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=F64), "row column")
    with pytest.raises(RuntimeError, match="rank deficient"):
        la.lowdin(t)
    nearly = tensor(torch.diag(torch.tensor([1.0, 1e-4], dtype=F64)), "row column")
    torch.testing.assert_close(la.lowdin(nearly).data, torch.eye(2, dtype=F64))
    with pytest.raises(RuntimeError, match=r"tolerance 0\.001"):
        la.lowdin(nearly, 1e-3)
    unseen = torch.func.vmap(lambda x: la.lowdin(wrap(x, t._axes)).data)(t.data.unsqueeze(0))
    assert unseen.isnan().all()
    assert la.lowdin(tensor(torch.zeros(0, 2))).shape == (0, 2)


def test_add_identity_keeps_dtype_and_other_entries() -> None:
    half = tensor(torch.zeros(2, 2, dtype=torch.float16))
    assert la.add_identity(half, 1.0).dtype == torch.float16
    assert la.add_identity(tensor(torch.zeros(2, 2, dtype=torch.int64)), 1).dtype == torch.int64
    infinite = la.add_identity(half, math.inf).data
    assert infinite.tolist() == [[math.inf, 0.0], [0.0, math.inf]]
    c = torch.tensor(2.0, requires_grad=True)
    la.add_identity(tensor(torch.zeros(2, 2)), c).data.sum().backward()
    assert c.grad == 2.0
    assert la.add_identity(half, tensor(3.0)).data[0, 0] == 3.0
    for wrong in ("1", None, torch.ones(2)):
        with pytest.raises(TypeError, match=r"add_identity|unsupported operand"):
            la.add_identity(half, wrong)


# -- dtypes, gradients, compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, F64, torch.complex64, torch.complex128]
)
def test_every_dtype_is_supported(dtype: torch.dtype) -> None:
    t = Tensor(operators().data.to(dtype), operators().dims)
    real = torch.zeros((), dtype=dtype).abs().dtype
    assert la.eigvalsh(t).dtype == real
    assert la.eigh(t).vectors.dtype == dtype
    for act in (la.inv, la.det, la.matrix_exp, la.cholesky, la.pinv, la.lowdin, la.trace):
        assert act(t).dtype == dtype
        assert not act(t).data.isnan().any()
    assert la.eig(t).values.data.is_complex()
    assert la.solve(t, torch.ones(3, dtype=dtype)).dtype == dtype


def test_integers_are_computed_in_the_default_dtype() -> None:
    t = tensor([[2, 0], [0, 4]])
    assert la.det(t).dtype == torch.get_default_dtype()
    assert la.trace(t).dtype == torch.int64


GRADIENTS = {
    "inv": la.inv,
    "det": la.det,
    "matrix_exp": la.matrix_exp,
    "cholesky": lambda t: la.cholesky(t),
    "eigvalsh": la.eigvalsh,
    "lowdin": la.lowdin,
    "slogdet": lambda t: la.slogdet(t).logabsdet,
    "add_identity": lambda t: la.add_identity(t, 2.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_functions_pass_gradcheck(name: str) -> None:
    t = reordered(operators(), 1, [1, 2, 0])

    def run(x: torch.Tensor) -> torch.Tensor:
        return GRADIENTS[name](wrap(x, t._axes)).data

    symmetric = align_data(t, operators()) if name in ("cholesky", "eigvalsh") else t.data
    axes = operators()._axes

    def run_symmetric(x: torch.Tensor) -> torch.Tensor:
        return GRADIENTS[name](wrap((x + x.mT) / 2, axes)).data

    chosen = run_symmetric if name in ("cholesky", "eigvalsh") else run
    assert torch.autograd.gradcheck(chosen, (symmetric.clone().requires_grad_(),))


def test_lowdin_is_differentiable_where_singular_values_coincide() -> None:
    axes = Tensor(torch.zeros(3, 2), (Space(ABC), Space(2)))._axes

    def run(x: torch.Tensor) -> torch.Tensor:
        return la.lowdin(wrap(x, axes)).data

    x = torch.eye(3, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_gradient_of_solve_reaches_both() -> None:
    a, b = general(), Tensor(torch.randn(3, dtype=F64), Space(["c", "a", "b"], "row"))

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return la.solve(wrap(x, a._axes), wrap(y, b._axes)).data

    assert torch.autograd.gradcheck(run, (a.data.clone().requires_grad_(), b.data.clone().requires_grad_()))


COMPILED = {
    **{name: OPERATORS[name] for name in OPERATORS},
    "svd": la.svd,
    "svdvals": la.svdvals,
    "qr": la.qr,
    "pinv": la.pinv,
    "lowdin": la.lowdin,
    "solve": lambda t: la.solve(t, t),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.compiles_labels
def test_functions_compile_to_one_graph(name: str) -> None:
    act = COMPILED[name]
    t = reordered(operators((2,)), 2, [2, 0, 1])
    if name == "solve":
        b = Tensor(torch.ones(2, 3, dtype=F64), (t.dims[0], t.dims[1][[1, 2, 0]]))
        results, expected = torch.compile(la.solve, fullgraph=True, backend="eager")(t, b), la.solve(t, b)
    else:
        results, expected = torch.compile(act, fullgraph=True, backend="eager")(t), act(t)
    if isinstance(expected, Tensor):
        results, expected = (results,), (expected,)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours._axes is theirs._axes
        torch.testing.assert_close(ours.data, theirs.data)


@pytest.mark.compiles_labels
def test_chains_and_scalars_compile_to_one_graph() -> None:
    t = reordered(operators(), 1, [2, 0, 1])

    def chain(a: Tensor, b: Tensor) -> Tensor:
        x = la.solve(la.inv(la.matrix_exp(la.add_identity(a, 0.5) * 0.1)), b)
        return x * la.det(a) + la.trace(a)

    right = Tensor(torch.ones(3, dtype=F64), Space(["b", "c", "a"], "column"))
    result = torch.compile(chain, fullgraph=True, backend="eager")(t, right)
    assert result._axes is chain(t, right)._axes
    torch.testing.assert_close(result.data, chain(t, right).data)
    sign, _ = torch.compile(la.slogdet, fullgraph=True, backend="eager")(t)
    assert sign.data == 1.0


def test_solve_compiles_with_batches_to_be_paired() -> None:
    a = Tensor(general((2,)).data, (Space(["x", "y"], "k"), Space(ABC, "row"), Space(ABC, "column")))
    b = Tensor(torch.randn(4, 2, 3, 1, dtype=F64), (Space(4, "t"), Space(["y", "x"], "k"), a.dims[1], Space(1, "rhs")))
    result = torch.compile(la.solve, fullgraph=True, backend="eager")(a, b)
    assert result.names == ("k", "t", "column", "rhs")
    torch.testing.assert_close(result.data, la.solve(a, b).data)


# -- torch's own names -------------------------------------------------------------------------------------------------


def test_torch_functions_are_labelled() -> None:
    t = reordered(operators(), 1, [2, 0, 1])
    assert_same(torch.linalg.inv(t), la.inv(t))
    assert_same(torch.inverse(t), la.inv(t))
    assert_same(torch.linalg.det(t), la.det(t))
    assert_same(torch.det(t), la.det(t))
    assert_same(torch.trace(t), la.trace(t))
    assert_same(torch.linalg.matrix_exp(t), la.matrix_exp(t))
    assert_same(torch.matrix_exp(t), la.matrix_exp(t))
    assert_same(torch.linalg.pinv(t), la.pinv(t))
    assert_same(torch.linalg.cholesky(t), la.cholesky(t))
    assert_same(torch.linalg.eigvalsh(t), la.eigvalsh(t))
    assert_same(torch.linalg.eigvals(t), la.eigvals(t))
    assert_same(torch.linalg.svdvals(t), la.svdvals(t))
    assert_same(torch.linalg.eigh(t).eigenvalues, la.eigh(t).values)
    assert_same(torch.linalg.eig(t).eigenvectors, la.eig(t).vectors)
    assert_same(torch.linalg.slogdet(t).logabsdet, la.slogdet(t).logabsdet)
    assert_same(torch.slogdet(t)[0], la.slogdet(t).sign)
    assert_same(torch.linalg.qr(t).Q, la.qr(t).Q)
    assert torch.linalg.svd(t).U.shape == (3, 3)
    assert torch.linalg.svd(t, full_matrices=False).Vh.names == ("singular", "column")
    assert_same(torch.linalg.solve(t, torch.ones(3, dtype=F64)), la.solve(t, torch.ones(3, dtype=F64)))
    assert_same(torch.linalg.inv(A=t), la.inv(t))


def test_options_that_labels_do_not_cover_are_refused() -> None:
    t = operators()
    with pytest.raises(TypeError, match="mode='reduced'"):
        torch.linalg.qr(t, mode="complete")
    with pytest.raises(TypeError, match="left=True"):
        torch.linalg.solve(t, t, left=False)
    with pytest.raises(TypeError, match="out="):
        torch.linalg.inv(t, out=torch.empty(3, 3))


def test_every_function_is_a_method() -> None:
    t = operators()
    for name in [
        "eigh",
        "eigvalsh",
        "eig",
        "eigvals",
        "svd",
        "svdvals",
        "qr",
        "cholesky",
        "inv",
        "det",
        "slogdet",
        "pinv",
        "matrix_exp",
        "lowdin",
        "trace",
    ]:
        getattr(t, name)()
    assert t.solve(torch.ones(3, dtype=F64)).names == ("column",)
    assert t.add_identity(1.0).names == t.names
