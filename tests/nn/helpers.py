"""Small modules and comparisons shared by the tests of modules and virtual tensors."""

import pytest
import torch
from torch import nn

from moduli.labels import Space, Tensor
from moduli.nn import Module, nograd_tensors, virtual

CHANNEL = Space(["r", "g", "b"], name="channel")
X = Space(4, name="x")


def labelled(*shape, names=None, requires_grad=True, seed=0):
    """Return a labelled tensor of random values with positional axes.

    Args:
        shape: The sizes of the axes.
        names: The names of the axes; none by default.
        requires_grad: Whether the tensor requires gradients.
        seed: The seed of the values.
    """
    data = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    names = names or [None] * data.ndim
    return Tensor(
        data.requires_grad_(requires_grad), tuple(Space(n, name) for n, name in zip(data.shape, names, strict=True))
    )


@nograd_tensors("basis")
class Fit(Module):
    """One trained tensor, one buffer, one plain child."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.basis = Tensor(torch.randn(3, 4, generator=generator), (CHANNEL, X))
        self.coef = Tensor(torch.randn(3, generator=generator).requires_grad_(), (CHANNEL,))
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.head((self.coef * self.basis).sum("channel").data * x)


class Skew(Module):
    """A module with an orthogonal weight computed from a square matrix; it counts how often it is computed."""

    def __init__(self, n=3, seed=0):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))
        self.counter = [0]

    @virtual
    def weight(self):
        self.counter[0] += 1
        return torch.matrix_exp(self.a - self.a.T)

    def forward(self, x):
        return x @ self.weight


class PlainSkew(nn.Module):
    """The same virtual tensor in a plain module of torch."""

    def __init__(self, n=3):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, n, generator=torch.Generator().manual_seed(0)))
        self.counter = [0]

    weight = virtual(Skew.__dict__["weight"].__wrapped__)


def formula(module):
    """Return the expected `weight` of a `Skew`, computed directly."""
    return torch.matrix_exp(module.a - module.a.T)


owners = pytest.mark.parametrize("owner", [Skew, PlainSkew])


def assert_wrappers_are_storage(module):
    """Check that every public wrapper holds the tensor that is registered now."""
    for each in module.modules():
        if isinstance(each, Module):
            for name, (key, axes) in each._labelled.items():
                wrapper = each.__getattr__(name)
                assert wrapper.data is each._parameters.get(key, each._buffers.get(key))
                assert wrapper._axes is axes
                assert wrapper.dtype == wrapper.data.dtype


def snapshot(module):
    """Return everything observable of a module's state, identities included, for `assert_unchanged`."""
    entries = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        entries[prefix] = (
            type(each),
            [
                (k, id(v), None if v is None else (v.detach().clone(), v.requires_grad))
                for k, v in each._parameters.items()
            ],
            [(k, id(v), None if v is None else (v.detach().clone(), False)) for k, v in each._buffers.items()],
            [(k, id(v)) for k, v in each._modules.items()],
            dict(each.__dict__.get("_labelled", {})),
            set(each._non_persistent_buffers_set),
            {k: id(v) for k, v in each.__dict__.items() if k not in ("_non_persistent_buffers_set", "_virtual_cache")},
        )
    return entries


def assert_unchanged(before, after):
    """Check that two snapshots have equal values bit by bit, and the same objects."""
    assert before.keys() == after.keys()
    for key, (kind, parameters, buffers, modules, *rest) in before.items():
        other_kind, other_parameters, other_buffers, other_modules, *other_rest = after[key]
        assert (kind, modules, rest) == (other_kind, other_modules, other_rest)
        for mine, theirs in ((parameters, other_parameters), (buffers, other_buffers)):
            assert [entry[:2] for entry in mine] == [entry[:2] for entry in theirs]
            for (_, _, a), (_, _, b) in zip(mine, theirs, strict=True):
                if a is not None:
                    assert torch.equal(a[0], b[0])
                    assert a[0].dtype == b[0].dtype
                    assert a[1] == b[1]
