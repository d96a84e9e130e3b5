"""Rules for torch's own reductions, scans and losses, in the signatures torch calls them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import _rank as rank
from . import _reduce as reduce
from ._axes import DimLike, DimsLike
from ._elementwise import elementwise, refuse_out
from ._matmul import matmul
from ._pointwise import register
from ._tensor import RULES, Tensor, finish


def _reduction(name: str) -> None:
    ours: Callable[..., Any] = getattr(reduce, name)
    theirs = getattr(torch, name)

    def rule(input: Tensor, dim: DimsLike = None, keepdim: bool = False, **options: Any) -> Tensor:
        refuse_out(theirs, options)
        result: Tensor = ours(input, dim, keepdim, **options)
        return result

    register(theirs, rule)


for _name in ("sum", "mean", "prod", "amin", "amax", "any", "all", "logsumexp", "nansum", "nanmean"):
    _reduction(_name)


def _spread(ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(input: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        refuse_out(ours, options)
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
    refuse_out(torch.norm, options)
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


_RANKS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.argmax: rank.argmax,
    torch.argmin: rank.argmin,
    torch.sort: rank.sort,
    torch.argsort: rank.argsort,
    torch.topk: rank.topk,
    torch.cumsum: rank.cumsum,
    torch.cumprod: rank.cumprod,
    torch.count_nonzero: reduce.count_nonzero,
}
for _function, _ours in _RANKS.items():
    register(_function, _ours)


def _softmax(
    input: Tensor, dim: DimLike | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    return rank.softmax(input, _require_dim(dim), dtype=dtype)


def _log_softmax(
    input: Tensor, dim: DimLike | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    return rank.log_softmax(input, _require_dim(dim), dtype=dtype)


def _softmin(
    input: Tensor, dim: DimLike | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    return rank.softmax(-input, _require_dim(dim), dtype=dtype)


def _require_dim(dim: DimLike | None) -> DimLike:
    if dim is None:
        raise TypeError("softmax of a labelled tensor needs dim=, the name or position of the axis")
    return dim


RULES[F.softmax] = _softmax
RULES[F.log_softmax] = _log_softmax
RULES[F.softmin] = _softmin
RULES[torch.softmax] = lambda input, dim, dtype=None: rank.softmax(input, dim, dtype=dtype)
RULES[torch.log_softmax] = lambda input, dim, dtype=None: rank.log_softmax(input, dim, dtype=dtype)


def _normalize(input: Tensor, p: float = 2.0, dim: DimLike = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return input / reduce.norm(input, p, dim, True).clamp(min=eps)


RULES[F.normalize] = _normalize


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Tensor:
    result = matmul(input, weight.transpose(-2, -1))
    return result if bias is None else result + bias


RULES[F.linear] = _linear


def _nan_to_num(
    input: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    return finish(torch.nan_to_num(input._data, nan, posinf, neginf), input._axes)


register(torch.nan_to_num, _nan_to_num)
