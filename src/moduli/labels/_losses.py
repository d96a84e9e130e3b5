"""Rules for torch's losses: paired element by element, then reduced over all axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import _reduce as reduce
from ._axes import SCALAR, Axes, cache_by_axes, intern_pairs
from ._elementwise import elementwise
from ._pairing import align
from ._tensor import RULES, Tensor, as_tensor, finish


def _loss(name: str, *options: str) -> None:
    """A loss is elementwise, then reduced over all axes: mean, sum or none."""
    function: Callable[..., torch.Tensor] = getattr(F, name)

    def rule(input: Any, target: Any, *args: Any, reduction: str = "mean", **given: Any) -> Tensor:
        for value, word in zip(args, ("size_average", "reduce", "reduction"), strict=False):
            if word == "reduction":
                reduction = value
        for old in ("size_average", "reduce"):
            if given.pop(old, None) is not None:
                raise TypeError(f"{name} of labelled tensors takes reduction=, not {old}=")
        if given.pop("weight", None) is not None:
            raise TypeError(f"{name} of labelled tensors takes no weight; use reduction='none' and multiply")
        losses = elementwise(lambda a, b: _compute_unreduced(function, a, b, given), input, target)
        return _total(losses, reduction)

    RULES[function] = rule


def _total(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    losses = as_tensor(losses)  # inside a function transform, without axes, it is a plain tensor
    return reduce.mean(losses) if reduction == "mean" else reduce.sum(losses)


def _compute_unreduced(
    function: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    # torch warns when it stretches a target; here it was BROADCAST that said so.
    x, y = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return function(x, y, reduction="none", **options)


for _name in (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
):
    _loss(_name)


# -- classes -----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: Tensor,
    target: Any,
    weight: Any = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Classes along the second axis (the only one, if there is one), as in torch.

    A target of integers gives the class of every other position; one of floats, paired with the input, probabilities. A
    weight is paired with the classes.
    """
    if size_average is not None or reduce is not None:
        raise TypeError("cross_entropy of labelled tensors takes reduction=, not size_average= or reduce=")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not isinstance(input, Tensor):
        raise TypeError("cross_entropy takes labelled logits; label them like the target, or use target.data")
    target = as_tensor(target)
    at, rest, classes = _classes(input._axes)
    logits, soft = input._data, target._data.is_floating_point()
    # One class has the axes of a target of integers.
    meets, whole = (input._axes, logits) if soft else (rest, logits.select(at, 0))
    axes, _, aim = align(meets, target._axes, whole, target._data)
    if axes.drop_marks() is not meets.drop_marks():
        raise ValueError(
            f"a target with {target._axes.listing()} does not fit logits, whose axes to meet are {meets!r}"
        )
    if weight is not None:
        weight = as_tensor(weight)
        _, _, weight = align(classes, weight._axes, logits.select(at, 0).new_empty(logits.shape[at]), weight._data)
    losses = F.cross_entropy(
        logits,
        aim.expand(whole.shape),
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return finish(losses, rest if reduction == "none" else SCALAR)


@cache_by_axes
def _classes(axes: Axes) -> tuple[int, Axes, Axes]:
    """Where the classes are, the axes of the positions, and the axis of the classes."""
    if not axes.ndim:
        raise ValueError("cross_entropy needs logits with an axis of classes")
    at = 1 if axes.ndim > 1 else 0
    pairs = axes.pairs()
    return at, intern_pairs(pairs[:at] + pairs[at + 1 :]), intern_pairs([pairs[at]])


RULES[F.cross_entropy] = _cross_entropy
