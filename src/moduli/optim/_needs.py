"""The requirements of links on the objective, as types: an impossible chain raises an error when it is built."""

from __future__ import annotations

import enum
from functools import cache


class Need(enum.Enum):
    """A requirement of a link on the objective.

    Example:
        >>> from moduli.optim import Need
        >>> Need.GRADIENT.value
        'the gradient'
    """

    GRADIENT = "the gradient"
    LOSS = "the loss"
    CLOSURE = "evaluations at other points"
    PRODUCTS = "products with the Hessian"
    HESSIAN = "the Hessian"
    RESIDUALS = "a vector of residuals"
    MEMBERS = "the losses of a population's members"

    @property
    def evaluates(self) -> bool:
        """Whether it requires a closure: `.grad` alone does not provide it."""
        return self is not Need.GRADIENT

    @property
    def graph(self) -> bool:
        """Whether the loss must keep its graph."""
        return self in (Need.PRODUCTS, Need.HESSIAN, Need.RESIDUALS)


class Across(enum.Enum):
    """A link's requirement on sharded parameters; losses and products are among its `Need`s.

    Example:
        >>> from moduli import m
        >>> m.Adam().across, m.ClipNorm(1.0).across, m.SOAP().across
        (<Across.NOTHING: 'nothing'>, <Across.SUMS: 'sums over all elements'>, <Across.MATRICES: 'whole tensors, one at a time'>)
    """

    NOTHING = "nothing"
    SUMS = "sums over all elements"
    MATRICES = "whole tensors, one at a time"
    EVERYTHING = "all parameters, whole"


@cache
def keeps_graph(needs: frozenset[Need]) -> bool:
    """Return whether any of these needs requires the graph of the loss."""
    return any(need.graph for need in needs)


PASS_LOSS = "opt.step(mo.closure(lambda: loss(net(x), y)))"


class ChainError(ValueError):
    """A chain of links that can't work, refused when it is built.

    Example:
        >>> import torch
        >>> from moduli.optim import ChainError, Optimizer
        >>> try:
        ...     Optimizer([torch.nn.Parameter(torch.ones(1))])
        ... except ChainError as error:
        ...     print(error)
        an Optimizer needs at least one link; for plain descent write Optimizer(params, m.LR(1e-2))
    """


class ClosureError(RuntimeError):
    """A step that needs a closure it was not given, or was given one that can't do what is needed.

    Example:
        >>> from moduli.optim import ClosureError
        >>> issubclass(ClosureError, RuntimeError)
        True
    """
