"""Products: einsum and dot contract by axis name or by letter, ``a @ b`` as matrices. All are one kind of plan."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any, Final

import torch

from ._axes import SCALAR, Axes, DimsLike, as_key, cache_by_axes, intern_pairs, split_names
from ._equations import Index, parse_equation
from ._gather import gather
from ._join import policy
from ._pairing import Check, Meeting, Moves, check_sizes, pair_axes, pair_labels
from ._tensor import RULES, Tensor, as_tensor, finish, method

_new: Final = object.__new__

# The equation for torch, the moves of each operand (empty if there are none), the sizes that must agree, the axes of the result,
# and whether each operand is transposed first (None for neither). In place of an equation, None means torch.matmul, and ""
# torch.mm, which saves a fifth of the time of a small product.
_Contraction = tuple[str | None, list[Moves], tuple[Check, ...], Axes, tuple[bool, bool] | None]


def einsum(equation: str, *tensors: Tensor) -> Tensor:
    """Multiply, and sum over what does not appear in the result.

    A term lists the axes of one tensor. With spaces between them they are names, looked up in the tensor by name in any
    order: ``einsum("b in, out in -> b out", x, w)``. Written together they are single letters for the axes in order:
    ``einsum("bi,oi->bo", x, w)``. Labels of a shared index are aligned; a letter that occurs twice in one term is the
    diagonal by label; ``...`` stands for all other axes, paired as in arithmetic.

    Args:
        equation: The terms, separated by commas, and after ``->`` the axes of the result. For letters the result may be
            left out: it then has the letters that occur once, in alphabetical order.
        tensors: One tensor per term.

    Raises:
        ValueError: If the terms do not fit the tensors, or labels or sizes of a shared index differ.

    Example:
        >>> import moduli as mo
        >>> w = mo.tensor([[1.0, 2.0], [3.0, 4.0]], out=["p", "q"], **{"in": ["a", "b"]})
        >>> x = mo.tensor([10.0, 1.0], **{"in": ["b", "a"]})
        >>> mo.einsum("out in, in -> out", w, x)
        Tensor(out: p=21., q=43.)
        >>> mo.einsum("oi,i->o", w, x)
        Tensor(out: p=21., q=43.)
    """
    operands = [as_tensor(t) for t in tensors]
    if not operands:
        raise ValueError("einsum needs at least one tensor")
    plan = _plan_equation(operands[0]._axes, tuple(t._axes for t in operands[1:]), equation, policy.how)
    return _contract(plan, [t._data for t in operands])


@method
def dot(a: Tensor, b: Tensor, over: DimsLike = None) -> Tensor:
    """Return the product of two tensors summed over named axes.

    Axes that both have and that are not summed over are paired; the result has the left's axes, then the right's others.

    Args:
        a: The left tensor.
        b: The right tensor.
        over: The axes to sum over, by name. Without it, the axes that both have; two unnamed vectors are summed over
            their only axis.

    Raises:
        ValueError: If an axis to sum over is missing, or labels or sizes differ.

    Example:
        >>> import moduli as mo
        >>> basis = mo.tensor([[1.0, 0.0], [1.0, 1.0]], mode=["s", "p"], x=[0, 1])
        >>> mo.dot(mo.tensor([2.0, 3.0], mode=["s", "p"]), basis, over="mode")
        Tensor(x: 0=5., 1=3.)
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        a, b = as_tensor(a), as_tensor(b)  # type: ignore[unreachable]
    x, y = a._data, b._data
    equation, moves, checks, axes, turns = plan = a._axes.run(_plan_dot, b._axes, as_key(over), policy.how)
    if equation or moves or checks or x.dtype is not y.dtype:
        return _contract(plan, [x, y])
    if turns is not None:
        x, y = (x.T if turns[0] else x), (y.T if turns[1] else y)
    return finish(torch.matmul(x, y) if equation is None else torch.mm(x, y), axes)


