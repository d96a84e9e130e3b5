"""What the solvers of linear systems return."""

from dataclasses import dataclass

from torch import Tensor

from ._outcome import Outcome


@dataclass(frozen=True, slots=True, eq=False)
class LinearSolution:
    """The last iterate of a linear solver, and how it came about.

    Args:
        x: The solution, or the best iterate where there is none.
        outcome: How the iteration ended.
        iterations: How many products with the operator it took (with the operator and its adjoint, in `lsqr`).
        residual_norm: ‖b - A x‖ as the recurrence knows it.
        direction: A direction v with vᴴ A v ≤ 0, where the outcome is `NEGATIVE_CURVATURE`, or with A v = 0, where it is
            `SINGULAR`; else None.

    Example:
        >>> import torch
        >>> from moduli.linalg import cg
        >>> solution = cg(torch.eye(2), torch.ones(2))
        >>> solution.x.round(decimals=3), solution.iterations, solution.residual_norm < 1e-6, solution.outcome.name
        (tensor([1., 1.]), 1, True, 'CONVERGED')
    """

    x: Tensor
    outcome: Outcome
    iterations: int
    residual_norm: float
    direction: Tensor | None = None
