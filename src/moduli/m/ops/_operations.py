"""Operations on the results of several chains.

* The base of all operations: operands that are numbers, or links run on a copy of the update.
* Several chains run on copies of the update, and their results combined.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Module, Objective, Schedule, as_real, restore_complex
from ...optim import step as run

Operand = float | int | Tensor | Chainable


class _MultiOperation(Module):
    """A link that combines the update with operands: numbers, and links each run on a copy of the update.

    Override `combine`, or `transform` where it needs all tensors. (Base class of the operations; a link of its own only in
    subclasses.)

    Args:
        defaults: Settings.
        **operands: Numbers, links, or None for an operand that is left out.
    """

    needs = frozenset()
    members = True
    differentiable = True

    def __init__(self, defaults: dict[str, Any] | None = None, **operands: Operand | None) -> None:
        super().__init__(
            {
                **(defaults or {}),
                **{k: v for k, v in operands.items() if isinstance(v, float | int | Tensor | Schedule)},
            }
        )
        self.operands = list(operands)
        for key, value in operands.items():
            if value is not None and not isinstance(value, float | int | Tensor | Schedule):
                self.set_child(key, value)

    def combine(self, *update: Any, **operands: Any) -> Tensor:
        """Return one tensor of the new update: a function of the update and, by name, of each operand's value for it."""
        raise TypeError(f"{type(self).__name__} does not say how to combine an update with its operands")

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        """Return the new update.

        Args:
            objective: The objective.
            update: The update.
            values: For each operand that is given a list: numbers or tensors, one for each parameter.
        """
        return [self.combine(u, **{key: column[i] for key, column in values.items()}) for i, u in enumerate(update)]

    def _clone(self, objective: Objective) -> Objective:
        copy = objective.clone(clone_updates=True)
        copy.stop = False
        return copy

    def update(self, objective: Objective) -> None:
        """Let every operand learn from a copy of the update."""
        for key in self.operands:
            if key in self.children:
                copy = self._clone(objective)
                self.children[key].update(copy)
                objective.update_attrs_from_clone_(copy)

    def _combine(self, objective: Objective, learn: bool) -> Objective:
        values: dict[str, Any] = {}
        for key in self.operands:
            child = self.children.get(key)
            if child is None:
                if key in self.defaults:
                    values[key] = spread_numbers(objective, [self.settings[p][key] for p in objective.params])
                continue
            copy = self._clone(objective)
            copy.get_updates()
            out = run(copy, [child]) if learn else child.apply(copy)
            values[key] = out.get_updates()
            objective.update_attrs_from_clone_(out)
        objective.updates = self.transform(objective, objective.get_updates(), values)
        return objective

    def apply(self, objective: Objective) -> Objective:
        """Combine the operands' results, learning nothing."""
        return self._combine(objective, learn=False)

    def step(self, objective: Objective) -> Objective:
        """Run the step of each operand on a copy of the update, then combine the results."""
        return self._combine(objective, learn=True)


def spread_numbers(objective: Objective, values: Sequence[Any]) -> list[Any]:
    """Return one number for each parameter; with one number per member, shaped to multiply stacked tensors."""
    out = []
    for value, param in zip(values, objective.params, strict=True):
        if isinstance(value, torch.Tensor) and value.dim() == 1 and objective.members is not None:
            value = value.reshape(-1, *([1] * (param.dim() - 1)))
        out.append(value)
    return out


def as_tensor(u: Tensor, value: Any) -> Tensor:
    """Return a number as a tensor like u; a tensor unmodified."""
    return value if isinstance(value, Tensor) else torch.full_like(u, value)


def apply_in_pairs(function: Callable[..., Tensor], u: Tensor, *others: Any) -> Tensor:
    """Return a pointwise comparison of tensors; complex numbers have no order, so they are compared as pairs of reals."""
    if not u.is_complex():
        return function(u, *(as_tensor(u, other) for other in others))
    pairs = as_real(u)
    real_others = [
        as_real(other.to(u.dtype)) if isinstance(other, Tensor) else as_tensor(pairs, other) for other in others
    ]
    return restore_complex(function(pairs, *real_others), u)


class _Reduce(_MultiOperation):
    """Operands in order, combined from left to right."""

    def __init__(self, *inputs: Operand) -> None:
        if not inputs:
            raise ValueError(f"{type(self).__name__} needs at least one link or number to combine")
        super().__init__(None, **{f"input_{i}": value for i, value in enumerate(inputs)})

    def combine(self, u: Tensor, **inputs: Any) -> Tensor:
        return self.join([as_tensor(u, value) for value in inputs.values()])

    @abstractmethod
    def join(self, values: list[Tensor]) -> Tensor:
        """Return several tensors combined to one."""


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


class LerpModules(_MultiOperation):
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


class SubModules(_MultiOperation):
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


class DivModules(_MultiOperation):
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


class PowModules(_MultiOperation):
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


class ClipModules(_MultiOperation):
    r"""The result of one chain, clipped between the results of two others.

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
