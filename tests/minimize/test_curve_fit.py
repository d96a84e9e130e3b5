"""curve_fit and scipy_method: equal to SciPy's, with parameters by name."""

import numpy as np
import pytest
import torch

import moduli as mo

scipy_optimize = pytest.importorskip("scipy.optimize")
D = torch.float64
T = torch.linspace(0, 2, 24, dtype=D)
Y = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(40 * T)


def model(t, height, rate, floor):
    return height * torch.exp(-rate * t) + floor


def numpy_model(t, height, rate, floor):
    return height * np.exp(-rate * t) + floor


SIGMA = 0.1 + 0.05 * torch.cos(T).abs()
SETTINGS = [
    {},
    {"sigma": SIGMA},
    {"sigma": SIGMA, "absolute_sigma": True},
    {"sigma": torch.diag(SIGMA**2) + 0.002, "absolute_sigma": True},
    {"bounds": ([0, 0, 0], [2, np.inf, 1])},
    {"bounds": (0, np.inf), "p0": [1.0, 0.5, 0.1]},
    {"sigma": 0.3, "absolute_sigma": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_values_and_covariances_are_those_of_scipy(settings):
    fit = mo.curve_fit(model, T, Y, **settings)
    theirs = {key: np.asarray(value) if key in ("sigma", "p0") else value for key, value in settings.items()}
    popt, pcov = scipy_optimize.curve_fit(
        numpy_model, T.numpy(), Y.numpy(), xtol=1e-12, ftol=1e-12, gtol=1e-12, **theirs
    )
    assert fit.success, fit
    assert list(fit.x) == ["height", "rate", "floor"]
    np.testing.assert_allclose([float(value) for value in fit.x.values()], popt, rtol=1e-5)
    covariance = fit.covariance()
    ours = np.array([[float(covariance[a][b]) for b in fit.x] for a in fit.x])
    np.testing.assert_allclose(ours, pcov, rtol=2e-3, atol=1e-9)


def test_starts_by_name_by_list_and_from_the_signature():
    exact = mo.curve_fit(model, T, Y).x
    named = mo.curve_fit(model, T, Y, {"floor": 0.0, "rate": 0.5, "height": 1.0})
    assert list(named.x) == ["floor", "rate", "height"]
    for fit in (
        named,
        mo.curve_fit(model, T, Y, [1.0, 0.5, 0.0]),
        mo.curve_fit(model, T.numpy(), Y.tolist(), torch.tensor([1.0, 0.5, 0.0], dtype=D)),
        mo.curve_fit(model, T, Y, bounds={"rate": (0, 5)}),
        mo.curve_fit(model, T, Y, bounds=[(0, 9), None, (-2, -0.5 + 2)]),
    ):
        for name, value in exact.items():
            assert float(fit.x[name]) == pytest.approx(float(value), rel=1e-6)
    anything = mo.curve_fit(lambda t, *p: model(t, *p), T, Y, [1.0, 0.5, 0.0])
    assert list(anything.x) == ["p0", "p1", "p2"]
    vector = mo.curve_fit(lambda t, c: c[0] + c[1] * t, T, Y, {"c": torch.zeros(2, dtype=D)})
    assert vector.stderr["c"].shape == (2,)


def test_labelled_data_fit_as_plain_data():
    time = mo.Space(len(T), "time")
    t, y = mo.Tensor(T, time), mo.Tensor(Y, time)
    fit = mo.curve_fit(lambda t, a, b: a + b * t, t, y)
    plain = mo.curve_fit(lambda t, a, b: a + b * t, T, Y)
    torch.testing.assert_close(fit.x, plain.x)
    assert isinstance(fit.residuals, mo.Tensor)
    assert fit.residuals.dims == y.dims


def test_a_given_jacobian_equals_differentiation():
    def jac(t, height, rate, floor):
        return torch.stack([torch.exp(-rate * t), -t * height * torch.exp(-rate * t), torch.ones_like(t)], 1)

    for sigma in (None, SIGMA):
        fit = mo.curve_fit(model, T, Y, sigma=sigma, jac=jac)
        exact = mo.curve_fit(model, T, Y, sigma=sigma)
        for name in fit.x:
            assert float(fit.x[name]) == pytest.approx(float(exact.x[name]), rel=1e-8)
            assert float(fit.stderr[name]) == pytest.approx(float(exact.stderr[name]), rel=1e-6)


def test_a_robust_loss_with_nan_masked():
    y = Y.clone()
    y[4], y[9] = torch.nan, 30.0
    fit = mo.curve_fit(model, T, y, nan="mask", loss="cauchy", f_scale=0.1)
    assert abs(float(fit.x["rate"]) - 1.3) < 0.1


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mo.curve_fit(lambda t: t, T, Y), TypeError, "no parameters"),
        (lambda: mo.curve_fit(model, T, Y, [1.0]), TypeError, "p0 has 1"),
        (lambda: mo.curve_fit(model, T, Y, {}), TypeError, "no parameters"),
        (lambda: mo.curve_fit(lambda t, a: a * t[:3], T, Y), ValueError, "shape"),
        (lambda: mo.curve_fit(lambda t, a: 3.0, T, Y), TypeError, "torch"),
        (lambda: mo.curve_fit(model, T, Y, sigma=-1.0), ValueError, "above zero"),
        (lambda: mo.curve_fit(model, T, Y, sigma=[1.0, 2.0]), ValueError, "does not fit"),
        (lambda: mo.curve_fit(model, T, Y, sigma=-torch.eye(24)), ValueError, "positive definite"),
        (lambda: mo.curve_fit(model, T, Y, bounds=[(0, 1)]), ValueError, "interval for each"),
        (lambda: mo.curve_fit(model, T, Y, jac=3), TypeError, "jac"),
        (lambda: mo.curve_fit(model, T, Y, jac=lambda t, *p: t), ValueError, "columns"),
    ],
)
def test_wrong_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


