"""Models to merge, every recipe as a function of a list of models, and checks of results and errors."""

import copy
import re
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from moduli import merge
from moduli.merge import MergeError
from strategies import Node

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def siblings(net, count, seed=0):
    """Return copies of a module with random values in all floating tensors; integers stay equal.

    Args:
        net: The module to copy.
        count: The number of copies.
        seed: The seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    models = [copy.deepcopy(net) for _ in range(count)]
    with torch.no_grad():
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() or tensor.is_complex():
                    shape = (*tensor.shape, 2) if tensor.is_complex() else tensor.shape
                    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
                    tensor.copy_(torch.view_as_complex(noise) if tensor.is_complex() else noise)
            for name, buffer in model.named_buffers():
                if name.endswith("running_var"):
                    buffer.abs_().add_(0.1)
                if name == "mask":
                    buffer.copy_(net.mask)
    return models


def get_tensors(model):
    """Return every tensor of a module or state dict by each of its names."""
    if isinstance(model, Mapping):
        return dict(model)
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def is_averaged(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def assert_same(left, right, exactly=True, **tolerance):
    left, right = get_tensors(left), get_tensors(right)
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        if exactly:
            assert torch.equal(tensor, right[name]), name
        else:
            torch.testing.assert_close(tensor, right[name], msg=lambda text: f"{name}: {text}", **tolerance)


def state(*values, dtype=torch.float32):
    """Return a state dict with one tensor `w`."""
    return {"w": torch.tensor(values, dtype=dtype)}


def raises_merge_error(*parts):
    """Return a context that expects a MergeError whose text contains the parts in this order."""
    return pytest.raises(MergeError, match=".*".join(map(re.escape, parts)))


def equal_fishers(models):
    return [{name: torch.ones(t.shape) for name, t in get_tensors(m).items() if is_averaged(t)} for m in models]


# Each takes at least three models, of which the first is the base if the recipe has one.
RECIPES = {
    "linear": lambda models, **how: merge.linear(models, range(1, len(models) + 1), **how),
    "lerp": lambda models, **how: merge.lerp(models[0], models[1], 0.3, **how),
    "slerp": lambda models, **how: merge.slerp(models[0], models[1], 0.3, **how),
    "slerp of whole models": lambda models, **how: merge.slerp(models[0], models[1], 0.3, angle="model", **how),
    "task arithmetic": lambda models, **how: merge.task_arithmetic(models[0], models[1:], 0.4, **how),
    "ties": lambda models, **how: merge.ties(models[0], models[1:], 0.5, **how),
    "ties by count": lambda models, **how: merge.ties(
        models[0], models[1:], 0.5, elect="count", normalize=False, scale=0.5, **how
    ),
    "ties of whole vectors": lambda models, **how: merge.ties(models[0], models[1:], 0.5, trim="model", **how),
    "dare": lambda models, **how: merge.dare(models[0], models[1:], 0.5, generator=3, **how),
    "dare and ties": lambda models, **how: merge.dare(models[0], models[1:], 0.5, generator=3, then="ties", **how),
    "soup": lambda models, **how: merge.soup(models, **how),
    "greedy soup": lambda models, **how: merge.greedy_soup(models, lambda model: 0.0, **how),
    "fisher": lambda models, **how: merge.fisher(models, [{} for _ in models], **how),
    "stock": lambda models, **how: merge.stock(models[0], models[1:], **how),
    "nuslerp": lambda models, **how: merge.nuslerp(models[:2], [3, 1], **how),
    "nuslerp of tasks": lambda models, **how: merge.nuslerp(models[:3], tasks=True, axis=0, **how),
    "multislerp": lambda models, **how: merge.multislerp(models, **how),
    "nearswap": lambda models, **how: merge.nearswap(models[0], models[1], 0.2, **how),
    "arcee fusion": lambda models, **how: merge.arcee_fusion(models[0], models[1], **how),
    "ram": lambda models, **how: merge.ram(models[0], models[1:], threshold=0.3, r=0.1, **how),
}


class Lazy(Mapping):
    """A mapping that creates each tensor when it is read, like one on a file, and records the reads."""

    def __init__(self, state):
        self.state, self.reads = state, []

    def __getitem__(self, name):
        self.reads.append(name)
        return self.state[name].clone()

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


class Described(Lazy):
    """A lazy mapping with a method that returns shapes and dtypes without reading."""

    def meta(self, name):
        return self.state[name].to("meta")


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)


class BatchNormNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


class Tied(nn.Module):
    """A small language model whose output layer is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("position_ids", torch.arange(5))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


__all__ = [
    "FLOATING",
    "RECIPES",
    "BatchNormNet",
    "Described",
    "Lazy",
    "Node",
    "Tied",
    "TwoParts",
    "assert_same",
    "is_averaged",
    "equal_fishers",
    "get_tensors",
    "raises_merge_error",
    "siblings",
    "state",
]
