"""Random regularisation: dropped updates and weights, noise, and weights that are reset."""

import torch

import moduli as mo
from m.first_order import F64
from moduli import m, optim


def test_dropped_updates():
    u = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=F64)
    out = optim.step_tensors(m.Dropout(0.25, seed=0), [u.clone()])[0]
    retained = out != 0
    torch.testing.assert_close(out[retained], u[retained])
    assert abs(float(retained.double().mean()) - 0.75) < 0.05
    grafted = optim.step_tensors(m.Dropout(0.25, graft=True, seed=0), [u.clone()])[0]
    torch.testing.assert_close(grafted.norm(), u.norm())
    assert optim.step_tensors(m.Dropout(1.0, graft=True), [u.clone()])[0].abs().max() == 0


def test_dropped_weights_have_no_gradient():
    w = torch.nn.Parameter(torch.ones(500, dtype=F64))
    opt = mo.Optimizer([w], m.WeightDropout(0.3, seed=0), m.LR(1.0))
    opt.step(mo.closure(lambda: w.square().sum() / 2))
    assert set(w.tolist()) == {
        0.0,
        1.0,
    }  # retained weights had gradient 1 and dropped ones 0; the step starts from all weights
    assert abs(float((w == 1).double().mean()) - 0.3) < 0.07


def test_noise_on_weights_is_relative_to_their_size():
    for relative, size in ((True, 0.3), (False, 0.1)):
        w = torch.nn.Parameter(torch.full((400,), 3.0, dtype=F64))
        opt = mo.Optimizer(
            [w], m.PerturbWeights(alpha=0.1, relative=relative, distribution="rademacher", seed=0), m.LR(1.0)
        )
        opt.step(mo.closure(lambda w=w: w.square().sum() / 2))
        torch.testing.assert_close(w.detach().abs(), torch.full_like(w, size))


def test_weights_are_reset_to_stored_values():
    w = torch.nn.Parameter(torch.ones(1000, dtype=F64))
    link = m.RandomReinitialize(p_reinit=1.0, p_weights=0.4, seed=0, reset=True)
    ema = m.EMA(0.9)
    opt = mo.Optimizer([w], ema, m.LR(0.1), link)
    opt.step(mo.closure(lambda: w.sum()))
    assert abs(float((w == 1).double().mean()) - 0.4) < 0.06
    assert not ema.state or not ema.state[w]
    again = m.RandomReinitialize(p_reinit=0.0, store_every=2, beta=0.5)
    opt = mo.Optimizer([w], m.LR(0.1), again)
    first = w.detach().clone()
    points = []
    for _ in range(3):
        points.append(w.detach().clone())
        opt.step(mo.closure(lambda: w.sum()))
    torch.testing.assert_close(again.state[w]["stored"], (first + points[2]) / 2)
