"""`Module`: a module that owns labelled tensors and is a value; and products of modules."""

from __future__ import annotations

import contextlib
from types import MemberDescriptorType
from typing import Any

from moduli import nn as _nn

from .._deprecated import move as _move
from ._particle import ParticleMethods
from ._product import ParamProduct as ParamProduct
from ._product import module_to_product as module_to_product
from ._product import product_assign_to_module as product_assign_to_module
from ._product import product_to_module as product_to_module
from ._record import build
from ._skeleton import PENDING

__getattr__ = _move(
    __name__,
    "moduli.compat.nytorch",
    ("unary_lambda_wrapper", "binary_lambda_wrapper"),
    since="0.3",
    until="0.4",
)


class Module(ParticleMethods, _nn.Module):
    """A module that is also a value: it can be added, scaled, cloned and drawn at random, and its structure has versions.

    It is a `moduli.nn.Module`, hence a `torch.nn.Module`. The result of an operation is a new module of the same class,
    whose parameters are leaves. Particles derived from each other follow a structural edit when they are touched or used next.

    Example:
        >>> import torch
        >>> from moduli.particles import Module
        >>> class Net(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        >>> (2 * Net()).w
        Parameter containing:
        tensor([0., 2., 4.], requires_grad=True)
    """

    # Labelled parameters are read first, for speed; other missing attributes may mean that the module is not built yet.
    __getattr__ = _nn.Module.__getattr__

    def _read_other(self, name: str) -> Any:
        state = self.__dict__
        if PENDING in state:
            build(self)
            return getattr(self, name)
        # The lookup of labels, or another thread, may have built the module after the lookup of the name failed.
        if name in state:
            return state[name]
        slot = getattr(type(self), name, None)
        if isinstance(slot, MemberDescriptorType):
            with contextlib.suppress(AttributeError):
                return slot.__get__(self)
        return _nn.Module._read_other(self, name)


NytoModule = Module
"""The name of `Module` in nytorch."""
