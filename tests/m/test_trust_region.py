"""A trust region accepts, grows and shrinks by the ratio of actual to predicted decrease, and restarts a singular model."""

import pytest
import torch

import moduli as mo
from moduli import linalg, m

LIMITS = {"eta": 0.1, "nplus": 2.0, "nminus": 0.25, "rho_good": 0.9, "rho_bad": 0.5, "max_attempts": 1}


@pytest.mark.parametrize("region", ["TrustCG", "TrustExact", "Dogleg"])
@pytest.mark.parametrize("radius", [0.2, 0.5, 1.0, 20.0])
@pytest.mark.parametrize("cubic", [-2.0, -0.9, -0.3, 0.0, 0.05, 0.2])
def test_the_radius_follows_the_ratio(region, radius, cubic):
    def f(x):
        return x + 0.5 * x**2 + cubic * x**3

    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    link = getattr(m, region)(m.Newton(), init=radius, **LIMITS)
    mo.Optimizer([w], link).step(mo.closure(lambda: f(w).sum()))
    # At 0 the slope and the curvature are 1, so that Newton's step is 1.
    d = min(radius, 1.0)
    ratio = (f(0.0) - f(-d)) / (d - 0.5 * d * d)
    assert w.item() == pytest.approx(-d if ratio > LIMITS["eta"] else 0.0, rel=1e-6)
    expected = radius
    if ratio < LIMITS["rho_bad"]:
        expected = LIMITS["nminus"] * d
    elif ratio > LIMITS["rho_good"] and d == radius:
        expected = LIMITS["nplus"] * d
    assert link.global_state["radius"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("radius", [0.2, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("cubic", [-2.0, -0.8, -0.3, 0.0, 0.1, 0.4, 1.0])
def test_the_penalty_of_cubic_regularisation_follows_the_ratio(radius, cubic):
    def f(x):
        return x + 0.5 * x**2 + cubic * x**3

    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    link = m.CubicRegularization(m.Newton(), init=radius, **LIMITS)
    mo.Optimizer([w], link).step(mo.closure(lambda: f(w).sum()))
    # The minimiser of -d + d^2 / 2 + d^3 / (3 r), where d + d^2 / r = 1.
    d = 0.5 * radius * (-1 + (1 + 4 / radius) ** 0.5)
    ratio = (f(0.0) - f(-d)) / (d - 0.5 * d * d - d**3 / (3 * radius))
    assert w.item() == pytest.approx(-d if ratio > LIMITS["eta"] else 0.0, rel=1e-6)
    change = LIMITS["nminus"] if ratio < LIMITS["rho_bad"] else LIMITS["nplus"] if ratio > LIMITS["rho_good"] else 1.0
    assert link.global_state["radius"] == pytest.approx(change * radius, rel=1e-6)


class Singular(m.BFGS):
    """A quasi-Newton model whose Hessian is zero."""

    def get_H(self, objective):
        size = sum(param.numel() for param in objective.params)
        return linalg.Dense(torch.zeros(size, size, dtype=objective.params[0].dtype), symmetric=True).inverse()


def test_a_singular_model_is_restarted_and_the_step_descends():
    x = torch.nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    opt = mo.Optimizer([x], m.TrustCG(Singular()))
    for _ in range(50):
        opt.step(mo.closure(lambda: 0.5 * x.square().sum()))
    assert x.norm() < 1e-3
