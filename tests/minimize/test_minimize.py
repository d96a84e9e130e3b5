"""minimize: standard problems, points of every form, bounds, and input that can't be minimised."""

import math
import sys
from pathlib import Path

import pytest
import torch

import moduli as mo
from moduli import Result, m, minimize

sys.path.insert(0, str(Path(__file__).parent))
from problems import PROBLEMS, digits_logistic

D = torch.float64
SMALL = [name for name in PROBLEMS if name != "Rosenbrock 100"]


def _bowl(x):
    return ((x - 3) ** 2).sum()


def _near(result, minima):
    return min(abs(result.value - value) for value in minima) < 1e-8


@pytest.mark.parametrize("method", ["auto", "bfgs", "lbfgs", "newton", "newton-cg", "trust-ncg"])
@pytest.mark.parametrize("name", SMALL)
def test_standard_problems(name, method):
    fun, x0, minima = PROBLEMS[name]
    result = minimize(fun, x0, method)
    assert _near(result, minima), result
    assert result.success


@pytest.mark.parametrize("method", ["bfgs", "lbfgs", "trust-exact"])
def test_rosenbrock_in_a_hundred_dimensions(method):
    fun, x0, minima = PROBLEMS["Rosenbrock 100"]
    assert _near(minimize(fun, x0, method), minima)


@pytest.mark.parametrize("method", ["auto", "newton-cg"])
def test_logistic_regression_of_digits(method):
    pytest.importorskip("sklearn")
    fun, x0, minima = digits_logistic()
    result = minimize(fun, x0, method)
    assert _near(result, minima), result
    assert result.success


@pytest.mark.parametrize("method", ["cg", "damped-newton", "trust-exact", "dogleg", "nelder-mead", "powell"])
@pytest.mark.parametrize("name", ["Rosenbrock 2", "Beale", "Helical valley"])
def test_the_other_methods_on_small_problems(name, method):
    fun, x0, minima = PROBLEMS[name]
    assert _near(minimize(fun, x0, method), minima)


@pytest.mark.parametrize("method", ["gd", "adam", "spsa", "cd"])
def test_simple_methods_solve_a_bowl(method):
    result = minimize(_bowl, torch.zeros(3, dtype=D), method)
    assert result.value < 1e-6, result


@pytest.mark.parametrize("method", ["auto", "lm", "gn"])
def test_vector_residuals(method):
    result = minimize(
        lambda x: torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]]), torch.tensor([-1.2, 1.0], dtype=D), method
    )
    assert result.value < 1e-16
    assert result.method in ("lm", "gn")
    assert result.success


def test_links_as_a_method():
    fun, x0, _ = PROBLEMS["Rosenbrock 2"]
    assert minimize(fun, x0, [m.TrustCG(m.SR1(inverse=False))], max_evals=2000).value < 1e-8


def test_points_keep_their_form_and_x0_its_numbers():
    start = {"a": torch.zeros(2, dtype=D), "b": [torch.ones((), dtype=D), (torch.ones(1, 2, dtype=D),)]}

    def fun(p):
        return ((p["a"] - 3) ** 2).sum() + (p["b"][0] + 1) ** 2 + (p["b"][1][0] ** 2).sum()

    result = minimize(fun, start)
    assert set(result.x) == {"a", "b"}
    assert isinstance(result.x["b"][1], tuple)
    torch.testing.assert_close(result.x["a"], torch.full((2,), 3.0, dtype=D))
    assert torch.equal(start["a"], torch.zeros(2, dtype=D))
    assert not result.x["a"].requires_grad


def test_a_labelled_tensor():
    import moduli as mo

    axis = mo.Space(3, "i")
    result = minimize(lambda x: ((x.data - 2) ** 2).sum(), mo.Tensor(torch.zeros(3, dtype=D), axis))
    assert isinstance(result.x, mo.Tensor)
    torch.testing.assert_close(result.x.data, torch.full((3,), 2.0, dtype=D))


