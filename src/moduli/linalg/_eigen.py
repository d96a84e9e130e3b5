"""The operator known by its eigenvalues and eigenvectors."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from . import _checks
from ._errors import SingularError
from ._factor import project_out, refuse_zero
from ._lowrank import LowRankPlusDiagonal
from ._operator import LinearOperator


@final
class Eigendecomposition(LinearOperator):
    """Q diag(λ) Qᴴ with orthonormal columns Q: all n of them, or only k (the operator is zero beside their span).

    A product or a system, with or without a multiple of the identity, costs two products with Q: the factorisation is
    paid once for every radius that a trust region tries. A shift by a vector goes through `LowRankPlusDiagonal` if
    k < n, and through the matrix otherwise.

    Args:
        values: λ, (*batch, k), real.
        vectors: Q, (*batch, n, k), with orthonormal columns (declared, not checked).

    Raises:
        TypeError: If the values are not real, or the dtypes do not belong together.
        ValueError: If the shapes do not belong together.

    Example:
        >>> import torch
        >>> from moduli.linalg import Eigendecomposition
        >>> A = Eigendecomposition.of(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> A.values
        tensor([-1.,  1.])
        >>> A.map(torch.abs).to_dense().round(decimals=4) + 0.0
        tensor([[1., 0.],
                [0., 1.]])
    """

    def __init__(self, values: Tensor, vectors: Tensor) -> None:
        _checks.check_floating(values, "values", 1)
        _checks.check_floating(vectors, "vectors", 2)
        *batch, n, k = vectors.shape
        if values.dtype.is_complex or values.dtype != vectors.real.dtype:
            raise TypeError(
                f"values are real numbers of the precision of the vectors ({vectors.dtype}), not {values.dtype}"
            )
        if tuple(values.shape) != (*batch, k) or k > n:
            raise ValueError(
                f"values have shape {tuple(values.shape)} and vectors {tuple(vectors.shape)}; needed are (..., k) and "
                "(..., n, k) with k at most n"
            )
        self._values, self._vectors = values, vectors
        super().__init__(
            (*batch, n, n),
            vectors.dtype,
            vectors.device,
            symmetric=True,
            positive_semidefinite=bool((values >= 0).all()),
        )

    @classmethod
    def of(cls, matrix: LinearOperator | Tensor) -> "Eigendecomposition":
        """The decomposition of a symmetric (Hermitian) matrix or operator; only the lower triangle is read.

        Raises:
            TypeError: If it is an operator that is not declared symmetric, or no real or complex tensor.
            ValueError: If the matrix is not square.

        Example:
            >>> import torch
            >>> from moduli.linalg import Eigendecomposition
            >>> Eigendecomposition.of(torch.eye(2)).values
            tensor([1., 1.])
        """
        if isinstance(matrix, LinearOperator):
            if not matrix.is_symmetric:
                raise TypeError(f"{matrix} is not declared symmetric, and only a symmetric operator has this form")
            if isinstance(matrix, Eigendecomposition) and matrix.values.shape[-1] == matrix.shape[-1]:
                return matrix
            matrix = matrix.to_dense()
        _checks.check_floating(matrix, "matrix", 2)
        if matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; only a square one has eigenvalues")
        values, vectors = torch.linalg.eigh(matrix)
        return cls(values, vectors)

    @property
    def values(self) -> Tensor:
        """λ, the eigenvalues, (*batch, k)."""
        return self._values

    @property
    def vectors(self) -> Tensor:
        """Q, the eigenvectors in columns, (*batch, n, k)."""
        return self._vectors

    def map(self, function: Callable[[Tensor], Tensor]) -> "Eigendecomposition":
        """Q diag(f(λ)) Qᴴ, with the same vectors: |A|, a power of A, a clipped spectrum.

        Args:
            function: Of the eigenvalues, keeping their shape.

        Example:
            >>> import torch
            >>> from moduli.linalg import Eigendecomposition
            >>> Eigendecomposition.of(torch.diag(torch.tensor([-4.0, 9.0]))).map(lambda v: v.abs().sqrt()).values
            tensor([2., 3.])
        """
        return Eigendecomposition(function(self._values), self._vectors)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._vectors @ (self._values.unsqueeze(-1) * (self._vectors.mH @ X))

    def _solve(self, B: Tensor) -> Tensor:
        n, k = self._vectors.shape[-2:]
        if k < n:
            raise SingularError(f"{self} is singular: it has {k} eigenvectors; solve_plus_diag adds a shift")
        refuse_zero(self._values, self, "eigenvalues")
        return self._vectors @ ((self._vectors.mH @ B) / self._values.unsqueeze(-1))

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        n, k = self._vectors.shape[-2:]
        if d.shape[-1] != 1 or n == 0:
            if k == n or not _checks.is_real(d):
                return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
            return LowRankPlusDiagonal(d.real.broadcast_to((*d.shape[:-1], n)), self._vectors, self._values)._solve(B)
        shifted = self._values + d
        refuse_zero(shifted, f"{self} plus the diagonal", "eigenvalues")
        inside = self._vectors.mH @ B
        X = self._vectors @ (inside / shifted.unsqueeze(-1))
        if k == n:
            return X
        refuse_zero(d, f"{self} plus the diagonal", "shifts")
        return X + project_out(self._vectors, B, inside) / d.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        Q = self._vectors
        return (Q * self._values.unsqueeze(-2) * Q.conj()).sum(-1)

    def _trace(self) -> Tensor:
        return self._values.sum(-1).to(self.dtype)

    def _to_dense(self) -> Tensor:
        return (self._vectors * self._values.unsqueeze(-2)) @ self._vectors.mH

    def _scale(self, factor: Tensor) -> LinearOperator:
        if not _checks.is_real(factor):
            return super()._scale(factor)
        return Eigendecomposition(factor.real.unsqueeze(-1) * self._values, self._vectors)