# ---------------------------------------------------------------------------------------------- scipy_method


@pytest.mark.parametrize("name", ["lbfgs", "bfgs", "cg", "nelder-mead", "sqp"])
@pytest.mark.parametrize("jac", [None, True, "function"])
def test_methods_run_in_scipys_minimize(name, jac):
    rosen, der = scipy_optimize.rosen, scipy_optimize.rosen_der
    fun = (lambda x: (rosen(x), der(x))) if jac is True else rosen
    gradient = der if jac == "function" else jac
    options = {} if jac else {"gtol": 1e-4} if name in ("lbfgs", "bfgs", "cg") else {}
    out = scipy_optimize.minimize(fun, [-1.2, 1.0], method=mo.scipy_method(name), jac=gradient, options=options)
    assert isinstance(out, scipy_optimize.OptimizeResult)
    assert out.success, out
    np.testing.assert_allclose(out.x, 1.0, atol=2e-3)
    assert out.nfev > 5
    assert out.message


def test_scipys_arguments_reach_the_method():
    def fun(x, centre):
        return float(((x - centre) ** 2).sum())

    seen = []
    out = scipy_optimize.minimize(
        fun, [0.5, 0.5], args=(3.0,), jac=lambda x, centre: 2 * (x - centre), bounds=[(0, 1), (0, 9)],
        callback=lambda x: seen.append(x), method=mo.scipy_method("lbfgs"), options={"maxiter": 50},
    )  # fmt: skip
    np.testing.assert_allclose(out.x, [1.0, 3.0], atol=1e-6)
    assert seen
    assert isinstance(seen[0], np.ndarray)
    newton = scipy_optimize.minimize(
        scipy_optimize.rosen, [-1.2, 1.0], jac=scipy_optimize.rosen_der, hess=scipy_optimize.rosen_hess,
        method=mo.scipy_method("newton"),
    )  # fmt: skip
    assert newton.success


def test_scipys_constraints_reach_the_method():
    constraints = [
        {"type": "eq", "fun": lambda x, total: x.sum() - total, "args": (1.0,)},
        scipy_optimize.NonlinearConstraint(lambda x: x[0], 0.8, np.inf),
        scipy_optimize.LinearConstraint(np.eye(2), [-9, -9], [9, 9]),
    ]
    out = scipy_optimize.minimize(
        lambda x: float((x**2).sum()), [3.0, 1.0], jac=lambda x: 2 * x, constraints=constraints,
        method=mo.scipy_method("sqp"),
    )  # fmt: skip
    assert out.success, out
    np.testing.assert_allclose(out.x, [0.8, 0.2], atol=1e-5)
    with pytest.raises(ValueError, match="no method"):
        mo.scipy_method("magic")


BANDS = mo.tensor([0.5, 0.5], band=["a", "b"], dtype=D)
ENERGY = mo.tensor(torch.linspace(0, 1, 6, dtype=D), "energy")
LINES = mo.tensor([1.0, 2.0], band=["a", "b"], dtype=D) * ENERGY + 0.05 * (9 * ENERGY).sin()
ERRORS = mo.tensor([10.0, 0.01], band=["a", "b"], dtype=D)


