"""A parameter with a low-rank change, W + s A Bᵀ, which is not formed where a product with it can be split into terms.

x (W + s A Bᵀ)ᵀ = x Wᵀ + s (x B) Aᵀ: over many members the first term is one product for all of them, and the others are thin.
Functions without a rule for this receive the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""Rules for functions of torch with such a parameter; a rule may return NotImplemented to receive the sum."""


class LowRankTensor(Tensor):
    """W + s A Bᵀ of one member, where the axes of W after the first are flattened to columns.

    Args:
        label: The name of the parameter in reports.
        weight: W, the same for all members.
        a: A, of shape (rows, rank), already multiplied with s.
        b: B, of shape (columns, rank).
        report: Receives for each name whether products with the parameter were "shared" or "materialised".
        turned: Whether this is the transpose.
        spread: S of a change S * (A Bᵀ), elementwise, the same for all members; None for ones. The change is the sum over ranks
            of diag(a) S diag(b): x is scaled by b, multiplied with S, and the result scaled by a.
    """

    label: str
    weight: Tensor
    a: Tensor
    b: Tensor
    report: dict[str, set[str]]
    turned: bool
    spread: Tensor | None

    @staticmethod
    def __new__(
        cls,
        label: str,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        report: dict[str, set[str]],
        turned: bool = False,
        spread: Tensor | None = None,
    ) -> LowRankTensor:
        shape = (weight.shape[1], weight.shape[0]) if turned else weight.shape
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=weight.dtype, device=weight.device)
        out.label, out.weight, out.a, out.b, out.report, out.turned = label, weight, a, b, report, turned
        out.spread = spread
        return out

    def materialise(self) -> Tensor:
        """Return the sum as a plain tensor."""
        self.report.setdefault(self.label, set()).add("materialised")
        change = (self.a @ self.b.mT).reshape(self.weight.shape)
        full = self.weight + (change if self.spread is None else change * self.spread)
        return full.mT if self.turned else full

    def note_shared(self) -> None:
        """Record in the report that a product was split."""
        self.report.setdefault(self.label, set()).add("shared")

    def turn(self) -> LowRankTensor:
        """Return the transpose of a matrix."""
        return LowRankTensor(self.label, self.weight, self.a, self.b, self.report, not self.turned, self.spread)

    def narrow_to(self, axis: int, start: int, length: int) -> LowRankTensor:
        """Return some rows (axis 0) or columns (axis 1) of a matrix, or entries along the first axis of any parameter.

        Args:
            axis: The axis.
            start: The first index.
            length: The number of entries.
        """
        some = slice(start, start + length)
        if (axis == 1) is not self.turned:  # columns of W
            where: Any = (slice(None), some)
            a, b = self.a, self.b[some]
        else:
            where, a, b = some, self.a[some], self.b
        spread = None if self.spread is None else self.spread[where]
        return LowRankTensor(self.label, self.weight[where], a, b, self.report, self.turned, spread)

    def multiply_rows(self, x: Tensor) -> Tensor:
        """Return x times the matrix."""
        self.note_shared()
        return x @ (self.weight.mT if self.turned else self.weight) + self.multiply_change(x)

    def multiply_change(self, x: Tensor) -> Tensor:
        """Return x times the change alone."""
        first, second = (self.b, self.a) if self.turned else (self.a, self.b)
        if self.spread is None:
            return (x @ first) @ second.mT
        spread = self.spread.mT if self.turned else self.spread
        ranks = zip(first.unbind(-1), second.unbind(-1), strict=True)
        parts = [((x * before) @ spread) * after for before, after in ranks]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LowRankTensor({self.label!r}, {tuple(self.shape)}, rank={self.a.shape[-1]})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = RULES.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in _PASSED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = _replace(args), {key: _replace(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operations that torch calls from C++ receive the sum.
        return func(*_replace(args), **{key: _replace(value) for key, value in (kwargs or {}).items()})


def _replace(value: Any) -> Any:
    """Return arguments with every LowRankTensor replaced by its sum."""
    if isinstance(value, LowRankTensor):
        return value.materialise()
    if isinstance(value, list | tuple):
        return type(value)(_replace(each) for each in value)
    return value


_PLAIN: Any = Tensor  # its properties, which type checkers take for their values
# Functions that read only metadata, which the wrapper has.
_PASSED = {
    *(getattr(_PLAIN, name).__get__ for name in
      ("shape", "dtype", "device", "layout", "requires_grad", "is_cuda", "ndim", "is_nested", "is_sparse", "grad_fn", "is_leaf")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
}  # fmt: skip
