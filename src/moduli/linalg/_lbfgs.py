"""The limited-memory BFGS matrix and its inverse, in compact form."""

from typing import final

import torch
from torch import Tensor

from . import _checks
from ._lowrank import LowRankPlusDiagonal
from ._matrices import expand, lu_solve
from ._operator import LinearOperator
from ._results import SingularError


@final
class LBFGSOperator(LinearOperator):
    """The BFGS approximation B of a Hessian after m pairs (s, y), started from B₀ = σ I.

    With the pairs in the rows of S and Y, and S Yᵀ = L + D + (strictly upper part), L strictly lower:

    * B = σ I - Wᵀ M⁻¹ W, with W = [σ S; Y] and M = [[σ S Sᵀ, L], [Lᵀ, -D]] (Theorem 2.3);
    * B⁻¹ = γ I + Sᵀ R⁻ᵀ (D + γ Y Yᵀ) R⁻¹ S - γ Yᵀ R⁻¹ S - γ Sᵀ R⁻ᵀ Y, γ = 1/σ, R the upper part of S Yᵀ with the diagonal
      (Theorem 2.2).

    A product and a system cost O(m n) once the Gram matrices are known, a shifted system O(m² n). The Gram matrices are
    computed in O(m² n), unless they are given.

    Attributes:
        initial: σ, the multiple of the identity that the pairs correct, one per member.

    Args:
        s: Steps in rows, oldest first, (*batch, m, n), real. A pair of two zero rows is an empty slot and has no effect.
        y: Gradient differences in rows, (*batch, m, n).
        scale: σ > 0: a number or one per member; by default yᵀy / sᵀy of the newest pair, or 1 without pairs.
        sy: S Yᵀ, if it is known.
        ss: S Sᵀ, if it is known.
        yy: Y Yᵀ, if it is known.

    Raises:
        TypeError: If the pairs are not real tensors of one dtype.
        ValueError: If shapes differ, a pair has sᵀy ≤ 0 (B would not be positive definite), or σ ≤ 0.
        SingularError: By products and shifted systems, if the condition number of the small matrix, scaled to a unit
            diagonal, is above 1 / (10 m eps) or 1 / (√n eps). Systems without a shift have no such matrix.

    Example:
        >>> import torch
        >>> from moduli.linalg import LBFGSOperator
        >>> B = LBFGSOperator(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 1.0]]))
        >>> torch.allclose(B @ torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]))
        True
        >>> torch.allclose(B.solve(torch.tensor([2.0, 1.0])), torch.tensor([1.0, 0.0]), atol=1e-6)
        True

    References:
        Byrd, Nocedal and Schnabel, Representations of quasi-Newton matrices and their use in limited memory methods,
        Mathematical Programming 63 (1994) 129-156.
    """

    def __init__(
        self,
        s: Tensor,
        y: Tensor,
        *,
        scale: float | Tensor | None = None,
        sy: Tensor | None = None,
        ss: Tensor | None = None,
        yy: Tensor | None = None,
    ) -> None:
        _check_pairs(s, y, {"sy": sy, "ss": ss, "yy": yy})
        *batch, _, n = s.shape
        self._s, self._y = s, y
        self._sy = s @ y.mT if sy is None else sy
        self._ss = s @ s.mT if ss is None else ss
        self._yy = y @ y.mT if yy is None else yy
        self._factored: tuple[Tensor, Tensor] | None = None
        curvature = self._sy.diagonal(dim1=-2, dim2=-1)
        # Zero rows are slots that hold no pair yet; a one on the diagonal keeps the small systems regular.
        self._empty = curvature == 0
        if bool(self._empty.any()):
            self._empty = self._empty & (s == 0).all(-1) & (y == 0).all(-1)
        if bool((~(curvature > 0) & ~self._empty).any()):
            at = tuple(int(i) for i in (~(curvature > 0) & ~self._empty).nonzero()[0])
            fact = f"pair {at if batch else at[0]} has sᵀy = {float(curvature[at]):.3g}"
            raise ValueError(f"{fact}, but BFGS needs sᵀy > 0; skip or damp it")
        self._d = torch.where(self._empty, torch.ones_like(curvature), curvature)
        self.initial = self._choose_initial(scale)
        if not bool((self.initial > 0).all()) or not bool(torch.isfinite(self.initial).all()):
            raise ValueError(f"scale is the initial curvature, a positive number, not {scale}")
        super().__init__((*batch, n, n), s.dtype, s.device, positive_semidefinite=True)

    def _choose_initial(self, scale: float | Tensor | None) -> Tensor:
        batch, m = self._s.shape[:-2], self._s.shape[-2]
        if scale is not None:
            return torch.as_tensor(scale, dtype=self._s.dtype, device=self._s.device).expand(batch)
        if m == 0:
            return torch.ones(batch, dtype=self._s.dtype, device=self._s.device)
        order = torch.arange(m, device=self._s.device).expand(self._d.shape)
        newest = torch.where(self._empty, -torch.ones_like(order), order).amax(-1, keepdim=True)
        ratios = self._yy.diagonal(dim1=-2, dim2=-1) / self._d
        return torch.where(newest < 0, 1.0, ratios.gather(-1, newest.clamp(min=0))).squeeze(-1)

    # -- the small matrices -------------------------------------------------------------------------------------------

    def _cholesky(self) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of E A E, and E: A = σ S Sᵀ + L D⁻¹ Lᵀ, and the diagonal E gives it a unit diagonal.

        A is positive definite when every sᵀy is positive (Theorem 2.4). The reciprocal of the smallest squared pivot of E A E
        is a lower bound of its condition number. The bound is compared with the rounding of the inner products, so that
        whether pairs are refused does not depend on the order in which a processor adds.
        """
        if self._factored is None:
            L = self._sy.tril(-1)
            inner = self.initial[..., None, None] * self._ss + (L / self._d.unsqueeze(-2)) @ L.mT
            inner = inner + self._empty.to(inner.dtype).diag_embed()
            size = inner.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-1)
            factor, info = torch.linalg.cholesky_ex(size * inner * size.mT)
            pivots = factor.diagonal(dim1=-2, dim2=-1).square()
            # Rounding of m steps of elimination, and of sums of n products.
            limit = max(10 * self._s.shape[-2], self._s.shape[-1] ** 0.5) * torch.finfo(self.dtype).eps
            if bool((info != 0).any()) or not bool((pivots > limit).all()):
                raise SingularError(f"steps are linearly dependent to working precision; keep fewer pairs of {self}")
            self._factored = factor, size
        return self._factored

    def _compact(self) -> LowRankPlusDiagonal:
        """Theorem 2.3, with a one or a minus one on the diagonal of M for empty slots."""
        self._cholesky()  # M is singular where this Schur complement of -D is
        sigma, L = self.initial[..., None, None], self._sy.tril(-1)
        top = torch.cat([sigma * self._ss + self._empty.to(self.dtype).diag_embed(), L], -1)
        M = torch.cat([top, torch.cat([L.mT, -self._d.diag_embed()], -1)], -2)
        # Pairs differ in length by orders of magnitude; scaling them alike costs nothing and keeps the pivots honest.
        size = M.diagonal(dim1=-2, dim2=-1).abs().clamp(min=torch.finfo(self.dtype).tiny).rsqrt().unsqueeze(-1)
        core = size * lu_solve(size * M * size.mT, size.squeeze(-1).diag_embed(), self)
        W = torch.cat([sigma * self._s, self._y], -2)
        return LowRankPlusDiagonal(self.initial.unsqueeze(-1).expand(self.shape[:-1]), W.mT, -core)

    # -- products and systems -----------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor) -> Tensor:
        sigma, d = self.initial[..., None, None], self._d.unsqueeze(-1)
        L = self._sy.tril(-1)
        u, v = sigma * (self._s @ X), self._y @ X
        # M [p; q] = [u; v] by block elimination: the second row gives q = D⁻¹ (Lᵀ p - v).
        factor, size = self._cholesky()
        factor, right = expand(factor, size * (u + L @ (v / d)))
        p = size * torch.cholesky_solve(right, factor)
        q = (L.mT @ p - v) / d
        return sigma * X - sigma * (self._s.mT @ p) - self._y.mT @ q  # Theorem 2.3

    def _solve(self, B: Tensor) -> Tensor:
        gamma, d = 1 / self.initial[..., None, None], self._d.unsqueeze(-1)
        R = self._sy.triu(1) + self._d.diag_embed()
        p: Tensor = torch.linalg.solve_triangular(R, self._s @ B, upper=True)
        right = d * p + gamma * (self._yy @ p - self._y @ B)
        w: Tensor = torch.linalg.solve_triangular(R.mT, right, upper=False)
        return gamma * B + self._s.mT @ w - gamma * (self._y.mT @ p)  # Theorem 2.2

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        return self._compact()._solve_plus_diag(B, d) if bool((d != 0).any()) else self._solve(B)

    def _diagonal(self) -> Tensor:
        return self._compact()._diagonal()


def _check_pairs(s: Tensor, y: Tensor, grams: dict[str, Tensor | None]) -> None:
    """Raise TypeError or ValueError unless pairs, and the matrices of their inner products, have equal dtypes and fit.

    Args:
        s: The steps.
        y: The changes of the gradient.
        grams: The matrices of inner products by name; None where it has to be computed.
    """
    _checks.check_floating(s, "s", 2)
    _checks.check_floating(y, "y", 2)
    if s.dtype.is_complex or s.dtype != y.dtype:
        raise TypeError(f"s and y are real and of one dtype, not {s.dtype} and {y.dtype}")
    if s.shape != y.shape:
        raise ValueError(f"s has shape {tuple(s.shape)}, but y {tuple(y.shape)}; there is one y for each s")
    *batch, m, _ = s.shape
    for name, gram in grams.items():
        if gram is not None and tuple(gram.shape) != (*batch, m, m):
            raise ValueError(f"{name} has shape {tuple(gram.shape)}; for {m} pairs it is {(*batch, m, m)}")
