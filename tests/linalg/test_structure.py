"""Properties of single kinds of operators: accuracy, cost, closed forms, and errors."""

import pytest
import torch

from linalg.kinds import Draw, explicit_bfgs, make, make_pairs
from moduli.linalg import (
    AAT,
    AtA,
    Dense,
    Diagonal,
    Eigendecomposition,
    FunctionOperator,
    LBFGSOperator,
    LinearOperator,
    LowRankPlusDiagonal,
    MissingAbilityError,
    OperatorProduct,
    OperatorSum,
    Scaled,
    ScaledIdentity,
    SingularError,
)

F64 = torch.float64


def draw(seed=0):
    return Draw(seed, F64, ())


def error(got, want):
    return float((got - want).norm() / want.norm())


# -- L-BFGS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 3, 7])
def test_lbfgs_equals_the_recursion_and_satisfies_the_secant_equation(m):
    s, y = make_pairs(draw(m), 9, m)
    B = LBFGSOperator(s, y)
    torch.testing.assert_close(B.to_dense(), explicit_bfgs(s, y, B.initial), rtol=1e-11, atol=1e-11)
    if m:
        torch.testing.assert_close(B @ s[-1], y[-1], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(B.solve(y[-1]), s[-1], rtol=1e-11, atol=1e-11)
        assert float(B.initial) == pytest.approx(float(y[-1] @ y[-1] / (s[-1] @ y[-1])))
    else:
        assert float(B.initial) == 1.0
    torch.testing.assert_close(B.inverse().to_dense() @ B.to_dense(), torch.eye(9, dtype=F64), rtol=1e-9, atol=1e-9)


def test_lbfgs_accepts_precomputed_gram_matrices():
    s, y = make_pairs(draw(), 6, 3)
    with_gram = LBFGSOperator(s, y, sy=s @ y.T, ss=s @ s.T, yy=y @ y.T)
    plain = LBFGSOperator(s, y)
    b = draw(1)(6)
    for method in ("matvec", "solve"):
        assert torch.equal(getattr(with_gram, method)(b), getattr(plain, method)(b))
    assert torch.equal(with_gram.solve_plus_diag(b, 2.0), plain.solve_plus_diag(b, 2.0))


def test_lbfgs_is_accurate_for_pairs_of_very_different_lengths():
    s, y = make_pairs(draw(2), 8, 4)
    lengths = torch.tensor([1e-8, 1.0, 1e6, 1e-3], dtype=F64)[:, None]
    B, plain, b = LBFGSOperator(lengths * s, lengths * y), LBFGSOperator(s, y), draw(3)(8)
    for shift in (1e-6, 1.0, 1e6, torch.linspace(0.1, 5, 8, dtype=F64)):
        assert error(B.solve_plus_diag(b, shift), plain.solve_plus_diag(b, shift)) < 1e-9
    assert error(B @ b, plain @ b) < 1e-9
    assert error(B.solve(b), plain.solve(b)) < 1e-9


def test_lbfgs_never_forms_the_matrix():
    n = 200_000
    s = torch.randn(4, n, generator=torch.Generator().manual_seed(0), dtype=F64)
    B = LBFGSOperator(s, s * torch.linspace(1, 3, n, dtype=F64))
    b = torch.ones(n, dtype=F64)
    assert error(B @ B.solve(b), b) < 1e-10
    x = B.solve_plus_diag(b, 0.5)
    assert error(B @ x + 0.5 * x, b) < 1e-10
    d = torch.linspace(0, 2, n, dtype=F64)
    x = B.solve_plus_diag(b, d)
    assert error(B @ x + d * x, b) < 1e-10
    assert B.diagonal().shape == (n,)
    x = (B + 0.5).solve(b)
    assert error(B @ x + 0.5 * x, b) < 1e-10


def test_members_of_a_batch_may_have_different_numbers_of_pairs():
    s, y = make_pairs(draw(4), 5, 3)
    mask = torch.tensor([[1.0], [1.0], [0.0]], dtype=F64)
    B = LBFGSOperator(torch.stack([s, s * mask, 0 * s]), torch.stack([y, y * mask, 0 * y]))
    b = draw(5)(3, 5)
    alone = [LBFGSOperator(s, y), LBFGSOperator(s[:2], y[:2]), LBFGSOperator(s[:0], y[:0])]
    for call in (lambda A, v: A.matvec(v), lambda A, v: A.solve(v), lambda A, v: A.solve_plus_diag(v, 0.3)):
        want = torch.stack([call(A, v) for A, v in zip(alone, b, strict=True)])
        torch.testing.assert_close(call(B, b), want, rtol=1e-10, atol=1e-10)


def test_lbfgs_refuses_invalid_pairs_and_options():
    s, y = make_pairs(draw(), 4, 2)
    with pytest.raises(ValueError, match=r"pair 1 has sᵀy = -.*, but BFGS needs sᵀy > 0; skip or damp it"):
        LBFGSOperator(s, torch.stack([y[0], -y[1]]))
    with pytest.raises(ValueError, match="pair 0 has sᵀy = 0"):
        LBFGSOperator(s, torch.zeros_like(y))
    with pytest.raises(ValueError, match=r"pair \(1, 0\) has sᵀy"):
        LBFGSOperator(torch.stack([s, s]), torch.stack([y, -y]))
    with pytest.raises(ValueError, match="pair 0 has sᵀy = nan"):
        LBFGSOperator(s * torch.nan, y)
    with pytest.raises(ValueError, match="one y for each s"):
        LBFGSOperator(s, y[:1])
    with pytest.raises(TypeError, match="of one dtype"):
        LBFGSOperator(s, y.float())
    with pytest.raises(ValueError, match="a positive number, not -1"):
        LBFGSOperator(s, y, scale=-1)
    with pytest.raises(ValueError, match=r"yy has shape \(1, 1\); for 2 pairs it is \(2, 2\)"):
        LBFGSOperator(s, y, yy=torch.ones(1, 1, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5])
def test_lbfgs_refuses_by_the_condition_of_the_small_matrix(dtype, fraction):
    """The sine of the angle between the steps squares to about the rounding error; at this scale their Gram matrix dominates."""
    s, y = (rows.to(dtype) for rows in make_pairs(draw(), 40, 2))
    limit = (20 * torch.finfo(dtype).eps) ** 0.5
    first = s[0] / s[0].norm()
    across = s[1] - first * (first @ s[1])
    near = first + fraction * limit * across / across.norm()
    b = torch.ones(40, dtype=dtype)
    for lengths in ((1.0, 1.0), (1e-6, 1e3)):
        size = torch.tensor(lengths, dtype=dtype)[:, None]
        B = LBFGSOperator(size * torch.stack([first, near]), size * torch.stack([first, near]), scale=1e20)
        for call in (lambda B=B: B.matvec(b), lambda B=B: B.solve_plus_diag(b, 1.0)):
            with pytest.raises(SingularError, match="linearly dependent to working precision; keep fewer pairs"):
                call()
        assert bool(torch.isfinite(B.solve(b)).all())
    B = LBFGSOperator(torch.stack([first, first + 2 * limit * across / across.norm()]), y, scale=1e20)
    assert bool(torch.isfinite(B.matvec(b)).all())


# -- accuracy ---------------------------------------------------------------------------------------------------------


def test_gram_systems_are_solved_with_the_condition_of_the_factor():
    """Forming the Gram matrix of a factor of condition 1e7 would leave a residual error of about 1e-2."""
    Q, P = draw(1).orthonormal(20, 6), draw(2).orthonormal(6, 6)
    J = (Q * torch.logspace(0, -7, 6, dtype=F64)) @ P.T
    x = draw(3)(6)
    r = J @ x
    assert error(AtA(J).solve(J.T @ r), x) < 1e-2  # computing b has already lost this precision
    exact = P @ ((Q.T @ r) / torch.logspace(0, -7, 6, dtype=F64))
    assert error(J @ AtA(J).solve(J.T @ r), J @ exact) < 1e-8
    damped = AtA(J).solve_plus_diag(J.T @ r, 1e-12)
    values = torch.logspace(0, -7, 6, dtype=F64)
    want = P @ ((Q.T @ r) * values / (values**2 + 1e-12))
    assert error(J @ damped, J @ want) < 1e-8


@pytest.mark.parametrize("shift", [1e-12, 1e-6, 1.0, 1e6])
def test_wide_gram_systems_do_not_cancel(shift):
    """(D + JᴴJ)⁻¹ Jᴴ r is lost in cancellation by the textbook Woodbury identity when D is small."""
    Q, P = draw(1).orthonormal(3, 3), draw(2).orthonormal(40, 3)
    values = torch.tensor([3.0, 1.0, 0.5], dtype=F64)
    J, r = (Q * values) @ P.T, draw(3)(3)
    want = (Q.T @ r) * values / (values**2 + shift)
    # Outside the span of J the rounding error of b is divided by the shift, so only components inside are compared.
    assert error(P.T @ AtA(J).solve_plus_diag(J.T @ r, shift), want) < 1e-12
    low = LowRankPlusDiagonal(torch.full((40,), shift, dtype=F64), J.T)
    assert error(P.T @ low.solve(J.T @ r), want) < 1e-12
    few = Eigendecomposition(values**2, P)
    assert error(P.T @ few.solve_plus_diag(J.T @ r, shift), want) < 1e-12


def test_low_rank_systems_with_an_enormous_core_are_accurate():
    low = LowRankPlusDiagonal(torch.ones(50, dtype=F64), draw(1)(50, 3), 1e12 * torch.ones(3, dtype=F64))
    b = draw(2)(50)
    want = b - draw(1)(50, 3) @ torch.linalg.lstsq(draw(1)(50, 3), b).solution
    assert error(low.solve(b), want) < 1e-9


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_sums_have_the_most_specific_class():
    d, A = Diagonal(torch.ones(3)), Dense(torch.eye(3), symmetric=True)
    assert isinstance(d + d, Diagonal)
    assert isinstance(ScaledIdentity(3) + ScaledIdentity(3), ScaledIdentity)
    assert isinstance(d + 1.0, Diagonal)
    assert isinstance(A + d, Dense)
    assert isinstance(AtA(torch.eye(3)) + A, Dense)
    assert isinstance(AtA(torch.eye(3)) + d, OperatorSum)
    assert isinstance(FunctionOperator(lambda x: x, 3, symmetric=True) + A, OperatorSum)
    assert isinstance(Diagonal(torch.ones(3)) * 2, Diagonal)
    assert isinstance(-AtA(torch.eye(3)), Scaled)
    assert len((AtA(torch.eye(3)) + d + AtA(torch.eye(3)) + d)._terms) == 4
    assert len((A @ d @ A)._factors) == 3
    assert A.H is A
    both = OperatorSum(d, ScaledIdentity(3, 2.0))
    assert torch.equal(both.solve(torch.ones(3)), torch.full((3,), 1 / 3))


def test_map_applies_a_function_to_the_eigenvalues():
    _, A = make("symmetric", n=5)
    decomposition = Eigendecomposition.of(A)
    torch.testing.assert_close(decomposition.to_dense(), A)
    torch.testing.assert_close(decomposition.map(lambda v: v**2).to_dense(), A @ A)
    assert decomposition.map(torch.abs).is_positive_semidefinite
    assert not decomposition.is_positive_semidefinite
    assert Eigendecomposition.of(decomposition) is decomposition
    torch.testing.assert_close(Eigendecomposition.of(Dense(A, symmetric=True)).to_dense(), A)
    torch.testing.assert_close(decomposition.vectors @ torch.diag(decomposition.values) @ decomposition.vectors.T, A)


def test_an_inverse_can_be_damped_without_inverting():
    _, A = make("positive", n=5)
    H, b = Dense(A, positive_semidefinite=True).inverse(), draw(1)(5)
    some = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0], dtype=F64)
    for shift in (0.0, 1e-9, 0.3, some):
        D = torch.diag(torch.as_tensor(shift, dtype=F64).expand(5))
        want = torch.linalg.solve(torch.linalg.inv(A) + D, b)
        assert error(H.solve_plus_diag(b, shift), want) < 1e-10


