"""The operator known only by what it does to a vector."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ._checks import broadcast
from ._operator import LinearOperator


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

    def _matvec(self, x: Tensor) -> Tensor:
        return self._call(self._forward, x, self.shape[-2], "matvec")

    def _matmat(self, X: Tensor) -> Tensor:
        return self._columns(self._matvec, X)

    def _rmatvec(self, y: Tensor) -> Tensor:
        if self._backward is None:
            return super()._rmatvec(y)
        return self._call(self._backward, y, self.shape[-1], "rmatvec")

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return super()._rmatmat(Y) if self._backward is None else self._columns(self._rmatvec, Y)

    def _columns(self, product: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
        if not self.batch_shape:
            return product(X.mT).mT
        # The function knows the batch axes next to the last one, so the columns become one more axis before them.
        lead = broadcast(self.batch_shape, X.shape[:-2])
        return product(X.expand(*lead, *X.shape[-2:]).movedim(-1, 0)).movedim(0, -1)

    def _call(self, function: Callable[[Tensor], Tensor], x: Tensor, length: int, name: str) -> Tensor:
        """The function applied to the last axis of x, with what it returns checked."""
        if x.ndim == 1 or self._vectorized:
            return self._check(function(x), length, name)
        if x.shape[:-1].numel() == 0:
            return x.new_zeros((*x.shape[:-1], length))
        flat = [self._check(function(row), length, name) for row in x.reshape(x.shape[:-1].numel(), x.shape[-1])]
        return torch.stack(flat).reshape(*x.shape[:-1], length)

    def _check(self, result: Tensor, length: int, name: str) -> Tensor:
        if result.ndim == 0 or result.shape[-1] != length or result.dtype != self.dtype:
            fact = f"{name} of {self} returned {result.dtype} of shape {tuple(result.shape)}"
            raise ValueError(f"{fact}; it should return {self.dtype} with {length} numbers along the last axis")
        return result
