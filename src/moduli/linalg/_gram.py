"""Systems with Jᴴ J, solved from J: the condition number of J, not its square, is what counts."""

from typing import final

import torch
from torch import Tensor

from ._checks import is_real
from ._lowrank import solve_one_sign
from ._matrices import Dense, expand, lu_solve
from ._operator import LinearOperator
from ._results import SingularError


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
        if not is_real(d) or bool((real < 0).any()):
            return lu_solve(J.mH @ J + d.expand(*d.shape[:-1], n).diag_embed(), B, what)
        if m < n and bool((real > 0).all()):
            return solve_one_sign(real, J.mH, torch.eye(m, dtype=J.dtype, device=J.device), B, what)
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
