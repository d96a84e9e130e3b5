"""The solvers compared with dense linear algebra, and their outcomes for singular and indefinite systems."""

import itertools
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from linalg.kinds import Draw, make
from moduli.linalg import (
    AtA,
    Dense,
    Diagonal,
    FunctionOperator,
    LBFGSOperator,
    MissingAbilityError,
    Outcome,
    cg,
    lsqr,
    minres,
    steihaug,
    trust_exact,
)

F64, F32, C128 = torch.float64, torch.float32, torch.complex128
some = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
seeds, sizes = st.integers(0, 10**6), st.integers(0, 8)
dtypes = st.sampled_from([F64, C128, F32])
scales = st.sampled_from([1e-12, 1.0, 1e9])

SYMMETRIC = [cg, minres, lambda A, b, **more: steihaug(A, b, 1.0, **more)]


def tol(dtype):
    return 1e-8 if dtype in (F64, C128) else 2e-3


def assert_close(got, want, tolerance):
    assert got.dtype == want.dtype
    if want.numel():
        assert float((got - want).abs().max()) <= tolerance * float(want.abs().max().clamp(min=1e-300))


@given(seed=seeds, n=sizes, dtype=dtypes, scale=scales)
@some
def test_cg_solves_positive_systems(seed, n, dtype, scale):
    _, A = make("positive", seed=seed, n=n, dtype=dtype)
    b = scale * Draw(seed + 1, dtype, ())(n)
    result = cg(A, b)
    assert result.outcome is Outcome.CONVERGED
    assert result.direction is None
    assert_close(result.x, torch.linalg.solve(A, b), tol(dtype))
    jacobi = Diagonal(A.diagonal(), positive_semidefinite=not dtype.is_complex)
    if not dtype.is_complex:
        assert_close(cg(A, b, preconditioner=jacobi.inverse()).x, result.x, tol(dtype))
    start = scale * Draw(seed + 2, dtype, ())(n)
    assert_close(cg(A, b, x0=start).x, result.x, 10 * tol(dtype))


@given(seed=seeds, n=sizes, dtype=dtypes, scale=scales)
@some
def test_minres_solves_indefinite_systems(seed, n, dtype, scale):
    _, A = make("symmetric", seed=seed, n=n, dtype=dtype)
    b = scale * Draw(seed + 1, dtype, ())(n)
    result = minres(A, b)
    assert result.outcome is Outcome.CONVERGED
    assert float((A @ result.x - b).norm()) <= 10 * tol(dtype) * float(b.norm())
    assert math.isclose(
        result.residual_norm, float((A @ result.x - b).norm()), abs_tol=10 * tol(dtype) * float(b.norm()) + 1e-300
    )


@given(seed=seeds, m=sizes, n=sizes, dtype=dtypes, scale=scales, damp=st.sampled_from([0.0, 0.5]))
@some
def test_lsqr_solves_least_squares(seed, m, n, dtype, scale, damp):
    draw = Draw(seed, dtype, ())
    A, b = draw(m, n), scale * draw(m)
    result = lsqr(A, b, damp=damp)
    stacked = torch.cat([A, damp * torch.eye(n, dtype=dtype)])
    right = torch.cat([b, torch.zeros(n, dtype=dtype)])
    want = torch.linalg.pinv(stacked) @ right
    assert result.outcome in (Outcome.CONVERGED, Outcome.LEAST_SQUARES)
    residual = stacked @ result.x - right
    assert float((stacked.mH @ residual).norm()) <= tol(dtype) * float(b.norm()) * (1 + float(A.norm())) ** 2 + 1e-300
    best = float((stacked @ want - right).norm())
    assert abs(result.residual_norm - best) <= tol(dtype) * max(best, float(b.norm())) * 10 + 1e-300
    if m and n and float(torch.linalg.cond(stacked)) < 30:
        assert float((result.x - want).norm()) <= 100 * tol(dtype) * float(b.norm())


def test_lsqr_is_the_matrix_free_gauss_newton_step():
    draw = Draw(0, F64, ())
    J, r = draw(9, 4), draw(9)
    A = FunctionOperator(lambda x: J @ x, 4, rows=9, rmatvec=lambda y: J.T @ y, dtype=F64)
    want = AtA(J).solve_plus_diag(J.T @ r, 0.3)
    assert_close(lsqr(A, r, damp=0.3**0.5).x, want, 1e-8)
    with pytest.raises(MissingAbilityError, match="give rmatvec="):
        lsqr(FunctionOperator(lambda x: J @ x, 4, rows=9, dtype=F64), r)


