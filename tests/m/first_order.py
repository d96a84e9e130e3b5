"""Helpers: the same small problem for a chain of links and for its reference."""

import torch

import moduli as mo

F64 = torch.float64


def problem(seed=0, shapes=((3, 4), (5,), ()), dtype=torch.float64):
    """Parameters, and a smooth loss of them with noise that changes with the step."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    targets = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    weights = [torch.rand(shape, generator=generator, dtype=dtype) * 3 + 0.1 for shape in shapes]

    def loss(t):
        parts = [
            (w * (p - c).square()).sum() + (p * torch.sin(c * (t + 1))).sum()
            for p, c, w in zip(params, targets, weights, strict=True)
        ]
        return sum(parts)

    return params, loss


def run(make, steps=12, seed=0, shapes=((3, 4), (5,), ()), dtype=torch.float64, after=None, **options):
    """Where a chain (a list of links) or a torch optimizer (a function of the parameters) ends up."""
    params, loss = problem(seed, shapes, dtype)
    found = make(params)
    opt = mo.Optimizer(params, found, **options) if isinstance(found, list) else found
    for t in range(steps):
        if isinstance(found, list):
            opt.step(mo.closure(lambda t=t: loss(t)))
        else:
            opt.zero_grad()
            loss(t).backward()
            if after is not None:
                after(params)
            opt.step()
    return [param.detach().clone() for param in params]


def formula(update):
    """A torch optimizer from `update(param, grad, memory, t)`, written out."""

    class Formula(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.memory = {}
            self.t = 0

        @torch.no_grad()
        def step(self):
            self.t += 1
            for i, param in enumerate(self.param_groups[0]["params"]):
                param -= update(param.detach().clone(), param.grad, self.memory.setdefault(i, {}), self.t)

    return Formula


def close(first, second, tolerance=1e-10):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def doubles(*numbers):
    """Return a vector in double precision."""
    return torch.tensor(numbers, dtype=F64)
