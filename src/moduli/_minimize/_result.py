"""What a minimisation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Result"]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The best point that was seen, and how it came about.

    Args:
        x: The best point, in the form of x0.
        value: The loss there (one per start, for batched starts).
        reason: Why it ended, as a sentence.
        success: Whether it ended at what looks like a minimum.
        steps: How many steps were made.
        evaluations: How often the function was called.
        gradient_norm: The largest component of the gradient where it was last known; None for methods without gradients.
        seconds: How long it took.
        history: (evaluations, best value) after each step.
        method: The method that was used.

    Example:
        >>> import torch, moduli as mo
        >>> mo.minimize(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2, dtype=torch.float64)).success
        True
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

    def __repr__(self) -> str:
        shown = f"{self.value:.6g}" if isinstance(self.value, float) else repr(self.value)
        return (
            f"Result(value={shown}, success={self.success}, steps={self.steps}, evaluations={self.evaluations}, "
            f"method={self.method!r}, reason={self.reason!r})"
        )
