"""Operations: functions of the update and of the results of other links."""

import torch

from laws.helpers import flatten_all, halve, halve_all
from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]

LR = 0.1
SMALL = 1e-3  # for ascent directions: losses of complex parameters grow exponentially


def _row(name, make, update, **options):
    """A link that is no optimizer by itself, with LR 0.1 after it; `update` is its formula."""
    reference = formula(lambda x, g, memory, t: SMALL * update(g)) if update is not None else None
    return Row(name, lambda: [make(), m.LR(SMALL)], target="", reference=reference, **options)


def _with_memory(name, make, update, **options):
    return Row(name, lambda: [make(), m.LR(SMALL)], target="", reference=formula(update), **options)


def _graft(direction, magnitude, eps=1e-6, least=None):
    """All tensors together."""

    def move(params, grads, memory, t):
        d, size = flatten_all(direction(grads, params)), flatten_all(magnitude(grads, params)).norm()
        size = size if least is None else size.clamp(min=least)
        vector = LR * d * size / (d.norm() + eps)
        at = 0
        for param in params:
            param.data.sub_(vector[at : at + param.numel()].reshape(param.shape))
            at += param.numel()

    return move


def _gram_schmidt(params, grads, memory, t):
    signs, update = flatten_all(grads).sign(), flatten_all(grads)
    factor = (signs @ update) / (signs @ signs)
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(LR * (grad - factor * grad.sign()))


def _accumulated(join, decay, start=None):
    def update(x, g, memory, t):
        before = memory.get("a", start)
        memory["a"] = g.clone() if before is None else join((1 - decay) * before, g)
        return SMALL * memory["a"]

    return update


def _mean(x, g, memory, t):
    memory["a"] = 0.9 * memory.get("a", 0) + g
    memory["n"] = 0.9 * memory.get("n", 0) + 1
    return SMALL * memory["a"] / memory["n"]


def _second_moment(beta, *, centered=False, root=False, debiased=False, amsgrad=False):
    def update(x, g, memory, t):
        memory["v"] = beta * memory.get("v", 0) + (1 - beta) * g**2
        memory["m"] = beta * memory.get("m", 0) + (1 - beta) * g
        v = memory["v"] - memory["m"] ** 2 if centered else memory["v"]
        if amsgrad:
            v = memory["max"] = torch.maximum(v, memory.get("max", torch.zeros_like(v)))
        v = v / (1 - beta**t) if debiased else v
        return SMALL * (v.sqrt() if root else v)

    return update


