"""Laws of operators of every kind: each method equals dense linear algebra, alone and in a batch."""

import copy
import pickle

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from linalg.kinds import KINDS, MATRIX_FREE, REAL_ONLY, RECTANGULAR, SINGULAR, make
from moduli.linalg import (
    Dense,
    Diagonal,
    LinearOperator,
    MissingAbilityError,
    ScaledIdentity,
    SingularError,
)

kinds = pytest.mark.parametrize("name", KINDS)
square = pytest.mark.parametrize("name", [name for name in KINDS if name not in RECTANGULAR])
solvable = pytest.mark.parametrize("name", [n for n in KINDS if n not in RECTANGULAR | MATRIX_FREE | SINGULAR])
shiftable = pytest.mark.parametrize("name", [n for n in KINDS if n not in RECTANGULAR | MATRIX_FREE])

draws = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "n": st.integers(0, 6),
        "k": st.integers(0, 7),
        "scale": st.sampled_from([1e-3, 1.0, 1e4]),
        "dtype": st.sampled_from([torch.float64, torch.complex128]),
        "batch": st.sampled_from([(), (3,), (2, 1)]),
    }
)
few = settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


def build(name, case):
    case = dict(case)
    if name in REAL_ONLY:
        case["dtype"] = torch.float64
    operator, dense = make(name, **case)
    return operator, dense, torch.Generator().manual_seed(case["seed"] + 1), case


def numbers(generator, shape, dtype):
    return torch.randn(*shape, generator=generator, dtype=dtype)


def assert_close(got, want, tol=1e-10):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel():
        assert float((got - want).abs().max()) <= tol * max(1.0, float(want.abs().max()))


def multiply(A, x):
    return (A @ x.unsqueeze(-1)).squeeze(-1)


