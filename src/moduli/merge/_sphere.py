"""Interpolation along great circles, and means on the sphere.

The Karcher mean, with x_t = ‖x_t‖ u_t, tensor by tensor: u is moved by the mean of the logarithms of the u_t at u, until that mean
vanishes,

    u ← exp_u(Σ_t w_t log_u(u_t)),    log_u(v) = θ / sin θ · (v − cos θ u),  cos θ = ⟨u, v⟩,

and the result is u times the weighted mean of the norms. Of two models of one norm it is `slerp`.

References:
    Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985 (the formula of section 3.3, for any dimension).
    Karcher, "Riemannian center of mass and mollifier smoothing", Communications on Pure and Applied Mathematics 30 (1977).
"""

from collections.abc import Sequence
from math import atan2, cos, sin
from typing import Literal, cast

import torch
from torch import Tensor

from ._coefficients import Coefficient, Coefficients, per_model
from ._errors import MergeError
from ._linear import share_out, weighted_sum, widen
from ._paths import recipe
from ._recipe import Buffers, Integers, Kernel, ModelT, Recipe, Row

# Below this sine the arc cannot be told from a straight line in the precision of the accumulation.
_FLAT = 1e-6


@recipe
def slerp(
    a: ModelT,
    b: ModelT,
    t: Coefficient,
    *,
    angle: Literal["tensor", "model"] = "tensor",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Interpolate between two models along an arc, which keeps norms where a straight line would shrink them.

    With Ω the angle between `a` and `b`,

        θ = sin((1 − t) Ω) / sin Ω · a + sin(t Ω) / sin Ω · b.

    If both have norm r, so has every θ. Where there is no arc (parallel, opposite, or a norm of 0; so always for tensors of
    one element), it is `lerp`.

    Args:
        a: A module or state dict. It decides form, structure and dtypes of the result.
        b: Another of the same structure.
        t: How far to go from `a` to `b`: a number, or numbers by glob pattern of parameter names.
        angle: Whether each tensor has its own angle, or Ω is that of the whole models, all tensors that are merged and
            differ seen as one vector. The latter reads the models twice.
        buffers: Whether floating buffers are those of `a` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `a` in any case.

    Raises:
        MergeError: If the structures differ, `t` lacks a name, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}
        >>> merge.slerp(a, b, 0.5)
        {'w': tensor([1.4142, 1.4142])}

    Reference:
        Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985.
    """
    if angle not in ("tensor", "model"):
        raise MergeError(f"angle is {angle!r}; it must be 'tensor' or 'model'")
    place = Coefficients(t, "t")

    def kernel(name: str, row: Row) -> Tensor:
        return weighted_sum(row, _weights(place(name), _products(row[0], row[1])))

    def survey(rows: Sequence[tuple[str, Row]]) -> Kernel:
        total = torch.zeros(3, dtype=torch.float64)
        for _, row in rows:
            total += _products(row[0], row[1]).cpu()
        return lambda name, row: weighted_sum(row, [weight.item() for weight in _weights(place(name), total)])

    return cast(ModelT, Recipe(kernel, (place,), survey=survey if angle == "model" else None))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, a⟩, ⟨a, b⟩ and ⟨b, b⟩; of complex tensors the real parts, as if they were real pairs."""
    pairs = ((a, a), (a, b), (b, b))
    return widen(torch.stack([torch.vdot(x.reshape(-1), y.reshape(-1)).real for x, y in pairs]))


def _weights(t: float, products: Tensor) -> tuple[Tensor, Tensor]:
    aa, ab, bb = products.unbind()
    omega = torch.acos((ab / (aa * bb).sqrt()).clamp(-1.0, 1.0))
    sine = torch.sin(omega)
    arc = sine >= _FLAT  # not where a norm is 0, which makes it NaN
    weights = ((1.0 - t, torch.sin((1.0 - t) * omega) / sine), (t, torch.sin(t * omega) / sine))
    first, second = (torch.where(arc, there, straight) for straight, there in weights)
    return first, second


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
