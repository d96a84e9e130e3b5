"""Fits: residuals of every shape and dtype; undetermined, fixed, bounded and constrained parameters."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli import minimize

D = torch.float64
T = torch.linspace(0, 2, 20, dtype=D)
Y = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.02 * torch.sin(40 * T)


def decay(p, t=T, y=Y):
    return p[0] * torch.exp(-p[1] * t) + p[2] - y


def regression(A, y):
    """Return the coefficients of ordinary least squares and their standard errors."""
    x = torch.linalg.lstsq(A, y[:, None]).solution[:, 0]
    variance = (A @ x - y).square().sum() / (len(y) - A.shape[1])
    return x, (variance * torch.linalg.inv(A.T @ A).diagonal()).sqrt()


START = torch.tensor([1.0, 0.5, 0.0], dtype=D)


def test_undetermined_parameters_have_infinite_errors_and_the_others_theirs():
    fit = minimize(lambda p: p[0] + p[1] + p[2] * T - Y, torch.zeros(3, dtype=D))
    _, stderr = regression(torch.stack([torch.ones_like(T), T], 1), Y)
    assert fit.success
    assert fit.stderr[:2].isinf().all()
    # Three parameters determine two directions: the residual variance is divided by one degree of freedom less.
    assert float(fit.stderr[2]) == pytest.approx(float(stderr[1]) * math.sqrt((len(T) - 2) / (len(T) - 3)), rel=1e-9)


def test_only_the_unused_parameter_has_an_infinite_error():
    fit = minimize(lambda p: decay(p[:3]), torch.tensor([1.0, 0.5, 0.0, 7.0], dtype=D))
    assert fit.stderr.isinf().tolist() == [False, False, False, True]
    assert float(fit.x[3]) == 7.0


@pytest.mark.parametrize("shape", [(4, 5), (2, 2, 5), (20, 1)])
@pytest.mark.parametrize("method", ["auto", "lm"])
def test_residuals_may_have_several_axes(shape, method):
    flat, fit = minimize(decay, START), minimize(lambda p: decay(p).reshape(shape), START, method)
    assert torch.equal(fit.x, flat.x)
    assert fit.value == flat.value
    assert torch.equal(fit.stderr, flat.stderr)
    assert fit.jacobian().shape == (*shape, 3)


def test_complex_residuals_equal_real_and_imaginary_parts():
    wave = torch.exp(1j * 3 * T) * (2 + 1j) + 0.01 * torch.cos(50 * T)

    def residuals(p):
        return torch.complex(p[0], p[1]) * torch.exp(1j * p[2] * T) - wave

    start = torch.tensor([1.0, 0.0, 2.8], dtype=D)
    fit = minimize(residuals, start)
    parts = minimize(lambda p: torch.view_as_real(residuals(p)).reshape(-1), start)
    assert fit.success
    torch.testing.assert_close(fit.x, parts.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fit.stderr, parts.stderr, rtol=1e-6, atol=0)


def test_complex_parameters_are_fitted():
    target = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128)
    fit = minimize(lambda z: (z**2 - target).reshape(-1), torch.tensor([1 + 1j, 1 - 1j], dtype=torch.complex128))
    assert fit.success
    torch.testing.assert_close(fit.x**2, target, rtol=1e-9, atol=1e-9)


def test_single_precision_reaches_its_accuracy():
    fit = minimize(lambda p: decay(p, T.float(), Y.float()), START.float())
    exact = minimize(decay, START)
    assert fit.x.dtype == torch.float32
    assert fit.success, fit
    torch.testing.assert_close(fit.x.double(), exact.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fit.stderr.double(), exact.stderr, rtol=1e-3, atol=0)


def test_an_optimum_outside_of_its_bounds():
    fit = minimize(decay, START, bounds=[(0, 2), (0, None), (0, 1)])
    assert fit.success
    assert float(fit.x[0]) == 2.0
    # The other parameters are those of a fit with the first one fixed.
    rest = minimize(lambda q: decay(torch.cat([torch.tensor([2.0], dtype=D), q])), START[1:])
    torch.testing.assert_close(fit.x[1:], rest.x, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("i", range(3))
def test_fixed_parameters_have_no_error_and_others_that_of_a_smaller_fit(i):
    at = minimize(decay, START).x
    bounds = [(None, None)] * 3
    bounds[i] = (float(at[i]), float(at[i]))
    fit = minimize(decay, at, bounds=bounds)
    others = [j for j in range(3) if j != i]

    def smaller(q):
        p = list(at)
        for j, value in zip(others, q, strict=True):
            p[j] = value
        return decay(p)

    rest = minimize(smaller, at[others])
    assert float(fit.stderr[i]) == 0.0
    torch.testing.assert_close(fit.stderr[others], rest.stderr, rtol=1e-6, atol=0)


def test_a_constraint_removes_one_degree_of_freedom():
    fit = minimize(decay, START, constraints={"type": "eq", "fun": lambda p: p[0] + p[2] - 3})
    rest = minimize(lambda q: decay([q[0], q[1], 3 - q[0]]), START[:2])
    assert fit.success
    torch.testing.assert_close(fit.x[:2], rest.x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fit.stderr[:2], rest.stderr, rtol=1e-4, atol=0)
    assert float(fit.stderr[2]) == pytest.approx(float(fit.stderr[0]), rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(-6, 6))
def test_linear_fits_are_linear_regression_in_any_units(seed, n, unit):
    g = torch.Generator().manual_seed(seed)
    A, y = torch.randn(n + 6, n, generator=g, dtype=D), torch.randn(n + 6, generator=g, dtype=D)
    scale = torch.logspace(0, unit, n, dtype=D)
    x, stderr = regression(A, y)
    fit = minimize(lambda p: A @ (p * scale) - y, torch.zeros(n, dtype=D), "lm")
    assert fit.success
    torch.testing.assert_close(fit.x * scale, x, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(fit.stderr * scale, stderr, rtol=1e-7, atol=0)


def test_evaluations_are_counted_once_and_steps_reuse_them():
    calls = []

    def residuals(p):
        calls.append(np.asarray(p.detach()).tobytes())
        return decay(p)

    fit = minimize(residuals, START)
    # Jacobians call the function again, at points that were evaluated before.
    assert fit.evaluations == len(set(calls))


def _box(x):
    t = 0.1 * torch.arange(1, 11, dtype=D)
    return torch.exp(-t * x[0]) - torch.exp(-t * x[1]) - x[2] * (torch.exp(-t) - torch.exp(-10 * t))


def _powell_badly_scaled(x):
    return torch.stack([1e4 * x[0] * x[1] - 1, torch.exp(-x[0]) + torch.exp(-x[1]) - 1.0001])


def _powell_singular(x):
    pair = [x[0] + 10 * x[1], math.sqrt(5) * (x[2] - x[3])]
    return torch.stack([*pair, (x[1] - 2 * x[2]) ** 2, math.sqrt(10) * (x[0] - x[3]) ** 2])


@pytest.mark.parametrize(
    ("fun", "start", "minpack"),
    [
        (_box, [0.0, 10.0, 20.0], 7),
        (_powell_badly_scaled, [0.0, 1.0], 19),
        (_powell_singular, [3.0, -1.0, 0.0, 1.0], 59),
        (lambda p: decay(p * torch.tensor([1e6, 1e-3, 1.0], dtype=D)), [1e-6, 500.0, 0.0], 12),
    ],
)
def test_evaluations_are_of_the_order_of_minpacks(fun, start, minpack):
    fit = minimize(fun, torch.tensor(start, dtype=D))
    assert fit.success, fit
    assert fit.evaluations <= 1.5 * minpack


def test_units_of_the_variables_do_not_change_the_evaluations():
    unit = torch.tensor([2.0**20, 2.0**-12, 2.0**5], dtype=D)  # powers of two, so that rounding does not differ
    plain, scaled = minimize(decay, START), minimize(lambda p: decay(p * unit), START / unit)
    assert scaled.evaluations == plain.evaluations
    torch.testing.assert_close(scaled.x * unit, plain.x, rtol=1e-9, atol=1e-12)
