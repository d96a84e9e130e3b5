"""Adaptive first-order links."""

import torch

from laws.helpers import orthogonalize_quintic
from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _lion(x, g, memory, t):
    before = memory.get("m", torch.zeros_like(g))
    memory["m"] = 0.99 * before + 0.01 * g
    return 0.01 * (0.9 * before + 0.1 * g).sign()


def _adan(x, g, memory, t):
    d = g - memory.get("g", g)
    memory["g"] = g.clone()
    memory["m"] = 0.98 * memory.get("m", 0) + 0.02 * g
    memory["v"] = 0.92 * memory.get("v", 0) + 0.08 * d
    memory["n"] = 0.99 * memory.get("n", 0) + 0.01 * (g + 0.92 * d) ** 2
    ahead = memory["m"] / (1 - 0.98**t) + 0.92 * memory["v"] / (1 - 0.92**t)
    return 0.05 * ahead / ((memory["n"] / (1 - 0.99**t)).sqrt() + 1e-8)


def _clipped_adam(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    mean = memory["m"].clamp(-5, 5) / (1 - 0.9**t)
    return 0.05 * mean / ((2 * memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


def _msam(params, grads, memory, t):
    before = memory.get("v", [torch.zeros_like(g) for g in grads])
    after = memory["v"] = [0.9 * v + g for v, g in zip(before, grads, strict=True)]

    def shift(velocity):
        size = sum(float(v.abs().square().sum()) for v in velocity) ** 0.5
        return [1e-3 * v / size if size > 0 else v for v in velocity]

    # Momentum moves the trained point; the parameters are perturbed from it.
    for param, v, old, new in zip(params, after, shift(before), shift(after), strict=True):
        param.data = param.data + old - 0.02 * v - new


_SHIFTED = {"split_groups": "parameters are at perturbed points, whatever the step size"}


def _adan_through_links(x, g, memory, t):
    """Adan whose mean goes through another mean, and whose square is doubled, when they are used."""
    before = memory.get("g", g)
    ahead = g + 0.92 * (g - before)
    memory["m"] = 0.98 * memory.get("m", 0) + 0.02 * g
    memory["v"] = 0.92 * memory.get("v", 0) + 0.08 * (g - before)
    memory["n"] = 0.99 * memory.get("n", 0) + 0.01 * ahead**2
    memory["mm"] = 0.5 * memory.get("mm", 0) + 0.5 * memory["m"]
    memory["g"] = g.clone()
    below = (2 * memory["n"] / (1 - 0.99**t)).sqrt() + 1e-8
    return 0.05 * (memory["mm"] / (1 - 0.98**t) + 0.92 * memory["v"] / (1 - 0.92**t)) / below


def _rmsprop_through_links(x, g, memory, t):
    memory["v"] = 0.99 * memory.get("v", 0) + 0.01 * g * g
    memory["vv"] = 0.5 * memory.get("vv", 0) + 0.5 * memory["v"]
    return 0.01 * g / (memory["vv"].sqrt() + 1e-8)


def _sign_sizes(x, g, memory, t):
    """Rprop's step sizes, in place of the update."""
    agrees = g * memory.get("g", torch.zeros_like(g))
    size = memory.get("size", torch.ones_like(g))
    grown = torch.where(agrees > 0, size * 1.2, torch.where(agrees < 0, size * 0.5, size))
    memory["size"], memory["g"] = grown.clamp(1e-6, 50), g.clone()
    return 0.01 * memory["size"]


def _sign_mask(x, g, memory, t):
    same = (g * memory.get("g", torch.zeros_like(g)) > 0).to(g)
    memory["g"] = g.clone()
    return 0.01 * same


def _orthogonal_to(xs, gs):
    x, g = (torch.cat([t.reshape(-1) for t in each]) for each in (xs, gs))
    along = (x @ g) / (x @ x + 1e-8)
    left = g - along * x
    return along, g.norm() / (left.norm() + 1e-8)


def _orthograd(params, grads, memory, t):
    along, size = _orthogonal_to([p.data for p in params], grads)
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(0.1 * size * (grad - along * param.data))


def _orthograd_each(x, g, memory, t):
    along, size = _orthogonal_to([x], [g])
    return 0.1 * size * (g - along * x)


def _dual_norm(x, g, memory, t):
    if g.dim() < 2:
        return 1e-3 * g
    out = orthogonalize_quintic(g)
    return 1e-3 * out * (out * g).sum()


ROWS = [
    Row("Adam", lambda: [m.Adam(), m.LR(0.05)], reference=lambda params: torch.optim.Adam(params, 0.05)),
    Row(
        "Adam, amsgrad",
        lambda: [m.Adam(amsgrad=True), m.LR(0.05)],
        reference=lambda params: torch.optim.Adam(params, 0.05, amsgrad=True),
    ),
    Row(
        "Adam, its moments through links",
        lambda: [m.Adam(exp_avg_tfm=m.ClipValue(5.0), exp_avg_sq_tfm=m.Mul(2.0)), m.LR(0.05)],
        steps=1500,
        tolerance=1e-2,
        reference=formula(_clipped_adam),
    ),
    Row(
        "Adan, its moments through links",
        lambda: [m.Adan(m_tfm=m.EMA(0.5), n_tfm=m.Mul(2.0)), m.LR(0.05)],
        target="",
        reference=formula(_adan_through_links),
    ),
    Row("Adagrad, its sum through links", lambda: [m.Adagrad(accumulator_tfm=m.Mul(2.0)), m.LR(0.5)], steps=800),
    Row(
        "RMSprop, its square through links",
        lambda: [m.RMSprop(exp_avg_sq_tfm=m.EMA(0.5)), m.LR(0.01)],
        target="",
        reference=formula(_rmsprop_through_links),
    ),
    Row(
        "FullMatrixAdagrad, its matrix through links",
        lambda: [m.FullMatrixAdagrad(accumulator_tfm=m.Mul(2.0)), m.LR(0.5)],
        tolerance=1e-2,
    ),
    Row(
        "RMSprop",
        lambda: [m.RMSprop(), m.LR(0.01)],
        steps=800,
        tolerance=1e-2,
        reference=lambda params: torch.optim.RMSprop(params, 0.01),
    ),
    Row(
        "Adagrad",
        lambda: [m.Adagrad(), m.LR(0.5)],
        reference=lambda params: torch.optim.Adagrad(params, 0.5),
    ),
    Row("Lion", lambda: [m.Lion(), m.LR(0.01)], steps=1000, tolerance=0.05, reference=formula(_lion)),
    Row("Adan", lambda: [m.Adan(), m.LR(0.05)], tolerance=1e-2, reference=formula(_adan)),
    Row("Rprop", lambda: [m.Rprop(alpha=0.05)], tolerance=1e-2),
    Row(
        "Rprop, as torch",
        lambda: [m.Rprop(alpha=0.05, backtrack=False)],
        tolerance=1e-2,
        reference=lambda params: torch.optim.Rprop(params, 0.05),
    ),
    Row("ScaleLRBySignChange", lambda: [m.ScaleLRBySignChange(ub=5.0), m.LR(0.05)], tolerance=1e-2),
    Row("SignConsistencyLRs", lambda: [m.SignConsistencyLRs(), m.LR(0.01)], target="", reference=formula(_sign_sizes)),
    Row("Shampoo", lambda: [m.Shampoo(precond_freq=2), m.LR(0.5)], tolerance=1e-2, pieces=False),
    Row("SOAP", lambda: [m.SOAP(precond_freq=2), m.LR(0.05)], tolerance=1e-2, pieces=False),
    Row(
        "SOAP, its mean outside, inner",
        lambda: [m.SOAP(precond_freq=2, proj_exp_avg=False, inner=m.EMA(0.5)), m.LR(0.05)],
        steps=800,
        tolerance=0.05,
        pieces=False,
    ),
    Row("GGT", lambda: [m.GGT(history_size=5, damping=0.1), m.Warmup(500, start_lr=0.2, end_lr=1e-3)], tolerance=1e-2),
    Row("FullMatrixAdagrad", lambda: [m.FullMatrixAdagrad(), m.LR(0.5)], tolerance=1e-2),
    Row(
        "Orthogonalize",
        lambda: [m.Orthogonalize(), m.Warmup(500, start_lr=0.1, end_lr=1e-3)],
        tolerance=1e-2,
        pieces=False,
    ),
    Row("OrthoGrad", lambda: [m.OrthoGrad(), m.LR(0.1)], target="", reference=_orthograd),
    Row(
        "OrthoGrad, each",
        lambda: [m.OrthoGrad(dim=None), m.LR(0.1)],
        target="",
        pieces=False,
        reference=formula(_orthograd_each),
    ),
    Row(
        "PSGDKronWhiten",
        lambda: [m.PSGDKronWhiten(seed=0), m.Warmup(500, start_lr=0.1, end_lr=1e-3)],
        tolerance=2e-2,
        random=True,
        pieces=False,
    ),
    Row(
        "PSGDLRAWhiten",
        lambda: [m.PSGDLRAWhiten(rank=2, seed=0), m.Warmup(500, start_lr=0.1, end_lr=1e-3)],
        tolerance=5e-2,
        random=True,
        pieces=False,
    ),
    Row("SAM", lambda: [m.SAM(rho=0.01), m.LR(0.1)], tolerance=1e-2, closure=True, population=False),
    Row("ASAM", lambda: [m.ASAM(rho=0.01), m.LR(0.1)], tolerance=1e-2, closure=True, population=False),
    Row("BacktrackOnSignChange", lambda: [m.BacktrackOnSignChange(), m.LR(0.05)], tolerance=1e-2),
    Row(
        "BacktrackOnSignChange, by gradients",
        lambda: [m.BacktrackOnSignChange(use_grad=True, backtrack=False), m.LR(0.05)],
        tolerance=1e-2,
    ),
    Row("SignConsistencyMask", lambda: [m.SignConsistencyMask(), m.LR(0.01)], target="", reference=formula(_sign_mask)),
    Row(
        "DualNormCorrection",
        lambda: [m.Orthogonalize(), m.DualNormCorrection(), m.LR(1e-3)],
        target="",
        reference=formula(_dual_norm),
        pieces=False,
    ),
    Row("MuonAdjustLR", lambda: [m.MuonAdjustLR(), m.LR(0.05)], pieces=False),
    Row("MSAMMomentum", lambda: [m.MSAMMomentum(0.02, rho=1e-3)], tolerance=1e-2, reference=_msam, skip=_SHIFTED),
    Row("MSAM", lambda: [m.MSAM([m.Adam(), m.LR(0.05)], rho=1e-3)], tolerance=1e-2, skip=_SHIFTED),
    Row("AEGD", lambda: [m.AEGD(lr=0.5)], steps=1000, tolerance=1e-2, closure=True),
    Row("AdaptiveHeavyBall", lambda: [m.AdaptiveHeavyBall()], tolerance=1e-6, closure=True),
    Row("Prodigy", lambda: [m.Prodigy(d0=0.01), m.LR(1.0)], tolerance=0.05),
    Row("DAdaptAdam", lambda: [m.DAdaptAdam(d0=0.01, growth_rate=1.02), m.LR(1.0)], tolerance=0.05),
    Row("AdagradNorm", lambda: [m.AdagradNorm(), m.LR(1.0)], tolerance=1e-2, pieces=False),
    Row("AdagradNorm, all", lambda: [m.AdagradNorm(layerwise=False), m.LR(1.0)], tolerance=1e-2),
]