@kinds
@given(case=draws)
@few
def test_products_and_entries_equal_dense_ones(name, case):
    A, dense, generator, case = build(name, case)
    m, n = dense.shape[-2:]
    assert A.shape == dense.shape
    assert A.batch_shape == dense.shape[:-2] == case["batch"]
    assert A.dtype == dense.dtype
    assert A.device == dense.device
    assert_close(A.to_dense(), dense)
    assert_close(A.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    x, y = numbers(generator, (n,), A.dtype), numbers(generator, (m,), A.dtype)
    X, Y = numbers(generator, (n, 3), A.dtype), numbers(generator, (m, 2), A.dtype)
    assert_close(A.matvec(x), multiply(dense, x))
    assert_close(A @ x, multiply(dense, x))
    assert_close(A.rmatvec(y), multiply(dense.mH, y))
    assert_close(A @ X, dense @ X)
    assert_close(A.rmatmat(Y), dense.mH @ Y)
    lead = (*case["batch"],) if case["batch"] else (5,)
    many, back = numbers(generator, (*lead, n), A.dtype), numbers(generator, (*lead, m), A.dtype)
    assert_close(A.matvec(many), multiply(dense, many))
    assert_close(A.rmatvec(back), multiply(dense.mH, back))
    stack = numbers(generator, (*lead, n, 2), A.dtype)
    assert_close(A.matmat(stack), dense @ stack)
    # <A x, y> = <x, Aᴴ y>
    left = torch.linalg.vecdot(A.matvec(x), y)
    right = torch.linalg.vecdot(x.expand(A.rmatvec(y).shape), A.rmatvec(y))
    assert_close(left, right, 1e-10 * max(1.0, float(dense.abs().sum()) if dense.numel() else 1.0))


@kinds
@given(case=draws)
@few
def test_sums_multiples_and_adjoints_equal_dense_ones(name, case):
    A, dense, generator, case = build(name, case)
    n = dense.shape[-1]
    assert_close(A.H.to_dense(), dense.mH)
    assert_close(A.T.to_dense(), dense.mT)
    assert_close(A.T.T.to_dense(), dense)
    x = numbers(generator, (dense.shape[-2],), A.dtype)
    assert_close(A.H @ x, multiply(dense.mH, x))
    assert_close(A.T @ x, multiply(dense.mT, x))
    assert_close((-A).to_dense(), -dense)
    assert_close((A / 4).to_dense(), dense / 4)
    member = torch.arange(1, 1 + dense.shape[:-2].numel()).to(A.dtype).reshape(dense.shape[:-2])
    assert_close((A * member).to_dense(), dense * member[..., None, None])
    assert_close((A * member * 2).H.to_dense(), 2 * dense.mH * member[..., None, None])
    if A.dtype.is_complex:
        assert_close(((1 + 2j) * A).to_dense(), (1 + 2j) * dense)
        assert_close(((1 + 2j) * A).H.to_dense(), (1 - 2j) * dense.mH)
    other = numbers(generator, tuple(dense.shape), A.dtype)
    assert_close((A + Dense(other)).to_dense(), dense + other)
    assert_close((A - Dense(other)).H.to_dense(), (dense - other).mH)
    assert_close((A @ Dense(other.mH)).to_dense(), dense @ other.mH)
    assert_close((Dense(other.mH) @ A).T.to_dense(), (other.mH @ dense).mT)
    if dense.shape[-2] == n:
        eye, d = torch.eye(n, dtype=A.dtype), numbers(generator, (n,), A.dtype)
        assert_close((A + 2.5).to_dense(), dense + 2.5 * eye)
        assert_close((2.5 - A).to_dense(), 2.5 * eye - dense)
        assert_close((A + Diagonal(d)).to_dense(), dense + d.diag_embed())
        assert_close((ScaledIdentity(n, 2.0, dtype=A.dtype) + A).to_dense(), dense + 2 * eye)
        assert_close(A.add_diagonal(d).to_dense(), dense + d.diag_embed())
        assert_close((A + A + A).to_dense(), 3 * dense)
        assert_close(A.trace(), dense.diagonal(dim1=-2, dim2=-1).sum(-1))


def assert_solves(dense, X, B, tol=1e-10):
    """Check that B = dense X, relative to the norms of all three.

    Args:
        dense: The matrix.
        X: The solution.
        B: The right-hand side.
        tol: The relative tolerance.
    """
    if X.numel() == 0:
        return
    residual = dense @ X - B
    size = float(torch.linalg.matrix_norm(dense, 2).max()) * float(X.abs().max()) + float(B.abs().max())
    assert float(residual.abs().max()) <= tol * size


@solvable
@given(case=draws)
@few
def test_solutions_and_inverses_solve_the_dense_system(name, case):
    A, dense, generator, case = build(name, case)
    n = dense.shape[-1]
    for lead in ((), (*case["batch"],), (4, *case["batch"])):
        b = numbers(generator, (*lead, n), A.dtype)
        x = A.solve(b)
        assert x.shape == (*torch.broadcast_shapes(lead, case["batch"]), n)
        assert_solves(dense, x.unsqueeze(-1), b.unsqueeze(-1))
    assert_close(A.inverse().to_dense(), torch.linalg.inv(dense), 1e-9)
    assert_close(A.inverse().inverse().to_dense(), dense)
    b = numbers(generator, (n,), A.dtype)
    assert_close(A.inverse().solve(b), multiply(dense, b))
    assert_solves(dense.mH, A.H.solve(b).unsqueeze(-1), b.unsqueeze(-1))
    assert_solves(-2 * dense, (-2 * A).solve(b).unsqueeze(-1), b.unsqueeze(-1))


@shiftable
@given(case=draws)
@few
def test_solutions_of_shifted_systems_solve_the_dense_system(name, case):
    A, dense, generator, case = build(name, case)
    n = dense.shape[-1]
    eye = torch.eye(n, dtype=A.dtype)
    size = float(torch.linalg.matrix_norm(dense, 2).max()) + 1.0 if n else 1.0
    vector = size * (2 + torch.rand(n, generator=generator, dtype=torch.float64)).to(A.dtype)
    members = (size * (2 + torch.rand(*case["batch"], 1, generator=generator, dtype=torch.float64))).to(A.dtype)
    member_vectors = members * (1 + torch.rand(n, generator=generator, dtype=torch.float64))
    b = numbers(generator, (n,), A.dtype)
    for shift in (2 * size, -2 * size, torch.tensor(3 * size, dtype=A.dtype), vector, -vector, members, member_vectors):
        if isinstance(shift, float):
            D = shift * eye
        else:
            D = shift.expand(*shift.shape[:-1], n).diag_embed() if shift.ndim else shift * eye
        x = A.solve_plus_diag(b, shift)
        assert_solves(dense + D, x.unsqueeze(-1), b.unsqueeze(-1))
        y = A.add_diagonal(shift).solve(b)
        assert_solves(dense + D, y.unsqueeze(-1), b.unsqueeze(-1))
    mixed = vector * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    assert_solves(dense + mixed.diag_embed(), A.solve_plus_diag(b, mixed).unsqueeze(-1), b.unsqueeze(-1))
    if name not in SINGULAR:
        x = A.solve_plus_diag(b, 0.0)
        assert_solves(dense, x.unsqueeze(-1), b.unsqueeze(-1))
        some = vector * (torch.arange(n) % 2 == 0)
        if name in {"positive", "gram tall", "outer wide", "low rank plain", "lbfgs", "lbfgs slots", "lbfgs inverse"}:
            assert_solves(dense + some.diag_embed(), A.solve_plus_diag(b, some).unsqueeze(-1), b.unsqueeze(-1))


@kinds
def test_single_precision_stays_single(name):
    A, dense = make(name, dtype=torch.float32)
    b = torch.ones(dense.shape[-1])
    assert A.to_dense().dtype == torch.float32
    assert A.matvec(b).dtype == torch.float32
    assert_close(A.matvec(b), dense @ b, 1e-5)
    if name in RECTANGULAR | MATRIX_FREE:
        return
    assert A.solve_plus_diag(b, 30.0).dtype == torch.float32
    assert_solves(dense + 30 * torch.eye(4), A.solve_plus_diag(b, 30.0)[:, None], b[:, None], 1e-5)


@kinds
def test_declared_properties_hold(name):
    A, dense = make(name, n=5)
    if A.is_symmetric:
        assert_close(dense, dense.mH)
        assert A.H is A
        assert A.T is A
    if A.is_positive_semidefinite:
        assert A.is_symmetric
        assert float(torch.linalg.eigvalsh(dense).min()) >= -1e-10
        assert (2 * A).is_positive_semidefinite
        assert not (-1 * A).is_positive_semidefinite
        assert (A + A).is_positive_semidefinite
    assert A.is_matrix_free == (name in MATRIX_FREE)


@kinds
def test_copies_and_pickles_are_equal(name):
    A, _ = make(name)
    assert torch.equal(copy.deepcopy(A).to_dense(), A.to_dense())
    if name not in MATRIX_FREE:  # a lambda cannot be pickled
        assert torch.equal(pickle.loads(pickle.dumps(A)).to_dense(), A.to_dense())


@kinds
def test_wrong_arguments_are_refused(name):
    A, dense = make(name)
    m, n = dense.shape
    with pytest.raises(ValueError, match=rf"x has shape \({n + 1},\), but {type(A).__name__} of shape {m} x {n} needs"):
        A.matvec(torch.zeros(n + 1, dtype=A.dtype))
    with pytest.raises(ValueError, match="matvec takes vectors"):
        A.matmat(torch.zeros(n, dtype=A.dtype))
    with pytest.raises(TypeError, match="write x.to"):
        A.matvec(torch.zeros(n, dtype=torch.float32))
    with pytest.raises(TypeError, match="not list"):
        A.matvec([0.0] * n)
    with pytest.raises(TypeError, match="could mean two things"):
        A + torch.zeros(n, dtype=A.dtype)
    with pytest.raises(TypeError):
        A + "text"
    with pytest.raises(TypeError, match="a number or a torch.Tensor"):
        A * "text"
    with pytest.raises(TypeError, match="is real"):
        A * 1j
    with pytest.raises(ValueError, match="one per member"):
        A * torch.ones(3, dtype=A.dtype)
    with pytest.raises(ValueError, match="equal rows and columns"):
        A + Dense(torch.zeros(m + 1, n, dtype=A.dtype))
    with pytest.raises(TypeError, match="convert one"):
        A + Dense(torch.zeros(m, n))
    with pytest.raises(ValueError, match="gives others"):
        A @ Dense(torch.zeros(n + 1, 2, dtype=A.dtype))
    if m != n:
        for ability in ("solve", "solve_plus_diag", "trace", "inverse"):
            with pytest.raises(MissingAbilityError, match=f"cannot {ability}: it is not square"):
                getattr(A, ability)(
                    *[torch.zeros(n, dtype=A.dtype), 1.0][: ability.count("solve") + ability.count("diag")]
                )
        return
    b = torch.zeros(n, dtype=A.dtype)
    with pytest.raises(ValueError, match="diag has shape"):
        A.solve_plus_diag(b, torch.zeros(n + 1, dtype=A.dtype))
    with pytest.raises(TypeError, match="number or a torch.Tensor"):
        A.solve_plus_diag(b, "text")
    with pytest.raises(TypeError, match="is real"):
        A.solve_plus_diag(b, 1j)
    if name in MATRIX_FREE:
        for call in (lambda: A.solve(b), lambda: A.solve_plus_diag(b, 1.0)):
            with pytest.raises(MissingAbilityError, match="it is matrix-free; use cg, minres or lsqr"):
                call()
    if name in SINGULAR:
        with pytest.raises(SingularError, match="is singular"):
            A.solve(b)


@shiftable
def test_products_and_solutions_pass_gradcheck(name):
    """Check derivatives with respect to the vector, the right-hand side and the shift."""
    A, dense = make(name, n=3)
    size = float(torch.linalg.matrix_norm(dense, 2)) + 1.0
    b = torch.linspace(1, 2, 3, dtype=torch.float64, requires_grad=True)
    d = torch.tensor([2.0, 2.5, 3.0], dtype=torch.float64).mul(size).requires_grad_()
    assert torch.autograd.gradcheck(A.matvec, (b,))
    assert torch.autograd.gradcheck(A.solve_plus_diag, (b, d))
    assert torch.autograd.gradcheck(A.solve_plus_diag, (b, d[:1]))
    if name not in SINGULAR:
        assert torch.autograd.gradcheck(A.solve, (b,))


def test_a_user_defined_operator_needs_one_method():
    """All other methods are derived from `_matmat`."""

    class Reverse(LinearOperator):
        def _matmat(self, X):
            return X.flip(-2)

    A = Reverse((3, 3), torch.float64, torch.device("cpu"), symmetric=True)
    b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.equal(A @ b, b.flip(0))
    assert torch.equal(A.rmatvec(b), b.flip(0))
    assert_close(A.solve(b), b.flip(0))
    assert_close(A.solve_plus_diag(b, 2.0), torch.linalg.solve(A.to_dense() + 2 * torch.eye(3, dtype=torch.float64), b))
    assert torch.equal(A.diagonal(), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    bare = Reverse((3, 3), torch.float64, torch.device("cpu"))
    with pytest.raises(MissingAbilityError, match="Reverse of shape 3 x 3 cannot multiply by its adjoint"):
        bare.rmatvec(b)
    with pytest.raises(MissingAbilityError):
        bare.rmatmat(b[:, None])
    with pytest.raises(TypeError, match="abstract"):
        LinearOperator((1, 1), torch.float64, torch.device("cpu"))
