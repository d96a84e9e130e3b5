"""Operators known by a factor: of low rank beside a diagonal, by eigenvalues and eigenvectors, and Jᴴ J by J."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from . import _checks
from ._matrices import Dense, expand, lu_solve, project_out, refuse_zero
from ._operator import LinearOperator
from ._results import SingularError


@final
class LowRankPlusDiagonal(LinearOperator):
    """D + U C Uᴴ with a diagonal D of n numbers, U of n rows and k columns, and a Hermitian C of k by k.

    A product costs O(n k), a system O(n k²). Where D has one sign, the system is solved in the basis that the QR
    factorisation D^(-1/2) U = Q R gives: (I + R C Rᴴ) within the span of Q, nothing to do beside it. The two parts never
    cancel, as they do in the textbook form of Woodbury's identity when U C Uᴴ is much larger than D. Where D changes
    sign, Woodbury's identity in the form D⁻¹ - D⁻¹ U (I + C Uᴴ D⁻¹ U)⁻¹ C Uᴴ D⁻¹, which needs no inverse of C, is followed
    by one step of iterative refinement. Where D has a zero, or k exceeds n, the matrix is formed.

    Args:
        diag: D, (*batch, n), real.
        factor: U, (*batch, n, k).
        core: C, (*batch, k, k), Hermitian (declared, not checked); or its diagonal, (*batch, k); or None for I.

    Raises:
        TypeError: If the dtypes do not belong together.
        ValueError: If the shapes do not belong together.

    Example:
        >>> import torch
        >>> from moduli.linalg import LowRankPlusDiagonal
        >>> A = LowRankPlusDiagonal(torch.ones(3), torch.tensor([[1.0], [1.0], [0.0]]))
        >>> A.to_dense()
        tensor([[2., 1., 0.],
                [1., 2., 0.],
                [0., 0., 1.]])
        >>> A.solve(torch.tensor([3.0, 3.0, 1.0])).round(decimals=3)
        tensor([1., 1., 1.])

    References:
        Woodbury, Inverting modified matrices, Princeton 1950; Hager, Updating the inverse of a matrix, SIAM Review 31
        (1989) 221-239.
    """

    def __init__(self, diag: Tensor, factor: Tensor, core: Tensor | None = None) -> None:
        _checks.check_floating(diag, "diag", 1)
        _checks.check_floating(factor, "factor", 2)
        n, k = factor.shape[-2:]
        if diag.shape[-1] != n:
            raise ValueError(f"diag has shape {tuple(diag.shape)}, but factor {tuple(factor.shape)}: both need n = {n}")
        if core is None:
            core = torch.ones((*factor.shape[:-2], k), dtype=factor.dtype, device=factor.device)
        else:
            _checks.check_floating(core, "core", 1)
        if core.ndim == factor.ndim - 1 and core.shape[-1] == k:
            core = core.diag_embed()
        elif core.ndim != factor.ndim or core.shape[-2:] != (k, k):
            fact = f"core has shape {tuple(core.shape)}, and factor {tuple(factor.shape)}"
            raise ValueError(f"{fact}: core is (..., {k}, {k}), or (..., {k}) for a diagonal one")
        if any(part.real.dtype != factor.real.dtype for part in (diag, core)) or diag.dtype.is_complex:
            raise TypeError(f"diag ({diag.dtype}, real), factor ({factor.dtype}) and core need one precision")
        self._diag, self._factor, self._core = diag, factor, core.to(factor.dtype)
        batch = _checks.broadcast(diag.shape[:-1], factor.shape[:-2], core.shape[:-2])
        super().__init__((*batch, n, n), factor.dtype, factor.device, symmetric=True)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._diag.unsqueeze(-1) * X + self._factor @ (self._core @ (self._factor.mH @ X))

    def _solve(self, B: Tensor) -> Tensor:
        return self._solve_with(self._diag, B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        if not _checks.is_real(d):
            return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
        return self._solve_with(self._diag + d.real, B, f"{self} plus the diagonal")

    def _solve_with(self, D: Tensor, B: Tensor, what: object) -> Tensor:
        U, C = self._factor, self._core
        n, k = U.shape[-2:]
        if k > n or bool((D == 0).any()):
            return lu_solve(D.to(U.dtype).diag_embed() + U @ C @ U.mH, B, what)
        if bool((D > 0).all()):
            return _solve_one_sign(D, U, C, B, what)
        if bool((D < 0).all()):
            return -_solve_one_sign(-D, U, -C, B, what)
        X = _woodbury(D, U, C, B, what)
        residual = B - (D.unsqueeze(-1) * X + U @ (C @ (U.mH @ X)))
        return X + _woodbury(D, U, C, residual, what)

    def _diagonal(self) -> Tensor:
        U = self._factor
        return self._diag + ((U @ self._core) * U.conj()).sum(-1)

    def _to_dense(self) -> Tensor:
        return self._diag.to(self.dtype).diag_embed() + self._factor @ self._core @ self._factor.mH


@final
class Eigendecomposition(LinearOperator):
    """Q diag(λ) Qᴴ with orthonormal columns Q: all n of them, or only k (the operator is zero beside their span).

    A product or a system, with or without a multiple of the identity, costs two products with Q: the factorisation is
    paid once for every radius that a trust region tries. A shift by a vector goes through `LowRankPlusDiagonal` if
    k < n, and through the matrix otherwise.

    Attributes:
        values: λ, the eigenvalues, (*batch, k).
        vectors: Q, the eigenvectors in columns, (*batch, n, k).

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
        if values.dtype != vectors.real.dtype:
            raise TypeError(f"values are real, of the precision of the vectors ({vectors.dtype}), not {values.dtype}")
        if tuple(values.shape) != (*batch, k) or k > n:
            fact = f"values have shape {tuple(values.shape)} and vectors {tuple(vectors.shape)}"
            raise ValueError(f"{fact}; needed are (..., k) and (..., n, k) with k at most n")
        self.values, self.vectors = values, vectors
        positive = bool((values >= 0).all())
        super().__init__((*batch, n, n), vectors.dtype, vectors.device, symmetric=True, positive_semidefinite=positive)

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
        return Eigendecomposition(function(self.values), self.vectors)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.vectors @ (self.values.unsqueeze(-1) * (self.vectors.mH @ X))

    def _solve(self, B: Tensor) -> Tensor:
        n, k = self.vectors.shape[-2:]
        if k < n:
            raise SingularError(f"{self} is singular: it has {k} eigenvectors; solve_plus_diag adds a shift")
        refuse_zero(self.values, self, "eigenvalues")
        return self.vectors @ ((self.vectors.mH @ B) / self.values.unsqueeze(-1))

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        n, k = self.vectors.shape[-2:]
        if d.shape[-1] != 1 or n == 0:
            if k == n or not _checks.is_real(d):
                return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
            return LowRankPlusDiagonal(d.real.broadcast_to((*d.shape[:-1], n)), self.vectors, self.values)._solve(B)
        shifted = self.values + d
        refuse_zero(shifted, f"{self} plus the diagonal", "eigenvalues")
        inside = self.vectors.mH @ B
        X = self.vectors @ (inside / shifted.unsqueeze(-1))
        if k == n:
            return X
        refuse_zero(d, f"{self} plus the diagonal", "shifts")
        return X + project_out(self.vectors, B, inside) / d.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        Q = self.vectors
        return (Q * self.values.unsqueeze(-2) * Q.conj()).sum(-1)

    def _to_dense(self) -> Tensor:
        return (self.vectors * self.values.unsqueeze(-2)) @ self.vectors.mH


