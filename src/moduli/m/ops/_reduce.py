"""Several chains run on copies of the update, and their results combined."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._operands import MultiOperation, Operand, apply_in_pairs, as_tensor


class _Reduce(MultiOperation):
    """Operands in order, combined from left to right."""

    def __init__(self, *inputs: Operand) -> None:
        if not inputs:
            raise ValueError(f"{type(self).__name__} needs at least one link or number to combine")
        super().__init__(None, **{f"input_{i}": value for i, value in enumerate(inputs)})

    def combine(self, u: Tensor, **inputs: Any) -> Tensor:
        return self.join([as_tensor(u, value) for value in inputs.values()])

    @abstractmethod
    def join(self, values: list[Tensor]) -> Tensor:
        """One tensor of several."""


class Sum(_Reduce):
    r"""$u \leftarrow \sum_i o_i$ over chains (and numbers), each run on a copy of the update.

    Args:
        *inputs: Links, sequences of links, numbers.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Sum(m.Sign(), m.Mul(2.0), 1), [torch.tensor([3.0, -4.0])])
        [tensor([ 8., -8.])]
    """

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add, values)


class Mean(_Reduce):
    r"""$u \leftarrow \frac1k\sum_i o_i$ over chains, each run on a copy of the update.

    Args:
        *inputs: Links, sequences of links, numbers.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Mean(m.Sign(), m.Mul(2.0)), [torch.tensor([3.0, -4.0])])
        [tensor([ 3.5000, -4.5000])]
    """

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add, values) / len(values)


class Prod(_Reduce):
    r"""$u \leftarrow \prod_i o_i$ over chains, each run on a copy of the update.

    Args:
        *inputs: Links, sequences of links, numbers.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Prod(m.Sign(), m.Mul(2.0)), [torch.tensor([3.0, -4.0])])
        [tensor([6., 8.])]
    """

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(torch.mul, values)


class MaximumModules(_Reduce):
    r"""$u \leftarrow \max_i o_i$, element by element.

    Args:
        *inputs: Links, sequences of links, numbers.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.MaximumModules(m.Sign(), m.Mul(2.0)), [torch.tensor([3.0, -4.0])])
        [tensor([ 6., -1.])]
    """

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(functools.partial(apply_in_pairs, torch.maximum), values)


class MinimumModules(_Reduce):
    r"""$u \leftarrow \min_i o_i$, element by element.

    Args:
        *inputs: Links, sequences of links, numbers.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.MinimumModules(m.Sign(), m.Mul(2.0)), [torch.tensor([3.0, -4.0])])
        [tensor([ 1., -8.])]
    """

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(functools.partial(apply_in_pairs, torch.minimum), values)


class WeightedSum(_Reduce):
    r"""$u \leftarrow \sum_i w_i o_i$.

    Args:
        *inputs: Links, sequences of links, numbers.
        weights: One number for each.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.WeightedSum(m.Sign(), m.Mul(2.0), weights=[1.0, 0.5]), [torch.tensor([3.0, -4.0])])
        [tensor([ 4., -5.])]
    """

    def __init__(self, *inputs: Operand, weights: Sequence[float]) -> None:
        super().__init__(*inputs)
        if len(weights) != len(inputs):
            raise ValueError(
                f"{type(self).__name__}: {len(inputs)} inputs and {len(weights)} weights; give one for each"
            )
        self.weights = [float(weight) for weight in weights]

    def join(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add, [w * value for w, value in zip(self.weights, values, strict=True)])


class WeightedMean(WeightedSum):
    r"""$u \leftarrow \sum_i w_i o_i / \sum_i w_i$.

    Args:
        *inputs: Links, sequences of links, numbers.
        weights: One number for each; their sum must not be zero.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.WeightedMean(m.Sign(), m.Mul(2.0), weights=[1.0, 3.0]), [torch.tensor([4.0])])
        [tensor([6.2500])]
    """

    def __init__(self, *inputs: Operand, weights: Sequence[float]) -> None:
        super().__init__(*inputs, weights=weights)
        if sum(self.weights) == 0:
            raise ValueError("WeightedMean: the weights add up to 0, so there is no mean; use WeightedSum")

    def join(self, values: list[Tensor]) -> Tensor:
        return super().join(values) / sum(self.weights)


class LerpModules(MultiOperation):
    r"""$u \leftarrow (1-w)\,a + w\,b$ for two chains a and b.

    Args:
        input: Links that give a.
        end: Links that give b.
        weight: w.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.LerpModules(m.Sign(), m.Mul(2.0), weight=0.25), [torch.tensor([4.0])])
        [tensor([2.7500])]
    """

    def __init__(self, input: Operand, end: Operand, *, weight: Any) -> None:
        super().__init__(input=input, end=end, weight=weight)

    def combine(self, u: Tensor, input: Any, end: Any, weight: Any) -> Tensor:
        return input + weight * (end - input)


class SubModules(MultiOperation):
    r"""$u \leftarrow a - \alpha b$ for two chains a and b.

    Args:
        input: Links that give a.
        other: Links that give b.
        alpha: The factor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.SubModules(m.Mul(2.0), m.Sign(), alpha=0.5), [torch.tensor([4.0])])
        [tensor([7.5000])]
    """

    def __init__(self, input: Operand, other: Operand, *, alpha: Any = 1.0) -> None:
        super().__init__(input=input, other=other, alpha=alpha)

    def combine(self, u: Tensor, input: Any, other: Any, alpha: Any) -> Tensor:
        return input - alpha * other


class DivModules(MultiOperation):
    r"""$u \leftarrow a / b$ for two chains a and b.

    Args:
        input: Links that give a.
        other: Links that give b.
        other_first: Run b before a.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.DivModules(m.Mul(2.0), m.Abs()), [torch.tensor([-4.0])])
        [tensor([-2.])]
    """

    def __init__(self, input: Operand, other: Operand, *, other_first: bool = False) -> None:
        pair = {"other": other, "input": input} if other_first else {"input": input, "other": other}
        super().__init__(None, **pair)

    def combine(self, u: Tensor, input: Any, other: Any) -> Tensor:
        return input / other


class PowModules(MultiOperation):
    r"""$u \leftarrow a^b$ for two chains a and b, element by element.

    Args:
        input: Links that give a.
        exponent: Links that give b, or a number.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.PowModules(m.Abs(), 2.0), [torch.tensor([-4.0])])
        [tensor([16.])]
    """

    def __init__(self, input: Operand, exponent: Operand) -> None:
        super().__init__(input=input, exponent=exponent)

    def combine(self, u: Tensor, input: Any, exponent: Any) -> Tensor:
        return input**exponent


class ClipModules(MultiOperation):
    r"""What one chain gives, between what two others give.

    Args:
        input: The links.
        min: A number, links, or None for no lower bound.
        max: A number, links, or None for no upper bound.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ClipModules(m.Mul(2.0), min=-1.0, max=3.0), [torch.tensor([-4.0, 5.0])])
        [tensor([-1.,  3.])]
    """

    def __init__(self, input: Operand, *, min: Operand | None = None, max: Operand | None = None) -> None:
        super().__init__(input=input, min=min, max=max)

    def combine(self, u: Tensor, input: Any, min: Any = None, max: Any = None) -> Tensor:
        out = as_tensor(u, input)
        if min is not None:
            out = apply_in_pairs(torch.maximum, out, min)
        return out if max is None else apply_in_pairs(torch.minimum, out, max)