def test_a_module():
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1).double()
    before = net.weight.detach().clone()
    X, y = torch.randn(20, 2, dtype=D), torch.randn(20, 1, dtype=D)
    result = minimize(lambda net: ((net(X) - y) ** 2).mean(), net)
    assert isinstance(result.x, torch.nn.Linear)
    assert torch.equal(net.weight, before)
    A = torch.cat([X, torch.ones(20, 1, dtype=D)], 1)
    best = torch.linalg.lstsq(A, y).solution
    torch.testing.assert_close(result.x.weight[0].detach(), best[:2, 0], atol=1e-7, rtol=1e-6)


def test_numbers_and_lists_of_numbers():
    assert abs(float(minimize(lambda x: (x - 2) ** 2, 0.0).x) - 2) < 1e-7
    assert minimize(lambda x: _bowl(x), [0.0, 1.0]).value < 1e-12


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "gd", "cg"])
def test_bounds_by_projection(method):
    result = minimize(
        _bowl, torch.tensor([0.5, 0.5], dtype=D), method, lower=0.0, upper=torch.tensor([1.0, 5.0], dtype=D)
    )
    torch.testing.assert_close(result.x, torch.tensor([1.0, 3.0], dtype=D), atol=1e-6, rtol=0)
    assert result.success, result


@pytest.mark.parametrize("method", ["lbfgs", "newton", "trust-ncg", "nelder-mead"])
def test_bounds_by_transform(method):
    result = minimize(
        _bowl,
        torch.tensor([0.5, 0.5], dtype=D),
        method,
        upper=torch.tensor([1.0, 5.0], dtype=D),
        bounds_by="transform",
    )
    torch.testing.assert_close(result.x, torch.tensor([1.0, 3.0], dtype=D), atol=1e-4, rtol=0)


