"""Models and comparisons for the tests of populations."""

import copy

import torch
from torch import nn

import moduli as mo
from moduli.particles import adopt


class Wave(mo.Module):
    """A labelled module with a virtual weight."""

    def __init__(self):
        super().__init__()
        self.raw = mo.tensor(torch.randn(3, dtype=torch.float64), feature=["a", "b", "c"])
        self.requires_grad_(True)

    @mo.virtual
    def unit(self):
        return self.raw / self.raw.data.square().sum().sqrt()

    def forward(self, x):
        return (self.unit.data * x).sum(-1, keepdim=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.reshape(2, 3, 4))


class Counter(nn.Module):
    """A module that assigns a new tensor to its buffer at every call."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls = self.calls + x.sum()
        return self.lin(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(3, 2)

    def forward(self, x):
        return self.cell(x)[0]


def frozen():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net


# Name: (function that makes a module, shape of an input).
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (6, 3)),
    "deep": (
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 5, bias=False), nn.GELU(), nn.Linear(5, 2)),
        (2, 3, 3),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), (6, 3)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten()), (4, 2, 5)),
    "tied": (Tied, (6, 3)),
    "frozen": (frozen, (6, 3)),
    "attention": (Attention, (6, 4)),
    "buffer": (Counter, (6, 3)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 3)),
    "virtual": (Wave, (6, 3)),
}


def make_modules(name, count, seed=0):
    """Return different modules in double precision, and an input.

    Args:
        name: The key of `MODELS`.
        count: The number of modules.
        seed: The seed of parameters and input.
    """
    make, shape = MODELS[name]
    torch.manual_seed(seed)
    nets = [adopt(make().double()) for _ in range(count)]
    return nets, torch.randn(shape, dtype=torch.float64)


def copies(pop):
    """Return independent copies of all members."""
    return [copy.deepcopy(net) for net in pop]


def close(left, right):
    """Assert that tensors are equal up to rounding in double precision."""
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10, equal_nan=True)


def assert_same_members(pop, nets):
    """Assert that members have the parameters and buffers of modules."""
    assert len(pop) == len(nets)
    for member, net in zip(pop, nets, strict=True):
        ours, theirs = member.state_dict(), net.state_dict()
        assert list(ours) == list(theirs)
        for key in ours:
            close(ours[key], theirs[key])
