"""Rules for torch's losses: paired element by element, then reduced over all axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import _reduce as reduce
from ._axes import Axes, intern_pairs, static
from ._elementwise import elementwise
from ._pairing import align
from ._tensor import RULES, Tensor, as_tensor, finish

__all__: list[str] = []


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
        losses = elementwise(lambda a, b: _unreduced(function, a, b, given), input, target)
        return _total(losses, reduction)

    RULES[function] = rule


def _total(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    losses = as_tensor(losses)  # inside a function transform, without axes, it is a plain tensor
    return reduce.mean(losses) if reduction == "mean" else reduce.sum(losses)


def _unreduced(
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
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Classes along the second axis (the only one, if there is one), as in torch.

    A target of integers gives the class of every other position; one of floats, paired with the input, probabilities.
    """
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        raise TypeError(
            "cross_entropy of labelled tensors takes ignore_index and reduction alone; "
            "for weights or smoothing apply it to t.data"
        )
    if not isinstance(input, Tensor):
        raise TypeError("cross_entropy takes labelled logits; label them like the target, or use target.data")
    target = as_tensor(target)
    at, rest = _classes(input._axes)
    scores = torch.log_softmax(input._data, at)
    if target._data.is_floating_point():
        losses = elementwise(torch.mul, finish(-scores, input._axes), target).sum(at)
        return _total(losses, reduction)
    scores = scores.movedim(at, -1)
    # The class axis is last and no axis of the target: align the positions on one class, then gather.
    axes, one, aim = align(rest, target._axes, scores[..., 0], target._data)
    if axes is not rest:
        raise ValueError(f"a target with {target._axes.listing()} does not fit logits whose other axes are {rest!r}")
    counted = aim != ignore_index
    chosen = scores.gather(-1, torch.where(counted, aim, 0).expand(one.shape).unsqueeze(-1)).squeeze(-1)
    losses = finish(torch.where(counted, -chosen, 0.0), rest)
    if reduction == "mean":
        return _total(losses, "sum") / counted.expand(one.shape).sum()
    return _total(losses, reduction)


@static
def _classes(axes: Axes) -> tuple[int, Axes]:
    if not axes.ndim:
        raise ValueError("cross_entropy needs logits with an axis of classes")
    at = 1 if axes.ndim > 1 else 0
    return at, intern_pairs(pair for i, pair in enumerate(axes.pairs()) if i != at)


RULES[F.cross_entropy] = _cross_entropy
