"""Programs written for SciPy: budgets, bounds, constraints, callbacks, and functions without a minimum."""

import math

import numpy as np
import pytest
import torch

from moduli import minimize
from moduli._minimize._direct import DIRECT
from moduli._minimize._methods import CHAINS
from moduli._minimize._names import BATCHED

D = torch.float64
METHODS = sorted({*CHAINS, *DIRECT, "lm", "auto"})
START = torch.tensor([-1.2, 0.3], dtype=D)


def _rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def _residuals(x):
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def _bowl(x):
    return ((x - torch.tensor([4.0, 1.0], dtype=D)) ** 2).sum()


class Counted:
    """A function that counts its calls and stores its points."""

    def __init__(self, fun):
        self.fun, self.calls, self.points = fun, 0, set()

    def __call__(self, x):
        self.calls += 1
        self.points.add(tuple(x.tolist()))
        return self.fun(x)


# ---------------------------------------------------------------------------------------------- budgets

OPTIONS = {
    "plain": {},
    "bounds": {"bounds": [(-2, 2), (None, 0.5)]},
    "transform": {"bounds": [(-2, 2), (None, 0.5)], "bounds_by": "transform"},
    "fixed": {"bounds": [(-1.2, -1.2), (None, 0.5)]},
    "all fixed": {"bounds": [(-1.2, -1.2), (0.3, 0.3)]},
    "constraints": {"constraints": {"type": "ineq", "fun": lambda x: 1 - x[0] - x[1]}},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_is_never_exceeded(method, options):
    for budget in (1, 2, 3, 7, 12):
        fun = Counted(_residuals if method in ("lm", "gn") else _rosenbrock)
        result = minimize(fun, START, method, max_evals=budget, **OPTIONS[options])
        assert result.evaluations <= budget
        if method != "lm":
            assert result.evaluations == fun.calls
        elif options != "constraints":  # a fit counts points: Jacobians are computed at evaluated points
            assert result.evaluations == len(fun.points)
        value = fun.fun(result.x)
        assert result.value == pytest.approx(float(value if value.dim() == 0 else 0.5 * value.square().sum()))


def test_auto_chooses_the_method_without_an_extra_evaluation():
    for fun, method in ((_rosenbrock, "bfgs"), (_residuals, "lm")):
        auto, named = minimize(fun, START), minimize(fun, START, method)
        assert auto.method == method
        assert auto.evaluations == named.evaluations
        assert torch.equal(auto.x, named.x)


def test_max_steps_limits_all_steps_under_constraints():
    sphere = {"type": "eq", "fun": lambda x: (x**2).sum() - 1}
    free = minimize(_rosenbrock, START, constraints=sphere)
    short = minimize(_rosenbrock, START, constraints=sphere, max_steps=4)
    assert free.steps > 8
    assert short.steps == 4
    assert "4 steps" in short.reason


# ---------------------------------------------------------------------------------------------- bounds


def test_bounds_as_iterators_and_arrays_of_objects():
    x0 = torch.tensor([0.5, 2.5], dtype=D)
    for bounds in (
        zip([0, 2], [1, 3], strict=True),
        np.array([[0, 1], [2, 3]]),
        np.array([[0, 1], [2, None]], dtype=object),
    ):
        torch.testing.assert_close(minimize(_bowl, x0, bounds=bounds).x, torch.tensor([1.0, 2.0], dtype=D))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lower": math.inf}, "outside of the bounds"),
        ({"upper": -math.inf}, "outside of the bounds"),
        ({"lower": "low"}, "lower bounds are numbers"),
        ({"lower": True}, "lower bounds are numbers"),
        ({"bounds": np.array([["a", "b"], ["c", "d"]])}, "not understood"),
    ],
)
def test_wrong_bounds_are_refused(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        minimize(_bowl, torch.tensor([0.5, 2.5], dtype=D), **options)


@pytest.mark.parametrize("method", BATCHED)
def test_intervals_of_batched_starts_are_those_of_one_point(method):
    starts = torch.tensor([[0.5, 2.5], [0.2, 2.9], [0.7, 2.1]], dtype=D)
    more = {"max_evals": 600} if method == "adam" else {}
    for bounds in ([(0, 1), (2, 3)], np.array([[0, 1], [2, 3]]), torch.tensor([[[0.0, 1.0], [2.0, 3.0]]] * 3)):
        result = minimize(_bowl, starts, method, batched=True, bounds=bounds, **more)
        torch.testing.assert_close(result.x, torch.tensor([[1.0, 2.0]] * 3, dtype=D), atol=1e-2, rtol=0)
    fixed = minimize(_bowl, starts, method, batched=True, bounds=[(0.3, 0.3), None], **more)
    assert fixed.x[:, 0].tolist() == [0.3] * 3
    torch.testing.assert_close(fixed.x[:, 1], torch.ones(3, dtype=D), atol=1e-2, rtol=0)
    with pytest.raises(ValueError, match="2 variables"):
        minimize(_bowl, starts, method, batched=True, bounds=[(0, 1)] * 6)


# ---------------------------------------------------------------------------------------------- constraints


class NonlinearConstraint:
    """The attributes of scipy.optimize.NonlinearConstraint, with open intervals and an equality."""

    fun, lb, ub = staticmethod(lambda x: torch.stack([x[0], x[1], x[2]])), [2.0, -math.inf, 5.0], [math.inf, -1.0, 5.0]


class LinearConstraint:
    """The attributes of scipy.optimize.LinearConstraint."""

    A, lb, ub = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), np.array([2.0, -np.inf]), np.array([np.inf, -1.0])


