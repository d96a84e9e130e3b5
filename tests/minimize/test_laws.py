"""Laws of `minimize`: the result describes its point, offsets, bounds, method names, standard errors."""

import pickle

import pytest
import torch

import moduli as mo
from launching import run_python
from moduli import minimize
from moduli._minimize._direct import DIRECT
from moduli._minimize._methods import CHAINS, IN_BOX
from moduli._minimize._names import CHAINED, PROJECTED

D = torch.float64
GRADIENTS = ["bfgs", "lbfgs", "cg", "newton", "damped-newton", "newton-cg", "trust-ncg", "trust-exact", "dogleg"]


def _rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def _quartic(x):
    return ((x - 1) ** 2 * torch.arange(1, 4, dtype=D)).sum() + (x**4).sum()


PROBLEMS = {
    "Rosenbrock": (_rosenbrock, torch.tensor([-1.2, 1.0], dtype=D)),
    "quartic": (_quartic, torch.zeros(3, dtype=D)),
}


def _slope(fun, x):
    x = x.clone().requires_grad_()
    value = fun(x)
    value = value if value.dim() == 0 else 0.5 * value.square().sum()
    return float(torch.autograd.grad(value, x)[0].abs().max()), float(value.detach())


def test_every_method_name_has_its_chain():
    assert list(CHAINS) == list(CHAINED)
    assert list(IN_BOX) == list(PROJECTED)


@pytest.mark.parametrize("limits", [{}, {"max_evals": 9}, {"max_steps": 3}])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", sorted({*CHAINS, *DIRECT} - {"gn"}))
def test_the_result_describes_the_point_it_returns(method, name, limits):
    fun, x0 = PROBLEMS[name]
    # Slow methods need not converge for this.
    result = minimize(fun, x0, method, **({"max_evals": 400} | limits))
    slope, value = _slope(fun, result.x)
    assert result.value == value
    assert result.evaluations <= limits.get("max_evals", 400)
    if result.gradient_norm is not None:
        assert result.gradient_norm == pytest.approx(slope, rel=1e-9, abs=1e-15)
        assert not (result.success and slope > 1e-6)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", GRADIENTS)
def test_an_offset_does_not_change_the_point(method, name):
    fun, x0 = PROBLEMS[name]
    plain, lifted = minimize(fun, x0, method), minimize(lambda x: 1e6 + fun(x), x0, method)
    torch.testing.assert_close(lifted.x, plain.x, atol=2e-6, rtol=0)
    assert lifted.success
    slope, _ = _slope(lambda x: 1e6 + fun(x), lifted.x)
    assert slope <= 1e-5
    assert lifted.gradient_norm == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("method", sorted(DIRECT))
def test_an_offset_moves_methods_without_gradients_by_rounding_only(method):
    fun, x0 = PROBLEMS["quartic"]
    plain, lifted = minimize(fun, x0, method), minimize(lambda x: 1e6 + fun(x), x0, method)
    # Values of 1e6 have an error of 1e-10; a minimum is known up to its root.
    torch.testing.assert_close(lifted.x, plain.x, atol=5e-5, rtol=0)


@pytest.mark.parametrize("method", ["lm", "gn"])
def test_an_offset_of_residuals_does_not_change_the_point(method):
    def residuals(x, more=0.0):
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0], torch.tensor(more, dtype=D)])

    x0 = torch.tensor([-1.2, 1.0], dtype=D)
    result = minimize(lambda x: residuals(x, 1e3), x0, method)
    torch.testing.assert_close(result.x, torch.ones(2, dtype=D), atol=1e-6, rtol=0)
    assert result.gradient_norm == pytest.approx(_slope(lambda x: residuals(x, 1e3), result.x)[0], rel=1e-9)


def test_results_of_batched_starts_describe_their_points():
    fun, _ = PROBLEMS["Rosenbrock"]
    starts = torch.tensor([[-1.2, 1.0], [0.0, 2.0]], dtype=D)
    result = minimize(lambda x: 1e6 + fun(x), starts, batched=True)
    for i, start in enumerate(result.starts):
        assert start.gradient_norm == pytest.approx(_slope(fun, result.x[i])[0], rel=1e-6)
        assert start.gradient_norm == float(result.gradient_norm[i])
        assert start.gradient_norm < 1e-5


