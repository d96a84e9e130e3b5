"""`Module`: a module that owns labelled tensors and is a value; and products of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from moduli import nn as _nn

from ._particle import ParticleMethods
from ._product import ParamProduct as ParamProduct
from ._product import module_to_product as module_to_product
from ._product import product_assign_to_module as product_assign_to_module
from ._product import product_to_module as product_to_module
from ._record import build, is_composing
from ._skeleton import PENDING
from .edits import clone_param
from .mtype import ParamConfig


class Module(ParticleMethods, _nn.Module):
    """A module that is also a value: it can be added, scaled, cloned and drawn at random, and its structure has versions.

    It is a `moduli.nn.Module`, hence a `torch.nn.Module`. The result of an operation is a new module of the same class,
    whose parameters are leaves; siblings follow a structural edit when they are touched or used next.

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

    # A labelled parameter is read at once. Whatever is missing may be so because the module is not built yet.
    __getattr__ = _nn.Module.__getattr__

    def _read_other(self, name: str) -> Any:
        state = self.__dict__
        if PENDING in state:
            build(self)
            return getattr(self, name)
        # Another thread may have built it after the name was looked for, before this.
        return state[name] if name in state else _nn.Module._read_other(self, name)


NytoModule = Module
"""The name of `Module` in nytorch."""


def unary_lambda_wrapper(
    fn: Callable[[nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of a tensor one that honours a parameter's configuration.

    Example:
        >>> import torch
        >>> from moduli.particles import ParamConfig
        >>> double = unary_lambda_wrapper(lambda p: 2 * p)
        >>> one = nn.Parameter(torch.ones(1))
        >>> double(one, ParamConfig()).item(), double(one, ParamConfig(operational=False)).item()
        (2.0, 1.0)
    """
    act = binary_lambda_wrapper(lambda param, _: fn(param))
    return lambda param, config: act(param, param, config)


def binary_lambda_wrapper(
    fn: Callable[[nn.Parameter, nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of two tensors one that honours a parameter's configuration.

    Example:
        >>> import torch
        >>> from moduli.particles import ParamConfig
        >>> minus = binary_lambda_wrapper(lambda p, q: p - q)
        >>> one = nn.Parameter(torch.ones(1))
        >>> minus(one, one, ParamConfig()).item(), minus(one, one, ParamConfig(operational=False)).item()
        (0.0, 1.0)
    """

    def act(left: nn.Parameter, right: nn.Parameter, config: ParamConfig) -> nn.Parameter:
        if not config.operational:
            return clone_param(left) if config.clone else left
        value = fn(left, right)
        if is_composing():
            return value  # type: ignore[return-value]
        flag = left.requires_grad and (value.is_floating_point() or value.is_complex())
        return nn.Parameter(value.detach(), requires_grad=flag)

    return act