@method
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product, as torch's: the last axis of ``a`` with the second-last of ``b``.

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
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        a, b = as_tensor(a), as_tensor(b)  # type: ignore[unreachable]
    x, y = a._data, b._data
    equation, moves, checks, axes, _ = plan = a._axes.run(_plan_product, b._axes, policy.how)
    if not (equation or moves or checks) and x.dtype is y.dtype and axes is not SCALAR:
        result = _new(Tensor)  # `wrap` without the call
        result._data = torch.matmul(x, y) if equation is None else torch.mm(x, y)
        result._axes = axes
        return result
    return _contract(plan, [x, y])


@method
def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return all products of an entry of one vector with an entry of another.

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


def _contract(plan: _Contraction, data: list[torch.Tensor]) -> Tensor:
    equation, moves, checks, axes, turns = plan
    if checks:
        check_sizes(checks, data)
    fill = policy.fill if policy.how != "exact" else 0.0
    for number, its in enumerate(moves):
        for axis, move in its:
            data[number] = gather(data[number], axis, move, fill)
    if any(each.dtype != data[0].dtype for each in data):
        dtype = functools.reduce(torch.promote_types, [each.dtype for each in data])
        data = [each.to(dtype) for each in data]
    if turns is not None:
        data = [each.T if turn else each for each, turn in zip(data, turns, strict=True)]
    return finish(torch.einsum(equation, *data) if equation else torch.matmul(*data), axes)


def _plan_product(axes: Axes, other: Axes, how: str) -> _Contraction:
    if not axes.ndim or not other.ndim:
        raise ValueError("matmul needs at least one axis on both sides; multiply numbers with *")
    last, row = axes.ndim - 1, max(other.ndim - 2, 0)
    name, second = axes.names[-1], other.names[row]
    if None not in (name, second) and name != second and not _meet(axes, other, row):
        raise ValueError(
            f"matmul would sum {name!r}, the last axis of {axes!r}, against {second!r}, the axis of {other!r} it meets; "
            "permute or rename one of them, or contract by name with mo.dot(a, b, over=...)"
        )
    meetings = pair_axes([each.take(range(each.ndim - 2)) for each in (axes, other)])
    free = [(axes.names[-2], [(0, last - 1)])] if axes.ndim > 1 else []
    free += [(other.names[-1], [(1, row + 1)])] if other.ndim > 1 else []
    outer_axes = [*meetings, *free]
    summed: Meeting = (name or second, [(0, last), (1, row)])
    plan = _plan_contraction((axes, other), [*outer_axes, summed], len(outer_axes), how)
    # torch.matmul pairs leading axes that meet by position, or need not be moved.
    batch = len(meetings)
    plain = all(
        parts
        == [(k, at - batch + each.ndim - 2) for k, each in enumerate((axes, other)) if at >= batch - each.ndim + 2]
        for at, (_, parts) in enumerate(meetings)
    )
    if not plain or axes.stretches(last) != other.stretches(row):
        return plan
    return _find_product(axes, other), *plan[1:]


def _meet(axes: Axes, other: Axes, row: int) -> bool:
    """Whether the contracted axes are the columns and the rows of one kind of operator, such as "bra" and "ket".

    An operator has the same labels on both; its columns meet the axis that has the name of its rows.
    """
    name, second = axes.names[-1], other.names[row]
    left = axes.ndim > 1 and axes.names[-2] == second and _is_operator(axes)
    right = other.ndim > 1 and other.names[-1] == name and _is_operator(other)
    return left or right


def _is_operator(axes: Axes) -> bool:
    row, column = axes.spaces[-2:]
    return row is not None and column is not None and row.labelled and column.labelled and row.has_labels_of(column)


def _plan_dot(axes: Axes, other: Axes, over: DimsLike, how: str) -> _Contraction:
    if over is None and not any(axes.names) and not any(other.names):
        if axes.ndim != 1 or other.ndim != 1:
            raise ValueError(f"dot needs the names of the axes to sum over; {axes.listing()} and {other.listing()}")
        return _as_matmul(_plan_terms((axes, other), [["sum"], ["sum"]], [], how), axes, other, 0, 0)
    shared = [name for name in axes.names if name is not None and name in other.names]
    names = shared if over is None else _read_names(axes, other, over)
    terms = [_list_indices(k, each) for k, each in enumerate((axes, other))]
    result = [index for index in dict.fromkeys([*terms[0], *terms[1]]) if index not in names]
    plan = _plan_terms((axes, other), terms, result, how)
    if names == shared and len(names) == 1 and max(axes.ndim, other.ndim) <= 2:
        return _as_matmul(plan, axes, other, axes.axis(names[0]), other.axis(names[0]))
    return plan


