"""A monotone function of the loss in place of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...optim import Objective, Reformulation
from .._metrics import shape_like


class LambdaHomotopy(Reformulation):
    r"""Optimizes $h(f)$ in place of f; gradients become $h'(f)\,\nabla f$.

    Args:
        fn: h, a differentiable, pointwise function of a tensor. It is not saved: it belongs to the code.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> opt = mo.Optimizer([w], m.LambdaHomotopy(lambda f: 3 * f), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([1.2500])
    """

    members = True

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        """The function of the loss, and the chain rule."""
        loss = closure(backward)
        with torch.enable_grad():
            inner = loss.detach().requires_grad_()
            outer = self.fn(inner)
            (slope,) = torch.autograd.grad(outer.sum(), inner)
        if not backward:
            return outer.detach(), None
        grads = [
            torch.zeros_like(param) if param.grad is None else shape_like(slope, param) * param.grad for param in params
        ]
        return outer.detach(), grads


def _square(f: Tensor) -> Tensor:
    return f * f.abs()


def _sqrt(f: Tensor) -> Tensor:
    return (f + 1e-12).sqrt()


def _log(f: Tensor) -> Tensor:
    return (f + 1e-12).log()


class SquareHomotopy(LambdaHomotopy):
    r"""Optimizes $\operatorname{sign}(f) f^2$.

    Example:
        >>> from moduli import m
        >>> m.SquareHomotopy()
        SquareHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_square)


class SqrtHomotopy(LambdaHomotopy):
    r"""Optimizes $\sqrt{f}$, for a loss that is not negative.

    Example:
        >>> from moduli import m
        >>> m.SqrtHomotopy()
        SqrtHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_sqrt)


class ExpHomotopy(LambdaHomotopy):
    r"""Optimizes $e^f$.

    Example:
        >>> from moduli import m
        >>> m.ExpHomotopy()
        ExpHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(torch.exp)


class LogHomotopy(LambdaHomotopy):
    r"""Optimizes $\log f$, for a loss that is positive.

    Example:
        >>> from moduli import m
        >>> m.LogHomotopy()
        LogHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_log)
