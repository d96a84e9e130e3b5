"""Recipes based on the angles between models: interpolation along great circles, means on the sphere, and Model Stock.

The Karcher mean, with x_t = ‖x_t‖ u_t, tensor by tensor: u is moved by the mean of the logarithms of the u_t at u, until that mean
vanishes,

    u ← exp_u(Σ_t w_t log_u(u_t)),    log_u(v) = θ / sin θ · (v − cos θ u),  cos θ = ⟨u, v⟩,

and the result is u times the weighted mean of the norms. For two models of equal norm it is `slerp`.

Model Stock, with δ_i = θ_i − θ_base for N models, tensor by tensor (section 4 of the paper):

    (1) cos ω = the mean of ⟨δ_i, δ_j⟩ / (‖δ_i‖ ‖δ_j‖) over i ≠ j;
    (2) t = N cos ω / (1 + (N − 1) cos ω);
    (3) θ = t · mean of θ_i + (1 − t) · θ_base.

References:
    Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985 (the formula of section 3.3, for any dimension).
    Karcher, "Riemannian center of mass and mollifier smoothing", Communications on Pure and Applied Mathematics 30 (1977).
    Jang, Yun and Han, "Model Stock: all we need is just a few fine-tuned models", ECCV 2024, arXiv:2403.19522.
"""

from collections.abc import Sequence
from functools import partial
from math import acos, atan2, cos, sin, sqrt
from typing import Literal, cast

import torch
from torch import Tensor

from ._averages import add_base, share_out, weighted_sum
from ._call import recipe
from ._coefficients import Coefficient, Coefficients, per_model
from ._driver import Buffers, Integers, Kernel, ModelT, Recipe, Row
from ._models import MergeError, check_choice

# Below this sine the arc and the straight line are equal in the precision of the accumulation.
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
    """Interpolate between two models along an arc, which preserves norms that a straight line would shrink.

    With Ω the angle between `a` and `b`,

        θ = sin((1 − t) Ω) / sin Ω · a + sin(t Ω) / sin Ω · b.

    If both have norm r, so has every θ. If there is no arc (parallel, opposite, or a norm of 0; so always for tensors of
    one element), the result is that of `lerp`.

    Args:
        a: A module or state dict. It decides form, structure and dtypes of the result.
        b: Another of the same structure.
        t: The position between `a` (0) and `b` (1): a number, or numbers by glob pattern of parameter names.
        angle: "tensor" for one angle per tensor, "model" for the angle Ω between the whole models: all merged tensors that
            differ, as one vector. The latter reads the models twice.
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
    place = Coefficients(t, "t")
    check_choice("angle", angle, "tensor", "model")

    def multiply(row: Row) -> tuple[float, float, float]:
        return _multiply(row[0], row[1])

    def follow(products: tuple[float, float, float], name: str, row: Row) -> Tensor:
        return weighted_sum(row, _find_factors(*products, place(name)))

    def survey(rows: Sequence[tuple[str, Row]]) -> Kernel:
        products = [multiply(row) for _, row in rows]
        aa, ab, bb = (sum(each[place] for each in products) for place in range(3))
        return partial(follow, (aa, ab, bb))

    def kernel(name: str, row: Row) -> Tensor:
        return follow(multiply(row), name, row)

    return cast(ModelT, Recipe(kernel, (place,), survey=survey if angle == "model" else None))


def _multiply(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Return ⟨x, x⟩, ⟨x, y⟩ and ⟨y, y⟩; for complex tensors the real parts, as for real pairs."""
    aa, ab, bb = (torch.vdot(p.reshape(-1), q.reshape(-1)).real.item() for p, q in ((x, x), (x, y), (y, y)))
    return aa, ab, bb


def _find_factors(aa: float, ab: float, bb: float, t: float) -> tuple[float, float]:
    """Return the factors of two vectors for the point at t on the arc between them; on the line if there is no arc.

    Args:
        aa: ⟨a, a⟩.
        ab: ⟨a, b⟩.
        bb: ⟨b, b⟩.
        t: The position on the arc.
    """
    omega = acos(min(max(ab / sqrt(aa * bb), -1.0), 1.0)) if aa * bb > 0 else 0.0
    sine = sin(omega)
    return (1.0 - t, t) if sine < _FLAT else (sin((1.0 - t) * omega) / sine, sin(t * omega) / sine)


