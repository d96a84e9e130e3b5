"""Recipes that select entries: close ones (nearswap), important ones (Arcee Fusion), those that one model changed (RAM).

Arcee Fusion, tensor by tensor, with δ = b − a:
    (1) the importance of an entry is |δ| · KL(softmax(b) ‖ softmax(a)), with the divergence of its row;
    (2) entries are taken from b whose importance is at least median + 1.5 (Q3 − Q1) of all of them.

RAM, with δ_t = θ_t − θ_base and the mask m_t = |δ_t| > ε (section 4 of the paper): a change that only one model made is added,
times λ_t = 1 + r min(ρ_t, α), with ρ_t the ratio of entries of m_t shared with others to those of its own (RAM+; r = 0 is
RAM); of changes that several models made, the mean is added.

References:
    The page of the model QuartetAnemoi-70B-t0.0001, for nearswap; the description of Arcee Fusion in the release of mergekit 0.1.
    Yuan et al., "Behavior knowledge merge in reinforced agentic models", 2026, arXiv:2601.13572.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ._call import recipe
from ._coefficients import Coefficient, Coefficients
from ._driver import Buffers, Integers, ModelT, Recipe, Row
from ._ties import view_real


@recipe
def nearswap(
    a: ModelT, b: ModelT, t: Coefficient, *, buffers: Buffers = "first", integers: Integers = "equal"
) -> ModelT:
    """Move every entry of a model towards that of another, by at most the distance t.

    With w = min(t / |a − b|, 1), θ = w b + (1 − w) a.

    Args:
        a: A module or state dict. It decides form, structure and dtypes of the result.
        b: Another of the same structure.
        t: The largest change of an entry: a number, or numbers by glob pattern of parameter names.
        buffers: Whether floating buffers are those of `a` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `a` in any case.

    Raises:
        MergeError: If the structures differ, `t` lacks a name, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.nearswap({"w": torch.zeros(2)}, {"w": torch.tensor([0.1, 4.0])}, 0.5)
        {'w': tensor([0.1000, 0.5000])}
    """
    distance = Coefficients(t, "t", low=0.0)

    def kernel(name: str, row: Row) -> Tensor:
        reach = distance(name)
        gap = (row[0] - row[1]).abs()
        weight = torch.where(gap <= reach, 1.0, reach / gap)
        return (weight * row[1]).add_((1.0 - weight).mul(row[0]))

    return cast(ModelT, Recipe(kernel, (distance,), elementwise=True))


@recipe
def arcee_fusion(a: ModelT, b: ModelT, *, buffers: Buffers = "first", integers: Integers = "equal") -> ModelT:
    """Take from another model the entries that differ most, in rows whose softmax differs most (Arcee Fusion).

    Args:
        a: A module or state dict. It decides form, structure and dtypes of the result.
        b: Another of the same structure.
        buffers: Whether floating buffers are those of `a` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `a` in any case.

    Raises:
        MergeError: If the structures differ, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.arcee_fusion({"w": torch.zeros(6)}, {"w": torch.tensor([0.1, 0.2, 0.1, 0.2, 0.1, 3.0])})
        {'w': tensor([0., 0., 0., 0., 0., 3.])}
    """

    def kernel(name: str, row: Row) -> Tensor:
        if not row.like.numel():
            return row[0].clone()
        # Complex tensors become rows of real pairs.
        here, there = (view_real(each).reshape(*each.shape[:-1], -1) for each in row)
        left, right = here.log_softmax(-1), there.log_softmax(-1)
        divergence = (right.exp() * (right - left)).sum(-1, keepdim=True)  # (1)
        importance = (there - here).abs().mul_(divergence)
        result = torch.where(importance >= _find_threshold(importance.reshape(-1)), there, here)  # (2)
        return result.view(row.dtype).reshape(row.like.shape)

    return cast(ModelT, Recipe(kernel))


def _find_threshold(values: Tensor) -> Tensor:
    """Return median + 1.5 (Q3 − Q1), with entries as quartiles."""
    ordered = values.sort().values
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return middle + 1.5 * (high - low)


@recipe
def ram(
    base: ModelT,
    models: Sequence[ModelT],
    *,
    threshold: float = 1e-5,
    r: Coefficient = 0.0,
    alpha: Coefficient = 0.2,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Add sparse task vectors: changes that one model made in full, of changes that several made the mean (RAM, RAM+).

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        threshold: ε: an entry counts as changed if its distance from the base is larger than this.
        r: The additional factor of changes that one model made: a number, or numbers by glob pattern. 0 is RAM, 0.1 RAM+.
        alpha: α: the upper bound of the ratio of shared entries to own ones, likewise.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base = {"w": torch.zeros(3)}
        >>> merge.ram(base, [{"w": torch.tensor([1.0, 2.0, 0.0])}, {"w": torch.tensor([0.0, 4.0, 8.0])}])
        {'w': tensor([1., 3., 8.])}

    Reference:
        Yuan et al., "Behavior knowledge merge in reinforced agentic models", 2026, arXiv:2601.13572.
    """
    rate, most = Coefficients(r, "r", low=0.0), Coefficients(alpha, "alpha", low=0.0)
    least = Coefficients(threshold, "threshold", low=0.0).number
    count = len(models)

    def kernel(name: str, row: Row) -> Tensor:
        changed = torch.zeros(row[0].shape, dtype=torch.float32, device=row.device)
        for place in range(count):
            changed.add_((row[place + 1] - row[0]).abs() > least)
        total = torch.zeros_like(row[0])
        for place in range(count):
            delta = row[place + 1] - row[0]
            mask = delta.abs() > least
            own = mask & (changed == 1)
            ratio = (int(mask.sum()) - int(own.sum())) / max(int(own.sum()), 1)
            factor = 1.0 + rate(name) * min(ratio, most(name))
            total.add_(delta.mul_(mask).mul_(own.to(changed.dtype).mul_(factor - 1.0).add_(1.0)))
        return total.div_(changed.clamp_(min=1.0)).add_(row[0])

    return cast(ModelT, Recipe(kernel, (rate, most)))
