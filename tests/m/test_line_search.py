"""Line searches by bisection and by SciPy."""

import pytest
import scipy.optimize
import torch

import moduli as mo
from m.first_order import doubles
from moduli import m


def test_bisection_goes_down_or_up_from_the_last_length():
    for init, end in ((8.0, 0.5), (0.0625, 0.5)):
        w = torch.nn.Parameter(doubles(3.0))
        link = m.AdaptiveBisection(init=init)
        mo.Optimizer([w], link).step(mo.closure(lambda w=w: w.square().sum()))
        assert link.global_state["last"] == end
        assert w.item() == 0.0


def test_bisection_stays_where_nothing_is_lower():
    w = torch.nn.Parameter(doubles(0.0))
    mo.Optimizer([w], m.Fill(1.0), m.AdaptiveBisection()).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == 0.0


@pytest.mark.parametrize(
    "settings", [{}, {"method": "golden"}, {"bounds": (0.0, 5.0)}, {"prev_init": True, "maxiter": 50}]
)
def test_scipys_searches_find_the_minimum_along_the_line(settings):
    w = torch.nn.Parameter(doubles(3.0, 1.0))
    x, g = w.detach().clone(), doubles(6.0, 6.0)
    best = scipy.optimize.minimize_scalar(lambda a: float((((x - a * g) ** 2) * doubles(1.0, 3.0)).sum())).x
    mo.Optimizer([w], m.ScipyMinimizeScalar(**settings)).step(mo.closure(lambda: w[0] ** 2 + 3 * w[1] ** 2))
    torch.testing.assert_close(w.detach(), x - best * g, rtol=1e-3, atol=1e-3)
