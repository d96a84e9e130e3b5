"""Rules for torch's own reductions, scans and losses, in the signatures torch calls them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import _adjoint, _assign, _concat, _maths, _shape
from . import _rank as rank
from . import _reduce as reduce
from ._axes import SCALAR, Axes, DimLike, DimsLike, cache_by_axes
from ._elementwise import elementwise, register
from ._pairing import align
from ._products import matmul, outer
from ._tensor import RULES, Tensor, as_tensor, finish

# -- functions that are called as torch's are ---------------------------------------------------------------------------

for _name in ("sum", "mean", "prod", "amin", "amax", "any", "all", "logsumexp", "nansum", "nanmean", "count_nonzero"):
    register(getattr(torch, _name), getattr(reduce, _name))
for _name in ("argmax", "argmin", "sort", "argsort", "topk", "cumsum", "cumprod", "flip", "roll"):
    register(getattr(torch, _name), getattr(rank, _name))
for _name in ("permute", "transpose", "movedim", "unsqueeze", "squeeze"):
    register(getattr(torch, _name), getattr(_shape, _name))
for _name in ("cat", "split", "chunk", "unbind"):
    register(getattr(torch, _name), getattr(_concat, _name))
for _name in ("real", "imag", "clamp", "isclose", "allclose", "equal"):
    register(getattr(torch, _name), getattr(_maths, _name))
_OTHERWISE: tuple[tuple[Callable[..., Any], ...], ...] = (
    (_concat.cat, torch.concat, torch.concatenate),
    (_shape.transpose, torch.swapaxes),
    (_maths.clamp, torch.clip),
    (_adjoint.adjoint, torch.adjoint),
    (_assign.index_add, torch.index_add),
    (outer, torch.outer),
    (matmul, torch.matmul, torch.mm, torch.mv, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__),
)
for _ours, *_known in _OTHERWISE:
    RULES.update(dict.fromkeys(_known, _ours))
RULES[torch.t] = lambda input: input.T if input.ndim == 2 else input
RULES[torch.Tensor.__rmatmul__] = lambda x, y: matmul(y, x)


def _spread(ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(input: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        if isinstance(dim, bool):  # torch.std(t, unbiased)
            dim, unbiased = None, dim
        correction = options.pop("correction", 1 if unbiased is None else int(unbiased))
        return ours(input, dim, keepdim, correction=1 if correction is None else correction, **options)

    return rule


register(torch.std, _spread(reduce.std))
register(torch.var, _spread(reduce.var))


def _extremum(ours: Callable[..., Any], pairwise: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def rule(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if other is None and isinstance(dim, (Tensor, torch.Tensor)):  # torch.max(a, b)
            other, dim = dim, None
        return ours(input, dim, keepdim) if other is None else elementwise(pairwise, input, other)

    return rule


register(torch.max, _extremum(rank.max, torch.maximum))
register(torch.min, _extremum(rank.min, torch.minimum))


def _norm(input: Tensor, p: Any = 2.0, dim: DimsLike = None, keepdim: bool = False, **options: Any) -> Tensor:
    if options.get("dtype") is not None:
        input = input.to(options["dtype"])
    if p in ("fro", None):
        p = 2.0
    if isinstance(p, str):
        raise TypeError(
            f"norm of order {p!r} is a matrix norm and has no rule for labelled tensors; apply it to t.data"
        )
    return reduce.norm(input, float(p), dim, keepdim)


register(torch.norm, _norm)
RULES[torch.linalg.vector_norm] = lambda x, ord=2, dim=None, keepdim=False: reduce.norm(x, ord, dim, keepdim)


def _share(ours: Callable[..., Tensor], sign: int = 1) -> Callable[..., Tensor]:
    def rule(
        input: Tensor, dim: DimLike | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        if dim is None:
            raise TypeError("softmax of a labelled tensor needs dim=, the name or position of the axis")
        return ours(input if sign > 0 else -input, dim, dtype=dtype)

    return rule


RULES[F.softmax] = _share(rank.softmax)
RULES[F.log_softmax] = _share(rank.log_softmax)
RULES[F.softmin] = _share(rank.softmax, -1)
RULES[torch.softmax] = lambda input, dim, dtype=None: rank.softmax(input, dim, dtype=dtype)
RULES[torch.log_softmax] = lambda input, dim, dtype=None: rank.log_softmax(input, dim, dtype=dtype)


RULES[F.normalize] = lambda x, p=2.0, dim=1, eps=1e-12: x / reduce.norm(x, p, dim, True).clamp(min=eps)


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Tensor:
    result = matmul(input, weight.transpose(-2, -1))
    return result if bias is None else result + bias


RULES[F.linear] = _linear


# -- losses: paired element by element, then reduced over all axes -----------------------------------------------------


def _loss(name: str) -> None:
    """Register the rule of an elementwise loss, which is reduced over all axes: mean, sum or none."""
    function: Callable[..., torch.Tensor] = getattr(F, name)

    def rule(input: Any, target: Any, *, reduction: str = "mean", **given: Any) -> Tensor:
        for other in ("size_average", "reduce", "weight"):
            if given.pop(other, None) is not None:
                raise TypeError(f"{name} of labelled tensors takes no {other}; use reduction='none' and multiply")
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
    # torch warns when it broadcasts a target; here a BROADCAST axis requested it.
    x, y = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return function(x, y, reduction="none", **options)


for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    _loss(_name)
for _name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
    _loss(_name)


# -- classes -----------------------------------------------------------------------------------------------------------


def _cross_entropy(input: Tensor, target: Any, weight: Any = None, reduction: str = "mean", **options: Any) -> Tensor:
    """Return the cross entropy over classes along the second axis (the only one, if there is one), as in torch.

    A target of integers gives the class of every other position; one of floats, paired with the input, probabilities. A
    weight is paired with the classes.
    """
    if not isinstance(input, Tensor):
        raise TypeError("cross_entropy takes labelled logits; label them like the target, or use target.data")
    target = as_tensor(target)
    at, rest, classes = _classes(input._axes)
    logits, soft = input._data, target._data.is_floating_point()
    # The logits of one class have the axes of a target of integers.
    meets, whole = (input._axes, logits) if soft else (rest, logits.select(at, 0))
    axes, _, aim = align(meets, target._axes, whole, target._data)
    if axes.drop_marks() is not meets.drop_marks():
        raise ValueError(
            f"a target with {target._axes.listing()} does not fit logits, whose axes to meet are {meets!r}"
        )
    if weight is not None:
        weight = as_tensor(weight)
        _, _, weight = align(classes, weight._axes, logits.select(at, 0).new_empty(logits.shape[at]), weight._data)
    losses = F.cross_entropy(logits, aim.expand(whole.shape), weight, reduction=reduction, **options)
    return finish(losses, rest if losses.ndim else SCALAR)


@cache_by_axes
def _classes(axes: Axes) -> tuple[int, Axes, Axes]:
    """Return the axis of the classes, the other axes, and the axis of the classes as Axes."""
    if not axes.ndim:
        raise ValueError("cross_entropy needs logits with an axis of classes")
    at = 1 if axes.ndim > 1 else 0
    return at, axes.drop(at), axes.take([at])


RULES[F.cross_entropy] = _cross_entropy
