"""The trust-region problem: guarantees of steihaug, and optimality conditions of trust_exact."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from linalg.kinds import Draw
from moduli.linalg import Dense, Diagonal, Eigendecomposition, FunctionOperator, Outcome, steihaug, trust_exact

F64, F32, C128 = torch.float64, torch.float32, torch.complex128
some = settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "n": st.integers(0, 8),
        "kind": st.sampled_from(["positive", "semidefinite", "indefinite", "negative", "zero", "repeated"]),
        "gradient": st.sampled_from(["random", "hard", "nearly hard", "zero"]),
        "radius": st.sampled_from([1e-3, 0.5, 10.0, 1e4]),
        "scale": st.sampled_from([1e-3, 1.0, 1e4]),
        "dtype": st.sampled_from([F64, C128, F32]),
    }
)


def problem(seed, n, kind, gradient, scale, dtype, **_):
    draw = Draw(seed, dtype, ())
    spread = 0.5 + draw.real(n).abs()
    signs = {"positive": 1.0, "semidefinite": 1.0, "negative": -1.0, "zero": 0.0}
    if kind in signs:
        values = signs[kind] * spread
        if kind == "semidefinite":
            values = values * (torch.arange(n) > 0)
    else:
        values = spread * torch.where(torch.arange(n) < (n + 1) // 2, -1.0, 1.0).to(spread.dtype)
        if kind == "repeated":
            values = torch.where(values < 0, -torch.ones_like(values), values)
    values = scale * values
    Q = draw.orthonormal(n, n)
    H = (Q * values.unsqueeze(-2)) @ Q.mH
    parts = draw(n)
    if n and gradient in ("hard", "nearly hard"):
        lowest = values == values.min()
        parts = torch.where(lowest, parts * (1e-9 if gradient == "nearly hard" else 0.0), parts)
    g = Q @ (parts if gradient != "zero" else torch.zeros_like(parts))
    return (H + H.mH) / 2, g


def compute_model(H, g, p):
    return float((torch.linalg.vecdot(g, p) + 0.5 * torch.linalg.vecdot(p, H @ p)).real)


def compute_cauchy_decrease(H, g, radius):
    """Return the decrease at the Cauchy point (Nocedal and Wright, (4.11)).

    Args:
        H: The Hessian.
        g: The gradient.
        radius: The radius of the region.
    """
    size = float(g.norm())
    if size == 0:
        return 0.0
    curvature = float(torch.linalg.vecdot(g, H @ g).real)
    tau = 1.0 if curvature <= 0 else min(size**3 / (radius * curvature), 1.0)
    return -compute_model(H, g, -tau * radius / size * g)


def compute_scale_and_precision(H, g, radius):
    """Return a scale of decreases, and the relative precision to which they can be computed.

    Args:
        H: The Hessian.
        g: The gradient.
        radius: The radius of the region.
    """
    eps = torch.finfo(H.dtype).eps
    size = float(torch.linalg.matrix_norm(H, 2)) if H.numel() else 0.0
    return float(g.norm()) * radius + 0.5 * size * radius**2, 2e3 * eps


@given(case=cases)
@some
def test_steihaug_decreases_at_least_like_the_cauchy_point(case):
    H, g = problem(**case)
    radius = case["radius"]
    result = steihaug(H, g, radius)
    p = result.step
    length, (size, eps) = float(p.norm()), compute_scale_and_precision(H, g, radius)
    assert length <= radius * (1 + eps)
    assert result.predicted_decrease >= compute_cauchy_decrease(H, g, radius) * (1 - eps) - eps * 1e-3 * size
    assert abs(result.predicted_decrease + compute_model(H, g, p)) <= eps * size
    if result.outcome is Outcome.INTERIOR:
        assert float((H @ p + g).norm()) <= 1e-3 * float(g.norm()) + 1e-300
    elif result.outcome in (Outcome.BOUNDARY, Outcome.NEGATIVE_CURVATURE):
        assert length == pytest.approx(radius, rel=eps)
    if case["kind"] == "positive":
        assert result.outcome in (Outcome.INTERIOR, Outcome.BOUNDARY)
        best = trust_exact(H, g, radius).predicted_decrease
        assert result.predicted_decrease >= 0.5 * best - eps * size


@given(case=cases)
@some
def test_trust_exact_satisfies_the_optimality_conditions(case):
    H, g = problem(**case)
    radius, n = case["radius"], case["n"]
    result = trust_exact(H, g, radius)
    p, multiplier = result.step, result.multiplier
    length, (size, eps) = float(p.norm()), compute_scale_and_precision(H, g, radius)
    assert length <= radius * (1 + eps)
    # Nocedal and Wright, theorem 4.1: these conditions are necessary and sufficient
    assert multiplier >= 0
    bound = (float(torch.linalg.matrix_norm(H, 2)) if n else 0.0) + multiplier
    assert float((H @ p + multiplier * p + g).norm()) <= 10 * eps * (bound * max(length, 1e-300) + float(g.norm()))
    assert float((H @ p + multiplier * p + g).norm()) == pytest.approx(
        result.residual_norm, abs=10 * eps * (bound * length + float(g.norm())) + 1e-300
    )
    if n:
        low = float(torch.linalg.eigvalsh(H).min())
        assert low + multiplier >= -eps * max(bound, 1e-300)
        assert multiplier * (radius - length) <= 10 * eps * max(bound, multiplier) * radius
    if result.outcome is Outcome.INTERIOR:
        assert multiplier == 0
    else:
        assert length == pytest.approx(radius, rel=10 * eps)
    assert abs(result.predicted_decrease + compute_model(H, g, p)) <= eps * size
    assert result.predicted_decrease >= compute_cauchy_decrease(H, g, radius) - eps * size
    assert result.predicted_decrease >= steihaug(H, g, radius).predicted_decrease - eps * size


@given(seed=st.integers(0, 10**6), radius=st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_trust_exact_is_no_worse_than_any_point_of_the_disc(seed, radius):
    draw = Draw(seed, F64, ())
    H, g = draw(2, 2), draw(2)
    H = H + H.T
    angle = torch.linspace(0, 2 * math.pi, 721, dtype=F64)
    rho = radius * torch.linspace(0, 1, 101, dtype=F64)
    points = (rho[:, None, None] * torch.stack([angle.cos(), angle.sin()], -1)).reshape(-1, 2)
    best = float((points @ g + 0.5 * ((points @ H) * points).sum(-1)).min())
    assert -trust_exact(H, g, radius).predicted_decrease <= best + 1e-12


def test_the_hard_case_is_reported():
    H = torch.diag(torch.tensor([-2.0, -2.0, 1.0], dtype=F64))
    result = trust_exact(H, torch.tensor([0.0, 0.0, 3.0], dtype=F64), 2.0)
    assert result.outcome is Outcome.HARD_CASE
    assert result.multiplier == pytest.approx(2.0)
    assert float(result.step[2]) == pytest.approx(-1.0)
    assert float(result.step[:2].norm()) == pytest.approx(3**0.5)
    inside = trust_exact(H, torch.tensor([0.0, 0.0, 30.0], dtype=F64), 2.0)
    assert inside.outcome is Outcome.BOUNDARY
    still = trust_exact(H, torch.zeros(3, dtype=F64), 2.0)
    assert (still.outcome, still.predicted_decrease) == (Outcome.HARD_CASE, pytest.approx(4.0))
    flat = trust_exact(torch.zeros(2, 2), torch.zeros(2), 1.0)
    assert (flat.outcome, flat.predicted_decrease) == (Outcome.INTERIOR, 0.0)
    assert not flat.step.any()


def test_a_decomposition_is_reused_for_every_radius(monkeypatch):
    draw = Draw(1, F64, ())
    root, g = draw(5, 5), draw(5)
    H = root + root.T
    decomposition = Eigendecomposition.of(H)
    want = [trust_exact(Dense(H, symmetric=True), g, radius).step for radius in (0.1, 1.0, 3.0)]
    monkeypatch.setattr(torch.linalg, "eigh", None)
    for radius, step in zip((0.1, 1.0, 3.0), want, strict=True):
        torch.testing.assert_close(trust_exact(decomposition, g, radius).step, step)


def test_steihaug_with_an_infinite_radius_limits_and_callbacks():
    A = FunctionOperator(lambda x: torch.arange(1.0, 9.0, dtype=F64) * x, 8, dtype=F64, symmetric=True)
    g = torch.ones(8, dtype=F64)
    free = steihaug(A, g, math.inf)
    assert free.outcome is Outcome.INTERIOR
    torch.testing.assert_close(free.step, -g / torch.arange(1.0, 9.0, dtype=F64))
    assert steihaug(A, g, 10.0, maxiter=2).outcome is Outcome.MAXITER
    assert steihaug(A, g, 10.0, maxiter=2).iterations == 2
    steps = []
    stopped = steihaug(A, g, 10.0, callback=lambda k, p, norm: steps.append((p, norm)) or k == 3)
    assert (stopped.outcome, stopped.iterations) == (Outcome.STOPPED, 3)
    torch.testing.assert_close(steps[-1][0], stopped.step)
    assert steps[-1][1] == pytest.approx(stopped.residual_norm)
    lengths = [float(p.norm()) for p, _ in steps]
    assert lengths == sorted(lengths)
    down = steihaug(Diagonal(-g), 2 * g, math.inf)
    assert down.outcome is Outcome.NEGATIVE_CURVATURE
    torch.testing.assert_close(down.step, -2 * g)
    assert down.predicted_decrease > 0
    later = steihaug(Diagonal(torch.tensor([1.0, -0.5])), torch.tensor([1.0, 0.5]), math.inf)
    assert later.outcome is Outcome.NEGATIVE_CURVATURE
    assert later.predicted_decrease > 0
    nothing = steihaug(A, 0 * g, 1.0)
    assert (nothing.outcome, nothing.predicted_decrease, nothing.multiplier) == (Outcome.INTERIOR, 0.0, 0.0)
    assert trust_exact(torch.zeros(0, 0), torch.zeros(0), 1.0).outcome is Outcome.INTERIOR
