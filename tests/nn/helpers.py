"""Small modules and comparisons shared by the tests of this room."""

import torch
from torch import nn

from moduli.labels import Space, Tensor
from moduli.nn import Module, nograd_tensors

CHANNEL = Space(["r", "g", "b"], name="channel")
X = Space(4, name="x")


def labelled(*shape_or_values, names=None, requires_grad=True, seed=0):
    """A labelled tensor of random values with positional axes."""
    data = torch.randn(*shape_or_values, generator=torch.Generator().manual_seed(seed))
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


def wrappers_are_storage(module):
    """Every public wrapper is the storage that is registered now."""
    for each in module.modules():
        if isinstance(each, Module):
            for name, (key, axes) in each._labelled.items():
                wrapper = each.__getattr__(name)
                assert wrapper.data is each._parameters.get(key, each._buffers.get(key))
                assert wrapper._axes is axes
                assert wrapper.dtype == wrapper.data.dtype


def picture(module):
    """Everything observable of a module's state, to compare before and after; identities included."""
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


def same_picture(before, after):
    """Bit-identical."""
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
