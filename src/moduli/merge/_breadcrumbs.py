"""Model breadcrumbs: task vectors without their smallest entries and without their largest.

With δ_t = θ_t − θ_base, tensor by tensor: the share γ of entries of greatest magnitude is masked as outliers, and of the others
those of least magnitude, so that the share `density` of all entries remains. Then θ = θ_base + λ Σ_t w_t m_t ⊙ δ_t (eq. 3), or
signs are elected among the sparse vectors as in TIES.

Reference:
    Davari and Belilovsky, "Model breadcrumbs: scaling multi-task model merging with sparse masks", ECCV 2024, arXiv:2312.06795.
"""

from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor

from ._coefficients import Coefficient, per_model
from ._errors import MergeError
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row
from ._ties import Fusion
from ._trim import mask_greatest


@recipe
def breadcrumbs(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient | Sequence[Coefficient] = 0.9,
    *,
    gamma: Coefficient | Sequence[Coefficient] = 0.01,
    scale: Coefficient = 1.0,
    weights: Sequence[Coefficient] | None = None,
    then: Literal["linear", "ties"] = "linear",
    normalize: bool | None = None,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge task vectors without their smallest and their largest entries.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The share of entries that is kept, from 0 to 1, for all models or a sequence with one for each.
        gamma: The share of the largest entries that is dropped first, likewise.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        then: Whether the sparse vectors are summed, or signs are elected first as in `ties`.
        normalize: Whether to divide by the weights, of those that agree; by default, where signs are elected.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, model = {"w": torch.zeros(4)}, {"w": torch.tensor([9.0, 2.0, -1.0, 0.1])}
        >>> merge.breadcrumbs(base, [model], 0.5, gamma=0.25)
        {'w': tensor([ 0.,  2., -1.,  0.])}

    Reference:
        Davari and Belilovsky, "Model breadcrumbs", ECCV 2024, arXiv:2312.06795.
    """
    fusion = Fusion(len(models), density, scale, weights, then, normalize)
    outliers = per_model(gamma, len(models), "gamma", low=0.0, high=1.0)

    def kernel(name: str, row: Row) -> Tensor:
        def sparse(place: int, delta: Tensor) -> Tensor:
            share, largest = fusion.densities[place](name), outliers[place](name)
            if share + largest > 1 + 1e-9:
                raise MergeError(
                    f"density {share:g} and gamma {largest:g} of {name!r} are more than all entries; lower one of them"
                )
            drop, size = round(largest * delta.numel()), delta.abs()
            keep = min(round(share * delta.numel()), delta.numel() - drop)
            return delta.mul_(mask_greatest(size, drop + keep) & ~mask_greatest(size, drop))

        return fusion(name, row, sparse)

    return cast(ModelT, Recipe(kernel, (*fusion.coefficients, *outliers)))