def _list_indices(number: int, axes: Axes) -> list[Index]:
    """Return the names of axes as indices, and (operand, axis) for axes without a name."""
    return [(number, at) if name is None else name for at, name in enumerate(axes.names)]


def _read_names(axes: Axes, other: Axes, over: Any) -> list[str]:
    """Return the names of the axes to sum over; raise if one is not a name of an axis of both operands."""
    if isinstance(over, int):
        raise TypeError(f"dot sums over axes by name, not by {over!r}")
    names = list(split_names(over) if isinstance(over, str) else over)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"dot sums over axes by name, not by {name!r}")
        axes.axis(name)
        other.axis(name)
    return names


def _as_matmul(plan: _Contraction, axes: Axes, other: Axes, left: int, right: int) -> _Contraction:
    """Return the plan for vectors and matrices with one common axis: torch's matmul takes a tenth of the time of einsum."""
    if axes.stretches(left) != other.stretches(right):
        return plan
    turns = left < axes.ndim - 1, right > 0
    return _find_product(axes, other), *plan[1:4], turns if any(turns) else None


def _find_product(axes: Axes, other: Axes) -> str | None:
    return "" if axes.ndim == other.ndim == 2 else None


@cache_by_axes
def _plan_equation(axes: Axes, others: tuple[Axes, ...], equation: str, how: str) -> _Contraction:
    operands = (axes, *others)
    return _plan_terms(operands, *parse_equation(equation, operands), how)


def _plan_terms(
    operands: Sequence[Axes], terms: Sequence[Sequence[Index]], result: list[Index], how: str
) -> _Contraction:
    """Return the plan that pairs the axes with the same index in the terms."""
    meetings: list[Meeting] = []
    for index in dict.fromkeys([*result, *(index for term in terms for index in term)]):
        parts = [(k, i) for k, term in enumerate(terms) for i, each in enumerate(term) if each == index]
        own = [name for name in (operands[k].names[i] for k, i in parts) if name is not None]
        if isinstance(index, tuple) and len(set(own)) > 1:
            raise ValueError(
                f"axes that meet by position within '...' have different names: {own}; rename one of them, "
                "or name all axes so that they pair by name"
            )
        # A letter may pair axes with different names, because the equation declares them the same index.
        name = index if isinstance(index, str) and index in own else (own[0] if own else None)
        meetings.append((name, parts))
    return _plan_contraction(operands, meetings, len(result), how)


def _plan_contraction(operands: Sequence[Axes], meetings: Sequence[Meeting], kept: int, how: str) -> _Contraction:
    """Return the plan that multiplies along paired axes and sums over all but the first `kept`."""
    if len(meetings) > len(string.ascii_letters):
        raise ValueError(f"einsum can tell {len(string.ascii_letters)} axes apart, got {len(meetings)}")
    letters = {
        part: letter for (_, parts), letter in zip(meetings, string.ascii_letters, strict=False) for part in parts
    }
    pairs, moves, checks = pair_labels(operands, meetings, how)
    terms = ["".join(letters[k, i] for i in range(operand.ndim)) for k, operand in enumerate(operands)]
    equation = f"{','.join(terms)}->{string.ascii_letters[:kept]}"
    return equation, moves if any(moves) else [], checks, intern_pairs(pairs[:kept]), None


def _einsum_rule(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return einsum(equation, *operands)


def _matmul(self: Any, other: Any) -> Any:
    if not (isinstance(other, Tensor) or hasattr(other, "__array__")):
        return NotImplemented
    return matmul(self, other)


def _exchange(self: Any, other: Any) -> Any:
    if not isinstance(other, torch.Tensor) and not hasattr(other, "__array__"):
        return NotImplemented
    return matmul(other, self)


Tensor.__matmul__ = _matmul  # type: ignore[method-assign]
Tensor.__rmatmul__ = _exchange  # type: ignore[method-assign]
RULES[torch.einsum] = _einsum_rule
