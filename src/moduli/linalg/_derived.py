"""Operators made of others: sums and products, multiples, adjoints, transposes and inverses."""

from functools import reduce
from itertools import pairwise
from typing import ClassVar, final

import torch
from torch import Tensor

from . import _checks
from ._matrices import Diagonal, DiagonalKind
from ._operator import LinearOperator
from ._results import SingularError


@final
class OperatorSum(LinearOperator):
    """A + B + ..., made by `A + B` where the kinds have no closer form.

    A structured operator plus a diagonal one keeps its fast solution: the system is `A.solve_plus_diag`. Any other sum
    of stored operators is solved through its matrix, and one with a matrix-free term refuses.

    Args:
        terms: One or more operators of equal rows, columns, dtype and device; batches broadcast.

    Raises:
        TypeError: If the terms differ in dtype, or are no operators.
        ValueError: If they differ in shape.

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
        return reduce(torch.add, [term._matmat(X) for term in self._terms])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return reduce(torch.add, [term._rmatmat(Y) for term in self._terms])

    def _solve(self, B: Tensor) -> Tensor:
        return self._solve_plus_diag(B, torch.zeros((1,), dtype=self.dtype, device=self.device))

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        rest = [term for term in self._terms if not isinstance(term, DiagonalKind)]
        shift = reduce(torch.add, [term._entries for term in self._terms if isinstance(term, DiagonalKind)], d)
        if not rest:
            return Diagonal(shift.expand(*shift.shape[:-1], self.shape[-1]))._solve(B)
        if len(rest) == 1:
            # Without a shift the term may know a better way than that for a shifted one.
            return rest[0]._solve(B) if not bool((shift != 0).any()) else rest[0]._solve_plus_diag(B, shift)
        return self._dense_for("solve")._solve_plus_diag(B, d)

    def _diagonal(self) -> Tensor:
        return reduce(torch.add, [term._diagonal() for term in self._terms])

    def _to_dense(self) -> Tensor:
        return reduce(torch.add, [term._to_dense() for term in self._terms])

    def _adjoint(self) -> LinearOperator:
        return OperatorSum(*(term.adjoint() for term in self._terms))


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
        ValueError: If rows and columns do not meet.

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
        matrix = self._factors[-1]._to_dense()
        for factor in reversed(self._factors[:-1]):
            matrix = factor._matmat(matrix)
        return matrix

    def _adjoint(self) -> LinearOperator:
        return OperatorProduct(*(factor.adjoint() for factor in reversed(self._factors)))


def add(first: LinearOperator, second: LinearOperator) -> LinearOperator:
    """The sum of two operators in the closest form that their kinds know."""
    OperatorSum(first, second)  # refuses what cannot be added
    terms = [t for part in (first, second) for t in (part._terms if isinstance(part, OperatorSum) else (part,))]
    return first._plus(second) or second._plus(first) or OperatorSum(*terms)


def check_alike(kind: str, parts: tuple[LinearOperator, ...]) -> tuple[int, ...]:
    """Refuse parts that do not fit together; returns the first one's shape with the batch axes of all."""
    for part in parts:
        if not isinstance(part, LinearOperator):
            raise TypeError(f"{kind} is made of operators, not of {type(part).__name__}; write Dense(matrix)")
        if part.dtype != parts[0].dtype:
            raise TypeError(f"{parts[0]} has dtype {parts[0].dtype}, but {part} has {part.dtype}; convert one of them")
    try:
        batch = _checks.broadcast(*(part.batch_shape for part in parts))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(part.batch_shape)) for part in parts)
        raise ValueError(f"{kind} needs batch shapes that broadcast, not {shapes}") from error
    return (*batch, *parts[0].shape[-2:])


class DerivedOperator(LinearOperator):
    """An operator made of one other, of whose properties it has those that are not denied; `_flips` rows and columns.

    Args:
        operator: The other.
        symmetric: Whether symmetry is kept.
        positive_semidefinite: Whether semidefiniteness is kept.
    """

    _flips: ClassVar[bool] = False

    def __init__(self, operator: LinearOperator, *, symmetric: bool = True, positive_semidefinite: bool = True) -> None:
        self._operator = operator
        *batch, m, n = operator.shape
        super().__init__(
            (*batch, n, m) if self._flips else (*batch, m, n),
            operator.dtype,
            operator.device,
            symmetric=operator.is_symmetric and symmetric,
            positive_semidefinite=operator.is_positive_semidefinite and positive_semidefinite,
            matrix_free=operator.is_matrix_free,
        )


