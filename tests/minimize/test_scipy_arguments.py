"""Arguments as in SciPy: args, jac, hess, options, robust losses, NumPy functions, and SciPy's attributes of results."""

import numpy as np
import pytest
import torch

from moduli import minimize

scipy_optimize = pytest.importorskip("scipy.optimize")
D = torch.float64
T = torch.linspace(0, 2, 24, dtype=D)
Y = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.02 * torch.sin(40 * T)
START = torch.tensor([1.0, 0.5, 0.0], dtype=D)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def decay(p, t=T, y=Y):
    return p[0] * torch.exp(-p[1] * t) + p[2] - y


def decay_numpy(p):
    return p[0] * np.exp(-p[1] * T.numpy()) + p[2] - Y.numpy()


def decay_jac(p):
    t = T.numpy()
    return np.stack([np.exp(-p[1] * t), -t * p[0] * np.exp(-p[1] * t), np.ones_like(t)], 1)


X0 = np.array([-1.2, 1.0])


# ---------------------------------------------------------------------------------------------- args


def test_args_are_passed_after_the_point():
    result = minimize(lambda x, a, b: ((x - a) ** 2).sum() + b, torch.zeros(2, dtype=D), args=(3.0, 7.0))
    torch.testing.assert_close(result.x, torch.full((2,), 3.0, dtype=D))
    assert result.value == pytest.approx(7.0)
    assert minimize(lambda x, a: ((x - a) ** 2).sum(), torch.zeros(2, dtype=D), args=3.0).value < 1e-12
    torch.testing.assert_close(result.hessian(), 2 * torch.eye(2, dtype=D))


# ---------------------------------------------------------------------------------------------- jac, hess


@pytest.mark.parametrize("method", ["auto", "bfgs", "lbfgs", "cg", "gd"])
@pytest.mark.parametrize("both", [False, True])
def test_numpy_functions_with_a_gradient_are_minimised_as_with_torchs(method, both):
    rosen, der = scipy_optimize.rosen, scipy_optimize.rosen_der
    calls = []

    def gradient(x):
        assert isinstance(x, np.ndarray)
        calls.append(x.copy())
        return der(x)

    limits = {"max_steps": 40} if method == "gd" else {}
    if both:
        result = minimize(lambda x: (rosen(x), gradient(x)), X0, method, jac=True, **limits)
    else:
        result = minimize(rosen, X0, method, jac=gradient, **limits)
    exact = minimize(rosenbrock, torch.tensor([-1.2, 1.0], dtype=D), method, **limits)
    assert calls
    assert result.evaluations == pytest.approx(exact.evaluations, abs=4)
    torch.testing.assert_close(result.x, exact.x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.jac, der(result.x.numpy()), atol=1e-12)


@pytest.mark.parametrize("method", ["newton", "newton-cg", "trust-ncg", "trust-exact", "dogleg", "damped-newton"])
@pytest.mark.parametrize("own_gradient", [True, False])
def test_a_given_hessian_gives_the_steps_of_differentiation(method, own_gradient):
    rosen, der, hess = scipy_optimize.rosen, scipy_optimize.rosen_der, scipy_optimize.rosen_hess
    x0 = torch.tensor([-1.2, 1.0], dtype=D)
    exact = minimize(rosenbrock, x0, method)
    if own_gradient:
        result = minimize(rosen, X0, method, jac=der, hess=hess)
    else:
        result = minimize(rosenbrock, x0, method, hess=lambda x: torch.from_numpy(hess(x.numpy())))
    assert result.success, result
    assert result.evaluations == pytest.approx(exact.evaluations, abs=3)
    np.testing.assert_allclose(result.hessian(), hess(result.x.numpy()), rtol=1e-9)


def test_a_method_that_needs_second_derivatives_asks_for_them():
    with pytest.raises(TypeError, match="give hess="):
        minimize(scipy_optimize.rosen, X0, "newton", jac=scipy_optimize.rosen_der)


def test_gradients_and_hessians_in_the_form_of_x0():
    a, b = torch.tensor([1.0, 2.0], dtype=D), torch.tensor(3.0, dtype=D)
    start = {"u": torch.zeros(2, dtype=D), "v": torch.zeros((), dtype=D)}

    def value(p):
        return float(((p["u"] - a) ** 2).sum() + 2 * (p["v"] - b) ** 2 + p["u"][0] * p["v"])

    def gradient(p):
        return {
            "u": 2 * (p["u"] - a) + torch.stack([p["v"], 0 * p["v"]]),
            "v": 4 * (p["v"] - b) + p["u"][0],
        }

    cross = torch.tensor([1.0, 0.0], dtype=D)

    def hessian(p):
        return {"u": {"u": 2 * torch.eye(2, dtype=D), "v": cross}, "v": {"u": cross, "v": torch.tensor(4.0, dtype=D)}}

    quasi = minimize(value, start, "bfgs", jac=gradient)
    newton = minimize(value, start, "newton", jac=gradient, hess=hessian)
    torch.testing.assert_close(quasi.x, newton.x, rtol=1e-6, atol=1e-7)
    assert newton.evaluations <= 4
    torch.testing.assert_close(newton.hessian()["u"]["v"], cross)


