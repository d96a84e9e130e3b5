"""SVRG and MARS against their formulas."""

import pytest
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import m

CENTRES = torch.tensor([[1.0, 5.0], [-3.0, 2.0], [4.0, -1.0]], dtype=torch.float64)
SCALES = torch.tensor([[1.0, 2.0], [3.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def batch(w, b):
    return (SCALES[b] * (w - CENTRES[b]).square()).sum()


def gradient(w, b):
    return 2 * SCALES[b] * (w - CENTRES[b])


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_svrg_is_its_formula(alpha):
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = mo.Optimizer([w], m.SVRG(4, accum_steps=3, alpha=alpha), m.LR(0.05))
    x = w.detach().clone()
    for _ in range(2):
        for b in range(3):
            opt.step(mo.closure(lambda b=b: batch(w, b)))
        assert torch.equal(w.detach(), x), "parameters stay while the full gradient is averaged"
        anchor, full = x.clone(), sum(gradient(x, b) for b in range(3)) / 3
        for b in (0, 2, 1, 1):
            expected = batch(x, b)
            x = x - 0.05 * (gradient(x, b) - alpha * (gradient(anchor, b) - full))
            seen = opt.step(mo.closure(lambda b=b: batch(w, b)))
            assert seen.item() == pytest.approx(expected.item())
            close([w.detach()], [x])


def test_svrg_with_a_full_closure_steps_without_accumulating():
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = mo.Optimizer([w], m.SVRG(2), m.LR(0.05))
    full = mo.closure(lambda: sum(batch(w, b) for b in range(3)) / 3)
    opt.step(mo.closure(lambda: batch(w, 0)), full_closure=full)
    close([w.detach()], [-0.05 * sum(gradient(torch.zeros(2), b) for b in range(3)) / 3])


def test_svrg_does_not_move_from_the_optimum():
    best = (SCALES * CENTRES).sum(0) / SCALES.sum(0)
    w = torch.nn.Parameter(best.clone())
    opt = mo.Optimizer([w], m.SVRG(5, accum_steps=3), m.LR(0.1))
    for t in range(8):
        opt.step(mo.closure(lambda t=t: batch(w, t % 3)))
    close([w.detach()], [best])


@pytest.mark.parametrize("limit", [None, 1.0])
def test_mars_is_its_formula(limit):
    def update(x, g, memory, t):
        c = g + 0.025 * 9 * (g - memory.get("g", g))
        memory["g"] = g.clone()
        return 0.1 * (c if limit is None else c * min(1.0, limit / c.norm()))

    ours = run(lambda p: [m.MARSCorrection(max_norm=limit), m.LR(0.1)], shapes=((3, 2),))
    close(ours, run(formula(update), shapes=((3, 2),)))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="SVRG: svrg_steps"):
        m.SVRG(0)
    with pytest.raises(ValueError, match="MARSCorrection: beta"):
        m.MARSCorrection(beta=1.0)
