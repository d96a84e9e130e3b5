"""Quasi-Newton links: secant equations, known equivalences, restarts and scales."""

import torch

import moduli as mo
from m.first_order import F64, doubles
from moduli import m


def _pairs(link, n=4, steps=4, after=None):
    """Step a link on a quadratic; return its matrix, the differences of points and of gradients, and the parameter."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(n, n, generator=generator, dtype=F64)
    A = root @ root.mT + torch.eye(n, dtype=F64)
    w = torch.nn.Parameter(torch.randn(n, generator=generator, dtype=F64))
    opt = mo.Optimizer([w], link, *([] if after is None else [after]))
    points = []
    for _ in range(steps):
        points.append(w.detach().clone())
        opt.step(mo.closure(lambda: w @ A @ w / 2, fixed=True))
    X = torch.stack(points)
    S = X[1:] - X[:-1]
    return A, S, S @ A, w


def test_fletcher_is_bfgs():
    ends = [_pairs(link, steps=6, after=m.StrongWolfe())[3].detach() for link in (m.FletcherVMM(), m.BFGS())]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_thomas_obeys_the_secant_equation():
    link = m.ThomasOptimalMethod()
    _, S, Y, w = _pairs(link, steps=5, after=m.LR(0.05))
    torch.testing.assert_close(link.state[w]["matrix"] @ Y[-1], S[-1])


def test_projected_newton_has_the_inverse_after_n_pairs():
    link = m.ProjectedNewtonRaphson()
    A, S, Y, w = _pairs(link, steps=5, after=m.StrongWolfe(c2=0.01))
    inverse = link.state[w]["learnt"]
    torch.testing.assert_close(inverse @ Y.mT, S.mT, rtol=1e-6, atol=1e-6)  # the secant equation holds for all pairs
    torch.testing.assert_close(inverse, torch.linalg.inv(A), rtol=1e-4, atol=1e-4)


def test_corrected_gradients_have_no_part_along_the_last_step():
    link = m.GradientCorrection()
    w = torch.nn.Parameter(doubles(3.0, 1.0))
    scale = doubles(1.0, 5.0)
    before = w.detach().clone()
    opt = mo.Optimizer([w], link, m.LR(0.1))
    opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
    s, here = w.detach() - before, w.detach().clone()
    opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
    assert abs(torch.dot(here - w.detach(), s).item()) < 1e-12


def test_lsr1_forgets_and_scales():
    w = torch.nn.Parameter(doubles(30.0, 40.0))
    link = m.LSR1(scale_first=True, ptol_restart=True, gtol_restart=True)
    opt = mo.Optimizer([w], link, m.LR(1.0))
    opt.step(mo.closure(lambda: w.square().sum() / 2))
    torch.testing.assert_close(w.detach(), doubles(30.0, 40.0) * (1 - 1 / 50))
    opt.step(mo.closure(lambda: (w.square() * doubles(1.0, 3.0)).sum() / 2))
    assert len(link.state[w]["s"]) == 1
    opt.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        opt.step(mo.closure(lambda: w.square().sum() / 2))
    assert not link.state[w]["s"]
