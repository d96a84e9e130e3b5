"""Constraints: published optima of Hock and Schittkowski's problems, multipliers, standard errors, networks."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch

import moduli as mo
from moduli import m, minimize

D = torch.float64


def eq(fun):
    return {"type": "eq", "fun": fun}


def ineq(fun):
    return {"type": "ineq", "fun": fun}


# number: (f, constraints, bounds, x0, the published optimum)
PROBLEMS = {
    6: (lambda x: (1 - x[0]) ** 2, [eq(lambda x: 10 * (x[1] - x[0] ** 2))], None, [-1.2, 1.0], 0.0),
    7: (lambda x: torch.log(1 + x[0] ** 2) - x[1], [eq(lambda x: (1 + x[0] ** 2) ** 2 + x[1] ** 2 - 4)], None, [2.0, 2.0],
        -math.sqrt(3)),
    11: (lambda x: (x[0] - 5) ** 2 + x[1] ** 2 - 25, [ineq(lambda x: x[1] - x[0] ** 2)], None, [4.9, 0.1], -8.498464223),
    12: (lambda x: 0.5 * x[0] ** 2 + x[1] ** 2 - x[0] * x[1] - 7 * x[0] - 7 * x[1],
         [ineq(lambda x: 25 - 4 * x[0] ** 2 - x[1] ** 2)], None, [0.0, 0.0], -30.0),
    21: (lambda x: 0.01 * x[0] ** 2 + x[1] ** 2 - 100, [ineq(lambda x: 10 * x[0] - x[1] - 10)], [(2, 50), (-50, 50)],
         [3.0, -1.0], -99.96),
    28: (lambda x: (x[0] + x[1]) ** 2 + (x[1] + x[2]) ** 2, [eq(lambda x: x[0] + 2 * x[1] + 3 * x[2] - 1)], None,
         [-4.0, 1.0, 1.0], 0.0),
    35: (lambda x: 9 - 8 * x[0] - 6 * x[1] - 4 * x[2] + 2 * x[0] ** 2 + 2 * x[1] ** 2 + x[2] ** 2 + 2 * x[0] * x[1]
         + 2 * x[0] * x[2], [ineq(lambda x: 3 - x[0] - x[1] - 2 * x[2])], (0, None), [0.5, 0.5, 0.5], 1 / 9),
    43: (lambda x: (x**2).sum() + x[2] ** 2 - 5 * x[0] - 5 * x[1] - 21 * x[2] + 7 * x[3],
         [ineq(lambda x: torch.stack([
             8 - (x**2).sum() - x[0] + x[1] - x[2] + x[3],
             10 - (x**2).sum() - x[1] ** 2 - x[3] ** 2 + x[0] + x[3],
             5 - 2 * x[0] ** 2 - x[1] ** 2 - x[2] ** 2 - 2 * x[0] + x[1] + x[3]]))], None, [0.0] * 4, -44.0),
    71: (lambda x: x[0] * x[3] * (x[0] + x[1] + x[2]) + x[2],
         [ineq(lambda x: x.prod() - 25), eq(lambda x: (x**2).sum() - 40)], (1, 5), [1.0, 5.0, 5.0, 1.0], 17.0140173),
}  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "bfgs", "lbfgs"])
@pytest.mark.parametrize("number", PROBLEMS)
def test_published_optima(number, method):
    fun, constraints, bounds, x0, best = PROBLEMS[number]
    result = minimize(fun, x0, method, bounds=bounds, constraints=constraints)
    assert result.success, result
    assert result.value == pytest.approx(best, abs=2e-5, rel=1e-6)
    assert result.kkt_residual <= 1e-6
    for one in constraints:
        c = torch.as_tensor(one["fun"](result.x))
        assert float((c.abs() if one["type"] == "eq" else (-c).clamp(min=0)).max()) <= 1e-6


def test_multipliers_are_those_of_the_lagrangian():
    result = minimize(
        lambda x: (x**2).sum(), [3.0, 1.0], constraints=[eq(lambda x: x.sum() - 1), ineq(lambda x: x[0] - 0.8)]
    )
    torch.testing.assert_close(result.x, torch.tensor([0.8, 0.2], dtype=D), atol=1e-5, rtol=0)
    # 2x + lam (1, 1) - nu (1, 0) = 0
    assert float(result.multipliers[0]) == pytest.approx(-0.4, abs=1e-5)
    assert float(result.multipliers[1]) == pytest.approx(1.2, abs=1e-5)
    free = minimize(lambda x: (x**2).sum(), [3.0, 1.0], constraints=ineq(lambda x: x[0] + 5))
    assert float(free.multipliers[0]) == pytest.approx(0.0, abs=1e-6)


def test_standard_errors_of_least_squares_under_constraints():
    t = torch.linspace(0, 1, 9, dtype=D)
    y = 1 + 2 * t + 0.1 * torch.sin(40 * t)
    result = minimize(
        lambda p: p["a"] + p["b"] * t - y, {"a": 0.0, "b": 0.0}, "lm", bounds={"b": (0, None)},
        constraints=[eq(lambda p: p["a"] + p["b"] - 3)],
    )  # fmt: skip
    assert result.success, result
    assert result.method == "lm"
    assert float(result.x["a"] + result.x["b"]) == pytest.approx(3.0, abs=1e-6)
    # With a = 3 - b there is one parameter, with derivative t - 1.
    s2 = 2 * result.value / (9 - 1)
    assert float(result.stderr["b"]) == pytest.approx(float((s2 / ((t - 1) ** 2).sum()) ** 0.5), rel=1e-6)
    assert float(result.stderr["a"]) == pytest.approx(float(result.stderr["b"]), rel=1e-9)


class Nonlinear:
    """The attributes of scipy.optimize.NonlinearConstraint."""

    fun, lb, ub = staticmethod(lambda x: x.sum()), 1.0, 2.0


def test_scipys_constraint_objects_limits_and_errors():
    result = minimize(lambda x: (x**2).sum(), [3.0, 1.0], constraints=[Nonlinear()])
    torch.testing.assert_close(result.x, torch.tensor([0.5, 0.5], dtype=D), atol=1e-5, rtol=0)
    short = minimize(lambda x: (x**2).sum(), [3.0, 1.0], constraints=[Nonlinear()], max_evals=2)
    assert not short.success
    assert short.evaluations <= 2
    never = minimize(lambda x: (x**2).sum(), [3.0], constraints=[eq(lambda x: (x**2).sum() + 1)])
    assert not never.success
    assert "can not be met" in never.reason
    with pytest.raises(ValueError, match="'type': 'eq'"):
        minimize(lambda x: x.sum(), [1.0], constraints={"type": "less", "fun": abs})
    with pytest.raises(TypeError, match="dictionary"):
        minimize(lambda x: x.sum(), [1.0], constraints=[3])
    with pytest.raises(ValueError, match="one start"):
        minimize(lambda x: x.sum(), torch.zeros(2, 1, dtype=D), constraints=[Nonlinear()], batched=True)


def test_a_network_under_a_constraint():
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(32, 3, dtype=D), torch.randn(32, 1, dtype=D)
    hold = m.AugmentedLagrangian(lambda net: net.weight.norm() - 1, every=20)
    opt = mo.Optimizer(net, hold, m.Adam(), m.LR(2e-2))
    for _ in range(800):
        opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
    assert float(net.weight.detach().norm()) == pytest.approx(1.0, abs=2e-3)
    best = minimize(
        lambda w: (x @ w[:, None] - y).square().mean(), [0.5, 0.5, 0.5], constraints=eq(lambda w: w.norm() - 1)
    )
    torch.testing.assert_close(net.weight.detach()[0], best.x, atol=2e-2, rtol=0)
    with pytest.raises(TypeError, match="function"):
        m.AugmentedLagrangian(3.0)
    with pytest.raises(ValueError, match="mu"):
        m.AugmentedLagrangian(abs, mu=-1.0)


@pytest.mark.parametrize("method", ["sqp", "lm"])
@pytest.mark.parametrize("curved", [False, True])
def test_error_bars_do_not_depend_on_whether_constraints_are_one_function(method, curved):
    t = torch.linspace(0, 1, 9, dtype=D)
    data = 1 + 2 * t + 0.1 * torch.sin(20 * t)

    def floor(p):
        return p[0] ** 3 - 1.5**3 if curved else p[0] - 1.5

    def fit(*constraints):
        return minimize(lambda p: p[0] + p[1] * t - data, [1.0, 1.0], method, constraints=list(constraints))

    apart = fit(ineq(floor), ineq(lambda p: p[1] + 9))
    joint = fit(ineq(lambda p: torch.stack([floor(p), p[1] + 9])))
    assert joint.multipliers[0][0] > 0 == joint.multipliers[0][1]
    # What is left varies along the second number alone.
    expected = float((apart.residuals**2).sum() / 8 / (t**2).sum()) ** 0.5
    for found in (apart, joint):
        assert torch.allclose(found.stderr, torch.tensor([0.0, expected], dtype=D), rtol=1e-4, atol=1e-6)


def test_ends_of_scipys_constraints_meet_the_labels_of_their_function():
    optimize = pytest.importorskip("scipy.optimize")
    target = mo.tensor([1.0, 2.0], band=["a", "b"], dtype=D)
    upper = mo.tensor([1.5, 0.5], band=["b", "a"], dtype=D)
    found = minimize(
        lambda p: ((p - target) ** 2).sum(), 0 * target, constraints=optimize.NonlinearConstraint(lambda p: p, -9.0, upper)
    )  # fmt: skip
    assert torch.allclose(found.x.data, torch.tensor([0.5, 1.5], dtype=D))
    with pytest.raises(ValueError, match="not those of its function"):
        wrong = mo.tensor([1.5, 0.5], band=["b", "z"], dtype=D)
        minimize(lambda p: (p**2).sum(), target, constraints=optimize.NonlinearConstraint(lambda p: p, -9.0, wrong))
    with pytest.raises(ValueError, match="not a number"):
        minimize(lambda p: (p**2).sum(), target, constraints=optimize.NonlinearConstraint(lambda p: p, math.nan, 1.0))


def test_scipys_program_in_numpy_with_derivatives_of_its_own():
    constraints = [
        {"type": "ineq", "fun": lambda x: np.array([x[0] - 2 * x[1] + 2]), "jac": lambda x: np.array([[1.0, -2.0]])},
        {"type": "ineq", "fun": lambda x, c: np.dot(x, [-1, -2]) + c, "jac": lambda x, c: [-1.0, -2.0], "args": (6.0,)},
    ]

    def value(x):
        return np.sum((x - np.array([1.0, 2.5])) ** 2)

    def jac(x):
        return 2 * (x - np.array([1.0, 2.5]))

    start = np.array([2.0, 0.0])
    theirs = scipy.optimize.minimize(value, start, method="SLSQP", jac=jac, constraints=constraints)
    for method in ("SLSQP", "bfgs"):
        ours = minimize(value, start, method, jac=jac, constraints=constraints)
        np.testing.assert_allclose(ours.x, theirs.x, atol=1e-5)
    free = [{key: item for key, item in one.items() if key != "jac"} for one in constraints]
    np.testing.assert_allclose(minimize(value, start, "nelder-mead", constraints=free).x, theirs.x, atol=1e-4)
    disc = scipy.optimize.NonlinearConstraint(lambda x: np.sum(x**2), -np.inf, 1.0, jac=lambda x: 2 * x)
    assert np.linalg.norm(minimize(value, start, jac=jac, constraints=disc).x) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("constraint", "error", "words"),
    [
        (ineq(lambda x: x[0] > 1), TypeError, "returned True or False"),
        (lambda x: x[0] - 1, TypeError, "a constraint is a dictionary, not a function"),
        (
            scipy.optimize.LinearConstraint([[1, 1, 1]], 1, 2),
            ValueError,
            r"shape \(1, 3\), and x0 has the shape \(2,\)",
        ),
    ],
)
def test_constraints_that_say_nothing_are_errors(constraint, error, words):
    start = torch.tensor([3.0, 1.0], dtype=D)
    for method in ("auto", "bfgs", "nelder-mead"):
        with pytest.raises(error, match=words):
            minimize(lambda x: (x**2).sum(), start, method, constraints=constraint)


def test_a_constraint_without_values_holds():
    start = torch.tensor([3.0, 1.0], dtype=D)
    result = minimize(lambda x: (x**2).sum(), start, constraints=[eq(lambda x: x[:0]), eq(lambda x: x[0] - 1)])
    assert result.success
    torch.testing.assert_close(result.x, torch.tensor([1.0, 0.0], dtype=D))
    assert [len(part) for part in result.multipliers] == [0, 1]


def test_a_fit_under_constraints_has_the_options_of_fits():
    start = torch.tensor([-1.2, 1.0], dtype=D)

    def count(**options):
        result = minimize(
            lambda x: torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]]),
            start, "lm", constraints=ineq(lambda x: 0.5 - x[0]), **options,
        )  # fmt: skip
        assert result.success
        return result.nfev

    plain = count()
    assert all(count(**one) != plain for one in ({"x_scale": 1e3}, {"options": {"factor": 1e-3}}))
