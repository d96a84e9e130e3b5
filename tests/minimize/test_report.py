"""Correlations, confidence intervals, tables and plots of results."""

import builtins
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli as mo
from moduli._minimize._intervals import find_t_quantile

D = torch.float64
T = torch.linspace(0, 2, 24, dtype=D)
Y = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(40 * T)


def model(t, height, rate, floor):
    return height * torch.exp(-rate * t) + floor


def as_vector(form):
    return torch.stack([form[name] for name in ("height", "rate", "floor")])


def test_correlations_are_scaled_covariances():
    fit = mo.curve_fit(model, T, Y)
    covariance, correlation = fit.covariance(), fit.correlation()
    for a in fit.x:
        assert float(correlation[a][a]) == 1.0
        for b in fit.x:
            expected = covariance[a][b] / fit.stderr[a] / fit.stderr[b]
            assert float(correlation[a][b]) == pytest.approx(float(expected), rel=1e-12)
    loose = mo.minimize(lambda p: p[0] + p[1] + p[2] * T - Y, torch.zeros(3, dtype=D), bounds=[(None, None)] * 3)
    assert loose.correlation()[0, 1].isnan()
    fixed_fit = mo.curve_fit(model, T, Y, [1.0, 1.3, 0.0], bounds={"rate": (1.3, 1.3)})
    assert float(fixed_fit.correlation()["rate"]["floor"]) == 0.0


@given(st.floats(0.01, 0.9999), st.sampled_from([1, 2, 3, 7, 30, 500, math.inf]))
def test_quantiles_of_student(probability, freedom):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.norm.ppf(probability) if math.isinf(freedom) else stats.t.ppf(probability, freedom)
    assert find_t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_intervals_by_t():
    fit = mo.curve_fit(model, T, Y)
    low, high = fit.confidence_interval(0.9)
    reach = find_t_quantile(0.95, len(T) - 3)
    torch.testing.assert_close(as_vector(high) - as_vector(fit.x), reach * as_vector(fit.stderr))
    torch.testing.assert_close(as_vector(fit.x) - as_vector(low), reach * as_vector(fit.stderr))
    known_sigma = mo.curve_fit(model, T, Y, sigma=0.1, absolute_sigma=True)
    low, high = known_sigma.confidence_interval()
    torch.testing.assert_close(as_vector(high) - as_vector(low), 2 * 1.959963984540054 * as_vector(known_sigma.stderr))


def test_profiles_of_a_linear_model_are_the_intervals_by_t():
    fit = mo.minimize(lambda p: p[0] + p[1] * T + p[2] * T**2 - Y, torch.zeros(3, dtype=D))
    for straight, profiled in zip(fit.confidence_interval(), fit.confidence_interval(by="profile"), strict=True):
        torch.testing.assert_close(straight, profiled, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sigma", [None, 0.05])
def test_profiles_end_where_the_minimal_sum_of_squares_reaches_its_threshold(sigma):
    fit = mo.curve_fit(model, T, Y, sigma=sigma, absolute_sigma=sigma is not None)
    freedom = math.inf if sigma else len(T) - 3
    grown = find_t_quantile(0.975, freedom) ** 2 * (0.5 if sigma else fit.value / freedom)
    for ends in fit.confidence_interval(by="profile"):
        for name, end in ends.items():
            fixed_fit = mo.curve_fit(
                model, T, Y, {**fit.x, name: end}, sigma=sigma, bounds={name: (float(end), float(end))}
            )
            assert fixed_fit.value - fit.value == pytest.approx(grown, rel=1e-5)


def test_profiles_are_those_of_lmfit():
    lmfit = pytest.importorskip("lmfit")
    theirs = lmfit.Model(lambda t, height, rate, floor: height * np.exp(-rate * t) + floor)
    out = theirs.fit(Y.numpy(), t=T.numpy(), height=2.0, rate=1.0, floor=0.3)
    ends = out.conf_interval(sigmas=[0.95])
    fit = mo.curve_fit(model, T, Y)
    low, high = fit.confidence_interval(by="profile")
    for name in fit.x:
        assert float(low[name]) == pytest.approx(ends[name][0][1], rel=1e-4)
        assert float(high[name]) == pytest.approx(ends[name][-1][1], rel=1e-4)


def test_profiles_of_a_likelihood_at_bounds_and_without_limits():
    normal = mo.minimize(lambda x: 0.5 * ((x - 3) ** 2).sum(), torch.zeros(2, dtype=D))
    low, high = normal.confidence_interval(by="profile")
    torch.testing.assert_close(high - low, torch.full((2,), 2 * 1.959963984540054, dtype=D), rtol=1e-5, atol=0)
    bounded = mo.curve_fit(model, T, Y, bounds={"floor": (0.45, 9.0)})
    low, _ = bounded.confidence_interval(by="profile")
    assert float(low["floor"]) == pytest.approx(0.45)
    # For exp(-p) near zero the data bound p from below only.
    noise = 0.1 * torch.cos(math.pi * torch.arange(24, dtype=D)) + 0.01
    open_above = mo.minimize(lambda p: torch.exp(-p[0]) - noise, torch.ones(1, dtype=D))
    low, high = open_above.confidence_interval(by="profile")
    assert math.isinf(float(high[0]))
    assert 1 < float(low[0]) < float(open_above.x[0])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda fit: fit.confidence_interval(1.5), "level"),
        (lambda fit: fit.confidence_interval(by="magic"), "profile"),
        (lambda fit: mo.minimize(lambda p: p - 1, torch.zeros(2, dtype=D)).confidence_interval(), "no more residuals"),
        (lambda fit: pickle.loads(pickle.dumps(fit)).report(), "without its function"),
    ],
)
def test_results_without_an_interval_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call(mo.curve_fit(model, T, Y))
    constrained = mo.minimize(
        lambda p: p[0] + p[1] * T - Y, torch.zeros(2, dtype=D), constraints={"type": "eq", "fun": lambda p: p.sum() - 1}
    )
    with pytest.raises(ValueError, match="constraints"):
        constrained.confidence_interval(by="profile")


