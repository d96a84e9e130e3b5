"""The Karcher mean: the point of the sphere that is nearest to several directions.

With x_t = ‖x_t‖ u_t, tensor by tensor: u is moved by the mean of the logarithms of the u_t at u, until that mean vanishes,

    u ← exp_u(Σ_t w_t log_u(u_t)),    log_u(v) = θ / sin θ · (v − cos θ u),  cos θ = ⟨u, v⟩,

and the result is u times the weighted mean of the norms. Of two models of one norm it is `slerp`.

Reference:
    Karcher, "Riemannian center of mass and mollifier smoothing", Communications on Pure and Applied Mathematics 30 (1977).
"""

from collections.abc import Sequence
from math import atan2, cos, sin
from typing import cast

import torch
from torch import Tensor

from ._coefficients import Coefficient, per_model
from ._errors import MergeError
from ._linear import share_out
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row


@recipe
def karcher(
    models: Sequence[ModelT],
    weights: Sequence[Coefficient] | None = None,
    *,
    steps: int = 20,
    tolerance: float = 1e-6,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """The mean of models on the sphere: of their directions and of their norms, tensor by tensor.

    Args:
        models: Modules or state dicts. The first decides form, structure and dtypes.
        weights: One coefficient per model, not negative. Equal by default.
        steps: How often the mean is improved at most.
        tolerance: It ends when the next step is shorter than this.
        buffers: Whether floating buffers are those of the first model or merged too.
        integers: Whether tensors of integers must be equal; they are those of the first in any case.

    Raises:
        MergeError: If structures or weights do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b, c = ({"w": torch.tensor(w)} for w in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]))
        >>> merge.karcher([a, b, c])["w"] * 3**0.5
        tensor([1.0000, 1.0000, 1.0000])

    Reference:
        Karcher, "Riemannian center of mass and mollifier smoothing", 1977.
    """
    each_weight = per_model(weights, len(models), "weights", low=0.0)
    if steps < 1:
        raise MergeError(f"steps is {steps}; it must be at least 1")

    def kernel(name: str, row: Row) -> Tensor:
        shares = share_out([weight(name) for weight in each_weight], name)
        norms = [float(torch.linalg.vector_norm(each)) for each in row]
        norm = sum(share * each for share, each in zip(shares, norms, strict=True))
        used = [place for place, each in enumerate(norms) if each > 0 and shares[place] > 0]
        mean = sum((row[place] / norms[place] * shares[place] for place in used), torch.zeros_like(row[0]))
        length = float(torch.linalg.vector_norm(mean))
        if length < 1e-12:
            return mean * 0  # opposite directions, or no direction at all, have no mean
        u = mean / length
        spread = sum(shares[place] for place in used)
        for _ in range(steps):
            step = torch.zeros_like(u)
            for place in used:
                v = row[place] / norms[place]
                cosine = float(torch.vdot(u.flatten(), v.flatten()).real.clamp(-1, 1))
                rest = v - cosine * u
                sine = float(torch.linalg.vector_norm(rest))
                if sine > 1e-9:
                    step.add_(rest, alpha=shares[place] / spread * atan2(sine, cosine) / sine)
            angle = float(torch.linalg.vector_norm(step))
            if angle < tolerance:
                break
            u = cos(angle) * u + (sin(angle) / angle) * step
            u = u / torch.linalg.vector_norm(u)
        return u * norm

    return cast(ModelT, Recipe(kernel, each_weight))
