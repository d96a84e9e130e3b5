"""Matrix products: ``a @ b`` with labels aligned."""

from __future__ import annotations

from typing import Any, Final

import torch

from ._axes import SCALAR, Axes, intern_pairs
from ._einsum import einsum
from ._gather import Gather, gather
from ._join import policy
from ._pairing import PairingPlan, align_all, describe_sizes, pair, pair_spaces
from ._tensor import RULES, Tensor, as_tensor, finish, method

# The axes of the result; whether there is nothing to align; the plan of the batch axes; how the labels of either
# contracted axis are rearranged; and which of the two is BROADCAST: -1 the left, 1 the right, 0 none.
_Product = tuple[Axes, bool, PairingPlan, Gather | None, Gather | None, int]


@method
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product, as torch's: the last axis of ``a`` with the second-last of ``b``.

    The labels of the contracted axes are aligned whichever side has them in another order; leading axes are paired as in
    arithmetic. Contracted axes have one name, or are the columns and the rows of an operator: a matrix with the same
    labels on both, so that ``h @ h`` and ``h @ v`` are defined for ``h`` with axes ("orb", "bra") and ``v`` with "orb".
    The same as ``a @ b``, which `torch.compile` can't trace for anything but plain tensors: use this function inside
    compiled code.

    Args:
        a: A vector, a matrix, or a batch of matrices.
        b: Likewise.

    Raises:
        ValueError: If the contracted axes have different names, labels or sizes, or an operand has no axes.

    Example:
        >>> import moduli as mo
        >>> a = mo.tensor([[1.0, 2.0]], row=["r"], k=["x", "y"])
        >>> b = mo.tensor([[10.0], [100.0]], k=["y", "x"], column=["c"])
        >>> mo.matmul(a, b).item()
        120.0
    """
    a, b = as_tensor(a), as_tensor(b)
    x, y = a._data, b._data
    if policy.how == "exact":
        axes, simple, batch, left, right, stretch = a._axes.exact_product(b._axes)
    else:
        axes, simple, batch, left, right, stretch = a._axes.run(_plan_product, b._axes, policy.how, policy.fill)
    if x.dtype is not y.dtype:
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(dtype)
    if not simple:
        x, y = _align_operands(batch, left, right, stretch, x, y)
    try:
        return finish(torch.matmul(x, y), axes)
    except RuntimeError:
        row = -2 if y.ndim > 1 else -1
        if x.shape[-1] == y.shape[row]:
            raise
        first = (x.shape[-1], a._axes.names[-1], a.ndim - 1)
        second = (y.shape[row], b._axes.names[row], b.ndim + row)
        raise ValueError(
            f"the sizes of the contracted axes differ: {describe_sizes(first, second)} "
            f"in shapes {tuple(a._data.shape)} and {tuple(b._data.shape)}"
        ) from None


def _align_operands(
    batch: PairingPlan, left: Gather | None, right: Gather | None, stretch: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = align_all(batch, (x, y))
    row = y.ndim - 2 if y.ndim > 1 else 0
    if left is not None:
        x = gather(x, x.ndim - 1, left, batch.fill)
    if right is not None:
        y = gather(y, row, right, batch.fill)
    if stretch < 0:
        x = x.expand(*x.shape[:-1], y.shape[row])
    elif stretch > 0:
        y = y.expand(*y.shape[:row], x.shape[-1], *y.shape[row + 1 :])
    return x, y


def _exact_product(self: Axes, other: Axes) -> _Product:
    """The plan under the default policy, in one look-up."""
    plan: _Product | None = self._products.get(other)
    if plan is None:
        if len(self._products) >= _MOST:
            self._products.clear()
        plan = self._products[other] = _plan_product(self, other, "exact", 0.0)
    return plan


_new: Final = object.__new__
_MOST: Final = 128
Axes.exact_product = _exact_product  # type: ignore[method-assign]


def _plan_product(axes: Axes, other: Axes, how: str, fill: complex) -> _Product:
    if not axes.ndim or not other.ndim:
        raise ValueError("matmul needs at least one axis on both sides; multiply numbers with *")
    row = other.ndim - 2 if other.ndim > 1 else 0
    name, second = axes.names[-1], other.names[row]
    if name is not None and second is not None and name != second and not _meet(axes, other, row):
        raise ValueError(
            f"matmul would sum {name!r}, the last axis of {axes!r}, against {second!r}, the axis of {other!r} it meets; "
            "permute or rename one of them, or contract by name with mo.dot(a, b, over=...)"
        )
    spaces = [axes.spaces[-1], other.spaces[row]]
    _, (left, right) = pair_spaces(spaces, how, name or second, axes.ndim - 1)
    stretch = 0
    wide = [space is not None and space.broadcast for space in spaces]
    if wide[0] != wide[1]:
        stretch = -1 if wide[0] else 1
    batch = pair(axes.take(range(axes.ndim - 2)), (other.take(range(other.ndim - 2)),), how, fill)
    pairs = batch.axes.pairs()
    if axes.ndim > 1:
        pairs.append(axes.pairs()[-2])
    if other.ndim > 1:
        pairs.append(other.pairs()[-1])
    simple = left is None and right is None and not stretch and not batch.checks and batch.steps == (None, None)
    return intern_pairs(pairs), simple, batch, left, right, stretch


def _meet(axes: Axes, other: Axes, row: int) -> bool:
    """Whether the contracted axes are the columns and the rows of one kind of operator, such as "bra" and "ket".

    An operator has the same labels on both; with its names told apart, its columns meet what has the name of its rows.
    """
    name, second = axes.names[-1], other.names[row]
    left = axes.ndim > 1 and axes.names[-2] == second and _is_operator(axes)
    right = other.ndim > 1 and other.names[-1] == name and _is_operator(other)
    return left or right


def _is_operator(axes: Axes) -> bool:
    row, column = axes.spaces[-2:]
    return row is not None and column is not None and row.labelled and column.labelled and row.has_labels_of(column)


@method
def outer(a: Tensor, b: Tensor) -> Tensor:
    """All products of an entry of one vector with an entry of another.

    Args:
        a: A tensor with one axis, the first of the result.
        b: A tensor with one axis, the second of the result.

    Example:
        >>> import moduli as mo
        >>> mo.outer(mo.tensor([1.0, 2.0], "x"), mo.tensor([3.0, 4.0], "y")).data
        tensor([[3., 4.],
                [6., 8.]])
    """
    a, b = as_tensor(a), as_tensor(b)
    if a._data.ndim != 1 or b._data.ndim != 1:
        raise ValueError(f"outer takes two tensors with one axis each, got {a._data.ndim} and {b._data.ndim} axes")
    return einsum("i,j->ij", a, b)


def _matmul(self: Any, other: Any) -> Any:
    """`matmul`, by the shortest way there is for two labelled tensors with nothing to align."""
    if type(self) is Tensor and type(other) is Tensor and policy.how == "exact":
        plan = self._axes.exact_product(other._axes)
        x, y = self._data, other._data
        if plan[1] and x.dtype is y.dtype and plan[0] is not SCALAR:
            try:
                data = torch.matmul(x, y)
            except RuntimeError:
                return matmul(self, other)  # which says what is wrong
            made = _new(Tensor)
            made._data = data
            made._axes = plan[0]
            return made
    if not isinstance(other, (Tensor, torch.Tensor)) and not hasattr(other, "__array__"):
        return NotImplemented
    return matmul(self, other)


def _rmatmul(self: Tensor, other: Any) -> Any:
    if not isinstance(other, torch.Tensor) and not hasattr(other, "__array__"):
        return NotImplemented
    return matmul(as_tensor(other), self)


Tensor.__matmul__ = _matmul  # type: ignore[method-assign]
Tensor.__rmatmul__ = _rmatmul  # type: ignore[method-assign,assignment]


RULES.update(
    {
        torch.matmul: _matmul,
        torch.mm: matmul,
        torch.mv: matmul,
        torch.bmm: matmul,
        torch.Tensor.matmul: matmul,
        torch.Tensor.__matmul__: matmul,
        torch.Tensor.__rmatmul__: lambda self, other: matmul(other, self),
        torch.outer: outer,
    }
)
