"""`only`: operations that act on some of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn

from moduli._torch import keep_from_tracing

from . import _arithmetic
from ._config import fits, refuse
from ._operand import Operand
from ._operators import InPlaceOperators
from ._species import require


class Only(InPlaceOperators):
    """Some of the parameters of a particle. Made by `only`.

    Example:
        >>> from moduli.particles import adopt, only
        >>> only(adopt(nn.Linear(2, 1)), "bias")
        only(Linear, 'bias')
    """

    def __init__(self, module: nn.Module, patterns: tuple[str, ...]) -> None:
        self.module = module
        self.patterns = patterns

    def __repr__(self) -> str:
        return f"only({type(self.module).__name__}, {', '.join(map(repr, self.patterns))})"

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if isinstance(other, Only):
            other = other.module
        return _arithmetic.binary(fn, self.module, other, reflected, self.patterns)

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return _arithmetic.unary(fn, self.module, self.patterns)

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        if isinstance(other, Only):
            other = other.module
        return self if _arithmetic.change(fn, self.module, other, self.patterns) else NotImplemented


def only(module: Any, *patterns: str) -> Only:
    """Scope an operation to the parameters and buffers whose names match: the others keep their values.

    Args:
        module: A particle.
        *patterns: Names, or patterns such as `"encoder.*"`.

    Returns:
        Something that takes part in operations like the particle. The result is a whole particle.

    Raises:
        ValueError: If no parameter matches a pattern.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt, norm, only
        >>> net = adopt(nn.Linear(2, 1))
        >>> half = only(net, "bias") * 0.5
        >>> torch.equal(half.weight, net.weight), torch.equal(half.bias, 0.5 * net.bias)
        (True, True)
        >>> bool(norm(only(net, "bias")) == net.bias.abs().sum())
        True
    """
    particle = require(module)
    names = [name for name, _ in particle.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in particle.named_buffers(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fits(name, [pattern]) for name in (*names, *buffers)):
            refuse(type(module).__name__, "parameter", pattern, names)
    return Only(particle, patterns)


def operand_of(x: Any, live: bool = False) -> Operand:
    """The operand of a particle, or of a part of one."""
    module, scope = (x.module, x.patterns) if isinstance(x, Only) else (x, None)
    return Operand(require(module), scope, live=live)


keep_from_tracing(only, Only._binary, Only._unary, Only._inplace)