@final
class Adjoint(DerivedOperator):
    """Aᴴ: its products are A's adjoint products, and the other way round. Made by `A.H`, and by `A.T` if A is real.

    Args:
        operator: A, of any kind.

    Example:
        >>> import torch
        >>> from moduli.linalg import Adjoint, Dense
        >>> Adjoint(Dense(torch.tensor([[1.0, 2.0]]))) @ torch.ones(1)
        tensor([1., 2.])
    """

    _flips = True

    def _matmat(self, X: Tensor) -> Tensor:
        return self._operator._rmatmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator._matmat(Y)

    def _to_dense(self) -> Tensor:
        return self._operator._to_dense().mH

    def _diagonal(self) -> Tensor:
        return self._operator._diagonal().conj()

    def _adjoint(self) -> LinearOperator:
        return self._operator


@final
class Transpose(DerivedOperator):
    """Aᵀ x = conj(Aᴴ conj(x)). Made by `A.T` where A is complex; for a real A the adjoint is the transpose.

    Args:
        operator: A, of any kind.

    Example:
        >>> import torch
        >>> from moduli.linalg import FunctionOperator
        >>> A = FunctionOperator(lambda x: 1j * x, 2, rmatvec=lambda y: -1j * y, dtype=torch.complex64)
        >>> (A.T @ torch.ones(2, dtype=torch.complex64)).imag
        tensor([1., 1.])
    """

    _flips = True

    def _matmat(self, X: Tensor) -> Tensor:
        return self._operator._rmatmat(X.conj()).conj()

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator._matmat(Y.conj()).conj()

    def _solve(self, B: Tensor) -> Tensor:
        return self._operator.adjoint()._solve(B.conj()).conj()

    def _to_dense(self) -> Tensor:
        return self._operator._to_dense().mT

    def _transpose(self) -> LinearOperator:
        return self._operator


@final
class Inverse(DerivedOperator):
    """A⁻¹: its products are solutions of A, and its solutions products with A. Made by `A.inverse()`.

    A shift goes through A too. With y = D x, (A⁻¹ + D) x = b becomes (A + D⁻¹) y = A b, so a curvature model that is
    kept by its inverse can still be damped, without ever being inverted.

    Args:
        operator: A, square.

    Raises:
        MissingAbilityError: If A is not square.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense
        >>> H = Dense(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), symmetric=True).inverse()
        >>> H @ torch.ones(2), H.solve(torch.ones(2))
        (tensor([0.5000, 0.2500]), tensor([2., 4.]))
    """

    def __init__(self, operator: LinearOperator) -> None:
        operator._need_square("be inverted")
        super().__init__(operator)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._operator._solve(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator.adjoint()._solve(Y)

    def _solve(self, B: Tensor) -> Tensor:
        return self._operator._matmat(B)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        if bool((d == 0).any()):
            # There is no D⁻¹; a shift of zero is no shift, anything between needs the matrix.
            if bool((d == 0).all()):
                return self._operator._matmat(B)
            return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
        return self._operator._solve_plus_diag(self._operator._matmat(B), 1 / d) / d.unsqueeze(-1)

    def _adjoint(self) -> LinearOperator:
        return Inverse(self._operator.adjoint())


@final
class Scaled(DerivedOperator):
    """c A, made by `c * A`, `A / c` and `-A`.

    Args:
        operator: A, of any kind.
        factor: c: a number, or a tensor with one number per member.

    Example:
        >>> import torch
        >>> from moduli.linalg import AtA, Scaled
        >>> G = Scaled(AtA(torch.tensor([[1.0, 2.0]])), 0.5)
        >>> G @ torch.ones(2), G.diagonal()
        (tensor([1.5000, 3.0000]), tensor([0.5000, 2.0000]))
    """

    def __init__(self, operator: LinearOperator, factor: float | complex | Tensor) -> None:
        self._by = _checks.factor(operator, factor)
        super().__init__(operator, **operator._keep_under(self._by))

    def _matmat(self, X: Tensor) -> Tensor:
        return self._by[..., None, None] * self._operator._matmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._by.conj()[..., None, None] * self._operator._rmatmat(Y)

    def _solve(self, B: Tensor) -> Tensor:
        if self.shape[-1] and bool((self._by == 0).any()):
            raise SingularError(f"{self} is singular: its factor is zero; solve_plus_diag adds a shift")
        return self._operator._solve(B) / self._by[..., None, None]

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        # (c A + D) x = b is (A + D / c) x = b / c, unless the factor has taken the operator away.
        if bool((self._by == 0).any()):
            return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
        by = self._by.unsqueeze(-1)
        return self._operator._solve_plus_diag(B / by.unsqueeze(-1), d / by)

    def _diagonal(self) -> Tensor:
        return self._by.unsqueeze(-1) * self._operator._diagonal()

    def _to_dense(self) -> Tensor:
        return self._by[..., None, None] * self._operator._to_dense()

    def _adjoint(self) -> LinearOperator:
        return Scaled(self._operator.adjoint(), self._by.conj())