# -- singular and indefinite systems -----------------------------------------------------------------------------------------


def test_cg_reports_negative_curvature():
    A = torch.diag(torch.tensor([3.0, 2.0, -1.0], dtype=F64))
    result = cg(A, torch.ones(3, dtype=F64))
    assert result.outcome is Outcome.NEGATIVE_CURVATURE
    v = result.direction
    assert float(v @ A @ v) <= 0
    first = cg(torch.diag(torch.tensor([1.0, -1.0])), torch.ones(2))
    assert (first.outcome, first.iterations) == (Outcome.NEGATIVE_CURVATURE, 1)
    assert torch.equal(first.x, torch.zeros(2))


def test_singular_systems_have_least_squares_solutions_or_are_reported():
    A = torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=F64))
    solvable, not_solvable = torch.tensor([2.0, 1.0, 0.0], dtype=F64), torch.ones(3, dtype=F64)
    for solver in (cg, minres, lsqr):
        result = solver(A, solvable)
        assert result.outcome is Outcome.CONVERGED
        assert_close(result.x, torch.tensor([1.0, 1.0, 0.0], dtype=F64), 1e-9)
    unsolved = cg(A, not_solvable)
    assert unsolved.outcome is Outcome.SINGULAR
    assert float((A @ unsolved.direction).norm()) <= 1e-12 * float(unsolved.direction.norm())
    for solver in (minres, lsqr):
        result = solver(A, not_solvable)
        assert result.outcome is Outcome.LEAST_SQUARES
        assert math.isclose(result.residual_norm, 1.0, rel_tol=1e-9)
        assert float((A @ (not_solvable - A @ result.x)).norm()) < 1e-8
    zero = torch.zeros(3, 3, dtype=F64)
    assert cg(zero, not_solvable).outcome is Outcome.SINGULAR
    assert minres(zero, not_solvable).outcome is Outcome.LEAST_SQUARES
    assert lsqr(zero, not_solvable).outcome is Outcome.LEAST_SQUARES


@given(seed=seeds, n=st.integers(1, 8))
@some
def test_minres_reports_negative_curvature_when_asked(seed, n):
    _, A = make("symmetric", seed=seed, n=n)
    b = Draw(seed + 1, F64, ())(n)
    result = minres(A, b, stop_at_negative_curvature=True)
    if result.outcome is Outcome.NEGATIVE_CURVATURE:
        r = result.direction
        assert_close(r, b - A @ result.x, 1e-6)
        assert float(r @ A @ r) <= 1e-9 * float(r @ r)
    else:
        assert result.outcome is Outcome.CONVERGED
    _, positive = make("positive", seed=seed, n=n)
    assert minres(positive, b, stop_at_negative_curvature=True).outcome is Outcome.CONVERGED


def test_ill_conditioned_systems_are_solved_to_the_requested_residual():
    Q = Draw(3, F64, ()).orthonormal(12, 12)
    A = (Q * torch.logspace(0, -9, 12, dtype=F64)) @ Q.T
    A = (A + A.T) / 2
    b = A @ torch.ones(12, dtype=F64)
    for solver in (cg, minres):
        result = solver(A, b, rtol=1e-10, maxiter=2000)
        assert result.outcome is Outcome.CONVERGED
        assert float((A @ result.x - b).norm()) <= 2e-10 * float(b.norm())
    assert cg(A, Q[:, -1].contiguous(), rtol=1e-16, maxiter=5000).outcome is not Outcome.CONVERGED


def test_the_residual_of_minres_never_grows():
    _, A = make("symmetric", n=20, seed=5)
    norms = []
    minres(A, torch.ones(20, dtype=F64), callback=lambda k, x, norm: norms.append((k, norm)))
    assert [k for k, _ in norms] == list(range(1, len(norms) + 1))
    assert all(late <= early for (_, early), (_, late) in itertools.pairwise(norms))


