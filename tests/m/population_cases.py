"""Define a small population and its loss for tests of links over members."""

import torch
from torch import nn

import moduli as mo

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = (X @ torch.tensor([[1.5], [-0.5]], dtype=torch.float64)).tanh()


def population(n=8, seed=0):
    torch.manual_seed(seed)
    return mo.Population.of(nn.Linear, n, 2, 1, dtype=torch.float64)


def loss(net):
    return (net(X).tanh() - Y).square().mean()


def rows(pop):
    """Return the parameters of all members, one row each."""
    return torch.cat([p.detach().reshape(len(pop), -1) for _, p in pop.named_parameters()], 1).clone()


def fitness(members):
    """Return `loss` for rows of parameters."""
    weight, bias = members[:, :2, None], members[:, 2]
    return ((X @ weight)[..., 0] + bias[:, None]).tanh().sub(Y[:, 0]).square().mean(1)


def steps(opt, count):
    """Make steps and return their losses."""
    return [opt.step(mo.closure(loss)) for _ in range(count)]


def put(pop, members):
    """Write rows of parameters into a population."""
    start = 0
    with torch.no_grad():
        for _, param in pop.named_parameters():
            size = param[0].numel()
            param.copy_(members[:, start : start + size].reshape(param.shape))
            start += size