def test_constraints_with_some_ends_open():
    x0 = torch.tensor([3.0, -2.0, 4.0], dtype=D)
    for constraints in (NonlinearConstraint(), [NonlinearConstraint()]):
        result = minimize(lambda x: (x**2).sum(), x0, constraints=constraints)
        assert result.success
        torch.testing.assert_close(result.x, torch.tensor([2.0, -1.0, 5.0], dtype=D), atol=1e-5, rtol=0)
    for constraints in (LinearConstraint(), [LinearConstraint()]):
        result = minimize(lambda x: (x**2).sum(), x0, constraints=constraints)
        assert result.success
        torch.testing.assert_close(result.x, torch.tensor([1.0, 1.0, -1.0], dtype=D), atol=1e-5, rtol=0)


def test_a_constrained_function_that_is_not_finite_has_no_minimum():
    result = minimize(lambda x: (x * math.nan).sum(), START, constraints={"type": "ineq", "fun": lambda x: x + 9})
    assert not result.success
    assert "nan at the start" in result.reason
    assert result.evaluations < 10


# ---------------------------------------------------------------------------------------------- functions without a minimum


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: -x.sum(),
        lambda x: (x - 9).pow(3).sum(),
        lambda x: -(x**2).sum(),
        lambda x: x[0] + x[1] ** 2,
        lambda x: -torch.sqrt(1 + x**2).sum(),
    ],
)
@pytest.mark.parametrize("method", sorted({*CHAINS, *DIRECT} - {"lm", "gn", "adam", "spsa", "cmaes"}))
def test_unbounded_functions_are_recognised_by_every_method(method, fun):
    result = minimize(fun, torch.ones(2, dtype=D), method)
    assert not result.success
    assert "unbounded below" in result.reason, result
    assert result.evaluations <= 200


@pytest.mark.parametrize("method", BATCHED)
def test_unbounded_functions_are_recognised_from_every_start(method):
    starts = torch.tensor([[1.0, 1.0], [0.1, 2.0], [-3.0, -4.0]], dtype=D)
    for fun in (lambda x: -x.sum(), lambda x: -(x**2).sum())[: 1 if method == "adam" else 2]:
        result = minimize(fun, starts, method, batched=True)
        assert not result.success
        assert all("unbounded below" in start.reason for start in result.starts), result
        assert max(start.evaluations for start in result.starts) <= 100
    # The function is unbounded along the steps of the second start only.
    mixed = minimize(lambda x: x[0] * (x[1] ** 2).sum(), torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=D), batched=True)
    assert "gradient vanishes" in mixed.starts[0].reason
    assert "unbounded below" in mixed.starts[1].reason


