"""DELLA: drop entries of task vectors at random, the small ones more often, and rescale each by its own chance.

With δ_t = θ_t − θ_base, in each row of a tensor (section 3 of the paper, MagPrune): the entries are ranked by magnitude, the
drop probability falls linearly with the rank from p + ε/2 for the least to p − ε/2 for the greatest, p = 1 − density, and
what is kept is divided by its own probability, so that δ̂_t has the expectation δ_t. Then signs are elected and what agrees
is averaged, as in TIES, or the vectors are summed.

Reference:
    Deep, Bhardwaj and Poria, "DELLA-Merging: reducing interference in model merging through magnitude-based sampling", 2024,
    arXiv:2406.11617.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from ._coefficients import Coefficient, per_model
from ._dare import draw_seed, draw_uniform
from ._errors import MergeError
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row
from ._ties import Fusion


@recipe
def della(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient | Sequence[Coefficient],
    *,
    epsilon: Coefficient | Sequence[Coefficient] = 0.1,
    generator: torch.Generator | int | None = None,
    scale: Coefficient = 1.0,
    weights: Sequence[Coefficient] | None = None,
    then: Literal["linear", "ties"] = "ties",
    normalize: bool | None = None,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge task vectors of which small entries were dropped more often than large ones.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The mean probability to keep an entry, from 0 to 1, for all models or a sequence with one for each.
        epsilon: How far apart the probabilities of the least and the greatest entry of a row are, likewise.
        generator: A seed, or a generator of which one number is drawn; torch's own generator by default.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        then: Whether signs are elected as in `ties`, or the vectors are summed.
        normalize: Whether to divide by the weights, of those that agree; by default, where signs are elected.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, model = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
        >>> merge.della(base, [model], 0.5, epsilon=0.0, generator=0)["w"].unique()
        tensor([0., 2.])

    Reference:
        Deep, Bhardwaj and Poria, "DELLA-Merging", 2024, arXiv:2406.11617.
    """
    fusion, seed = Fusion(len(models), density, scale, weights, then, normalize), draw_seed(generator, base)
    widths = per_model(epsilon, len(models), "epsilon", low=0.0)

    def kernel(name: str, row: Row) -> Tensor:
        shape = row[0].shape

        def sparse(place: int, delta: Tensor) -> Tensor:
            density, epsilon = fusion.densities[place](name), widths[place](name)
            if density in (0.0, 1.0):
                return delta.mul_(density)
            if not epsilon / 2 <= density <= 1 - epsilon / 2:
                raise MergeError(
                    f"density {density:g} of {name!r} and epsilon {epsilon:g} give probabilities outside of 0 to 1; "
                    f"choose epsilon of at most {2 * min(density, 1 - density):g}"
                )
            rows = delta.abs().reshape(-1, delta.shape[-1]) if delta.ndim else delta.abs().reshape(1, 1)
            ranks = rows.argsort(dim=-1, stable=True).argsort(dim=-1).to(delta.dtype)
            # A row of one entry has the mean probability.
            span = max(rows.shape[-1] - 1, 1)
            centred = ranks / span - 0.5 if rows.shape[-1] > 1 else ranks * 0
            chance = (density + epsilon * centred).reshape(delta.shape)
            return delta.mul_(draw_uniform(seed, name, place, shape, delta) < chance).div_(chance)

        return fusion(name, row, sparse)

    return cast(ModelT, Recipe(kernel, (*fusion.coefficients, *widths)))
