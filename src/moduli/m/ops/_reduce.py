"""Several chains run on copies of the update, and their results combined."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from ._operands import MultiOperation, Operand, apply_in_pairs, as_tensor, spread_numbers


class _Reduce(MultiOperation):
    """Operands in order, combined from left to right."""

    differentiable = True

    def __init__(self, *inputs: Operand) -> None:
        if not inputs:
            raise ValueError(f"{type(self).__name__} needs at least one link or number to combine")
        super().__init__(None, **{f"input_{i}": value for i, value in enumerate(inputs)})

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        rows = [values[key] for key in self.operands]
        out = []
        for i, u in enumerate(update):
            out.append(self.combine([as_tensor(u, row[i]) for row in rows]))
        return out

    def combine(self, values: list[Tensor]) -> Tensor:
        """The operands of one parameter, in order, as one."""
        raise TypeError(f"{type(self).__name__} does not say how to combine")


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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
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

    def combine(self, values: list[Tensor]) -> Tensor:
        return super().combine(values) / sum(self.weights)


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

    differentiable = True

    def __init__(self, input: Operand, end: Operand, *, weight: Any) -> None:
        super().__init__({"weight": weight}, input=input, end=end)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        weights = spread_numbers(objective, [self.settings[param]["weight"] for param in objective.params])
        return [a + w * (b - a) for a, b, w in zip(values["input"], values["end"], weights, strict=True)]


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

    differentiable = True

    def __init__(self, input: Operand, other: Operand, *, alpha: Any = 1.0) -> None:
        super().__init__({"alpha": alpha}, input=input, other=other)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        factors = spread_numbers(objective, [self.settings[param]["alpha"] for param in objective.params])
        return [a - f * b for a, b, f in zip(values["input"], values["other"], factors, strict=True)]


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

    differentiable = True

    def __init__(self, input: Operand, other: Operand, *, other_first: bool = False) -> None:
        pair = {"other": other, "input": input} if other_first else {"input": input, "other": other}
        super().__init__(None, **pair)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        return [a / b for a, b in zip(values["input"], values["other"], strict=True)]


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

    differentiable = True

    def __init__(self, input: Operand, exponent: Operand) -> None:
        super().__init__(input=input, exponent=exponent)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        return [a**b for a, b in zip(values["input"], values["exponent"], strict=True)]


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

    differentiable = True

    def __init__(self, input: Operand, *, min: Operand | None = None, max: Operand | None = None) -> None:
        super().__init__(input=input, min=min, max=max)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        out = [as_tensor(u, value) for u, value in zip(update, values["input"], strict=True)]
        for key, bound in (("min", torch.maximum), ("max", torch.minimum)):
            if values[key] is not None:
                out = [apply_in_pairs(bound, a, b) for a, b in zip(out, values[key], strict=True)]
        return out
