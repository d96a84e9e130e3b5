"""The update combined with a number, or with what other links make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from ._operands import MultiOperation, Operand, apply_in_pairs, as_tensor, present, spread_numbers


class _Binary(MultiOperation):
    """u and one other operand, element by element."""

    differentiable = True

    def __init__(self, other: Operand) -> None:
        super().__init__(other=other)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        return [self.combine(u, o) for u, o in zip(update, values["other"], strict=True)]

    def combine(self, u: Tensor, o: Any) -> Tensor:
        """The update of one parameter with the operand: a number or a tensor."""
        raise TypeError(f"{type(self).__name__} does not say how to combine")


class _Scaled(MultiOperation):
    """u plus or minus a multiple of the other operand."""

    differentiable = True
    sign = 1.0

    def __init__(self, other: Operand, *, alpha: Any = 1.0) -> None:
        super().__init__({"alpha": alpha}, other=other)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        factors = spread_numbers(objective, [self.settings[param]["alpha"] for param in objective.params])
        return [u + self.sign * a * o for u, a, o in zip(update, factors, values["other"], strict=True)]


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return o - u


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return u * o


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return u / o


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return o / u


class Pow(MultiOperation):
    r"""$u \leftarrow u^p$, element by element.

    Args:
        exponent: A number, a link or a sequence of links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Pow(2.0), [torch.tensor([2.0, -4.0])])
        [tensor([ 4., 16.])]
    """

    differentiable = True

    def __init__(self, exponent: Operand) -> None:
        super().__init__(exponent=exponent)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        return [u**p for u, p in zip(update, values["exponent"], strict=True)]


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return o**u


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return apply_in_pairs(torch.maximum, u, o)


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return apply_in_pairs(torch.minimum, u, o)


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return u.abs() * torch.sgn(as_tensor(u, o))


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

    def combine(self, u: Tensor, o: Any) -> Tensor:
        return as_tensor(u, o).abs() * torch.sgn(u)


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
        others = present(objective, [as_tensor(u, o) for u, o in zip(update, values["other"], strict=True)])
        keep = 0 if objective.members is None else 1

        def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
            return torch.stack([(x.conj() * y).flatten(keep).sum(-1) for x, y in zip(a, b, strict=True)]).sum(0)

        size = dot(others, others)
        factor = torch.where(size == 0, 0.0, dot(others, update) / torch.where(size == 0, 1.0, size))
        return [
            u - factor.reshape(-1, *([1] * (u.dim() - 1))).to(u.dtype) * o if keep else u - factor.to(u.dtype) * o
            for u, o in zip(update, others, strict=True)
        ]


class Threshold(MultiOperation):
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

    differentiable = True

    def __init__(self, threshold: Operand, *, value: Operand, update_above: bool) -> None:
        super().__init__({"update_above": update_above}, threshold=threshold, value=value)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        out = []
        for i, param in enumerate(objective.params):
            keep = _replace_above if self.settings[param]["update_above"] else _replace_below
            out.append(apply_in_pairs(keep, update[i], values["threshold"][i], values["value"][i]))
        return out


def _replace_above(u: Tensor, limit: Tensor, value: Tensor) -> Tensor:
    return torch.where(u > limit, u, value)


def _replace_below(u: Tensor, limit: Tensor, value: Tensor) -> Tensor:
    return torch.where(u < limit, u, value)