@pytest.mark.parametrize("both", [False, True])
def test_a_numpy_fit_with_its_jacobian_equals_torchs(both):
    exact = minimize(decay, START)
    if both:
        fit = minimize(lambda p: (decay_numpy(p), decay_jac(p)), START.numpy(), "lm", jac=True)
    else:
        fit = minimize(decay_numpy, START.numpy(), jac=decay_jac)
    assert fit.method == "lm"
    assert fit.evaluations == exact.evaluations
    assert fit.njev == exact.njev
    torch.testing.assert_close(fit.x, exact.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fit.stderr, exact.stderr, rtol=1e-7, atol=0)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_modes_of_differentiation_agree(mode):
    exact, fit = minimize(decay, START), minimize(decay, START, jac=mode)
    torch.testing.assert_close(fit.x, exact.x, rtol=1e-9, atol=1e-12)
    assert fit.evaluations == exact.evaluations


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"jac": "2-point"}, ValueError, "torch differentiates"),
        ({"jac": 3}, TypeError, "jac is 3"),
        ({"jac": lambda x: np.zeros(5)}, ValueError, "jac returned"),
        ({"jac": True}, TypeError, "returns"),
        ({"jac": lambda x: x, "batched": True}, ValueError, "batched"),
        ({"x_scale": -1.0}, ValueError, "above zero"),
        ({"x_scale": torch.ones(3, dtype=D), "method": "lm"}, ValueError, "form of x0"),
        ({"x_scale": 2.0, "method": "bfgs"}, TypeError, "lm"),
        ({"loss": "tukey"}, ValueError, "soft_l1"),
        ({"loss": "huber", "f_scale": 0.0}, ValueError, "f_scale"),
        ({"loss": "huber"}, ValueError, "one number"),
        ({"nan": "drop"}, ValueError, "mask"),
        ({"options": {"maxiter": 3}, "max_steps": 4}, TypeError, "give one"),
        ({"options": {"stepmx": 3}}, TypeError, "stepmx"),
        ({"options": {"ftol": 1e-9}, "method": "lbfgs"}, TypeError, "tol="),
        ({"options": {"xtol": 1e-9}}, TypeError, "lm"),
        ({"options": {"maxiter": 0}}, ValueError, "at least one"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    options = {"fun": rosenbrock, "x0": torch.tensor([[-1.2, 1.0]], dtype=D)[0], **options}
    with pytest.raises(error, match=match):
        minimize(**options)


# ---------------------------------------------------------------------------------------------- options, callbacks


def test_options_by_scipys_names():
    x0 = torch.tensor([-1.2, 1.0], dtype=D)
    assert minimize(rosenbrock, x0, "L-BFGS-B", options={"maxiter": 3}).nit == 3
    assert minimize(rosenbrock, x0, "BFGS", options={"maxfev": 9}).nfev <= 9
    loose = minimize(rosenbrock, x0, "BFGS", options={"gtol": 1e-2})
    assert 1e-8 < loose.gradient_norm <= 1e-2
    rough, fine = (minimize(decay, START, options={"xtol": xtol}) for xtol in (1e-3, 1e-10))
    assert rough.nfev < fine.nfev
    assert minimize(decay, START, options={"broyden": True}).njev < minimize(decay, START).njev


def test_callbacks_of_both_kinds():
    points, results = [], []
    x0 = torch.tensor([-1.2, 1.0], dtype=D)
    minimize(rosenbrock, x0, "bfgs", callback=lambda xk: points.append(xk), max_steps=3)
    assert len(points) == 3
    assert all(isinstance(point, torch.Tensor) for point in points)

    def keep(*, intermediate_result):
        results.append(intermediate_result.fun)

    minimize(rosenbrock, x0, "bfgs", callback=keep, max_steps=3)
    assert len(results) == 3


@pytest.mark.parametrize("scale", [1.0, "jac", torch.tensor([1.0, 1e-3, 10.0], dtype=D)])
def test_scales_of_variables_do_not_change_the_result(scale):
    fit, exact = minimize(decay, START, x_scale=scale), minimize(decay, START)
    assert fit.success
    torch.testing.assert_close(fit.x, exact.x, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------- robust losses, NaN


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
def test_robust_losses_are_those_of_scipy(loss):
    y = Y.clone()
    y[[3, 11]] += torch.tensor([5.0, -4.0], dtype=D)

    def numpy_residuals(p):
        return p[0] * np.exp(-p[1] * T.numpy()) + p[2] - y.numpy()

    theirs = scipy_optimize.least_squares(
        numpy_residuals, [2.0, 1.0, 0.5], loss=loss, f_scale=0.1, xtol=1e-14, ftol=1e-14, gtol=1e-14, max_nfev=2000
    )
    fit = minimize(lambda p: decay(p, y=y), torch.tensor([2.0, 1.0, 0.5], dtype=D), loss=loss, f_scale=0.1)
    assert fit.success, fit
    assert fit.value == pytest.approx(theirs.cost, rel=1e-9)
    np.testing.assert_allclose(fit.x, theirs.x, rtol=1e-5)
    # The two outliers move the fit much less than they move least squares.
    clean = minimize(decay, START).x
    assert (fit.x - clean).norm() < 0.2 * (minimize(lambda p: decay(p, y=y), START).x - clean).norm()


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
def test_robust_losses_have_exact_derivatives_also_at_zero(loss):
    from moduli._minimize._functions import change_residuals

    fun = change_residuals(lambda x: x, loss, 0.7, None)
    r = torch.tensor([0.0, 1e-9, 1e-3, 0.0071, 0.3, 0.69, 0.71, 2.0, -50.0], dtype=D, requires_grad=True)
    (g,) = torch.autograd.grad(0.5 * fun(r).square().sum(), r)
    z = (r.detach() / 0.7) ** 2
    slope = {
        "soft_l1": (1 + z) ** -0.5,
        "huber": torch.where(z <= 1, 1.0, z.clamp(min=1) ** -0.5),
        "cauchy": 1 / (1 + z),
        "arctan": 1 / (1 + z**2),
    }[loss]
    torch.testing.assert_close(g, r.detach() * slope, rtol=1e-9, atol=1e-14)


def test_residuals_that_are_not_a_number_can_be_left_out():
    y = Y.clone()
    y[[2, 9]] = torch.nan
    there = ~y.isnan()
    fit = minimize(lambda p: decay(p, y=y), START, nan="mask")
    rest = minimize(lambda p: decay(p, T[there], Y[there]), START)
    torch.testing.assert_close(fit.x, rest.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fit.stderr, rest.stderr, rtol=1e-7, atol=0)
    assert not minimize(lambda p: decay(p, y=y), START).success
    with pytest.raises(ValueError, match="nothing to fit"):
        minimize(lambda p: decay(p) * torch.nan, START, nan="mask")


# ---------------------------------------------------------------------------------------------- floats, names


@pytest.mark.parametrize("method", ["nelder-mead", "powell", "cd", "cmaes", "spsa"])
def test_methods_without_gradients_take_numpy_functions(method):
    result = minimize(lambda x: float(np.sum((x - 3) ** 2)), np.zeros(2), method)
    assert result.value < 1e-3
    lists = minimize(lambda x: sum((float(v) - 3) ** 2 for v in x), [0.0, 0.0], method)
    assert lists.value < 1e-3
    assert minimize(lambda x: np.float64((x - 3.0) ** 2), np.array(0.0), method).value < 1e-3


def test_python_numbers_where_a_gradient_is_needed_are_refused():
    with pytest.raises(TypeError, match="jac=.*nelder-mead"):
        minimize(lambda x: 3.0, torch.zeros(2, dtype=D), "bfgs")
    with pytest.raises(TypeError, match="str"):
        minimize(lambda x: "three", torch.zeros(2, dtype=D), "nelder-mead")


def test_results_have_scipys_names():
    x0 = torch.tensor([-1.2, 1.0], dtype=D)
    result = minimize(rosenbrock, x0)
    assert (result.fun, result.nfev, result.nit) == (result.value, result.evaluations, result.steps)
    assert (result.message, result.status) == (result.reason, 0)
    torch.testing.assert_close(result.jac, result.jacobian())
    assert minimize(rosenbrock, x0, max_steps=2).status == 1
    assert minimize(rosenbrock, x0, callback=lambda r: True).status == 99
    assert minimize(lambda x: x.sum(), x0).status == 2
    fit = minimize(decay, START)
    assert fit.jac.shape == (len(T), 3)
    torch.testing.assert_close(fit.residuals, decay(fit.x))
    assert 0.5 * float(fit.residuals.square().sum()) == pytest.approx(fit.fun)
    with pytest.raises(ValueError, match="one number"):
        _ = result.residuals


@pytest.mark.parametrize("method", ["powell", "cmaes", "cd"])
def test_the_tolerance_of_a_method_without_gradients_counts(method):
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    assert minimize(rosenbrock, x0, method, tol=0.1).nfev < minimize(rosenbrock, x0, method, max_evals=2000).nfev
    with pytest.raises(TypeError, match=f"{method} has no option 'gtol'; there are maxiter, maxfev, disp"):
        minimize(rosenbrock, x0, method, options={"gtol": 1e-3})