def test_the_table_has_every_parameter_and_the_numbers_of_lmfit():
    lmfit = pytest.importorskip("lmfit")
    fit = mo.curve_fit(model, T, Y)
    text = fit.report()
    theirs = lmfit.Model(lambda t, height, rate, floor: height * np.exp(-rate * t) + floor)
    out = theirs.fit(Y.numpy(), t=T.numpy(), height=2.0, rate=1.0, floor=0.3)
    rows = dict(line.split("=") for line in text.splitlines() if " = " in line)
    rows = {key.strip(): value.strip() for key, value in rows.items()}
    assert float(rows["chi-square"]) == pytest.approx(out.chisqr, rel=1e-6)
    assert float(rows["reduced chi-square"]) == pytest.approx(out.redchi, rel=1e-6)
    assert float(rows["Akaike info crit"]) == pytest.approx(out.aic, rel=1e-5)
    assert float(rows["Bayesian info crit"]) == pytest.approx(out.bic, rel=1e-5)
    assert float(rows["C(height, floor)"]) == pytest.approx(out.params["height"].correl["floor"], abs=2e-4)
    assert f"{float(fit.x['rate']):.8g} +/- {float(fit.stderr['rate']):.8g}" in text


def test_tables_name_numbers_by_their_labels():
    kind = mo.Space(["slope", "offset"], "kind")
    fit = mo.minimize(lambda p: p.data[0] * T + p.data[1] - Y, mo.Tensor(torch.zeros(2, dtype=D), kind))
    assert "x[slope]" in fit.report()
    nested = mo.minimize(
        lambda p: p["a"][0] * T + p["a"][1] - Y + 0 * p["b"],
        {"a": torch.zeros(2, dtype=D), "b": 0.0},
        bounds={"a": [(None, None), (2.0, 2.0)]},
    )
    text = nested.report()
    assert "a[1]: " in text
    assert "(fixed)" in text
    assert "not determined" in text
    loss = mo.minimize(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2, dtype=D))
    assert "loss" in loss.report()


def test_plots_show_data_model_and_residuals():
    pytest.importorskip("matplotlib")
    fit = mo.curve_fit(model, T, Y, sigma=0.1)
    above, below = fit.plot().axes
    data, curve = (line.get_ydata() for line in above.get_lines()[:2])
    np.testing.assert_allclose(data, Y)
    np.testing.assert_allclose(curve, model(T, **fit.x))
    np.testing.assert_allclose(below.get_lines()[0].get_ydata(), Y - model(T, **fit.x))
    plain = mo.minimize(lambda p: p[0] + p[1] * T - Y, torch.zeros(2, dtype=D))
    assert len(plain.plot().axes) == 2
    loss = mo.minimize(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2, dtype=D))
    (axes,) = loss.plot().axes
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [value for _, value in loss.history])


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match=r"moduli\[plot\]"):
        mo.curve_fit(model, T, Y).plot()