# ---------------------------------------------------------------------------------------------- bounds


def _away(x):
    return ((x - torch.tensor([4.0, 1.0], dtype=D)) ** 2).sum()


ALL = ["bfgs", "lbfgs", "cg", "gd", "newton", "damped-newton", "trust-ncg", "trust-exact", "nelder-mead"]


@pytest.mark.parametrize("method", ALL)
def test_bounds_are_intervals_as_in_scipy(method):
    result = minimize(_away, torch.tensor([0.5, 2.5], dtype=D), method, bounds=[(0, 1), (2, 3)])
    torch.testing.assert_close(result.x, torch.tensor([1.0, 2.0], dtype=D), atol=1e-4, rtol=0)
    assert result.success, result


@pytest.mark.parametrize("method", ALL)
def test_open_and_fixed_variables(method):
    x0 = torch.tensor([0.5, 2.5], dtype=D)
    open_ = minimize(_away, x0, method, bounds=[(None, 3), (None, None)])
    torch.testing.assert_close(open_.x, torch.tensor([3.0, 1.0], dtype=D), atol=1e-4, rtol=0)
    fixed = minimize(_away, x0, method, bounds=[(2, 2), (0, None)])
    torch.testing.assert_close(fixed.x, torch.tensor([2.0, 1.0], dtype=D), atol=1e-4, rtol=0)
    assert float(fixed.x[0]) == 2.0
    everything = minimize(_away, x0, method, bounds=[(2, 2), (3, 3)])
    assert torch.equal(everything.x, torch.tensor([2.0, 3.0], dtype=D))
    assert everything.success


def test_bounds_for_one_and_three_variables():
    result = minimize(lambda x: ((x - 5) ** 2).sum(), torch.ones(3, dtype=D), bounds=[(0, 2), None, (0, None)])
    torch.testing.assert_close(result.x, torch.tensor([2.0, 5.0, 5.0], dtype=D), atol=1e-6, rtol=0)
    assert float(minimize(lambda x: (x**2).sum(), [3.0], bounds=[(1, 4)]).x) == pytest.approx(1.0)
    assert float(minimize(lambda x: x**2, 3.0, bounds=(1, 4)).x) == pytest.approx(1.0)


def test_intervals_by_name_in_nested_points():
    start = {"amp": torch.ones(2, dtype=D), "rest": [torch.ones((), dtype=D), 2.0]}

    def fun(p):
        return ((p["amp"] - 3) ** 2).sum() + (p["rest"][0] + 1) ** 2 + (p["rest"][1] - 9) ** 2

    result = minimize(fun, start, bounds={"amp": [(0, 2), None], "rest": [(0, None), None]})
    torch.testing.assert_close(result.x["amp"], torch.tensor([2.0, 3.0], dtype=D), atol=1e-6, rtol=0)
    assert float(result.x["rest"][0]) == pytest.approx(0.0, abs=1e-7)
    assert float(result.x["rest"][1]) == pytest.approx(9.0)
    low = minimize(fun, start, lower={"rest": [0.0, None]}, upper={"amp": torch.tensor([2.0, torch.inf], dtype=D)})
    torch.testing.assert_close(low.x["amp"], result.x["amp"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("by", ["projection", "transform"])
def test_bounds_of_parameters_of_a_module(by):
    net = torch.nn.Linear(2, 1).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, 0.5]]))
    X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=D)
    y = X @ torch.tensor([[2.0], [-1.0]], dtype=D)
    result = minimize(lambda n: ((n(X) - y) ** 2).sum(), net, "lbfgs", bounds={"weight": (0, 1)}, bounds_by=by)
    assert bool(((result.x.weight >= 0) & (result.x.weight <= 1)).all())
    torch.testing.assert_close(result.x.weight.detach(), torch.tensor([[1.0, 0.0]], dtype=D), atol=1e-4, rtol=0)


class Bounds:
    """The attributes of scipy.optimize.Bounds."""

    lb, ub = [0.0, 2.0], [1.0, 3.0]


def test_scipys_bounds_objects_and_arrays():
    x0 = torch.tensor([0.5, 2.5], dtype=D)
    for bounds in (Bounds(), torch.tensor([[0.0, 1.0], [2.0, 3.0]])):
        torch.testing.assert_close(minimize(_away, x0, bounds=bounds).x, torch.tensor([1.0, 2.0], dtype=D))


