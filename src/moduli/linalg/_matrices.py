"""Operators known by their entries (a matrix, a diagonal, one number) or by a function; and how dense systems are solved."""

from abc import abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from . import _checks
from ._operator import LinearOperator
from ._results import SingularError


@final
class Dense(LinearOperator):
    """A matrix, or a batch of them.

    Systems are solved by LU with partial pivoting, or by Cholesky where the matrix is declared positive semidefinite.

    Args:
        matrix: (*batch, m, n), real or complex.
        symmetric: Declared: the matrix equals its conjugate transpose.
        positive_semidefinite: Declared: it is symmetric and has no negative eigenvalue.

    Raises:
        TypeError: If the matrix is no real or complex tensor.
        ValueError: If it has fewer than two axes, or is declared symmetric and not square.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense
        >>> A = Dense(torch.tensor([[4.0, 1.0], [2.0, 3.0]]))
        >>> A.solve(torch.tensor([6.0, 8.0])).round(decimals=3), A.T @ torch.tensor([1.0, 0.0])
        (tensor([1., 2.]), tensor([4., 1.]))
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False, positive_semidefinite: bool = False) -> None:
        self._matrix = _checks.check_floating(matrix, "matrix", 2)
        super().__init__(
            tuple(matrix.shape),
            matrix.dtype,
            matrix.device,
            symmetric=symmetric,
            positive_semidefinite=positive_semidefinite,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._matrix @ X

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._matrix.mH @ Y

    def _solve(self, B: Tensor) -> Tensor:
        solve = positive_solve if self.is_positive_semidefinite else lu_solve
        return solve(self._matrix, B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        n = self.shape[-1]
        shifted = self._matrix + (d.expand(*d.shape[:-1], n)).diag_embed()
        # A shift that takes nothing away keeps a positive matrix positive.
        positive = self.is_positive_semidefinite and not d.dtype.is_complex and bool((d >= 0).all())
        return (positive_solve if positive else lu_solve)(shifted, B, f"{self} plus the diagonal")

    def _to_dense(self) -> Tensor:
        return self._matrix

    def _adjoint(self) -> LinearOperator:
        return Dense(self._matrix.mH)

    def _scale(self, factor: Tensor) -> LinearOperator:
        return Dense(factor[..., None, None] * self._matrix, **self._keep_under(factor))

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        # A dense matrix absorbs whatever is stored: the sum costs no more than the matrix that is already there.
        if other.is_matrix_free:
            return None
        return Dense(
            self._matrix + other.to_dense(),
            symmetric=self.is_symmetric and other.is_symmetric,
            positive_semidefinite=self.is_positive_semidefinite and other.is_positive_semidefinite,
        )


class DiagonalKind(LinearOperator):
    """A diagonal matrix: `_entries` are (..., n), or (..., 1) where all of them are equal."""

    _entries: Tensor

    @abstractmethod
    def _replace(self, entries: Tensor, positive: bool) -> LinearOperator: ...

    def _matmat(self, X: Tensor) -> Tensor:
        return self._entries.unsqueeze(-1) * X

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._entries.conj().unsqueeze(-1) * Y

    def _solve(self, B: Tensor) -> Tensor:
        refuse_zero(self._entries, self, "entries")
        return B / self._entries.unsqueeze(-1)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        shifted = self._entries + d
        refuse_zero(shifted, f"{self} plus the diagonal", "entries")
        return B / shifted.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self._entries.expand(self.shape[:-1])

    def _to_dense(self) -> Tensor:
        return self._diagonal().diag_embed()

    def _adjoint(self) -> LinearOperator:
        return self._replace(self._entries.conj(), False)

    def _transpose(self) -> LinearOperator:
        return self

    def _scale(self, factor: Tensor) -> LinearOperator:
        positive = self._keep_under(factor)["positive_semidefinite"]
        return self._replace(factor.unsqueeze(-1) * self._entries, positive)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if not isinstance(other, DiagonalKind):
            return None
        wider = self if isinstance(self, Diagonal) else other
        positive = self.is_positive_semidefinite and other.is_positive_semidefinite
        return wider._replace(self._entries + other._entries, positive)


@final
class Diagonal(DiagonalKind):
    """A diagonal matrix, stored as its diagonal. Everything costs O(n).

    Args:
        diag: (*batch, n), real or complex.
        positive_semidefinite: Declared: no entry is negative.

    Raises:
        TypeError: If the diagonal is no real or complex tensor.
        ValueError: If it has no axis.

    Example:
        >>> import torch
        >>> from moduli.linalg import Diagonal
        >>> D = Diagonal(torch.tensor([1.0, 4.0]))
        >>> D @ torch.ones(2), D.solve(torch.ones(2)), D.solve_plus_diag(torch.ones(2), 1.0)
        (tensor([1., 4.]), tensor([1.0000, 0.2500]), tensor([0.5000, 0.2000]))
    """

    def __init__(self, diag: Tensor, *, positive_semidefinite: bool = False) -> None:
        self._entries = _checks.check_floating(diag, "diag", 1)
        n = diag.shape[-1]
        super().__init__(
            (*diag.shape, n),
            diag.dtype,
            diag.device,
            symmetric=not diag.dtype.is_complex,
            positive_semidefinite=positive_semidefinite,
        )

    def _replace(self, entries: Tensor, positive: bool) -> LinearOperator:
        return Diagonal(entries, positive_semidefinite=positive)


@final
class ScaledIdentity(DiagonalKind):
    """A multiple of the identity: the curvature model of gradient descent with one step size.

    Args:
        n: How many coordinates.
        scale: The multiple: a number, or a tensor with one number per member (its shape is the batch shape).
        dtype: The dtype; that of the scale if not given, and torch's default dtype for a real number.
        device: The device.

    Raises:
        TypeError: If the scale is no real or complex number or tensor.

    Example:
        >>> import torch
        >>> from moduli.linalg import ScaledIdentity
        >>> A = ScaledIdentity(3, 2.0)
        >>> A @ torch.ones(3), A.solve_plus_diag(torch.ones(3), 2.0), A.trace()
        (tensor([2., 2., 2.]), tensor([0.2500, 0.2500, 0.2500]), tensor(6.))
    """

    def __init__(
        self,
        n: int,
        scale: float | complex | Tensor = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if dtype is None and not isinstance(scale, complex | Tensor):
            dtype = torch.get_default_dtype()
        value = _checks.check_floating(torch.as_tensor(scale, dtype=dtype, device=device), "scale", 0)
        self._entries = value.unsqueeze(-1)
        real = not value.dtype.is_complex
        positive = real and bool((value >= 0).all())
        super().__init__(
            (*value.shape, n, n), value.dtype, value.device, symmetric=real, positive_semidefinite=positive
        )

    def _replace(self, entries: Tensor, positive: bool) -> LinearOperator:
        return ScaledIdentity(self.shape[-1], entries[..., 0])


@final
class FunctionOperator(LinearOperator):
    """A matrix-free operator: products with a Hessian, a Jacobian, or anything else that is linear.

    It multiplies, and refuses to solve: forming the matrix would cost n products and n² numbers, so that is left to the
    caller, who has `cg`, `minres` and `lsqr` for it. `to_dense`, `diagonal` and `trace` cost n products when asked for.

    Args:
        matvec: A function of a vector (n,) that returns A x, (rows,); with `vectorized`, of (..., n).
        n: The length of x.
        rows: The length of A x; n by default.
        rmatvec: A function of a vector (rows,) that returns Aᴴ y; not needed if symmetric.
        dtype: The dtype of the vectors; torch's default dtype if not given.
        device: The device of the vectors.
        symmetric: Declared: A = Aᴴ, as every Hessian is.
        positive_semidefinite: Declared: A = Aᴴ and xᴴ A x ≥ 0.
        vectorized: Declared: the functions map the last axis and keep leading ones, so that one call does many products.
        batch: The batch shape, if the function holds one operator per member; needs `vectorized`.

    Raises:
        ValueError: If a batch is given without `vectorized`.

    Example:
        >>> import torch
        >>> from moduli.linalg import FunctionOperator
        >>> f = lambda x: (x**4).sum() / 12
        >>> x = torch.tensor([1.0, 2.0])
        >>> hvp = lambda v: torch.func.jvp(torch.func.grad(f), (x,), (v,))[1]
        >>> A = FunctionOperator(hvp, 2, symmetric=True)
        >>> A @ torch.ones(2), A.to_dense()
        (tensor([1., 4.]), tensor([[1., 0.],
                [0., 4.]]))
    """

    def __init__(
        self,
        matvec: Callable[[Tensor], Tensor],
        n: int,
        *,
        rows: int | None = None,
        rmatvec: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        symmetric: bool = False,
        positive_semidefinite: bool = False,
        vectorized: bool = False,
        batch: tuple[int, ...] = (),
    ) -> None:
        rows = n if rows is None else rows
        if not callable(matvec):
            raise TypeError(f"matvec is a function of a vector, not {type(matvec).__name__}; a matrix is a Dense")
        if batch and not vectorized:
            raise ValueError(f"batch = {tuple(batch)} needs a function of (..., {n}); declare it with vectorized=True")
        self._forward, self._backward, self._vectorized = matvec, rmatvec, vectorized
        super().__init__(
            (*batch, rows, n),
            torch.get_default_dtype() if dtype is None else dtype,
            torch.empty(0, device=device).device,
            symmetric=symmetric,
            positive_semidefinite=positive_semidefinite,
            matrix_free=True,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._map_columns(self._forward, X, self.shape[-2], "matvec")

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self._backward is None:
            return super()._rmatmat(Y)
        return self._map_columns(self._backward, Y, self.shape[-1], "rmatvec")

    def _map_columns(self, function: Callable[[Tensor], Tensor], X: Tensor, length: int, name: str) -> Tensor:
        """Return the function at every column, after checking its results."""
        # The function knows the batch axes next to the last one, so the columns become one more axis before them.
        lead = _checks.broadcast(self.batch_shape, X.shape[:-2])
        rows = X.expand(*lead, *X.shape[-2:]).movedim(-1, 0)
        outputs = [function(rows)] if self._vectorized else [function(row) for row in rows.flatten(0, -2)]
        for result in outputs:
            if result.ndim == 0 or result.shape[-1] != length or result.dtype != self.dtype:
                fact = f"{name} of {self} returned {result.dtype} of shape {tuple(result.shape)}"
                raise ValueError(f"{fact}; it should return {self.dtype} with {length} numbers along the last axis")
        results = torch.stack(outputs) if outputs else rows.new_zeros(0, length)
        return results.reshape(*rows.shape[:-1], length).movedim(0, -1)


def expand(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the same batch axes, so that torch does not take a matrix of right-hand sides as a batch of vectors."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    lead = _checks.broadcast(A.shape[:-2], B.shape[:-2])
    return A.expand(*lead, *A.shape[-2:]), B.expand(*lead, *B.shape[-2:])


def lu_solve(A: Tensor, B: Tensor, what: object) -> Tensor:
    """Return A⁻¹ B by LU with partial pivoting.

    Args:
        A: The matrix.
        B: The right-hand sides.
        what: The operator, for errors.
    """
    X: Tensor
    X, info = torch.linalg.solve_ex(*expand(A, B))
    if bool((info != 0).any()):
        raise SingularError(f"{what} is singular: its LU factorisation has a zero pivot; solve_plus_diag adds a shift")
    return X


def positive_solve(A: Tensor, B: Tensor, what: object) -> Tensor:
    """Return A⁻¹ B by Cholesky, for a positive definite A.

    Args:
        A: The matrix.
        B: The right-hand sides.
        what: The operator, for errors.
    """
    A, B = expand(A, B)
    L, info = torch.linalg.cholesky_ex(A)
    if bool((info != 0).any()):
        raise SingularError(f"{what} is declared positive semidefinite, but is singular, or not so")
    return torch.cholesky_solve(B, L)


def project_out(Q: Tensor, C: Tensor, inside: Tensor) -> Tensor:
    """Return C - Q Qᴴ C.

    If C lies almost in the span of Q, one subtraction leaves rounding errors within the span, which a small
    shift would amplify; a second subtraction removes them.

    Args:
        Q: Orthonormal columns.
        C: The matrix.
        inside: Qᴴ C.
    """
    rest = C - Q @ inside
    return rest - Q @ (Q.mH @ rest)


def refuse_zero(values: Tensor, what: object, name: str) -> None:
    """Raise SingularError if a divisor is zero.

    Args:
        values: The divisors.
        what: The operator, for the error.
        name: The plural noun for the divisors, for the error.
    """
    zero = int((values == 0).sum())
    if zero:
        fact = f"{what} is singular: {zero} of {values.numel()} {name} are zero"
        raise SingularError(f"{fact}; solve_plus_diag adds a shift")
