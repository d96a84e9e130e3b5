"""Symmetric orthonormalisation, differentiable also where singular values coincide."""

from __future__ import annotations

import torch

from ._matrix import as_floating, factors, round_to
from ._tensor import Tensor, _in_transform, as_tensor, method, wrap


@method
def lowdin(t: Tensor, tolerance: float | None = None) -> Tensor:
    """Symmetric orthonormalisation: the matrix with orthonormal columns that is nearest to ``t``.

    With the reduced decomposition ``t = U S Vh`` it is ``U Vh = t (th t)^(-1/2)`` (P.-O. Löwdin, J. Chem. Phys. 18,
    365, 1950); a matrix with more columns than rows gets orthonormal rows. Derivatives up to the third order are exact,
    also where singular values coincide.

    Args:
        t: Matrices on the last two axes; rows and columns may be any spaces.
        tolerance: A matrix is rank deficient if its smallest singular value is at most this times its largest. By
            default the larger size times the precision of the dtype.

    Returns:
        The orthonormal matrices, with the axes of ``t``.

    Raises:
        ValueError: If the tensor has fewer than two axes.
        RuntimeError: If a matrix is rank deficient: its direction is then undetermined. Where values can't be looked at
            (inside `torch.compile` or a function transform) its result is NaN instead.

    Example:
        >>> import moduli as mo
        >>> mo.lowdin(mo.tensor([[2.0, 0.0], [0.0, 5.0]], row=["u", "v"], column=["a", "b"])).data.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    t = as_tensor(t)
    factors(t._axes, "lowdin", "singular")
    data = as_floating(t._data)
    U, S, Vh = torch.linalg.svd(data.detach(), full_matrices=False)
    found = U @ Vh
    if S.shape[-1]:
        if tolerance is None:
            tolerance = max(data.shape[-2:]) * torch.finfo(S.dtype).eps
        deficient = S[..., -1] <= tolerance * S[..., 0]
        if torch.compiler.is_compiling() or _in_transform() or data.is_meta:
            found = torch.where(deficient[..., None, None], torch.nan, found)
        elif bool(deficient.any()):
            ratio = float((S[..., -1] / S[..., 0]).nan_to_num().min())
            raise RuntimeError(
                f"lowdin can't orthonormalise a rank deficient matrix: the smallest singular value is {ratio:.3g} of "
                f"the largest, the tolerance {tolerance:.3g}"
            )
    if data.requires_grad or _in_transform():
        tall = data.shape[-2] >= data.shape[-1]
        moved = _polar(data, S, Vh) if tall else _polar(data.mH, S, U.mH).mH
        found = found + (moved - moved.detach())
    return wrap(round_to(found, t._data.dtype), t._axes)


def _polar(a: torch.Tensor, S: torch.Tensor, Vh: torch.Tensor) -> torch.Tensor:
    """The product a P^-1 with P = (ah a)^(1/2), differentiable without the gaps between singular values.

    The derivative of the svd divides by differences of singular values, which vanish for the very matrices that are
    orthonormal already. Instead P solves P P = G = ah a by Newton's method from the known root P0 = V S Vh, whose
    linear equation P0 X + X P0 = R divides by sums: k steps have the derivatives up to order k right.
    """
    G = a.mH @ a
    P = Vh.mH @ (S.unsqueeze(-1) * Vh)
    sums = S.unsqueeze(-1) + S.unsqueeze(-2)
    for _ in range(3):
        P = P + Vh.mH @ ((Vh @ (G - P @ P) @ Vh.mH) / sums) @ Vh
    found: torch.Tensor = torch.linalg.solve(P, a, left=False)
    return found
