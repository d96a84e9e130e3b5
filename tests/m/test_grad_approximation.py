"""Gradients from one measurement, from coordinate descent, and from residuals."""

import pytest
import torch

import moduli as mo
from m.first_order import F64, doubles
from moduli import m


def test_one_measurement_is_unbiased_and_scales_with_one_over_h():
    w = torch.nn.Parameter(doubles(0.3, -0.2))
    link = m.SPSA1(h=0.1, n_samples=4000, seed=0)
    opt = mo.Optimizer([w], link, m.LR(1.0))
    before = w.detach().clone()
    opt.step(mo.closure(lambda: w.square().sum()))
    torch.testing.assert_close(before - w.detach(), 2 * before, rtol=0, atol=0.06)
    ends = []
    for h in (0.1, 0.2):
        x = torch.nn.Parameter(doubles(0.0))
        mo.Optimizer([x], m.SPSA1(h=h, seed=0)).step(mo.closure(lambda x=x: x.sum() * 0 + 1))
        ends.append(abs(x.item()))
    assert ends == pytest.approx([10.0, 5.0])


def test_coordinates_take_turns():
    seen = {}
    for index in ("cyclic", "cyclic2", "random"):
        w, x = torch.nn.Parameter(doubles(3.0, 2.0)), torch.nn.Parameter(doubles(1.0))
        opt = mo.Optimizer([w, x], m.CD(index=index, seed=0), m.LR(0.1))
        order = []
        for _ in range(6):
            before = torch.cat([w.detach().clone(), x.detach().clone()])
            opt.step(mo.closure(lambda w=w, x=x: w.square().sum() + x.square().sum()))
            moved = (torch.cat([w.detach(), x.detach()]) - before).abs()
            assert int((moved > 0).sum()) == 1
            order.append(int(moved.argmax()))
        seen[index] = order
    assert seen["cyclic"] == [0, 1, 2, 0, 1, 2]
    assert seen["cyclic2"] == [0, 1, 2, 1, 0, 1]
    assert set(seen["random"]) <= {0, 1, 2}


def test_slopes_of_coordinates_are_differences():
    w = torch.nn.Parameter(doubles(3.0))
    mo.Optimizer([w], m.CD(grad=True)).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == pytest.approx(-3.0)
    w = torch.nn.Parameter(doubles(3.0))
    mo.Optimizer([w], m.CD(grad=True, threepoint=False, h=0.5)).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == pytest.approx(3.0 - 6.5)


def test_a_coordinate_at_its_minimum_stays_and_halves_its_step():
    w = torch.nn.Parameter(doubles(0.0))
    link = m.CD(h=0.1)
    mo.Optimizer([w], link).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == 0.0
    assert link.state[w]["h"].item() == pytest.approx(0.05)


def test_coordinate_descent_refuses_complex_numbers():
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match="real"):
        mo.Optimizer([w], m.CD()).step(mo.closure(lambda: w.abs().sum()))


def test_residuals_for_any_links():
    w = torch.nn.Parameter(doubles(3.0, 1.0))
    A = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 1.0]], dtype=F64)
    mo.Optimizer([w], m.SumOfSquares(), m.LR(0.1)).step(mo.closure(lambda: A @ w - 1))
    x = doubles(3.0, 1.0)
    torch.testing.assert_close(w.detach(), x - 0.1 * A.mT @ (A @ x - 1))