def test_derivatives_reach_the_tensors_of_an_operator():
    J = draw(1)(3, 4).requires_grad_()
    d, U = (1 + draw(2)(4).abs()).requires_grad_(), draw(3)(4, 2).requires_grad_()
    b = draw(4)(4).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda J, b: AtA(J).solve_plus_diag(b, 0.5), (J, b))
    assert check(lambda J, b: AAT(J.T).solve_plus_diag(b, 0.5), (J, b))
    assert check(lambda d, U, b: LowRankPlusDiagonal(d, U).solve(b), (d, U, b))
    assert check(lambda d, b: Diagonal(d).solve(b), (d, b))
    assert check(lambda A, b: Dense(A).solve(b), (draw(5).regular(4).requires_grad_(), b))
    s, y = (part.requires_grad_() for part in make_pairs(draw(6), 4, 2))
    assert check(lambda s, y, b: LBFGSOperator(s, y).matvec(b), (s, y, b))
    assert check(lambda s, y, b: LBFGSOperator(s, y).solve(b), (s, y, b))


def test_complex_shifts_are_solved():
    some = Draw(7, torch.complex128, ())
    J, b, d = some(3, 4), some(4), some(4)
    Q = some.orthonormal(4, 2)
    for A in (
        AtA(J),
        AAT(J.mH),
        LowRankPlusDiagonal(torch.ones(4, dtype=F64), Q),
        Eigendecomposition(torch.ones(2, dtype=F64), Q),
        Dense(J.mH @ J, positive_semidefinite=True),
    ):
        for shift in (d, 1 + 2j, torch.tensor(0.5, dtype=F64), torch.ones(4, dtype=F64)):
            D = torch.diag(torch.as_tensor(shift, dtype=torch.complex128).expand(4))
            assert error(A.solve_plus_diag(b, shift), torch.linalg.solve(A.to_dense() + D, b)) < 1e-12
        assert not (A * 1j).is_symmetric
        assert error((A * 1j).to_dense(), 1j * A.to_dense()) == 0


