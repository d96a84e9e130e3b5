"""Weight decay and regularisation."""

import torch

from laws.registry import Row, formula, formula_of_closure
from moduli import m

__all__ = ["ROWS"]


def _relative_decay(params, grads, memory, t):
    count = sum(g.numel() for g in grads)
    size = sum(g.abs().sum() for g in grads) / count
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(0.05 * (grad + 0.1 * size * param.data))


def _dropped(params, evaluate, memory):
    generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
    start = [param.clone() for param in params]
    for param in params:
        param[torch.rand(param.shape, generator=generator) < 0.1] = 0
    evaluate()
    for param, x in zip(params, start, strict=True):
        param.copy_(x - 0.01 * param.grad)


def _begun_again(params, grads, memory, t):
    generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
    first = memory.setdefault("first", [param.detach().clone() for param in params])
    again = torch.rand((), generator=generator) < 0.5
    for param, grad, x in zip(params, grads, first, strict=True):
        new = param.data - 0.1 * grad
        chosen = torch.rand(param.shape, generator=generator) < 0.25 if again else torch.zeros(param.shape).bool()
        param.data.copy_(torch.where(chosen, x, new))


ROWS = [
    Row("Dropout", lambda: [m.Dropout(0.5, seed=0), m.LR(0.1)], random=True, pieces=False),
    Row("Dropout, grafted", lambda: [m.Dropout(0.5, graft=True, seed=0), m.LR(0.05)], random=True, pieces=False),
    Row(
        "WeightDropout",
        lambda: [m.WeightDropout(0.1, seed=0), m.LR(0.01)],
        target="",
        reference=formula_of_closure(_dropped),
        random=True,
        pieces=False,
        closure=True,
        population=False,
    ),
    Row(
        "PerturbWeights",
        lambda: [m.PerturbWeights(alpha=0.01, seed=0), m.LR(0.05)],
        tolerance=0.1,
        random=True,
        pieces=False,
        closure=True,
        population=False,
    ),
    Row(
        "RandomReinitialize",
        lambda: [m.LR(0.1), m.RandomReinitialize(p_reinit=0.5, p_weights=0.25, seed=0)],
        target="",
        random=True,
        pieces=False,
        reference=_begun_again,
    ),
    Row(
        "WeightDecay",
        lambda: [m.Adam(), m.WeightDecay(0.1), m.LR(0.05)],
        target="",
        reference=lambda params: torch.optim.AdamW(params, 0.05, weight_decay=0.1),
    ),
    Row(
        "CautiousWeightDecay",
        lambda: [m.CautiousWeightDecay(0.1), m.LR(0.05)],
        target="",
        reference=formula(lambda x, g, memory, t: 0.05 * (g + 0.1 * x * (g * x > 0))),
    ),
    Row("RelativeWeightDecay", lambda: [m.RelativeWeightDecay(0.1), m.LR(0.05)], target="", reference=_relative_decay),
]