def _by_mean(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    return LR * g * memory["m"].abs()


UNARY = [
    _row("Abs", m.Abs, torch.abs),
    _row("Exp", m.Exp, torch.exp),
    Row(
        "Sqrt",
        lambda: [m.Abs(), m.Sqrt(), m.LR(SMALL)],
        target="",
        reference=formula(lambda x, g, memory, t: SMALL * g.abs().sqrt()),
    ),
    Row(
        "Reciprocal",
        lambda: [m.Abs(), m.Reciprocal(eps=0.5), m.LR(LR)],
        target="",
        reference=formula(lambda x, g, memory, t: LR / (g.abs() + 0.5)),
    ),
    _row("Negate", m.Negate, torch.neg),
    Row("NanToNum", lambda: [m.NanToNum(nan=0.0), m.LR(LR)], reference=lambda params: torch.optim.SGD(params, LR)),
    Row(
        "UnaryLambda",
        lambda: [m.UnaryLambda(halve_all), m.LR(2 * LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    Row(
        "UnaryParameterwiseLambda",
        lambda: [m.UnaryParameterwiseLambda(halve), m.LR(2 * LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    _row("CustomUnaryOperation", lambda: m.CustomUnaryOperation("tanh"), torch.tanh),
]


def _drawn(draw):
    def move(params, grads, memory, t):
        generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
        for param in params:
            param.data.sub_(LR * draw(param.shape, dtype=param.dtype, generator=generator))

    return move


SOURCES = [
    Row("Params", lambda: [m.Params(), m.LR(LR)], target="", reference=formula(lambda x, g, memory, t: LR * x)),
    _row("Fill", lambda: m.Fill(0.5), lambda g: torch.full_like(g, 0.5)),
    _row("Zeros", m.Zeros, torch.zeros_like),
    _row("Ones", m.Ones, torch.ones_like),
    Row(
        "RandomSample",
        lambda: [m.RandomSample(seed=0), m.LR(LR)],
        target="",
        random=True,
        pieces=False,
        reference=_drawn(torch.randn),
    ),
    Row(
        "Randn",
        lambda: [m.Randn(seed=0), m.LR(LR)],
        target="",
        random=True,
        pieces=False,
        reference=_drawn(torch.randn),
    ),
    Row(
        "Uniform",
        lambda: [m.Uniform(low=0.0, high=1.0, seed=0), m.LR(LR)],
        target="",
        random=True,
        pieces=False,
        reference=_drawn(torch.rand),
    ),
    Row("Clone", lambda: [m.Clone(), m.LR(LR)], reference=lambda params: torch.optim.SGD(params, LR)),
    Row(
        "GradToNone",
        lambda: [m.GradToNone(), m.LR(LR)],
        closure=True,
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    Row(
        "UpdateToNone",
        lambda: [m.Sign(), m.UpdateToNone(), m.LR(LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
]

BINARY = [
    Row(
        "Add",
        lambda: [m.Add(m.Sign(), alpha=0.01), m.LR(LR)],
        tolerance=1e-2,
        reference=formula(lambda x, g, memory, t: LR * (g + 0.01 * g.sign())),
    ),
    Row(
        "Add, a number",
        lambda: [m.Add(1.0, alpha=0.01), m.LR(LR)],
        target="",
        reference=formula(lambda x, g, memory, t: LR * (g + 0.01)),
    ),
    Row(
        "Sub",
        lambda: [m.Sub(m.Mul(2.0), alpha=0.25), m.LR(2 * LR)],
        reference=lambda params: torch.optim.SGD(params, LR),
    ),
    Row("RSub", lambda: [m.RSub(m.Mul(2.0)), m.LR(LR)], reference=lambda params: torch.optim.SGD(params, LR)),
    Row("Mul", lambda: [m.Mul(0.5), m.LR(2 * LR)], reference=lambda params: torch.optim.SGD(params, LR)),
    Row(
        "Mul, by a chain",
        lambda: [m.Mul([m.EMA(0.9), m.Abs()]), m.LR(LR)],
        target="",
        reference=formula(_by_mean),
    ),
    Row("Div", lambda: [m.Div(2.0), m.LR(2 * LR)], reference=lambda params: torch.optim.SGD(params, LR)),
    Row(
        "RDiv",
        lambda: [m.Abs(), m.Add(1.0), m.RDiv(1.0), m.LR(LR)],
        target="",
        reference=formula(lambda x, g, memory, t: LR / (g.abs() + 1)),
    ),
    Row(
        "Pow",
        lambda: [m.Abs(), m.Pow(2.0), m.LR(SMALL)],
        target="",
        reference=formula(lambda x, g, memory, t: SMALL * g**2),
    ),
    _row("RPow", lambda: m.RPow(2.0), torch.exp2),
    _row("Maximum", lambda: m.Maximum(0.25), lambda g: g.clamp(min=0.25)),
    _row("Minimum", lambda: m.Minimum(m.Negate()), lambda g: -g.abs()),
    _row("CopySign", lambda: m.CopySign(m.Negate()), torch.neg),
    _row("RCopySign", lambda: m.RCopySign(m.Mul(-2.0)), lambda g: 2 * g),
    _row("CopyMagnitude", lambda: m.CopyMagnitude(0.5), lambda g: 0.5 * g.sign()),
    Row("GramSchmidt", lambda: [m.GramSchmidt(m.Sign()), m.LR(LR)], target="", reference=_gram_schmidt),
    _row(
        "Threshold",
        lambda: m.Threshold(0.25, value=0.1, update_above=True),
        lambda g: torch.where(g > 0.25, g, 0.1),
    ),
]

REDUCE = [
    _row("Sum", lambda: m.Sum(1, m.Sign(), m.Mul(2.0)), lambda g: 1 + g.sign() + 2 * g),
    _row("Mean", lambda: m.Mean(m.Sign(), m.Mul(2.0)), lambda g: (g.sign() + 2 * g) / 2),
    _row("Prod", lambda: m.Prod(m.Sign(), m.Mul(2.0)), lambda g: 2 * g.abs()),
    _row("MaximumModules", lambda: m.MaximumModules(m.Sign(), m.Mul(2.0)), lambda g: torch.maximum(g.sign(), 2 * g)),
    _row("MinimumModules", lambda: m.MinimumModules(m.Sign(), m.Mul(2.0)), lambda g: torch.minimum(g.sign(), 2 * g)),
    _row(
        "WeightedSum",
        lambda: m.WeightedSum(m.Sign(), m.Mul(2.0), weights=[0.5, 3.0]),
        lambda g: 0.5 * g.sign() + 6 * g,
    ),
    _row(
        "WeightedMean",
        lambda: m.WeightedMean(m.Sign(), m.Mul(2.0), weights=[1.0, 3.0]),
        lambda g: (g.sign() + 6 * g) / 4,
    ),
    _row(
        "LerpModules",
        lambda: m.LerpModules(m.Sign(), m.Mul(2.0), weight=0.25),
        lambda g: 0.75 * g.sign() + 0.5 * g,
    ),
    _row("SubModules", lambda: m.SubModules(m.Mul(2.0), m.Sign(), alpha=0.5), lambda g: 2 * g - 0.5 * g.sign()),
    _row(
        "DivModules",
        lambda: m.DivModules(m.Mul(2.0), [m.Abs(), m.Add(1.0)], other_first=True),
        lambda g: 2 * g / (g.abs() + 1),
    ),
    _row("PowModules", lambda: m.PowModules(m.Abs(), 2.0), torch.square),
    _row(
        "ClipModules",
        lambda: m.ClipModules(m.Mul(2.0), min=-0.5, max=m.Abs()),
        lambda g: (2 * g).clamp(min=-0.5).minimum(g.abs()),
    ),
]

GRAFT = [
    Row(
        "Graft",
        lambda: [m.Graft(m.Sign(), m.Mul(2.0), tensorwise=False), m.LR(LR)],
        target="",
        reference=_graft(lambda g, x: [v.sign() for v in g], lambda g, x: [2 * v for v in g]),
    ),
    Row("Graft, each", lambda: [m.Graft(m.Adam(), m.Identity()), m.LR(LR)], pieces=False),
    Row(
        "GraftInputToOutput",
        lambda: [m.GraftInputToOutput(m.Sign(), tensorwise=False), m.LR(LR)],
        target="",
        reference=_graft(lambda g, x: g, lambda g, x: [v.sign() for v in g]),
    ),
    Row(
        "GraftOutputToInput",
        lambda: [m.GraftOutputToInput(m.Sign(), tensorwise=False), m.LR(LR)],
        tolerance=1e-2,
        reference=_graft(lambda g, x: [v.sign() for v in g], lambda g, x: g),
    ),
    Row(
        "GraftToGrad",
        lambda: [m.Sign(), m.GraftToGrad(), m.LR(LR)],
        tolerance=1e-2,
        reference=_graft(lambda g, x: [v.sign() for v in g], lambda g, x: g),
    ),
    Row(
        "GraftGradToUpdate",
        lambda: [m.Sign(), m.GraftGradToUpdate(), m.LR(LR)],
        target="",
        reference=_graft(lambda g, x: g, lambda g, x: [v.sign() for v in g]),
    ),
    Row(
        "GraftToParams",
        lambda: [m.GraftToParams(), m.LR(LR)],
        target="",
        reference=_graft(lambda g, x: g, lambda g, x: x, eps=0.0, least=1e-4),
    ),
]

ACCUMULATE = [
    _with_memory("AccumulateSum", lambda: m.AccumulateSum(decay=0.1), _accumulated(torch.add, 0.1)),
    _with_memory("AccumulateMean", lambda: m.AccumulateMean(decay=0.1), _mean),
    _with_memory(
        "AccumulateProduct", lambda: m.AccumulateProduct(decay=0.5), _accumulated(torch.mul, 0.5, start=torch.ones(()))
    ),
    _with_memory("AccumulateMaximum", lambda: m.AccumulateMaximum(decay=0.1), _accumulated(torch.maximum, 0.1)),
    _with_memory("AccumulateMinimum", lambda: m.AccumulateMinimum(decay=0.1), _accumulated(torch.minimum, 0.1)),
    _with_memory("EMASquared", lambda: m.EMASquared(beta=0.9), _second_moment(0.9)),
    _with_memory(
        "SqrtEMASquared",
        lambda: m.SqrtEMASquared(beta=0.9, debiased=True, amsgrad=True),
        _second_moment(0.9, root=True, debiased=True, amsgrad=True),
    ),
    _with_memory("CenteredEMASquared", lambda: m.CenteredEMASquared(beta=0.9), _second_moment(0.9, centered=True)),
    _with_memory(
        "CenteredSqrtEMASquared",
        lambda: m.CenteredSqrtEMASquared(beta=0.9, amsgrad=True),
        _second_moment(0.9, centered=True, root=True, amsgrad=True),
    ),
    Row(
        "Debias",
        lambda: [m.Debias(beta1=0.5, beta2=0.9, alpha=2.0), m.LR(0.5 * LR)],
        reference=formula(lambda x, g, memory, t: LR * g * (1 - 0.9**t) ** 0.5 / (1 - 0.5**t)),
    ),
    Row(
        "Debias2",
        lambda: [m.Debias2(beta=0.9), m.LR(LR)],
        reference=formula(lambda x, g, memory, t: LR * g / (1 - 0.9**t) ** 0.5),
    ),
]

ROWS = [*UNARY, *SOURCES, *BINARY, *REDUCE, *GRAFT, *ACCUMULATE]
