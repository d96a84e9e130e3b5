"""`NytoModule`, products, and functions of tensors as functions of parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...particles.edits import clone_param
from ...particles.kernel import is_composing
from ...particles.module import NytoModule as NytoModule
from ...particles.module import ParamProduct as ParamProduct
from ...particles.module import module_to_product as module_to_product
from ...particles.module import product_assign_to_module as product_assign_to_module
from ...particles.module import product_to_module as product_to_module
from .mtype import ParamConfig


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
