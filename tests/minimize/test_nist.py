"""NIST's certified regressions: parameters, sums of squares and standard errors, from both starting points."""

import pytest
import torch

from moduli import minimize
from moduli.lab.problems import NistFit, get
from moduli.lab.problems import names as problem_names

SETS = [name for name in problem_names() if name.startswith("nist-")]
# These take hundreds of evaluations, and run with --all only.
SLOW = {("nist-bennett5", 1), ("nist-mgh10", 1), ("nist-mgh10", 2), ("nist-mgh17", 1)}

# Double precision determines the certified parameters of the first two to no more digits; steps of the last end with 7.6 to 8.3
# digits, depending on the rounding of the processor.
DIGITS = {"nist-enso": 6, "nist-lanczos3": 6, "nist-thurber": 7}


def count_digits(values, certified):
    return float((-torch.log10(((values - certified) / certified).abs().clamp_min(1e-11))).min())


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("name", SETS)
def test_certified_values(name, start, request):
    if (name, start) in SLOW and not request.config.getoption("--all"):
        pytest.skip("takes hundreds of evaluations: --all")
    problem = get(name)
    data = problem.data
    fit = minimize(lambda b: problem.predict(b, data.x) - data.y, data.starts[start - 1])
    assert fit.method == "lm"
    assert fit.success, fit
    assert count_digits(fit.x, data.certified) >= DIGITS.get(name, 8)
    if name == "nist-lanczos1":  # its data are values of the model with 14 digits, so the residuals are rounding errors
        assert 2 * fit.value < 1e-20
    else:
        assert 2 * fit.value == pytest.approx(data.rss, rel=1e-10)
        assert count_digits(fit.stderr, data.stderr) >= 6


def test_there_are_27_with_the_same_loss_as_problems():
    assert len(SETS) == 27
    for name in SETS:
        problem = get(name)
        assert isinstance(problem, NistFit)
        point = problem.model(0)
        with torch.no_grad():
            assert float(problem.loss(point)) == float(problem.residuals(point).square().sum())
            point.x.copy_(problem.data.certified)
            assert abs(float(problem.loss(point)) - problem.optimum) <= problem.tolerance


@pytest.mark.parametrize("options", [{"broyden": True}, {"geodesic": True}])
@pytest.mark.parametrize("name", ["nist-misra1a", "nist-chwirut2", "nist-danwood", "nist-rat43", "nist-eckerle4"])
def test_variants_end_at_the_same_point(name, options):
    problem = get(name)
    data = problem.data
    fit = minimize(lambda b: problem.predict(b, data.x) - data.y, data.starts[1], "lm", options=options)
    assert fit.success, fit
    assert count_digits(fit.x, data.certified) >= 6
