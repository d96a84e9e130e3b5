"""The Gauss-Newton operator: a factor times its own adjoint, from the inside."""

from typing import final

from torch import Tensor

from ._gram import Gram
from ._operator import LinearOperator


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