@pytest.mark.parametrize("start", [BANDS, BANDS.reindex(band=["b", "a"])])
@pytest.mark.parametrize(
    "sigma",
    [
        ERRORS,
        ERRORS.reindex(band=["b", "a"]),
        (ERRORS + 0 * ENERGY).permute("energy band"),
        (ERRORS + 0 * ENERGY).reindex(band=["b", "a"]),
        (ERRORS + 0 * ENERGY).data,
    ],
)
def test_labelled_sigmas_and_models_meet_the_labels_of_the_data(start, sigma):
    fit = mo.curve_fit(lambda x, k: k * x, ENERGY, LINES, {"k": start}, sigma=sigma, absolute_sigma=True)
    assert fit.stderr["k"].sel(band="a") > 1
    assert fit.stderr["k"].sel(band="b") < 0.1
    # The residuals of the plot are those of the data, in their order.
    assert float(fit.plot() is not None and fit.value) == pytest.approx(_find_chi(fit, LINES, ERRORS) / 2)


def _find_chi(fit, data, errors):
    return float((((fit.x["k"] * ENERGY - data) / errors) ** 2).sum())


@pytest.mark.parametrize("jac", [None, lambda x, k: x.data + 0.2 * k])
def test_a_labelled_covariance_meets_the_labels_of_the_data(jac):
    labels, swapped = ["a", "b", "c"], ["c", "a", "b"]
    matrix = torch.tensor([[1.0, 0.5, 0.0], [0.5, 4.0, 0.0], [0.0, 0.0, 9.0]], dtype=D)
    y, x = mo.tensor([1.0, 2.0, 3.0], band=labels, dtype=D), mo.tensor([3.0, 2.0, 1.0], band=["c", "b", "a"], dtype=D)
    covariance = mo.tensor(matrix, row=labels, column=labels).reindex(row=swapped, column=swapped)

    def curve(x, k):
        return k * x + 0.1 * k**2

    settings = {"p0": {"k": torch.tensor(0.5, dtype=D)}, "absolute_sigma": True}
    plain = mo.curve_fit(curve, x.data.flip(0), y.data, sigma=matrix, **settings)
    fit = mo.curve_fit(curve, x, y, sigma=covariance, jac=jac, **settings)
    assert float(fit.x["k"]) == pytest.approx(float(plain.x["k"]))
    assert float(fit.stderr["k"]) == pytest.approx(float(plain.stderr["k"]))


def test_labels_that_are_not_those_of_the_data_are_refused():
    y, k = mo.tensor([1.0, 2.0, 3.0], band=["a", "b", "c"], dtype=D), {"k": 1.0}
    for axes in ({"band": ["a", "b", "z"]}, {"other": ["a", "b", "c"]}):
        x = mo.tensor([1.0, 2.0, 3.0], dtype=D, **axes)
        with pytest.raises(ValueError, match="not those of y"):
            mo.curve_fit(lambda x, k: k * x, x, y, k)
        with pytest.raises(ValueError, match="not those of y"):
            mo.curve_fit(lambda x, k: k * x, y, y, k, sigma=x)


@pytest.mark.parametrize("jac", [None, lambda t, a, b: torch.stack([torch.exp(-b * t), -a * t * torch.exp(-b * t)], 1)])
def test_missing_data_leave_the_covariance_of_the_others(jac):
    keep = [i for i in range(len(T)) if i not in (3, 9)]
    damaged, covariance = Y.clone(), torch.diag(SIGMA**2) + 0.002
    damaged[3], damaged[9] = torch.nan, torch.nan

    def curve(t, a, b):
        return a * torch.exp(-b * t)

    left = mo.curve_fit(curve, T[keep], Y[keep], sigma=covariance[keep][:, keep], absolute_sigma=True)
    masked = mo.curve_fit(curve, T, damaged, sigma=covariance, absolute_sigma=True, nan="mask", jac=jac)
    for name in ("a", "b"):
        assert float(masked.x[name]) == pytest.approx(float(left.x[name]))
        assert float(masked.stderr[name]) == pytest.approx(float(left.stderr[name]))


def test_no_data_and_a_model_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="y has no numbers"):
        mo.curve_fit(model, T[:0], Y[:0])
    with pytest.raises(ValueError, match="f returned shape"):
        mo.curve_fit(lambda t, a: a * t[1:], T, Y, sigma=torch.eye(len(T), dtype=D), nan="mask")


def test_standard_deviations_of_a_square_table_are_no_covariance():
    grid = torch.linspace(1, 2, 9, dtype=D).reshape(3, 3)
    fit = mo.curve_fit(lambda x, a: a * x, grid, 2 * grid, sigma=0.1 * grid)
    assert torch.equal(fit.data.sigma, 0.1 * grid)


def test_a_covariance_matrix_is_symmetric():
    x = torch.arange(4.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="sigma, as a covariance matrix, is not symmetric"):
        mo.curve_fit(lambda x, a: a * x, x, 2 * x, [1.0], sigma=torch.ones(4, 4, dtype=torch.float64).triu())
