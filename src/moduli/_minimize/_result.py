"""What a minimisation returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ._derivatives import FoundProblem


def ask_to_stop(callback: Callable[[Result], Any], result: Result) -> bool:
    """Whether a callback ends the run: by a true answer, or by StopIteration as SciPy's do."""
    try:
        return bool(callback(result))
    except StopIteration:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The best point that was seen, and how it came about.

    Among values that are equal to rounding the flattest point is the best. With residuals r the value is half of |r|^2.

    Args:
        x: The best point, in the form of x0.
        value: The loss there (one per start, for batched starts).
        reason: Why it ended, as a sentence.
        success: Whether it ended at what looks like a minimum (for batched starts: all of them).
        steps: How many steps were made.
        evaluations: How often the function was called.
        gradient_norm: The largest component of the gradient at `x`, as far as bounds let it be followed; None for methods
            without gradients.
        seconds: How long it took.
        history: (evaluations, best value) after each step.
        method: The method that was used.
        starts: For batched starts the result of each; otherwise empty.
        multipliers: For each constraint its Lagrange multipliers, in the order they were given.
        kkt_residual: The largest violation of the conditions of Karush, Kuhn and Tucker: of the gradient of the Lagrangian,
            of a constraint, or of complementarity. None without constraints.

    Example:
        >>> import torch, moduli as mo
        >>> t = torch.linspace(0, 1, 5, dtype=torch.float64)
        >>> noise = torch.tensor([0.1, -0.1, 0.0, -0.1, 0.1], dtype=torch.float64)
        >>> fit = mo.minimize(lambda p: p["a"] + p["b"] * t - (1 + 2 * t + noise), {"a": 0.0, "b": 0.0})
        >>> fit.success, round(float(fit.x["b"]), 3), round(float(fit.stderr["b"]), 3)
        (True, 2.0, 0.146)
    """

    x: Any
    value: Any
    reason: str
    success: bool
    steps: int
    evaluations: int
    gradient_norm: Any
    seconds: float
    history: tuple[tuple[int, Any], ...]
    method: str
    starts: tuple[Result, ...] = ()
    multipliers: tuple[Any, ...] = ()
    kkt_residual: float | None = None
    problem: FoundProblem | None = field(default=None, repr=False)

    def jacobian(self) -> Any:
        """The derivatives of the function at `x`: of the residuals, an axis before those of x0's; else the gradient.

        In the form of x0, labelled where x0 is (the axis of residuals is called "residual", or as they call it).
        """
        return self._require_problem().jacobian(self.x)

    def hessian(self) -> Any:
        """The second derivatives of the value at `x`: for each tensor of x0, in its form, a block for each tensor of x0.

        For one tensor of shape S it has shape S + S. Where x0 is labelled, the second axes have a prime in their name.
        """
        return self._require_problem().hessian(self.x)

    def covariance(self) -> Any:
        r"""The covariance of the parameters, in the form of `hessian`.

        For residuals $s^2 (J^TJ)^{-1}$ with $s^2 = |r|^2 / (m - n)$, as SciPy's `curve_fit` has it. For a loss the inverse of
        its Hessian, which is the covariance if the loss is a negative log-likelihood. What is fixed, and what constraints
        determine, does not vary; what the function does not determine has an infinite variance.
        """
        return self._require_problem().covariance(self.x)

    @property
    def stderr(self) -> Any:
        """The standard error of each parameter: roots of the diagonal of `covariance`, in the form of x0."""
        return self._require_problem().stderr(self.x)

    def _require_problem(self) -> FoundProblem:
        if self.starts:
            raise ValueError("this result is of many starts; ask one of them: result.starts[i].stderr")
        if self.problem is None:
            raise ValueError("this result was loaded without its function, so it can not be differentiated any more")
        return self.problem

    def __getstate__(self) -> list[Any]:
        # Functions are seldom picklable, and a result is worth keeping without.
        return [None if entry.name == "problem" else getattr(self, entry.name) for entry in fields(self)]

    def __setstate__(self, state: list[Any]) -> None:
        for entry, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, entry.name, value)

    def __repr__(self) -> str:
        shown = f"{self.value:.6g}" if isinstance(self.value, float) else repr(self.value)
        return (
            f"Result(value={shown}, success={self.success}, steps={self.steps}, evaluations={self.evaluations}, "
            f"method={self.method!r}, reason={self.reason!r})"
        )
