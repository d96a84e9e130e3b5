"""Clipping and normalisation."""

from functools import partial

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


_fading = partial(pow, 0.99)


def _clip_norm(params, grads, memory, t):
    norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(0.1 * grad * (1.0 / (norm + 1e-6)).clamp(max=1.0))


def _normalize(params, grads, memory, t):
    norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(_fading(t - 1) * grad / norm)


def _each(x, g, memory, t):
    return _fading(t - 1) * g / g.norm() if g.norm() > 0 else torch.zeros_like(g)


def _clip_value_by_ema(x, g, memory, t):
    memory["a"] = 0.99 * memory.get("a", g.abs()) + 0.01 * g.abs()
    return 0.1 * g.clamp(-2 * memory["a"], 2 * memory["a"])


ROWS = [
    Row(
        "ClipValueByEMA, its mean through links",
        lambda: [m.ClipValueByEMA(init="update", exp_avg_tfm=m.Mul(2.0)), m.LR(0.1)],
        target="",
        reference=formula(_clip_value_by_ema),
    ),
    Row(
        "ClipValue",
        lambda: [m.ClipValue(0.5), m.LR(0.1)],
        reference=formula(lambda x, g, memory, t: 0.1 * g.clamp(-0.5, 0.5)),
    ),
    Row("ClipNorm", lambda: [m.ClipNorm(1.0), m.LR(0.1)], reference=_clip_norm),
    Row("ClipNorm, each", lambda: [m.ClipNorm(1.0, dim=None), m.LR(0.1)], pieces=False),
    Row("Normalize", lambda: [m.Normalize(), m.LR(_fading)], tolerance=1e-2, reference=_normalize),
    Row(
        "Normalize, each",
        lambda: [m.Normalize(dim=None), m.LR(_fading)],
        tolerance=1e-2,
        reference=formula(_each),
        pieces=False,
    ),
    Row(
        "Centralize",
        lambda: [m.Centralize(), m.LR(0.1)],
        target="",
        reference=formula(lambda x, g, memory, t: 0.1 * (g - g.mean() if g.numel() > 1 else g)),
        pieces=False,
    ),
    Row("ClipNormByEMA", lambda: [m.ClipNormByEMA(init="update"), m.LR(0.1)], tolerance=1e-2, pieces=False),
    Row("ClipNormByEMA, all", lambda: [m.ClipNormByEMA(init="update", tensorwise=False), m.LR(0.1)], tolerance=1e-2),
    Row("NormalizeByEMA", lambda: [m.NormalizeByEMA(beta=0.5, init="update"), m.LR(0.1)], tolerance=1e-2, pieces=False),
    Row("ClipValueByEMA", lambda: [m.ClipValueByEMA(init="update"), m.LR(0.1)], tolerance=1e-2),
    Row("ClipNormGrowth", lambda: [m.ClipNormGrowth(), m.LR(0.1)], tolerance=1e-2, pieces=False),
    Row("ClipValueGrowth", lambda: [m.ClipValueGrowth(), m.LR(0.1)], tolerance=1e-2),
]