@recipe
def nuslerp(
    models: Sequence[ModelT],
    weights: Sequence[Coefficient] | None = None,
    *,
    tasks: bool = False,
    axis: int | None = None,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Interpolate between two models along arcs: of whole tensors, of their rows or columns, or of task vectors.

    With t = w_2 / (w_1 + w_2) it is `slerp` from the first model to the second, or, with `tasks`, the base plus the `slerp` of
    the task vectors. With an axis, every vector along it has its own angle.

    Args:
        models: Two modules or state dicts; with `tasks`, the base before them. The first decides form, structure and dtypes.
        weights: One coefficient for each of the two. Equal by default.
        tasks: Whether the first of three models is a base, from which task vectors are computed.
        axis: The axis of the vectors in tensors of two or more axes: -1 for rows, 0 for columns; None for whole tensors.
        buffers: Whether floating buffers are those of the first model or merged too.
        integers: Whether tensors of integers must be equal; they are those of the first in any case.

    Raises:
        MergeError: If there are more or fewer models, weights add up to 0, structures differ, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, a, b = ({"w": torch.tensor(w)} for w in ([1.0, 1.0], [3.0, 1.0], [1.0, 3.0]))
        >>> merge.nuslerp([base, a, b], [1, 1], tasks=True)
        {'w': tensor([2.4142, 2.4142])}

    Reference:
        The method of this name in mergekit, from its documentation.
    """
    if len(models) != 2 + tasks:
        raise MergeError(f"models holds {len(models)}; this needs two models{' after the base' * tasks}")
    each_weight = per_model(weights, 2, "weights")

    def kernel(name: str, row: Row) -> Tensor:
        t = share_out([weight(name) for weight in each_weight], name)[1]
        if axis is None or row.like.ndim < 2:
            x, y = (row[1] - row[0], row[2] - row[0]) if tasks else (row[0], row[1])
            factors = _find_factors(*_multiply(x, y), t)
            return weighted_sum(row, add_base(factors) if tasks else factors)
        x, y = (row[1] - row[0], row[2] - row[0]) if tasks else (row[0], row[1])
        result = _follow_vectors(x, y, t, axis)
        return result.add_(row[0]) if tasks else result

    return cast(ModelT, Recipe(kernel, each_weight))


def _follow_vectors(x: Tensor, y: Tensor, t: float, axis: int) -> Tensor:
    """Interpolate between the vectors along an axis, each pair on its arc."""
    aa, ab, bb = (torch.sum((p.conj() * q).real, axis, keepdim=True) for p, q in ((x, x), (x, y), (y, y)))
    omega = torch.acos((ab / (aa * bb).sqrt()).nan_to_num(1.0).clamp(-1.0, 1.0))
    sine = torch.sin(omega)
    flat = sine < _FLAT
    left = torch.where(flat, 1.0 - t, torch.sin((1.0 - t) * omega) / sine)
    return (left * x).add_(torch.where(flat, t, torch.sin(t * omega) / sine) * y)


@recipe
def multislerp(
    models: Sequence[ModelT],
    weights: Sequence[Coefficient] | None = None,
    *,
    tasks: bool = False,
    normalize: bool = True,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Average the directions and the norms of models separately, tensor by tensor: an approximation of `karcher` in one step.

    With x_t = ‖x_t‖ u_t the result is Σ_t w_t ‖x_t‖ times the direction of Σ_t w_t u_t. That is the weighted mean in the tangent
    space at this direction, in which the projections of the u_t cancel.

    Args:
        models: Modules or state dicts; with `tasks`, the base first. The first decides form, structure and dtypes.
        weights: One coefficient for each, not for the base. Equal by default.
        tasks: Whether the first model is a base, and task vectors are averaged and added to it.
        normalize: Whether to divide the weights by their sum.
        buffers: Whether floating buffers are those of the first model or merged too.
        integers: Whether tensors of integers must be equal; they are those of the first in any case.

    Raises:
        MergeError: If structures or weights do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
        >>> merge.multislerp([a, b])
        {'w': tensor([2.1213, 2.1213])}

    Reference:
        The method of this name in mergekit, from its documentation.
    """
    count = len(models) - tasks
    if count < 1:
        raise MergeError("models holds a base and no model; give at least one more")
    each_weight = per_model(weights, count, "weights")

    def kernel(name: str, row: Row) -> Tensor:
        shares = share_out([weight(name) for weight in each_weight], name, normalize)

        def take(place: int) -> Tensor:
            return row[place + 1] - row[0] if tasks else row[place]

        norms = [float(torch.linalg.vector_norm(take(place))) for place in range(count)]
        direction = torch.zeros_like(row[0])
        for place, norm in enumerate(norms):
            if norm > 0 and shares[place] != 0:
                direction.add_(take(place), alpha=shares[place] / norm)
        length = float(torch.linalg.vector_norm(direction))
        # Opposite directions cancel except for rounding, and have no mean.
        scale = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        direction.mul_(scale / length if length > _FLAT * sum(map(abs, shares)) else 0.0)
        return direction.add_(row[0]) if tasks else direction

    def keeps(name: str) -> bool:
        # Equal models give the same model unless they are scaled; task vectors of 0 give the base in any case.
        return normalize or tasks or abs(sum(weight(name) for weight in each_weight) - 1.0) < 1e-12

    return cast(ModelT, Recipe(kernel, each_weight, keeps))


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
    """Average models on the sphere: the Karcher mean of directions times the mean of norms, tensor by tensor.

    Args:
        models: Modules or state dicts. The first decides form, structure and dtypes.
        weights: One coefficient per model, not negative. Equal by default.
        steps: The largest number of iterations.
        tolerance: The iteration ends when the next step is shorter than this.
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
            return mean * 0  # opposite directions, and zero vectors, have no mean direction
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


@recipe
def stock(
    base: ModelT, models: Sequence[ModelT], *, buffers: Buffers = "first", integers: Integers = "equal"
) -> ModelT:
    """Interpolate between a base and the average of models fine-tuned from it, by the angle between them (Model Stock).

    For each tensor, θ = t · mean(θ_i) + (1 − t) · θ_base with t = N cos ω / (1 + (N − 1) cos ω), where ω is the angle between
    the task vectors θ_i − θ_base of N models (its cosine is the mean over all pairs). The smaller the angle, the closer is θ
    to their average. A negative mean cosine, for which the paper has no ratio, gives t = 0; a
    task vector of norm 0 has cosine 0 with every other.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: At least two fine-tuned models.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If there are fewer than two models, the structures differ, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base = {"w": torch.zeros(2)}
        >>> a, b = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
        >>> merge.stock(base, [a, b])
        {'w': tensor([1.5000, 1.5000])}

    Reference:
        Jang, Yun and Han, "Model Stock", ECCV 2024, arXiv:2403.19522.
    """
    count = len(models)
    if count < 2:
        raise MergeError(f"models holds {count}, and this needs at least two models")

    def kernel(name: str, row: Row) -> Tensor:
        # For unit vectors u_i, ‖Σ u_i‖² = Σ ‖u_i‖² + Σ_{i≠j} cos ω_ij: one sum instead of all pairs.
        total, directions = torch.zeros_like(row[0]), 0
        for index in range(count):
            delta = row[index + 1] - row[0]
            norm = float(torch.linalg.vector_norm(delta))
            if norm > 0:
                total.add_(delta, alpha=1.0 / norm)
                directions += 1
        pairs = float(torch.linalg.vector_norm(total)) ** 2 - directions
        cosine = min(max(pairs / (count * (count - 1)), 0.0), 1.0)  # (1)
        ratio = count * cosine / (1.0 + (count - 1) * cosine)  # (2)
        return weighted_sum(row, add_base([ratio / count] * count))  # (3)

    return cast(ModelT, Recipe(kernel))
