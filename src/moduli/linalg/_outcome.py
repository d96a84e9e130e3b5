"""How an iteration ended, as a sentence."""

from enum import Enum, unique


@unique
class Outcome(Enum):
    """How a solver ended. The value of each member is the sentence, which `str` gives.

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
