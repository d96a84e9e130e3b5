"""Train a population of simple members in one optimizer, and each member in its own."""

import torch

import moduli as mo
from moduli.population import Population


class Net(torch.nn.Module):
    """A module with two parameters."""

    def __init__(self, generator, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2, generator=generator, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.randn(4, generator=generator, dtype=dtype))


class Stacked:
    """A population whose members have different starts and different targets."""

    def __init__(self, count=3, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        self.count = count
        self.population = Population.from_modules([Net(generator, dtype) for _ in range(count)])
        self.params = dict(self.population.named_parameters())
        self.targets = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in self.params.values()]

    def losses(self):
        parts = [
            ((p - c) ** 2 * (1 + 0.1 * torch.cos(p))).flatten(1).sum(1)
            for p, c in zip(self.params.values(), self.targets, strict=True)
        ]
        return sum(parts)

    def member(self, i):
        """Return copies of the parameters of one member, by name, and its loss."""
        params = [torch.nn.Parameter(p.detach()[i].clone()) for p in self.params.values()]
        targets = [c[i] for c in self.targets]

        def loss():
            parts = [((p - c) ** 2 * (1 + 0.1 * torch.cos(p))).sum() for p, c in zip(params, targets, strict=True)]
            return sum(parts)

        return list(zip(self.params, params, strict=True)), loss


def together(make, steps=6, count=3):
    """Return the parameters of all members after steps of one optimizer.

    Args:
        make: A function that returns links.
        steps: The number of steps.
        count: The number of members.
    """
    population = Stacked(count)
    opt = mo.Optimizer(population.population, *make())
    for _ in range(steps):
        opt.step(mo.closure(population.losses))
    return [p.detach() for p in population.params.values()]


def apart(make, steps=6, count=3):
    """Return the parameters of all members after steps of an optimizer each, with the arguments of `together`."""
    population = Stacked(count)
    rows = []
    for i in range(count):
        params, loss = population.member(i)
        opt = mo.Optimizer(params, *make())
        for _ in range(steps):
            opt.step(mo.closure(loss))
        rows.append([p.detach() for _, p in params])
    return [torch.stack(column) for column in zip(*rows, strict=True)]
