"""BFGS and L-BFGS in NumPy equal the chains of links of those names, for every form of a point."""

import pathlib
import sys

import numpy as np
import pytest
import torch

from moduli import m, minimize
from moduli._minimize import _quasi_newton

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from problems import PROBLEMS, rosenbrock

LINKS = {
    "bfgs": lambda: [m.BFGS(), m.StrongWolfe()],
    "lbfgs": lambda: [m.LBFGS(history_size=10), m.StrongWolfe()],
}


@pytest.mark.parametrize("method", LINKS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_method_steps_as_the_chain(name, method):
    fun, x0, _ = PROBLEMS[name]
    # Rounding grows with the steps, so only the first ones are compared exactly.
    early, chain = (minimize(fun, x0, how, max_steps=8) for how in (method, LINKS[method]()))
    assert early.evaluations == chain.evaluations - 1  # a chain evaluates the returned point once more
    torch.testing.assert_close(early.x, chain.x, rtol=1e-6, atol=1e-8)
    ours, chain = minimize(fun, x0, method), minimize(fun, x0, LINKS[method]())
    assert ours.success or not chain.success
    assert ours.evaluations <= 1.3 * chain.evaluations + 5


@pytest.mark.parametrize("method", LINKS)
def test_float32_ends_where_the_chain_ends(method):
    x0 = torch.tensor([-1.2, 1.0])
    ours, chain = minimize(rosenbrock, x0, method), minimize(rosenbrock, x0, LINKS[method]())
    assert ours.success
    assert ours.x.dtype is torch.float32
    torch.testing.assert_close(ours.x, chain.x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", LINKS)
def test_points_of_several_tensors_are_one_vector(method):
    x0 = torch.tensor([-1.2, 1.0, 0.5, 2.0], dtype=torch.float64)

    def join(p):
        return rosenbrock(torch.cat([p["a"].reshape(1), p["b"].reshape(-1)])) + 0 * p["unused"].sum().detach()

    parts = {"a": x0[0], "b": x0[1:].reshape(3, 1), "unused": torch.ones(2, dtype=torch.float64)}
    one, several = minimize(rosenbrock, x0, method), minimize(join, parts, method)
    assert several.evaluations == one.evaluations
    torch.testing.assert_close(torch.cat([several.x["a"].reshape(1), several.x["b"].reshape(-1)]), one.x)
    assert torch.equal(several.x["unused"], parts["unused"])
    assert torch.equal(x0, torch.tensor([-1.2, 1.0, 0.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("method", LINKS)
def test_bounds_by_transform_are_kept(method):
    x0 = torch.tensor([-1.2, 0.5], dtype=torch.float64)
    result = minimize(rosenbrock, x0, method, upper=0.8, bounds_by="transform")
    assert bool((result.x <= 0.8 + 1e-12).all())
    torch.testing.assert_close(result.x, torch.tensor([0.8, 0.64], dtype=torch.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("box", [{"upper": 0.1}, {"bounds": (None, 0.1)}, {"bounds": [(None, 0.1)]}, {"upper": [0.1]}])
def test_bounds_are_not_rounded_to_single_precision(box):
    result = minimize(lambda x: -x.sum(), torch.zeros(1, dtype=torch.float64), "lbfgs", **box)
    assert result.x.item() == 0.1


def test_a_module_that_is_minimised_under_no_grad():
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    y = x @ torch.tensor([[2.0], [-1.0]], dtype=torch.float64) + 0.5
    with torch.no_grad():
        result = minimize(lambda net: (net(x) - y).square().mean(), net, "bfgs")
    assert result.success
    torch.testing.assert_close(result.x.weight.data, torch.tensor([[2.0, -1.0]], dtype=torch.float64))


def test_large_and_mixed_points_use_the_chain(monkeypatch):
    def refuse(*args, **settings):
        raise AssertionError("these points need the chain")

    monkeypatch.setattr("moduli._minimize._loop.run_quasi_newton", refuse)
    several = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    assert minimize(lambda p: p[0].square().sum() + p[1].square().sum(), several, "lbfgs").success
    monkeypatch.setattr(_quasi_newton, "LARGEST", 3)
    assert minimize(lambda x: x.square().sum(), np.ones(4), "lbfgs").success
