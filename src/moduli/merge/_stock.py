"""Model Stock: how far to trust an average, told by the angles between the models.

The equations of section 4 of the paper, with δ_i = θ_i − θ_base for N models, tensor by tensor:

    (1) cos ω = the mean of ⟨δ_i, δ_j⟩ / (‖δ_i‖ ‖δ_j‖) over i ≠ j;
    (2) t = N cos ω / (1 + (N − 1) cos ω);
    (3) θ = t · mean of θ_i + (1 − t) · θ_base.

Reference:
    Jang, Yun and Han, "Model Stock: all we need is just a few fine-tuned models", ECCV 2024, arXiv:2403.19522.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ._errors import MergeError
from ._linear import add_to_base, widen
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row


@recipe
def stock(
    base: ModelT, models: Sequence[ModelT], *, buffers: Buffers = "first", integers: Integers = "equal"
) -> ModelT:
    """Interpolate between a base and the average of models fine-tuned from it, by the angle between them (Model Stock).

    For each tensor, θ = t · mean(θ_i) + (1 − t) · θ_base with t = N cos ω / (1 + (N − 1) cos ω), where ω is the angle between
    the task vectors θ_i − θ_base of N models (its cosine is the mean over all pairs). The more the models agree, the closer
    to their average. Task vectors that point away from each other on average, for which the paper has no ratio, give t = 0; a
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
    return cast(ModelT, Recipe(lambda _, row: add_to_base(row, [find_ratio(row) / count] * count)))  # (3)


def find_ratio(row: Row) -> Tensor:
    """T of (2) for the base and the models of a row."""
    count = len(row) - 1
    base = row[0]
    # Of unit vectors u_i, ‖Σ u_i‖² = Σ ‖u_i‖² + Σ_{i≠j} cos ω_ij: one sum in place of all pairs.
    total = torch.zeros_like(base)
    directions = torch.zeros((), dtype=torch.int64, device=base.device)
    for index in range(count):
        delta = row[index + 1] - base
        norm = widen(torch.linalg.vector_norm(delta))
        total.add_(delta * torch.where(norm > 0, 1.0 / norm, 0.0))
        directions.add_(norm > 0)
    pairs = widen(torch.linalg.vector_norm(total)).square() - directions
    cosine = (pairs / (count * (count - 1))).clamp(0.0, 1.0)  # (1)
    return count * cosine / (1.0 + (count - 1) * cosine)  # (2)