def test_a_shift_that_cancels_the_initial_matrix_of_lbfgs():
    s, y = make_pairs(draw(), 4, 4)
    B, b = LBFGSOperator(s, y, scale=2.0), draw(1)(4)
    shift = torch.tensor([-2.0, 1.0, 1.0, 1.0], dtype=F64)
    x = B.solve_plus_diag(b, shift)
    assert error(B @ x + shift * x, b) < 1e-10


def test_products_with_matrices_without_columns_are_empty():
    A = FunctionOperator(lambda x: 2 * x, 3, symmetric=True)
    assert (A @ torch.zeros(3, 0)).shape == (3, 0)


def test_batched_functions_equal_dense_products():
    some = Draw(1, F64, (2,))
    M = some(3, 4)
    A = FunctionOperator(
        lambda x: torch.einsum("bij,...bj->...bi", M, x),
        4,
        rows=3,
        rmatvec=lambda y: torch.einsum("bij,...bi->...bj", M, y),
        dtype=F64,
        vectorized=True,
        batch=(2,),
    )
    X = Draw(2, F64, ())(5, 2, 4)
    torch.testing.assert_close(A.matvec(X), (M @ X.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(A.to_dense(), M)
    torch.testing.assert_close(A.H.to_dense(), M.mT)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_singular_systems_are_refused_by_class():
    b = torch.ones(2)
    for A in (
        Dense(torch.ones(2, 2)),
        Dense(torch.zeros(2, 2), positive_semidefinite=True),
        Diagonal(torch.tensor([1.0, 0.0])),
        ScaledIdentity(2, 0.0),
        Scaled(AtA(torch.eye(2)), 0.0),
        AtA(torch.zeros(2, 2)),
        Eigendecomposition(torch.zeros(2), torch.eye(2)),
        LowRankPlusDiagonal(torch.zeros(2), torch.ones(2, 1)),
    ):
        with pytest.raises(SingularError, match=f"^{type(A).__name__} of shape 2 x 2 is (singular|declared)"):
            A.solve(b)
    with pytest.raises(torch.linalg.LinAlgError, match="plus the diagonal is singular"):
        Diagonal(torch.ones(2)).solve_plus_diag(b, -1.0)
    torch.testing.assert_close(Scaled(AtA(torch.eye(2)), 0.0).solve_plus_diag(b, 2.0), b / 2)


def test_invalid_tensors_of_operators_are_refused():
    eye = torch.eye(2)
    with pytest.raises(TypeError, match="matrix is a torch.Tensor, not list"):
        Dense([[1.0]])
    with pytest.raises(TypeError, match="has dtype torch.int64"):
        Diagonal(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 2 axes"):
        Dense(torch.ones(2))
    with pytest.raises(ValueError, match="declared symmetric, but is not square"):
        Dense(torch.ones(2, 3), symmetric=True)
    with pytest.raises(TypeError, match="needs real or complex"):
        ScaledIdentity(2, torch.tensor(1))
    with pytest.raises(TypeError, match="of the precision of the vectors"):
        Eigendecomposition(torch.ones(2, dtype=F64), eye)
    with pytest.raises(ValueError, match="with k at most n"):
        Eigendecomposition(torch.ones(3), eye)
    with pytest.raises(TypeError, match="not declared symmetric"):
        Eigendecomposition.of(Dense(eye))
    with pytest.raises(ValueError, match="only a square one"):
        Eigendecomposition.of(torch.ones(2, 3))
    with pytest.raises(ValueError, match="both need n = 2"):
        LowRankPlusDiagonal(torch.ones(3), eye)
    with pytest.raises(ValueError, match="core has shape"):
        LowRankPlusDiagonal(torch.ones(2), eye, torch.ones(3))
    with pytest.raises(TypeError, match="need one precision"):
        LowRankPlusDiagonal(torch.ones(2, dtype=F64), eye)
    with pytest.raises(TypeError, match="made of operators, not of Tensor"):
        OperatorProduct(eye, eye)
    with pytest.raises(ValueError, match="batch shapes that broadcast"):
        OperatorSum(Dense(eye.expand(2, 2, 2)), Dense(eye.expand(3, 2, 2)))
    with pytest.raises(ValueError, match="do not broadcast"):
        Dense(eye.expand(2, 2, 2)).matvec(torch.ones(3, 2))


def test_invalid_factors_are_refused():
    A = Dense(torch.eye(2))
    with pytest.raises(TypeError, match="the factor is complex, but Dense of shape 2 x 2 is real"):
        A * torch.tensor(1j)
    with pytest.raises(TypeError, match="not bool"):
        A * True


def test_invalid_functions_are_refused():
    with pytest.raises(TypeError, match="a function of a vector, not Tensor"):
        FunctionOperator(torch.eye(2), 2)
    with pytest.raises(ValueError, match="declare it with vectorized=True"):
        FunctionOperator(torch.clone, 2, batch=(3,))
    with pytest.raises(ValueError, match=r"matvec of FunctionOperator of shape 2 x 2 returned .* of shape \(3,\)"):
        FunctionOperator(lambda x: torch.zeros(3), 2) @ torch.ones(2)
    with pytest.raises(MissingAbilityError, match="give rmatvec=, or declare symmetric=True"):
        FunctionOperator(torch.clone, 2).rmatvec(torch.ones(2))
    with pytest.raises(MissingAbilityError, match="AtA of shape 2 x 2 cannot solve: it is matrix-free"):
        AtA(FunctionOperator(torch.clone, 2, symmetric=True)).solve(torch.ones(2))


def test_classes_of_operators_are_final():
    # Some classes share an abstract base below LinearOperator.
    classes = [kind for kind in LinearOperator.__subclasses__() if kind.__module__.startswith("moduli.")]
    kinds = [leaf for kind in classes for leaf in (kind.__subclasses__() or [kind])]
    assert len(kinds) == 15
    assert all(getattr(kind, "__final__", False) for kind in kinds)
