"""Systems with Jᴴ J, solved from J: the condition number of J, not its square, is what counts."""

from typing import final

import torch
from torch import Tensor

from ._checks import is_real
from ._dense import Dense
from ._errors import SingularError
from ._factor import expand, lu_solve, project_out
from ._operator import LinearOperator


class Gram(LinearOperator):
    """Jᴴ J for an operator J, which is all that `AtA` and `AAT` are.

    Args:
        inner: J.
    """

    def __init__(self, inner: LinearOperator) -> None:
        self._factor = inner
        *batch, _, n = inner.shape
        free = inner.is_matrix_free
        super().__init__((*batch, n, n), inner.dtype, inner.device, positive_semidefinite=True, matrix_free=free)

    @staticmethod
    def _operator(factor: LinearOperator | Tensor) -> LinearOperator:
        return factor if isinstance(factor, LinearOperator) else Dense(factor)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._factor._rmatmat(self._factor._matmat(X))

    def _matvec(self, x: Tensor) -> Tensor:
        return self._factor._rmatvec(self._factor._matvec(x))

    def _solve(self, B: Tensor) -> Tensor:
        return gram_solve(self._explicit("solve"), B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        return gram_solve_plus_diag(self._explicit("solve_plus_diag"), B, d, f"{self} plus the diagonal")

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
        super().__init__(self._operator(factor))


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
        super().__init__(self._operator(factor).adjoint())


def gram_solve(J: Tensor, B: Tensor, what: object) -> Tensor:
    """(Jᴴ J)⁻¹ B from J = Q R, hence Jᴴ J = Rᴴ R (Björck 1996, chapter 2)."""
    m, n = J.shape[-2:]
    if m < n:
        raise SingularError(
            f"{what} is singular: its factor has {m} rows and {n} columns; solve_plus_diag adds a shift"
        )
    return _seminormal(torch.linalg.qr(J)[1], B, what)


def gram_solve_plus_diag(J: Tensor, B: Tensor, d: Tensor, what: object) -> Tensor:
    """(Jᴴ J + diag d)⁻¹ B, without forming Jᴴ J where the shift takes nothing away."""
    m, n = J.shape[-2:]
    real = d.real
    if not is_real(d) or bool((real < 0).any()):
        return lu_solve(J.mH @ J + d.expand(*d.shape[:-1], n).diag_embed(), B, what)
    if m < n and bool((real > 0).all()):
        return _solve_wide(J, B, real.sqrt().to(J.dtype), what)
    # The square root has no derivative at zero, where the augmented rows are zero anyway.
    root = torch.where(real > 0, real, 1).sqrt() * (real > 0)
    rows = root.to(J.dtype).expand(*d.shape[:-1], n).diag_embed()
    J, rows = expand(J, rows)
    return _seminormal(torch.linalg.qr(torch.cat([J, rows], -2))[1], B, what)


def _seminormal(R: Tensor, B: Tensor, what: object) -> Tensor:
    """(Rᴴ R)⁻¹ B by two triangular systems."""
    if bool((R.diagonal(dim1=-2, dim2=-1) == 0).any()):
        raise SingularError(
            f"{what} is singular: the columns of its factor are dependent; solve_plus_diag adds a shift"
        )
    half = torch.linalg.solve_triangular(R.mH, B, upper=False)
    X: Tensor = torch.linalg.solve_triangular(R, half, upper=True)
    return X


def _solve_wide(J: Tensor, B: Tensor, root: Tensor, what: object) -> Tensor:
    """(Jᴴ J + D)⁻¹ B for fewer rows than columns and D > 0, in O(n m²).

    With K = D^(-1/2) Jᴴ = Q R the matrix is D^(1/2) (I + Q R Rᴴ Qᴴ) D^(1/2), whose inverse acts as (I + R Rᴴ)⁻¹ on the
    span of Q and as the identity beside it. The two parts are computed apart, so that nothing cancels for a small D.
    """
    Q: Tensor
    R: Tensor
    Q, R = torch.linalg.qr(J.mH / root.unsqueeze(-1))
    C = B / root.unsqueeze(-1)
    inside = Q.mH @ C
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    eye = eye.expand(*R.shape[:-2], *eye.shape)
    solved = _seminormal(torch.linalg.qr(torch.cat([R.mH, eye], -2))[1], inside, what)
    return (Q @ solved + project_out(Q, C, inside)) / root.unsqueeze(-1)
