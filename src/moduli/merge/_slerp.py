"""Interpolation along great circles.

Reference:
    Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985 (the formula of section 3.3, for any dimension).
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from ._coefficients import Coefficient, Coefficients
from ._errors import MergeError
from ._linear import weighted_sum, widen
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
