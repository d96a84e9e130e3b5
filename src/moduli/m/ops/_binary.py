"""The update combined with a number, or with what other links make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from .._vectors import mask_absent
from ._operations import Operand, _MultiOperation, apply_in_pairs, as_tensor


class _Binary(_MultiOperation):
    """u and one other operand, element by element."""

    def __init__(self, other: Operand) -> None:
        super().__init__(other=other)


class _Scaled(_MultiOperation):
    """u plus or minus a multiple of the other operand."""

    sign = 1.0

    def __init__(self, other: Operand, *, alpha: Any = 1.0) -> None:
        super().__init__(other=other, alpha=alpha)

    def combine(self, u: Tensor, other: Any, alpha: Any) -> Tensor:
        return u + self.sign * alpha * other


class Add(_Scaled):
    r"""$u \leftarrow u + \alpha\, o$, where o is a number or what other links make of a copy of u.

    Args:
        other: A number, a link or a sequence of links.
        alpha: The factor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Add(m.Sign(), alpha=0.5), [torch.tensor([2.0, -4.0])])
        [tensor([ 2.5000, -4.5000])]
    """


class Sub(_Scaled):
    r"""$u \leftarrow u - \alpha\, o$, where o is a number or what other links make of a copy of u.

    Args:
        other: A number, a link or a sequence of links.
        alpha: The factor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Sub(1.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 1., -5.])]
    """

    sign = -1.0


class RSub(_Binary):
    r"""$u \leftarrow o - u$.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.RSub(1.0), [torch.tensor([2.0, -4.0])])
        [tensor([-1.,  5.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return other - u


class Mul(_Binary):
    r"""$u \leftarrow u \odot o$.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Mul(3.0), [torch.tensor([2.0, -4.0])])
        [tensor([  6., -12.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return u * other


class Div(_Binary):
    r"""$u \leftarrow u / o$.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Div(2.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 1., -2.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return u / other


class RDiv(_Binary):
    r"""$u \leftarrow o / u$.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.RDiv(8.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 4., -2.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return other / u


class Pow(_MultiOperation):
    r"""$u \leftarrow u^p$, element by element.

    Args:
        exponent: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Pow(2.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 4., 16.])]
    """

    def __init__(self, exponent: Operand) -> None:
        super().__init__(exponent=exponent)

    def combine(self, u: Tensor, exponent: Any) -> Tensor:
        return u**exponent


class RPow(_Binary):
    r"""$u \leftarrow o^u$, element by element.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.RPow(2.0), [torch.tensor([2.0, -1.0])])
        [tensor([4.0000, 0.5000])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return other**u


class Maximum(_Binary):
    r"""$u \leftarrow \max(u, o)$, element by element.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Maximum(0.0), [torch.tensor([2.0, -4.0])])
        [tensor([2., 0.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return apply_in_pairs(torch.maximum, u, other)


class Minimum(_Binary):
    r"""$u \leftarrow \min(u, o)$, element by element.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Minimum(0.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 0., -4.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return apply_in_pairs(torch.minimum, u, other)


class CopySign(_Binary):
    r"""$u \leftarrow |u| \operatorname{sign}(o)$: the sizes of the update with the signs of the operand.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.CopySign(m.Negate()), [torch.tensor([2.0, -4.0])])
        [tensor([-2.,  4.])]
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return u.abs() * torch.sgn(as_tensor(u, other))


class RCopySign(_Binary):
    r"""$u \leftarrow |o| \operatorname{sign}(u)$: the sizes of the operand with the signs of the update.

    With an adaptive method as operand this is Grams.

    Args:
        other: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.RCopySign(m.Mul(-3.0)), [torch.tensor([2.0, -4.0])])
        [tensor([  6., -12.])]

    References:
        Y. Cao, X. Li, Z. Song, "Grams: gradient descent with adaptive momentum scaling", 2024.
    """

    def combine(self, u: Tensor, other: Any) -> Tensor:
        return as_tensor(u, other).abs() * torch.sgn(u)


class CopyMagnitude(RCopySign):
    """Another name of `RCopySign`.

    Example:
        >>> from moduli import m
        >>> issubclass(m.CopyMagnitude, m.RCopySign)
        True
    """


class GramSchmidt(_Binary):
    r"""The part of the update that is orthogonal to the operand.

    $u \leftarrow u - \frac{\langle o,u\rangle}{\langle o,o\rangle}\, o$

    The products are over all parameters together (for each member, in a population).

    Args:
        other: A link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.GramSchmidt(m.Sign()), [torch.tensor([3.0, 1.0])])
        [tensor([ 1., -1.])]
    """

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        others = mask_absent([as_tensor(u, o) for u, o in zip(update, values["other"], strict=True)], objective.present)
        keep = 0 if objective.members is None else 1

        def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
            products = [x.conj() * y for x, y in zip(a, b, strict=True)]
            # A parameter that is one number has one for each member already.
            return torch.stack([p if p.dim() == keep else p.sum(tuple(range(keep, p.dim()))) for p in products]).sum(0)

        size = dot(others, others)
        factor = torch.where(size == 0, 0.0, dot(others, update) / torch.where(size == 0, 1.0, size))
        return [
            u - factor.reshape(-1, *([1] * (u.dim() - 1))).to(u.dtype) * o if keep else u - factor.to(u.dtype) * o
            for u, o in zip(update, others, strict=True)
        ]


class Threshold(_MultiOperation):
    r"""Keeps elements of the update on one side of a threshold, and puts a value in place of the others.

    Args:
        threshold: A number, a link or a sequence of links.
        value: What the others become: a number, a link or a sequence of links.
        update_above: True keeps what is above the threshold, False what is below.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Threshold(1.0, value=0.0, update_above=True), [torch.tensor([2.0, -4.0])])
        [tensor([2., 0.])]
    """

    def __init__(self, threshold: Operand, *, value: Operand, update_above: bool) -> None:
        super().__init__(threshold=threshold, value=value, update_above=update_above)

    def combine(self, u: Tensor, threshold: Any, value: Any, update_above: bool) -> Tensor:
        return apply_in_pairs(_replace_above if update_above else _replace_below, u, threshold, value)


def _replace_above(u: Tensor, limit: Tensor, value: Tensor) -> Tensor:
    return torch.where(u > limit, u, value)


def _replace_below(u: Tensor, limit: Tensor, value: Tensor) -> Tensor:
    return torch.where(u < limit, u, value)
