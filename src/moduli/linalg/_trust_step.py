"""What the solvers of the trust-region problem return."""

from dataclasses import dataclass

from torch import Tensor

from ._outcome import Outcome


@dataclass(frozen=True, slots=True, eq=False)
class TrustRegionStep:
    """A step p for min gᴴ p + ½ pᴴ H p subject to ‖p‖ ≤ radius, and how it came about.

    Args:
        step: p.
        outcome: `INTERIOR`, `BOUNDARY`, `NEGATIVE_CURVATURE`, `HARD_CASE`, `MAXITER` or `STOPPED`.
        predicted_decrease: -(gᴴ p + ½ pᴴ H p), never negative beyond rounding.
        iterations: How many products with H it took (`steihaug`), or steps on the multiplier (`trust_exact`).
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
