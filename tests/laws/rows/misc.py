"""Small links without a family."""

import torch

from laws.helpers import ignore, scale_loss
from laws.registry import Row, formula, formula_of_closure
from moduli import m, optim

__all__ = ["ROWS"]

LR = 0.1
SMALL = 1e-3


def _last(combine, start):
    def update(x, g, memory, t):
        before = memory.get("last", torch.full_like(g, start))
        memory["last"] = g.clone()
        return SMALL * combine(g, before)

    return update


def _previous(x, g, memory, t):
    memory.setdefault("all", []).append(g.clone())
    return LR * memory["all"][max(t - 3, 0)]


def _by_loss(update):
    def move(params, evaluate, memory):
        loss = evaluate()
        for param in params:
            param -= SMALL * update(param.grad, loss)

    return formula_of_closure(move)


def _homotopy(slope):
    """Descent on h(f): the gradient times h'(f). `slope` is h'."""
    return _by_loss(lambda g, f: slope(f) * g)


# Differences of gradients of eighth order: along z, error h^8.
_STENCIL = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}


def _random_products(params, evaluate, memory):
    generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
    start, total, h = [p.clone() for p in params], [torch.zeros_like(p) for p in params], 0.02
    for _ in range(2):
        z = optim.sample_like(params, "normal", generator=generator)
        for k, weight in ((side * k, side * weight) for k, weight in _STENCIL.items() for side in (1, -1)):
            for param, x, v in zip(params, start, z, strict=True):
                param.copy_(x + k * h * v)
            evaluate()
            for sum_, v, param in zip(total, z, params, strict=True):
                sum_ += v * param.grad * (weight / h / 2)
    for param, x, product in zip(params, start, total, strict=True):
        param.copy_(x - 0.01 * product)


def _print(name):
    return Row(
        name,
        lambda: [getattr(m, name)(print_fn=ignore), m.LR(LR)],
        closure=name == "PrintLoss",
        reference=lambda params: torch.optim.SGD(params, LR),
    )


def _row(name, make, update, **options):
    return Row(name, lambda: [*make(), m.LR(SMALL)], target="", reference=update, **options)


ROWS = [
    Row("Previous", lambda: [m.Previous(2), m.LR(LR)], reference=formula(_previous)),
    _row("LastDifference", lambda: [m.LastDifference()], formula(_last(torch.sub, 0.0))),
    _row("LastGradDifference", lambda: [m.Sign(), m.LastGradDifference()], formula(_last(torch.sub, 0.0))),
    _row("LastProduct", lambda: [m.LastProduct()], formula(_last(torch.mul, 1.0))),
    _row("LastRatio", lambda: [m.LastRatio()], formula(_last(torch.div, 1.0)), half=False),
    _row(
        "LastAbsoluteRatio",
        lambda: [m.LastAbsoluteRatio(numerator="prev", eps=0.1)],
        formula(_last(lambda now, last: last.abs() / (now.abs() + 0.1), 1.0)),
    ),
    Row(
        "GradSign",
        lambda: [m.Mul(-0.5), m.GradSign(), m.LR(2 * LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    Row(
        "UpdateSign",
        lambda: [m.Mul(0.5), m.UpdateSign(), m.LR(LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    Row("NoiseSign", lambda: [m.NoiseSign(seed=0), m.LR(0.01)], tolerance=1e-2, random=True, pieces=False),
    Row(
        "Relative",
        lambda: [m.Relative(min_value=0.1), m.LR(LR)],
        reference=formula(lambda x, g, memory, t: LR * g * x.abs().clamp(min=0.1)),
    ),
    _row("MulByLoss", lambda: [m.MulByLoss(alpha=0.5)], _by_loss(lambda g, f: 0.5 * f * g), closure=True),
    _row("DivByLoss", lambda: [m.DivByLoss()], _by_loss(lambda g, f: g / f), closure=True),
    _row("FillLoss", lambda: [m.FillLoss(alpha=0.5)], _by_loss(lambda g, f: 0.5 * f + 0 * g), closure=True),
    Row("HpuEstimate", lambda: [m.Add(m.HpuEstimate(), alpha=0.01), m.LR(0.05)], tolerance=1e-2),
    Row(
        "RandomHvp",
        lambda: [m.RandomHvp(n_samples=2, zHz=True, seed=0), m.LR(0.01)],
        target="",
        reference=formula_of_closure(_random_products),
        closure=True,
        random=True,
        pieces=False,
    ),
    Row("EscapeAnnealing", lambda: [m.EscapeAnnealing(max_iter=10, seed=0), m.LR(LR)], closure=True),
    _row("LambdaHomotopy", lambda: [m.LambdaHomotopy(scale_loss)], _homotopy(lambda f: 2 + 2 * f), closure=True),
    _row("SquareHomotopy", lambda: [m.SquareHomotopy()], _homotopy(lambda f: 2 * f), closure=True),
    _row("SqrtHomotopy", lambda: [m.SqrtHomotopy()], _homotopy(lambda f: 0.5 / (f + 1e-12).sqrt()), closure=True),
    _row(
        "ExpHomotopy",
        lambda: [m.SqrtHomotopy(), m.ExpHomotopy()],
        _homotopy(lambda f: 0.5 * ((f + 1e-12).sqrt().exp()) / (f + 1e-12).sqrt()),
        closure=True,
    ),
    _row("LogHomotopy", lambda: [m.LogHomotopy()], _homotopy(lambda f: 1 / (f + 1e-12)), closure=True),
    *(_print(name) for name in ("PrintLoss", "PrintParams", "PrintShape", "PrintUpdate")),
]
