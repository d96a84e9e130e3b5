"""Train a chain of links and its reference on the same small problem."""

import torch

import moduli as mo

F64 = torch.float64


def problem(seed=0, shapes=((3, 4), (5,), ()), dtype=torch.float64):
    """Return parameters, and a smooth loss of them with noise that depends on the step.

    Args:
        seed: The seed of parameters and targets.
        shapes: The shapes of the parameters.
        dtype: Their dtype.
    """
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
    """Return the parameters after some steps of a chain or of a torch optimizer.

    Args:
        make: A function of the parameters that returns a list of links or a torch optimizer.
        steps: The number of steps.
        seed: The seed of the problem.
        shapes: The shapes of the parameters.
        dtype: Their dtype.
        after: A function of the parameters that is called between `backward` and a step of a torch optimizer.
        **options: Options of `moduli.Optimizer`.
    """
    params, loss = problem(seed, shapes, dtype)
    chain_or_optimizer = make(params)
    opt = (
        mo.Optimizer(params, chain_or_optimizer, **options)
        if isinstance(chain_or_optimizer, list)
        else chain_or_optimizer
    )
    for t in range(steps):
        if isinstance(chain_or_optimizer, list):
            opt.step(mo.closure(lambda t=t: loss(t)))
        else:
            opt.zero_grad()
            loss(t).backward()
            if after is not None:
                after(params)
            opt.step()
    return [param.detach().clone() for param in params]


def formula(update):
    """Return a class of torch optimizers that subtract `update(param, grad, memory, t)`, with t from 1."""

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
    """Assert that two lists of tensors are equal up to a tolerance, absolute and relative."""
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def doubles(*numbers):
    """Return a vector in double precision."""
    return torch.tensor(numbers, dtype=F64)
