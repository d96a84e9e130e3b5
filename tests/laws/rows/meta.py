"""Links that drive other links."""

import torch

from laws.helpers import is_matrix
from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _split(x, g, memory, t):
    return 0.1 * g if x.dim() > 1 else 0.05 * g


def _alternate(x, g, memory, t):
    return 0.1 * g if (t - 1) % 3 < 2 else 0.01 * g.sign()


def _switch(x, g, memory, t):
    return 0.01 * g.sign() if t <= 3 else 0.1 * g


def _accumulated(x, g, memory, t):
    memory["sum"] = memory.get("sum", 0) + g
    if t % 2:
        return torch.zeros_like(g)
    return 0.1 * memory.pop("sum") / 2


class _Twice(torch.optim.Optimizer):
    """Two steps of plain descent as one."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        for _ in range(2):
            closure()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param -= 0.05 * param.grad


ROWS = [
    Row(
        "Split",
        lambda: [m.Split(is_matrix, m.LR(0.1), [m.LR(0.5), m.LR(0.1)])],
        reference=formula(_split),
        pieces=False,
        skip={"schedulers": "its links have different learning rates"},
    ),
    Row("Split, adaptive", lambda: [m.Split(is_matrix, m.Adam(), m.HeavyBall(0.5)), m.LR(0.05)], pieces=False),
    Row(
        "Split, line search",
        lambda: [m.Split(is_matrix, [m.LBFGS(), m.StrongWolfe()], m.LR(0.1))],
        closure=True,
        pieces=False,
        skip={"split_groups": "the part with a line search has no learning rate"},
    ),
    Row(
        "Alternate",
        lambda: [m.Alternate(m.LR(0.1), [m.Sign(), m.LR(0.01)], steps=[2, 1])],
        tolerance=1e-2,
        reference=formula(_alternate),
    ),
    Row("Switch", lambda: [m.Switch([m.Sign(), m.LR(0.01)], m.LR(0.1), steps=3)], reference=formula(_switch)),
    Row("Multistep", lambda: [m.Multistep(m.LR(0.05), steps=2)], closure=True, reference=_Twice),
    Row("Sequential", lambda: [m.Sequential([m.LR(0.05), m.LR(0.05)])], closure=True, reference=_Twice),
    Row("NegateOnLossIncrease", lambda: [m.LR(0.1), m.NegateOnLossIncrease()], closure=True),
    Row("Online", lambda: [m.Online(m.LBFGS()), m.LR(0.5)], closure=True),
    Row(
        "GradientAccumulation",
        lambda: [m.GradientAccumulation(2), m.LR(0.1)],
        reference=formula(_accumulated),
        skip={
            "split_groups": "its first step moves nothing",
            "schedulers": "functions of the step count the updates of the parameters, schedulers of torch all steps",
        },
    ),
    Row(
        "SaveBest",
        lambda: [m.SaveBest(), m.LR(0.1)],
        closure=True,
        reference=lambda params: torch.optim.SGD(params, 0.1),
    ),
    Row(
        "Wrap",
        lambda: [m.Wrap(torch.optim.Adam, lr=0.05)],
        reference=lambda params: torch.optim.Adam(params, 0.05),
    ),
    Row(
        "Wrap, in the middle",
        lambda: [m.Wrap(torch.optim.SGD, lr=1.0, momentum=0.9), m.Mul(0.02)],
        reference=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
    ),
    Row(
        "Wrap, with a closure",
        lambda: [m.Wrap(torch.optim.LBFGS, lr=0.5, max_iter=3, history_size=4)],
        closure=True,
        reference=lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3, history_size=4),
        skip={
            "split_groups": "the foreign optimizer has one group",
            "reordered": "the foreign optimizer's state is over all parameters together, so it starts afresh",
        },
    ),
]
