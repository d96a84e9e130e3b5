"""Functions of tensors as functions of parameters, which honour the configuration of each."""

from __future__ import annotations

from collections.abc import Callable

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from ._mode import is_composing
from .edits import clone_param
from .mtype import ParamConfig


def unary_lambda_wrapper(
    fn: Callable[[nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of a tensor one that honours a parameter's configuration.

    Example:
        >>> from moduli.particles import ParamConfig
        >>> double = unary_lambda_wrapper(lambda p: 2 * p)
        >>> one = nn.Parameter(torch.ones(1))
        >>> double(one, ParamConfig()).item(), double(one, ParamConfig(operational=False)).item()
        (2.0, 1.0)
    """

    def act(param: nn.Parameter, config: ParamConfig) -> nn.Parameter:
        if config.operational:
            return _parameter(fn(param), param)
        return clone_param(param) if config.clone else param

    return act


def binary_lambda_wrapper(
    fn: Callable[[nn.Parameter, nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of two tensors one that honours a parameter's configuration.

    Example:
        >>> from moduli.particles import ParamConfig
        >>> minus = binary_lambda_wrapper(lambda p, q: p - q)
        >>> one = nn.Parameter(torch.ones(1))
        >>> minus(one, one, ParamConfig()).item(), minus(one, one, ParamConfig(operational=False)).item()
        (0.0, 1.0)
    """

    def act(left: nn.Parameter, right: nn.Parameter, config: ParamConfig) -> nn.Parameter:
        if config.operational:
            return _parameter(fn(left, right), left)
        return clone_param(left) if config.clone else left

    return act


def _parameter(value: Tensor, like: nn.Parameter) -> nn.Parameter:
    if value.requires_grad or is_composing():
        return value  # type: ignore[return-value]
    flag = like.requires_grad and (value.is_floating_point() or value.is_complex())
    return nn.Parameter(value, requires_grad=flag)