@pytest.mark.parametrize("method", sorted({*CHAINS, *DIRECT} - {"gn"}))
def test_a_function_that_is_not_finite_at_the_start_is_evaluated_once(method):
    result = minimize(lambda x: (x * math.nan).sum(), START, method)
    assert not result.success
    assert "nan at the start" in result.reason
    assert result.evaluations == 1


# ---------------------------------------------------------------------------------------------- batched starts, callbacks


def test_every_start_has_its_reason():
    starts = torch.stack([START, START + 1])
    for options, words in (({"max_steps": 2}, "2 steps"), ({"callback": lambda now: now.steps == 2}, "callback")):
        result = minimize(_rosenbrock, starts, batched=True, **options)
        assert words in result.reason
        assert all(words in start.reason for start in result.starts)


def _stop(result):
    raise StopIteration


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "nelder-mead"}, {"constraints": {"type": "ineq", "fun": lambda x: x + 9}}, {"batched": True}],
)
def test_a_callback_may_raise_stop_iteration(options):
    x0 = torch.stack([START, START]) if "batched" in options else START
    result = minimize(_rosenbrock, x0, callback=_stop, **options)
    assert "callback" in result.reason
    assert not result.success


# ---------------------------------------------------------------------------------------------- points and values


def test_complex_arrays_are_minimised_and_others_refused():
    result = minimize(lambda z: (z - (1 + 2j)).abs().square().sum(), np.array([1j, 2.0]), "lbfgs")
    torch.testing.assert_close(result.x, torch.full((2,), 1 + 2j, dtype=torch.complex128))
    for x0 in (np.array([1, None], dtype=object), np.array(["a"])):
        with pytest.raises(TypeError, match="x0 is an array of"):
            minimize(_bowl, x0)
    with pytest.raises(TypeError, match="complex"):
        minimize(lambda x: (x * 1j).sum(), START)


def test_cmaes_minimises_with_and_without_bounds():
    result = minimize(_rosenbrock, START, "CMA-ES")
    assert result.method == "cmaes"
    assert result.success
    torch.testing.assert_close(result.x, torch.ones(2, dtype=D), atol=1e-5, rtol=0)
    inside = minimize(_bowl, torch.tensor([0.5, 2.5], dtype=D), "cmaes", bounds=[(0, 1), (2, 3)])
    torch.testing.assert_close(inside.x, torch.tensor([1.0, 2.0], dtype=D), atol=1e-4, rtol=0)
    again = minimize(_rosenbrock, START, "CMA-ES")
    assert torch.equal(result.x, again.x)


@pytest.mark.parametrize("batched", [False, True])
def test_the_evaluation_of_a_distant_point_neither_raises_nor_is_returned(batched):
    sizes = []

    def slope(x):  # decreases, but is bounded: far away it is only a little lower
        inside = torch.where(x.abs() < 1e6, x, torch.zeros_like(x))
        return (-1e-3 * inside - 100.0 * (x.abs() >= 1e6)).sum()

    def domain(x):
        sizes.append(float(x.detach().abs().max()))
        if sizes[-1] > 1e6:
            raise ValueError("outside of the domain")
        return -1e-3 * x.sum()

    x0 = torch.zeros(2, 2, dtype=D) if batched else torch.zeros(2, dtype=D)
    result = minimize(slope, x0, "adam", max_evals=60, batched=batched)
    assert float(result.x.abs().max()) < 100
    if not batched:
        assert float(minimize(domain, x0, "adam", max_evals=60).x.abs().max()) < 100
        assert max(sizes) > 1e6  # a distant point was evaluated
