"""The results and outcomes of solvers, and the errors of operators."""

from dataclasses import dataclass
from enum import Enum, unique

import torch
from torch import Tensor


@unique
class Outcome(Enum):
    """The outcome of a solver. The value of each member is a sentence, which `str` returns.

    Linear systems end in `CONVERGED`, `LEAST_SQUARES`, `SINGULAR`, `NEGATIVE_CURVATURE`, `STAGNATED`, `MAXITER` or
    `STOPPED`; trust-region problems in `INTERIOR`, `BOUNDARY`, `NEGATIVE_CURVATURE`, `HARD_CASE`, `MAXITER` or `STOPPED`.

    Example:
        >>> from moduli.linalg import Outcome
        >>> print(Outcome.CONVERGED)
        The residual is within the tolerance.
    """

    CONVERGED = "The residual is within the tolerance."
    LEAST_SQUARES = "The system has no solution; the residual is as small as it can be."
    SINGULAR = "The operator maps a search direction to zero; the system has no unique solution."
    NEGATIVE_CURVATURE = "The operator is not positive definite; a direction of negative or zero curvature was found."
    STAGNATED = "Rounding errors keep the residual above the tolerance."
    MAXITER = "The limit on iterations was reached."
    STOPPED = "The callback asked to stop."
    INTERIOR = "The minimiser of the model lies inside the trust region."
    BOUNDARY = "The step was cut at the boundary of the trust region."
    HARD_CASE = "The step reaches the boundary along an eigenvector, because the gradient has no part in it."

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class LinearSolution:
    """The last iterate of a linear solver, with its outcome.

    Args:
        x: The solution, or the best iterate where there is none.
        outcome: The outcome of the iteration.
        iterations: The number of products with the operator (with the operator and its adjoint, in `lsqr`).
        residual_norm: ‖b - A x‖ according to the recurrence.
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


@dataclass(frozen=True, slots=True, eq=False)
class TrustRegionStep:
    """A step p for min gᴴ p + ½ pᴴ H p subject to ‖p‖ ≤ radius, with its outcome.

    Args:
        step: p.
        outcome: `INTERIOR`, `BOUNDARY`, `NEGATIVE_CURVATURE`, `HARD_CASE`, `MAXITER` or `STOPPED`.
        predicted_decrease: -(gᴴ p + ½ pᴴ H p), never negative beyond rounding.
        iterations: The number of products with H (`steihaug`), or of steps on the multiplier (`trust_exact`).
        residual_norm: ‖H p + g‖ (`steihaug`), or ‖(H + λ I) p + g‖ (`trust_exact`).
        multiplier: λ ≥ 0 with (H + λ I) p = -g, where it is known; else None.

    Example:
        >>> import torch
        >>> from moduli.linalg import steihaug
        >>> found = steihaug(torch.eye(2), torch.tensor([3.0, 4.0]), radius=1.0)
        >>> found.step, found.outcome.name, round(found.predicted_decrease, 4)
        (tensor([-0.6000, -0.8000]), 'BOUNDARY', 4.5)
    """

    step: Tensor
    outcome: Outcome
    predicted_decrease: float
    iterations: int
    residual_norm: float
    multiplier: float | None = None


class MissingAbilityError(TypeError):
    """An operator does not have an ability, such as solving, that its kind cannot provide.

    The message names the class, the ability, and what to use instead.

    Example:
        >>> import torch
        >>> from moduli.linalg import FunctionOperator
        >>> A = FunctionOperator(lambda x: 2 * x, 3, symmetric=True)
        >>> A.solve(torch.ones(3))
        Traceback (most recent call last):
        ...
        moduli.linalg._results.MissingAbilityError: FunctionOperator of shape 3 x 3 cannot solve: ...
    """


class SingularError(torch.linalg.LinAlgError):  # type: ignore[misc, name-defined]
    """A system has no unique solution, or an operator declared positive (semi)definite turned out not to be.

    It is a `torch.linalg.LinAlgError`, which is what torch raises for its own matrices.

    Example:
        >>> import torch
        >>> from moduli.linalg import Diagonal
        >>> Diagonal(torch.tensor([1.0, 0.0])).solve(torch.ones(2))
        Traceback (most recent call last):
        ...
        moduli.linalg._results.SingularError: Diagonal of shape 2 x 2 is singular: ...
    """