@pytest.mark.parametrize(
    ("bounds", "match"),
    [
        ((torch.zeros(2), torch.ones(2)), "lower= and upper="),
        ([(0, 1)], "2 variables"),
        ([(0, 1), (2, 3), (0, 1)], "2 variables"),
        ("high", "not understood"),
        ([(1, 0), (0, 1)], "not below"),
        ({"a": (0, 1)}, "not understood"),
        (torch.zeros(3, 2), "shape"),
        ([(float("nan"), 1), (0, 1)], "not a number"),
    ],
)
def test_bounds_that_are_not_understood(bounds, match):
    with pytest.raises((TypeError, ValueError), match=match):
        minimize(_away, torch.zeros(2, dtype=D), bounds=bounds)


def test_bounds_given_twice_or_by_unknown_names_are_refused():
    with pytest.raises(TypeError, match="either"):
        minimize(_away, torch.zeros(2, dtype=D), bounds=(0, 9), lower=0.0)
    with pytest.raises(ValueError, match="does not have"):
        minimize(lambda p: (p["a"] ** 2).sum(), {"a": torch.ones(2, dtype=D)}, bounds={"b": (0, 1)})


def test_least_squares_with_the_optimum_on_a_bound():
    t = torch.linspace(0, 3, 20, dtype=D)
    data = 2.5 * torch.exp(-1.3 * t) + 0.5

    def residuals(p):
        return p[0] * torch.exp(-p[1] * t) + p[2] - data

    result = minimize(residuals, torch.tensor([1.0, 0.5, 0.1], dtype=D), "lm", bounds=[(0, 2), (0, None), (0, 1)])
    assert result.success
    assert float(result.x[0]) == 2.0
    assert result.evaluations <= 40
    fixed_fit = minimize(lambda q: residuals(torch.stack([torch.tensor(2.0, dtype=D), q[0], q[1]])), [0.5, 0.1], "lm")
    torch.testing.assert_close(result.x[1:], fixed_fit.x, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "ours"),
    [("L-BFGS-B", "lbfgs"), ("Nelder-Mead", "nelder-mead"), ("BFGS", "bfgs"), ("CG", "cg"), ("Newton-CG", "newton-cg"),
     ("trust-exact", "trust-exact"), ("NewtonCG", "newton-cg"), ("LBFGS", "lbfgs"), ("LevenbergMarquardt", "lm"),
     ("TrustCG", "trust-ncg"), ("SLSQP", "sqp"), ("PolakRibiere", "cg"), ("Powell", "powell")],
)  # fmt: skip
def test_spellings_of_method_names(name, ours):
    fun = (lambda x: x) if ours == "lm" else (lambda x: (x**2).sum())
    assert minimize(fun, torch.ones(2, dtype=D), name, max_evals=200).method == ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("trust-constr", "sqp"),
        ("TNC", "lbfgs"),
        ("COBYLA", "nelder-mead"),
        ("trust-krylov", "trust-ncg"),
        ("trf", "lm"),
    ],
)
def test_names_of_scipy_without_an_equal_say_what_to_use(name, ours):
    with pytest.raises(ValueError, match=f"use {ours}"):
        minimize(_away, torch.zeros(2, dtype=D), name)


# ---------------------------------------------------------------------------------------------- derivatives


def _line(t, p):
    return p["a"] + p["b"] * t


def test_standard_errors_are_those_of_linear_regression():
    t = torch.linspace(0, 1, 9, dtype=D)
    y = 1 + 2 * t + 0.1 * torch.sin(40 * t)
    fit = minimize(lambda p: _line(t, p) - y, {"a": 0.0, "b": 0.0})
    A = torch.stack([torch.ones_like(t), t], 1)
    s2 = 2 * fit.value / (9 - 2)
    expected = s2 * torch.linalg.inv(A.T @ A)
    assert float(fit.covariance()["a"]["b"]) == pytest.approx(float(expected[0, 1]), rel=1e-9)
    assert float(fit.stderr["b"]) == pytest.approx(float(expected[1, 1]) ** 0.5, rel=1e-9)
    torch.testing.assert_close(fit.jacobian()["b"], t)
    assert float(fit.hessian()["a"]["a"]) == pytest.approx(9.0)
    fixed = minimize(lambda p: _line(t, p) - y, {"a": 1.0, "b": 0.0}, bounds={"a": (1, 1)})
    assert float(fixed.stderr["a"]) == 0.0
    assert float(fixed.stderr["b"]) == pytest.approx(float((2 * fixed.value / 8 / (t**2).sum()) ** 0.5), rel=1e-9)