class Gram(LinearOperator):
    """Jᴴ J for an operator J, which is all that `AtA` and `AAT` are.

    Systems are solved from J: the condition number of J, not its square, is what counts.

    Args:
        inner: J.
    """

    def __init__(self, inner: LinearOperator) -> None:
        self._factor = inner
        *batch, _, n = inner.shape
        free = inner.is_matrix_free
        super().__init__((*batch, n, n), inner.dtype, inner.device, positive_semidefinite=True, matrix_free=free)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._factor._rmatmat(self._factor._matmat(X))

    def _solve(self, B: Tensor) -> Tensor:
        # J = Q R, hence Jᴴ J = Rᴴ R (Björck 1996, chapter 2)
        J = self._explicit("solve")
        m, n = J.shape[-2:]
        if m < n:
            fact = f"{self} is singular: its factor has {m} rows and {n} columns"
            raise SingularError(f"{fact}; solve_plus_diag adds a shift")
        return _seminormal(torch.linalg.qr(J)[1], B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        J, what = self._explicit("solve_plus_diag"), f"{self} plus the diagonal"
        m, n = J.shape[-2:]
        real = d.real
        if not _checks.is_real(d) or bool((real < 0).any()):
            return lu_solve(J.mH @ J + d.expand(*d.shape[:-1], n).diag_embed(), B, what)
        if m < n and bool((real > 0).all()):
            return _solve_one_sign(real, J.mH, torch.eye(m, dtype=J.dtype, device=J.device), B, what)
        # The square root has no derivative at zero, where the augmented rows are zero anyway.
        root = torch.where(real > 0, real, 1).sqrt() * (real > 0)
        rows = root.to(J.dtype).expand(*d.shape[:-1], n).diag_embed()
        return _seminormal(torch.linalg.qr(torch.cat(expand(J, rows), -2))[1], B, what)

    def _diagonal(self) -> Tensor:
        J = self._factor._to_dense()
        return (J * J.conj()).sum(-2)

    def _to_dense(self) -> Tensor:
        J = self._factor._to_dense()
        return J.mH @ J

    def _explicit(self, ability: str) -> Tensor:
        return self._factor._to_dense() if not self.is_matrix_free else self._dense_for(ability)._to_dense()


@final
class AtA(Gram):
    """Aᴴ A for a factor A of m rows and n columns, never formed for a product.

    With A the Jacobian of residuals it is the Gauss-Newton matrix; `solve_plus_diag(b, d)` is the Levenberg-Marquardt
    system. Systems are solved by the QR factorisation of A (of A above the root of the shift, if there is one), whose
    condition is the root of that of Aᴴ A. With fewer rows than columns a shifted system costs O(n m²).

    Args:
        factor: A: an operator, or a matrix (*batch, m, n).

    Raises:
        TypeError: If the factor is neither an operator nor a real or complex tensor.

    Example:
        >>> import torch
        >>> from moduli.linalg import AtA
        >>> J = torch.tensor([[1.0, 0.0, 2.0]])
        >>> G = AtA(J)
        >>> G @ torch.ones(3), G.diagonal(), G.solve_plus_diag(torch.tensor([1.0, 1.0, 2.0]), 1.0)
        (tensor([3., 0., 6.]), tensor([1., 0., 4.]), tensor([0.1667, 1.0000, 0.3333]))

    References:
        Björck, Numerical Methods for Least Squares Problems, SIAM 1996, chapter 2.
    """

    def __init__(self, factor: LinearOperator | Tensor) -> None:
        super().__init__(factor if isinstance(factor, LinearOperator) else Dense(factor))


@final
class AAT(Gram):
    """A Aᴴ for a factor A of n rows and k columns, never formed for a product.

    With one gradient per column it is the empirical Fisher matrix. Systems are solved as in `AtA`, for the adjoint
    factor: by QR, and in O(n k²) with a shift and fewer columns than rows.

    Args:
        factor: A: an operator, or a matrix (*batch, n, k).

    Raises:
        TypeError: If the factor is neither an operator nor a real or complex tensor.

    Example:
        >>> import torch
        >>> from moduli.linalg import AAT
        >>> F = AAT(torch.tensor([[1.0], [2.0]]))
        >>> F.to_dense(), F.solve_plus_diag(torch.tensor([1.0, 2.0]), 5.0)
        (tensor([[1., 2.],
                [2., 4.]]), tensor([0.1000, 0.2000]))
    """

    def __init__(self, factor: LinearOperator | Tensor) -> None:
        super().__init__((factor if isinstance(factor, LinearOperator) else Dense(factor)).adjoint())


def _seminormal(R: Tensor, B: Tensor, what: object) -> Tensor:
    """(Rᴴ R)⁻¹ B by two triangular systems."""
    if bool((R.diagonal(dim1=-2, dim2=-1) == 0).any()):
        raise SingularError(f"{what} is singular: the columns of its factor are dependent")
    half = torch.linalg.solve_triangular(R.mH, B, upper=False)
    X: Tensor = torch.linalg.solve_triangular(R, half, upper=True)
    return X


def _solve_one_sign(D: Tensor, U: Tensor, C: Tensor, B: Tensor, what: object) -> Tensor:
    """(D + U C Uᴴ)⁻¹ B for D > 0, in the basis of the span of D^(-1/2) U."""
    root = D.sqrt().unsqueeze(-1)
    Q: Tensor
    R: Tensor
    Q, R = torch.linalg.qr(U / root)
    scaled = B / root
    inside = Q.mH @ scaled
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    solved = lu_solve(eye + R @ C @ R.mH, inside, what)
    return (Q @ solved + project_out(Q, scaled, inside)) / root


def _woodbury(D: Tensor, U: Tensor, C: Tensor, B: Tensor, what: object) -> Tensor:
    """Woodbury's identity (Hager 1989), written without the inverse of C."""
    below = D.unsqueeze(-1)
    first, spread = B / below, U / below
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    inner, right = expand(eye + C @ (U.mH @ spread), C @ (U.mH @ first))
    return first - spread @ lu_solve(inner, right, what)
