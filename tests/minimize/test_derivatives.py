"""Jacobians of models with few parameters: one backward pass if and only if the formula is elementwise."""

import pytest
import torch

from moduli import curve_fit
from moduli._minimize._derivatives import VectorFunction
from moduli._minimize._point import StartPoint

D = torch.float64
X = torch.linspace(0.1, 3, 12, dtype=D)
START = {"a": torch.tensor(1.7, dtype=D), "b": torch.tensor(0.6, dtype=D)}

ELEMENTWISE = {
    "exponential": lambda p: p["a"] * torch.exp(-p["b"] * X),
    "power": lambda p: p["a"] * X ** p["b"] + X**2,
    "switch": lambda p: torch.where(p["b"] > X, p["a"] * X, p["a"] + torch.sin(X)),
    "clamped": lambda p: (p["a"] * X).clamp(max=2.0) - torch.maximum(X, p["b"]).log(),
    "one unused": lambda p: torch.tanh(p["a"] * X) / (1 + X),
    "table": lambda p: p["a"] * torch.sigmoid(X.view(4, 3) - p["b"]),
    "constant": lambda p: p["a"] / p["b"] + 0 * X,
}
OTHERS = {
    "running sum": lambda p: torch.cumsum(p["a"] * X - p["b"], 0),
    "normalised": lambda p: torch.softmax(p["a"] * X, 0) * p["b"],
    "mean of a": lambda p: (p["a"] * X).mean() * X + p["b"],
    "stack": lambda p: torch.stack([p["a"], p["b"]]).prod() * X,
    "branch": lambda p: p["a"] * X if p["b"] > 0 else X,
    "number": lambda p: p["a"] * X + float(p["b"].detach()),
    "count": lambda p: p["a"] * X * p["b"].detach().sum(),
    "shifted": lambda p: p["a"] * X.roll(1) + torch.roll(p["b"] * X, 1),
}


def _differentiate(fun, mode=None):
    function = VectorFunction(fun, StartPoint(START), mode)
    vector = torch.stack(list(START.values()))
    with torch.no_grad():
        values = function(vector)
    return function, function.jacobian(vector, values.numel())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_model_is_differentiated_in_one_pass(name):
    function, J = _differentiate(ELEMENTWISE[name])
    assert function.elementwise is True
    torch.testing.assert_close(J, _differentiate(ELEMENTWISE[name], "reverse")[1])


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_are_not_elementwise_are_recognised(name):
    function, J = _differentiate(OTHERS[name])
    assert function.elementwise is False
    torch.testing.assert_close(J, _differentiate(OTHERS[name], "reverse")[1])


def test_a_model_that_is_elementwise_for_some_parameters_only():
    def model(x, a, b):
        y = a * torch.exp(-b * x)
        # The model is elementwise for small b only.
        return y if float(b.detach().reshape(-1)[0]) < 1.0 else torch.cumsum(y, 0) / torch.arange(1, 13, dtype=D)

    y = torch.cumsum(2.0 * torch.exp(-1.5 * X), 0) / torch.arange(1, 13, dtype=D)
    fit = curve_fit(model, X, y, (1.0, 0.9))
    J = torch.autograd.functional.jacobian(lambda p: model(X, *p), torch.stack(list(fit.x.values())))
    gradient = J.T @ (model(X, *fit.x.values()) - y)
    assert float(gradient.abs().max()) < 1e-6
