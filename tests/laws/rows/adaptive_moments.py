"""Variants of Adam, with torch's or the formula of the paper as reference."""

import math

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _adopt(clip):
    def step(x, g, memory, t):
        if t == 1:
            memory.update(m=torch.zeros_like(g), v=g * g)
            return torch.zeros_like(g)
        scaled = g / torch.maximum(memory["v"].sqrt(), torch.full_like(g, 1e-6))
        if clip:
            scaled = scaled.clamp(-((t - 1) ** 0.25), (t - 1) ** 0.25)
        memory["m"] = 0.9 * memory["m"] + 0.1 * scaled
        memory["v"] = 0.9999 * memory["v"] + 0.0001 * g * g
        return 0.05 * memory["m"]

    return step


def _ademamix(warmup):
    def step(x, g, memory, t):
        alpha, beta3 = 2.0, 0.99
        if warmup:
            done, low, high = min(t / warmup, 1), math.log(0.9), math.log(0.99)
            alpha = 2.0 * done
            beta3 = min(math.exp(low * high / ((1 - done) * high + done * low)), 0.99)
        memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
        memory["n"] = beta3 * memory.get("n", 0) + (1 - beta3) * g
        memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
        mean = memory["m"] / (1 - 0.9**t) + alpha * memory["n"]
        return 0.02 * mean / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)

    return step


def _adabelief(eps):
    def step(x, g, memory, t):
        memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
        memory["s"] = 0.999 * memory.get("s", 0) + 0.001 * (g - memory["m"]) ** 2 + eps
        return 0.05 * memory["m"] / (1 - 0.9**t) / ((memory["s"] / (1 - 0.999**t)).sqrt() + eps)

    return step


def _nadam(x, g, memory, t):
    # torch keeps the product of the momenta in single precision, so the formula is written out in double.
    def momentum(i):
        return 0.9 * (1 - 0.5 * 0.96 ** (i * 4e-3))

    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    here = math.prod(momentum(i) for i in range(1, t + 1))
    ahead = here * momentum(t + 1)
    mean = (1 - momentum(t)) * g / (1 - here) + momentum(t + 1) * memory["m"] / (1 - ahead)
    return 0.05 * mean / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


def _grokfast(x, g, memory, t):
    memory["h"] = 0.9 * memory.get("h", g) + 0.1 * g
    return 0.02 * (g + 2.0 * memory["h"])


def _lookahead(x, g, memory, t):
    slow = memory.setdefault("slow", x.clone())
    there = x - 0.1 * g
    if t % 3 == 0:
        there = memory["slow"] = slow + 0.5 * (there - slow)
    return x - there


ROWS = [
    Row("ADOPT", lambda: [m.ADOPT(), m.LR(0.05)], tolerance=1e-2, reference=formula(_adopt(True))),
    Row("ADOPT, unclipped", lambda: [m.ADOPT(clip=False), m.LR(0.05)], target="", reference=formula(_adopt(False))),
    Row(
        "AdEMAMix",
        lambda: [m.AdEMAMix(beta3=0.99, alpha=2.0), m.LR(0.02)],
        steps=1500,
        tolerance=1e-2,
        reference=formula(_ademamix(None)),
    ),
    Row(
        "AdEMAMix, scheduled",
        lambda: [m.AdEMAMix(beta3=0.99, alpha=2.0, warmup=4), m.LR(0.02)],
        target="",
        reference=formula(_ademamix(4)),
    ),
    Row("AdaBelief", lambda: [m.AdaBelief(), m.LR(0.05)], tolerance=1e-2, reference=formula(_adabelief(1e-16))),
    Row("AdaBelief, eps", lambda: [m.AdaBelief(eps=1e-3), m.LR(0.05)], target="", reference=formula(_adabelief(1e-3))),
    Row(
        "Adadelta",
        lambda: [m.Adadelta(), m.LR(1.0)],
        steps=1500,
        tolerance=0.05,
        reference=lambda params: torch.optim.Adadelta(params, 1.0),
    ),
    Row("Adamax", lambda: [m.Adamax(), m.LR(0.05)], reference=lambda params: torch.optim.Adamax(params, 0.05)),
    Row("RAdam", lambda: [m.RAdam(), m.LR(0.05)], reference=lambda params: torch.optim.RAdam(params, 0.05)),
    Row("NAdam", lambda: [m.NAdam(), m.LR(0.05)], reference=formula(_nadam)),
    Row("GrokFast", lambda: [m.GrokFast(alpha=0.9), m.LR(0.02)], reference=formula(_grokfast)),
    Row("Lookahead", lambda: [m.LR(0.1), m.Lookahead(k=3)], reference=formula(_lookahead)),
]