def test_bounds_with_an_active_rosenbrock():
    fun, _, _ = PROBLEMS["Rosenbrock 2"]
    result = minimize(fun, torch.tensor([0.0, 0.0], dtype=D), "lbfgs", bounds=(-1.0, 0.5))
    torch.testing.assert_close(result.x, torch.tensor([0.5, 0.25], dtype=D), atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------- how it ends


def test_limits_callbacks_and_history():
    fun, x0, _ = PROBLEMS["Rosenbrock 2"]
    short = minimize(fun, x0, "lbfgs", max_evals=7)
    assert short.evaluations in (6, 7)  # the last is kept for the gradient at the point that is returned
    assert not short.success
    assert "7 evaluations" in short.reason
    assert short.value < float(fun(x0))
    stepped = minimize(fun, x0, "lbfgs", max_steps=3)
    assert stepped.steps == 3
    seen = []
    stopped = minimize(fun, x0, "lbfgs", callback=lambda now: seen.append(now.value) or len(seen) == 4)
    assert stopped.steps == 4
    assert "callback" in stopped.reason
    assert [value for _, value in stopped.history] == seen
    assert sorted(seen, reverse=True) == seen


def test_progress_shows_and_changes_nothing(capsys):
    fun, x0, _ = PROBLEMS["Rosenbrock 2"]
    assert minimize(fun, x0, "bfgs", progress=True).value == minimize(fun, x0, "bfgs").value


def test_a_zero_gradient_at_the_start():
    result = minimize(_bowl, torch.full((2,), 3.0, dtype=D))
    assert result.success
    assert result.steps == 0
    assert "gradient vanishes" in result.reason


def test_a_constant_function():
    result = minimize(lambda x: torch.tensor(4.0, dtype=D), torch.zeros(2, dtype=D))
    assert result.value == 4.0
    assert not result.success
    assert "does not depend" in result.reason
    assert minimize(lambda x: (0 * x).sum(), torch.zeros(2, dtype=D)).success


def test_an_unbounded_function():
    for method in ("bfgs", "lbfgs", "cg", "gd", "newton", "newton-cg", "trust-exact", "nelder-mead"):
        result = minimize(lambda x: x.sum(), torch.zeros(2, dtype=D), method)
        assert not result.success
        assert result.evaluations < 120, result
        assert "unbounded" in result.reason
        assert result.value < -1e6


@pytest.mark.parametrize("method", ["newton", "newton-cg", "gd"])
def test_a_long_slope_is_not_taken_for_an_unbounded_one(method):
    result = minimize(lambda x: (x - 50.0).abs().sum(), torch.zeros(2, dtype=D), method)
    assert "unbounded" not in result.reason
    assert result.value < 1e-3


@pytest.mark.parametrize("method", ["bfgs", "newton", "nelder-mead"])
def test_a_loss_that_is_not_finite_at_the_start(method):
    result = minimize(lambda x: torch.log(x).sum() * math.nan, torch.ones(2, dtype=D), method)
    assert not result.success
    assert "at the start" in result.reason
    assert torch.equal(result.x, torch.ones(2, dtype=D))


def test_regions_where_the_loss_is_not_defined_are_avoided():
    result = minimize(lambda x: (x - torch.log(x)).sum(), torch.full((2,), 5.0, dtype=D))
    torch.testing.assert_close(result.x, torch.ones(2, dtype=D), atol=1e-7, rtol=0)


def test_the_best_point_is_kept_when_the_function_fails():
    calls = [0]

    def fun(x):
        calls[0] += 1
        if calls[0] == 6:
            raise RuntimeError("out of luck")
        return _bowl(x) + (x**4).sum()

    with pytest.raises(RuntimeError, match="out of luck"):
        minimize(fun, torch.full((2,), 9.0, dtype=D))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: minimize(_bowl, torch.tensor([math.nan], dtype=D)), ValueError, "not finite"),
        (lambda: minimize(_bowl, torch.tensor([1, 2])), TypeError, "real numbers"),
        (lambda: minimize(_bowl, torch.zeros(0, dtype=D)), ValueError, "no numbers"),
        (lambda: minimize(_bowl, "start"), TypeError, "str"),
        (lambda: minimize(lambda x: x, torch.zeros(2, dtype=D), "bfgs"), ValueError, "one number"),
        (lambda: minimize(lambda x: 3.0, torch.zeros(2, dtype=D), "bfgs"), TypeError, "float"),
        (lambda: minimize(_bowl, torch.zeros(2, dtype=D), "magic"), ValueError, "no method"),
        (lambda: minimize(_bowl, torch.zeros(2, dtype=D), bounds=(1.0, 2.0)), ValueError, "outside"),
        (lambda: minimize(_bowl, torch.zeros(2, dtype=D), bounds=(2.0, 1.0)), ValueError, "not below"),
        (lambda: minimize(_bowl, torch.zeros(2, dtype=D), lower=torch.zeros(3)), ValueError, "shape"),
        (lambda: minimize(_bowl, torch.zeros(2, dtype=D), max_evals=0), ValueError, "max_evals"),
        (lambda: minimize(3, torch.zeros(2, dtype=D)), TypeError, "not callable"),
    ],
)
def test_bad_input_is_an_error_in_a_sentence(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_the_result_prints():
    result = minimize(_bowl, torch.zeros(2, dtype=D))
    assert isinstance(result, Result)
    assert "success=True" in repr(result)
    assert result.seconds > 0
    assert result.gradient_norm <= 1e-8


def test_without_gradients_a_value_that_is_lower_by_little_is_still_the_best():
    x0 = torch.tensor([0.005], dtype=torch.float64)
    assert minimize(lambda x: 1e10 + (x**2).sum(), x0, method="nelder-mead").value == 1e10


@pytest.mark.parametrize("method", ["cg", "gd"])
def test_an_overflow_is_called_an_overflow(method):
    result = minimize(lambda x: torch.exp(x**2).sum(), torch.tensor([20.0], dtype=torch.float64), method)
    assert not result.success
    assert "gradient overflows" in result.reason


# -- labels of bounds, scales and derivatives ---------------------------------------------------------------------------

TARGET = mo.tensor([1.0, 2.0], band=["a", "b"], dtype=D)
ZERO = mo.tensor([0.0, 0.0], band=["a", "b"], dtype=D)


@pytest.mark.parametrize(
    "bounds",
    [
        {"upper": mo.tensor([1.5, 0.5], band=["b", "a"], dtype=D)},
        {"bounds": mo.tensor([[-1.0, 1.5], [-1.0, 0.5]], band=["b", "a"], end=["low", "high"], dtype=D)},
        {"upper": torch.tensor([0.5, 1.5], dtype=D)},
    ],
)
def test_bounds_meet_the_labels_of_x0(bounds):
    found = minimize(lambda p: ((p - TARGET) ** 2).sum(), ZERO, **bounds)
    assert torch.allclose(found.x.data, torch.tensor([0.5, 1.5], dtype=D))


def test_bounds_along_one_axis_are_those_of_all_others():
    x0 = mo.tensor(torch.zeros(2, 3, dtype=D), row=["a", "b"], column=3)
    found = minimize(lambda p: ((p - 1) ** 2).sum(), x0, upper=mo.tensor([0.2, 0.1], row=["b", "a"], dtype=D))
    assert torch.allclose(found.x.data, torch.tensor([[0.1] * 3, [0.2] * 3], dtype=D))


@pytest.mark.parametrize("wrong", [{"band": ["b", "c"]}, {"other": ["b", "a"]}])
@pytest.mark.parametrize("setting", ["lower", "upper", "x_scale"])
def test_bounds_and_scales_with_other_labels_are_refused(setting, wrong):
    numbers = torch.tensor([-2.0, -1.0] if setting == "lower" else [2.0, 3.0], dtype=D)
    with pytest.raises(ValueError, match="not those of x0"):
        minimize(lambda p: p - TARGET, ZERO, **{setting: mo.tensor(numbers, **wrong)})


def test_bounds_of_batched_starts_meet_the_labels_of_one_start():
    starts = mo.tensor(torch.zeros(3, 2, dtype=D), start=3, band=["a", "b"])
    upper = mo.tensor([1.5, 0.5], band=["b", "a"], dtype=D)
    found = minimize(lambda p: ((p - TARGET) ** 2).sum(), starts, "bfgs", upper=upper, batched=True)
    assert torch.allclose(found.x.data, torch.tensor([[0.5, 1.5]] * 3, dtype=D), atol=1e-3)


def test_bounds_of_a_module_name_and_label_its_tensors():
    net = mo.Module()
    net.gain = mo.tensor([1.0, 2.0], band=["a", "b"], dtype=D).attach()
    upper = {"gain": mo.tensor([2.5, 1.5], band=["b", "a"], dtype=D)}
    start = minimize(lambda net: ((net.gain - 3) ** 2).sum(), net, upper={"gain": 2.75})
    found = minimize(lambda net: ((net.gain - 3) ** 2).sum(), net, upper={"gain": upper["gain"] + 0.5})
    assert torch.allclose(start.x.gain.data, torch.tensor([2.75, 2.75], dtype=D))
    assert torch.allclose(found.x.gain.data, torch.tensor([2.0, 3.0], dtype=D))
    assert list(found.stderr) == ["gain"]


@pytest.mark.parametrize("method", ["bfgs", "newton"])
def test_derivatives_of_the_user_meet_the_labels_of_x0(method):
    weights = mo.tensor([1.0, 10.0], band=["a", "b"], dtype=D)
    hessian = mo.tensor(torch.tensor([[20.0, 0.0], [0.0, 2.0]], dtype=D), band=["b", "a"], other=["b", "a"])
    found = minimize(
        lambda p: ((p - TARGET) ** 2 * weights).sum(), ZERO, method,
        jac=lambda p: (2 * weights * (p - TARGET)).reindex(band=["b", "a"]), hess=lambda p: hessian,
    )  # fmt: skip
    assert found.success
    assert torch.allclose(found.x.data, TARGET.data)
    assert found.evaluations < 10


def test_derivatives_with_other_labels_are_refused():
    with pytest.raises(ValueError, match="jac does not have the axes and labels of x0"):
        minimize(
            lambda p: ((p - TARGET) ** 2).sum(), ZERO, jac=lambda p: mo.tensor([1.0, 2.0], band=["a", "z"], dtype=D)
        )
