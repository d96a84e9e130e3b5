"""Dense systems, with torch's error codes turned into sentences."""

import torch
from torch import Tensor

from ._checks import broadcast
from ._errors import SingularError


def expand(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same batch axes, so that torch cannot mistake a matrix of right-hand sides for a batch of vectors."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    lead = broadcast(A.shape[:-2], B.shape[:-2])
    return A.expand(*lead, *A.shape[-2:]), B.expand(*lead, *B.shape[-2:])


def lu_solve(A: Tensor, B: Tensor, what: object) -> Tensor:
    """A⁻¹ B by LU with partial pivoting."""
    X: Tensor
    X, info = torch.linalg.solve_ex(*expand(A, B))
    if bool((info != 0).any()):
        raise SingularError(f"{what} is singular: its LU factorisation has a zero pivot; solve_plus_diag adds a shift")
    return X


def positive_solve(A: Tensor, B: Tensor, what: object) -> Tensor:
    """A⁻¹ B by Cholesky, for a positive definite A."""
    A, B = expand(A, B)
    L, info = torch.linalg.cholesky_ex(A)
    if bool((info != 0).any()):
        raise SingularError(
            f"{what} is declared positive semidefinite, but its Cholesky factorisation fails: it is singular, or the "
            "declaration is wrong; solve_plus_diag adds a shift"
        )
    return torch.cholesky_solve(B, L)


def project_out(Q: Tensor, C: Tensor, inside: Tensor) -> Tensor:
    """C - Q Qᴴ C, for orthonormal columns Q and inside = Qᴴ C.

    Where C lies almost in the span, one subtraction leaves as much rounding within the span as beside it, and a small
    shift would blow that up; the second one removes it.
    """
    rest = C - Q @ inside
    return rest - Q @ (Q.mH @ rest)


def refuse_zero(values: Tensor, what: object, name: str) -> None:
    """Refuse to divide by a zero."""
    zero = values == 0
    if bool(zero.any()):
        first = tuple(int(i) for i in zero.nonzero()[0])
        raise SingularError(
            f"{what} is singular: {int(zero.sum())} of {values.numel()} {name} are zero, the first at {first}; "
            "solve_plus_diag adds a shift"
        )
