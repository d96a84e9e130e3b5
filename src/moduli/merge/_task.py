"""Task vectors and their arithmetic.

Reference:
    Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089 (section 2).
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from ._coefficients import Coefficient, per_model
from ._linear import weighted_sum
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row


@recipe
def task_vector(model: ModelT, base: ModelT, *, buffers: Buffers = "first", integers: Integers = "equal") -> ModelT:
    """What fine-tuning changed: τ = θ − θ_base, as a model of its own.

    Adding it back gives the model: `linear([base, vector], [1, 1], normalize=False)`. To add several, or fractions of one,
    `task_arithmetic` needs no vectors in between and rounds less.

    Args:
        model: The fine-tuned module or state dict. It decides form, structure and dtypes of the result.
        base: What it was fine-tuned from.
        buffers: Whether floating buffers of the result are those of `model` or differences too.
        integers: Whether tensors of integers must be equal; they are those of `model` in any case.

    Raises:
        MergeError: If the structures differ, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.task_vector({"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 1.0])})
        {'w': tensor([0., 2.])}

    Reference:
        Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089.
    """
    return cast(ModelT, Recipe(lambda _, row: row[0] - row[1], keeps=lambda _: False, elementwise=True))


@recipe
def task_arithmetic(
    base: ModelT,
    models: Sequence[ModelT],
    scale: Coefficient | Sequence[Coefficient] = 1.0,
    *,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Add scaled task vectors to a base: learn several tasks at once, or, with negative scales, forget some.

    For each parameter, θ = θ_base + Σᵢ λᵢ τᵢ with τᵢ = θᵢ − θ_base. It is computed as (1 − Σᵢ λᵢ) θ_base + Σᵢ λᵢ θᵢ, so one
    model with scale 1 comes back exactly.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        scale: λ, for all models or a sequence with one for each: a number, or numbers by glob pattern.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or scales do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, a, b = ({"w": torch.tensor(w)} for w in ([1.0, 1.0], [2.0, 1.0], [1.0, 3.0]))
        >>> merge.task_arithmetic(base, [a, b])
        {'w': tensor([2., 3.])}
        >>> merge.task_arithmetic(base, [a, b], [1.0, -0.5])
        {'w': tensor([2., 0.])}

    Reference:
        Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089.
    """
    scales = per_model(scale, len(models), "scale")

    def kernel(name: str, row: Row) -> Tensor:
        return add_to_base(row, [scale(name) for scale in scales])

    return cast(ModelT, Recipe(kernel, scales, elementwise=True))


def add_to_base(row: Row, scales: Sequence[float | Tensor]) -> Tensor:
    """θ_base + Σᵢ λᵢ (θᵢ − θ_base) over a row that starts with the base."""
    return weighted_sum(row, [1.0 - sum(scales), *scales])
