"""Operators made of several others: their sums and products."""

from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from ._checks import broadcast
from ._diagonal import Diagonal, DiagonalKind
from ._operator import LinearOperator


@final
class OperatorSum(LinearOperator):
    """A + B + ..., made by `A + B` where the kinds have no closer form.

    A structured operator plus a diagonal one keeps its fast solution: the system is `A.solve_plus_diag`. Any other sum
    of stored operators is solved through its matrix, and one with a matrix-free term refuses.

    Args:
        terms: One or more operators of equal rows, columns, dtype and device; batches broadcast.

    Raises:
        TypeError: If the terms differ in dtype, or are no operators.
        ValueError: If there are none, or they differ in shape or device.

    Example:
        >>> import torch
        >>> from moduli.linalg import AtA, Diagonal, OperatorSum
        >>> G = OperatorSum(AtA(torch.tensor([[1.0, 1.0]])), Diagonal(torch.tensor([1.0, 2.0])))
        >>> G.to_dense()
        tensor([[2., 1.],
                [1., 3.]])
    """

    def __init__(self, *terms: LinearOperator) -> None:
        shape = check_alike("OperatorSum", terms)
        self._terms = terms
        if any(term.shape[-2:] != shape[-2:] for term in terms):
            raise ValueError(f"a sum needs operators of equal rows and columns, not {', '.join(map(str, terms))}")
        super().__init__(
            shape,
            terms[0].dtype,
            terms[0].device,
            symmetric=all(term.is_symmetric for term in terms),
            positive_semidefinite=all(term.is_positive_semidefinite for term in terms),
            matrix_free=any(term.is_matrix_free for term in terms),
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return _total([term._matmat(X) for term in self._terms])

    def _matvec(self, x: Tensor) -> Tensor:
        return _total([term._matvec(x) for term in self._terms])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return _total([term._rmatmat(Y) for term in self._terms])

    def _split(self) -> tuple[list[LinearOperator], Tensor | None]:
        """The terms that are not diagonal, and the diagonal of those that are: (..., 1) if a multiple of I, else (..., n)."""
        rest = [term for term in self._terms if not isinstance(term, DiagonalKind)]
        flat = [term._entries for term in self._terms if isinstance(term, DiagonalKind)]
        return rest, _total(flat) if flat else None

    def _solve(self, B: Tensor) -> Tensor:
        return self._solve_plus_diag(B, torch.zeros((1,), dtype=self.dtype, device=self.device))

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        rest, flat = self._split()
        shift = d if flat is None else flat + d
        if not rest:
            n = self.shape[-1]
            return Diagonal(shift.expand(*shift.shape[:-1], n))._solve(B)
        if len(rest) == 1:
            # Without a shift the term may know a better way than that for a shifted one.
            return rest[0]._solve(B) if not bool((shift != 0).any()) else rest[0]._solve_plus_diag(B, shift)
        return self._dense_for("solve")._solve_plus_diag(B, d)

    def _diagonal(self) -> Tensor:
        return _total([term._diagonal() for term in self._terms])

    def _to_dense(self) -> Tensor:
        return _total([term._to_dense() for term in self._terms])

    def _adjoint(self) -> LinearOperator:
        return OperatorSum(*(term.adjoint() for term in self._terms))

    def _transpose(self) -> LinearOperator:
        return OperatorSum(*(term.transpose() for term in self._terms))

    def _scale(self, factor: Tensor) -> LinearOperator:
        return OperatorSum(*(term._scale(factor) for term in self._terms))


@final
class OperatorProduct(LinearOperator):
    """A B ..., made by `A @ B`: the last factor acts first.

    A product of square factors is solved factor by factor. One of rectangular factors that is square as a whole is
    solved through its matrix, unless a factor is matrix-free.

    Args:
        factors: One or more operators, each with as many columns as the next has rows.
        symmetric: Declared: the product equals its adjoint.
        positive_semidefinite: Declared: the product is symmetric and has no negative eigenvalue.

    Raises:
        TypeError: If the factors differ in dtype, or are no operators.
        ValueError: If there are none, or rows and columns do not meet.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense, Diagonal, OperatorProduct
        >>> A = OperatorProduct(Dense(torch.tensor([[1.0, 1.0]])), Diagonal(torch.tensor([2.0, 3.0])))
        >>> A @ torch.ones(2), A.H @ torch.ones(1)
        (tensor([5.]), tensor([2., 3.]))
    """

    def __init__(self, *factors: LinearOperator, symmetric: bool = False, positive_semidefinite: bool = False) -> None:
        shape = check_alike("OperatorProduct", factors)
        for left, right in pairwise(factors):
            if left.shape[-1] != right.shape[-2]:
                raise ValueError(f"{left} @ {right}: the first takes {left.shape[-1]} numbers, the second gives others")
        self._factors: tuple[LinearOperator, ...] = tuple(
            g for f in factors for g in (f._factors if isinstance(f, OperatorProduct) else (f,))
        )
        super().__init__(
            (*shape[:-1], factors[-1].shape[-1]),
            factors[0].dtype,
            factors[0].device,
            symmetric=symmetric,
            positive_semidefinite=positive_semidefinite,
            matrix_free=any(factor.is_matrix_free for factor in factors),
        )

    def _matmat(self, X: Tensor) -> Tensor:
        for factor in reversed(self._factors):
            X = factor._matmat(X)
        return X

    def _matvec(self, x: Tensor) -> Tensor:
        for factor in reversed(self._factors):
            x = factor._matvec(x)
        return x

    def _rmatmat(self, Y: Tensor) -> Tensor:
        for factor in self._factors:
            Y = factor._rmatmat(Y)
        return Y

    def _solve(self, B: Tensor) -> Tensor:
        if any(factor.shape[-1] != factor.shape[-2] for factor in self._factors):
            return self._dense_for("solve")._solve(B)
        for factor in self._factors:
            B = factor._solve(B)
        return B

    def _to_dense(self) -> Tensor:
        return self._factors[0]._matmat(self._tail()) if len(self._factors) > 1 else self._factors[0]._to_dense()

    def _tail(self) -> Tensor:
        tail = self._factors[-1]._to_dense()
        for factor in reversed(self._factors[1:-1]):
            tail = factor._matmat(tail)
        return tail

    def _adjoint(self) -> LinearOperator:
        return OperatorProduct(*(factor.adjoint() for factor in reversed(self._factors)))

    def _transpose(self) -> LinearOperator:
        return OperatorProduct(*(factor.transpose() for factor in reversed(self._factors)))


def add(first: LinearOperator, second: LinearOperator) -> LinearOperator:
    """The sum of two operators in the closest form that their kinds know."""
    OperatorSum(first, second)  # refuses what cannot be added
    better = first._plus(second)
    if better is None:
        better = second._plus(first)
    if better is not None:
        return better
    terms = [t for part in (first, second) for t in (part._terms if isinstance(part, OperatorSum) else (part,))]
    return OperatorSum(*terms)


def check_alike(kind: str, parts: tuple[LinearOperator, ...]) -> tuple[int, ...]:
    """Refuse parts that do not fit together; returns the first one's shape with the batch axes of all."""
    if not parts:
        raise ValueError(f"{kind} needs at least one operator")
    for part in parts:
        if not isinstance(part, LinearOperator):
            raise TypeError(f"{kind} is made of operators, not of {type(part).__name__}; write Dense(matrix)")
        if part.dtype != parts[0].dtype:
            raise TypeError(f"{parts[0]} has dtype {parts[0].dtype}, but {part} has {part.dtype}; convert one of them")
        if part.device != parts[0].device:
            raise ValueError(f"{parts[0]} lives on {parts[0].device}, but {part} on {part.device}; move one of them")
    try:
        batch = broadcast(*(part.batch_shape for part in parts))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(part.batch_shape)) for part in parts)
        raise ValueError(f"{kind} needs batch shapes that broadcast, not {shapes}") from error
    return (*batch, *parts[0].shape[-2:])


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
