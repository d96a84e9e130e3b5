"""The outer Gram operator: a factor times its own adjoint, from the outside."""

from typing import final

from torch import Tensor

from ._gram import Gram
from ._operator import LinearOperator


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