@pytest.mark.parametrize("solver", [cg, minres, lsqr])
def test_limits_callbacks_and_zero_right_hand_sides(solver):
    _, A = make("positive", n=8)
    b = torch.ones(8, dtype=F64)
    assert solver(A, b, maxiter=2).outcome is Outcome.MAXITER
    assert solver(A, b, maxiter=2).iterations == 2
    assert solver(A, b, maxiter=0).iterations == 0
    stopped = solver(A, b, callback=lambda k, x, norm: k == 3)
    assert (stopped.outcome, stopped.iterations) == (Outcome.STOPPED, 3)
    nothing = solver(A, 0 * b)
    assert (nothing.outcome, nothing.iterations, nothing.residual_norm) == (Outcome.CONVERGED, 0, 0.0)
    assert not nothing.x.any()
    assert solver(A, b, rtol=0.0, atol=100.0).iterations == 0
    loose, tight = solver(A, b, rtol=1e-2), solver(A, b, rtol=1e-12)
    assert loose.iterations < tight.iterations
    assert loose.residual_norm <= 1e-2 * 8**0.5
    assert torch.equal(solver(A, b).x, solver(A, b).x)
    one = solver(torch.tensor([[4.0]]), torch.tensor([2.0]))
    assert one.x.tolist() == pytest.approx([0.5], rel=1e-6)
    assert solver(torch.zeros(0, 0), torch.zeros(0)).outcome is Outcome.CONVERGED


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_scales_are_solved_in_single_precision(scale):
    A, b = torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.full((3,), scale)
    want = b / A.diagonal()
    for solver in (cg, minres, lsqr):
        assert_close(solver(A, b).x, want, 1e-4)
    for result in (steihaug(A, b, 10 * scale), trust_exact(A, b, 10 * scale)):
        assert result.outcome is Outcome.INTERIOR
        assert_close(result.step, -want, 1e-4)
    for result in (steihaug(A, b, 0.1 * scale), trust_exact(A, b, 0.1 * scale)):
        assert result.outcome is Outcome.BOUNDARY
        assert result.step.double().norm().item() == pytest.approx(0.1 * scale, rel=1e-5)


@pytest.mark.parametrize("solver", SYMMETRIC)
def test_wrong_arguments_are_refused(solver):
    A, b = torch.eye(3), torch.ones(3)
    with pytest.raises(ValueError, match="[bg] has 1 non-finite of 3 entries"):
        solver(A, torch.tensor([1.0, math.nan, 1.0]))
    with pytest.raises(ValueError, match="non-finite numbers in iteration 1"):
        solver(A * math.inf, b)
    with pytest.raises(TypeError, match="not declared so; declare it"):
        solver(Dense(A), b)
    with pytest.raises(TypeError, match="a LinearOperator or a matrix"):
        solver("A", b)
    with pytest.raises(ValueError, match="is a batch; call it once per member"):
        solver(Dense(A.expand(2, 3, 3), symmetric=True), b)
    with pytest.raises(ValueError, match="take one vector of 3"):
        solver(A, b.expand(2, 3))
    for wrong in ({"rtol": -1.0}, {"atol": math.nan}, {"maxiter": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} cannot be"):
            solver(A, b, **wrong)
    with pytest.raises(ValueError, match="is declared symmetric, but is not square"):
        solver(torch.ones(2, 3), b)


def test_wrong_arguments_of_single_solvers_are_refused():
    A, b = torch.eye(3), torch.ones(3)
    with pytest.raises(ValueError, match="rᴴ M r = -3"):
        cg(A, 3**0.5 * b, preconditioner=Diagonal(-3 * torch.ones(3)))
    with pytest.raises(ValueError, match="they need equal shapes"):
        cg(A, b, preconditioner=Diagonal(torch.ones(2)))
    with pytest.raises(ValueError, match="x0 has 3 non-finite"):
        cg(A, b, x0=b / 0)
    with pytest.raises(ValueError, match="damp is a finite number"):
        lsqr(A, b, damp=-1.0)
    with pytest.raises(TypeError, match="lsqr needs a LinearOperator"):
        lsqr("A", b)
    for solver in (steihaug, trust_exact):
        for radius in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match="radius of a trust region is positive"):
                solver(A, b, radius)
    with pytest.raises(ValueError, match="infinite; without a region"):
        trust_exact(A, b, math.inf)
    with pytest.raises(ValueError, match="non-finite entries"):
        trust_exact(A * math.nan, b, 1.0)
    with pytest.raises(MissingAbilityError, match="cannot solve the trust-region problem exactly: it is matrix-free"):
        trust_exact(FunctionOperator(lambda x: x, 3, symmetric=True), b, 1.0)


def test_outcomes_are_sentences():
    assert all(str(outcome).endswith(".") and " " in str(outcome) for outcome in Outcome)


def test_solvers_accept_lbfgs_operators_and_shifts():
    draw = Draw(0, F64, ())
    s = draw(3, 6)
    B = LBFGSOperator(s, s @ (torch.eye(6, dtype=F64) + torch.diag(torch.arange(6.0, dtype=F64))))
    b = draw(6)
    for solver in (cg, minres):
        assert_close(solver(B, b).x, B.solve(b), 1e-8)
        assert_close(solver(B + 0.5, b).x, B.solve_plus_diag(b, 0.5), 1e-8)