def test_derivatives_are_labelled_where_x0_is():
    amp = mo.tensor(torch.tensor([1.0, 2.0], dtype=D), channel=["r", "g"])
    result = minimize(lambda x: ((x.data - 3) ** 2 * torch.tensor([1.0, 4.0])).sum() + x.data.prod(), amp)
    H = result.hessian()
    assert [space.name for space in H.dims] == ["channel", "channel'"]
    torch.testing.assert_close(H.data, torch.tensor([[2.0, 1.0], [1.0, 8.0]], dtype=D))
    torch.testing.assert_close(result.covariance().data @ H.data, torch.eye(2, dtype=D), atol=1e-12, rtol=0)
    assert result.stderr.dims == amp.dims
    assert result.jacobian().dims == amp.dims


def test_undetermined_parameters_have_infinite_errors():
    result = minimize(lambda x: torch.stack([x[0] + x[1] - 1, 2 * (x[0] + x[1]) - 2.1, x[0] + x[1]]), [0.0, 0.0], "lm")
    assert bool(torch.isinf(result.stderr).all())


def test_a_pickled_result_has_no_function():
    result = minimize(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2, dtype=D))
    loaded = pickle.loads(pickle.dumps(result))
    assert torch.equal(loaded.x, result.x)
    assert loaded.reason == result.reason
    with pytest.raises(ValueError, match="without its function"):
        _ = loaded.stderr


def test_a_first_call_does_not_import_the_compiler():
    program = (
        "import sys, torch, moduli as mo; mo.minimize(lambda x: (x**2).sum(), torch.ones(2)); "
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_python("-c", program).strip() == "False"


SWITCHED_OFF = {
    "a fit": lambda: minimize(lambda x: torch.stack([x[0] - 1, x[1] - 1, x.sum() - 2.5]), torch.zeros(2, dtype=D)),
    "a loss": lambda: minimize(lambda x: ((x - 1) ** 2).sum(), torch.zeros(2, dtype=D)),
    "within bounds": lambda: minimize(lambda x: ((x - 1) ** 2).sum(), torch.zeros(2, dtype=D), bounds=(None, 0.5)),
    "constraints": lambda: minimize(
        lambda x: ((x - 1) ** 2).sum(), torch.zeros(2, dtype=D), constraints={"type": "ineq", "fun": lambda x: 0.5 - x}
    ),
    "batched": lambda: minimize(lambda x: ((x - 1) ** 2).sum(), torch.zeros(3, 2, dtype=D), batched=True),
    "a curve": lambda: mo.curve_fit(lambda x, a: a * x, [1.0, 2.0, 3.0], [2.0, 4.0, 6.5], [1.0]),
    "a module": lambda: minimize(
        lambda net: (net.weight - 1).square().sum(), torch.nn.Linear(2, 1, bias=False).double()
    ),
    "implicit": lambda: minimize(
        lambda x, c: ((x - c) ** 2).sum(), torch.zeros(2, dtype=D), args=(torch.ones(2, dtype=D),), implicit=True
    ),
}


@pytest.mark.parametrize("name", SWITCHED_OFF)
@pytest.mark.parametrize("switch_off", [torch.no_grad, torch.inference_mode])
def test_results_where_the_caller_has_switched_gradients_off(name, switch_off):
    torch.manual_seed(0)
    usual = SWITCHED_OFF[name]()
    torch.manual_seed(0)
    with switch_off():
        result = SWITCHED_OFF[name]()
        errors = None if name in ("batched", "a module") else result.stderr
    assert result.success is usual.success is True
    torch.testing.assert_close(result.value, usual.value)
    pairs = [(result.x.weight, usual.x.weight)] if name == "a module" else [(result.x, usual.x)]
    if errors is not None:
        pairs.append((errors, usual.stderr))
    for one, other in pairs:
        torch.testing.assert_close(one, other)
