"""Recipes that drop entries of task vectors: at random (DARE, DELLA), by magnitude (breadcrumbs), by variance (SCE).

The equations of section 3 of the paper, with δ_t = θ_t − θ_base and drop rate p = 1 − density:

    (1) m_t ~ Bernoulli(p), entry by entry;
    (2) δ̃_t = (1 − m_t) ⊙ δ_t;
    (3) δ̂_t = δ̃_t / (1 − p),

so that the expectation of δ̂_t is δ_t. The vectors are then merged by another method.

DELLA drops small entries more often, and rescales each by its own probability.

With δ_t = θ_t − θ_base, in each row of a tensor (section 3 of the paper, MagPrune): the entries are ranked by magnitude, the
drop probability falls linearly with the rank from p + ε/2 for the least to p − ε/2 for the greatest, p = 1 − density, and
remaining entries are divided by their own probability, so that δ̂_t has the expectation δ_t. Then the vectors are merged as in
TIES, or summed.

Model breadcrumbs, tensor by tensor: the share γ of entries of greatest magnitude is masked as outliers, and of the others those of
least magnitude, so that the share `density` of all entries remains. Then θ = θ_base + λ Σ_t w_t m_t ⊙ δ_t (eq. 3), or the sparse
vectors are merged as in TIES.

SCE, tensor by tensor (section 3.3 of the paper):

    S  entries are selected whose variance over the models is among the greatest, a share `density` of them;
    C  w_t = Σ δ_t² / Σ_s Σ δ_s², over the selected entries;
    E  entries of δ_t with another sign than Σ_s δ_s are erased; the weights of the others are normalised.

References:
    Yu et al., "Language models are Super Mario: absorbing abilities from homologous models as a free lunch", ICML 2024,
    arXiv:2311.03099.
    Deep, Bhardwaj and Poria, "DELLA-Merging: reducing interference in model merging through magnitude-based sampling", 2024,
    arXiv:2406.11617.
    Davari and Belilovsky, "Model breadcrumbs: scaling multi-task model merging with sparse masks", ECCV 2024, arXiv:2312.06795.
    Wan et al., "FuseChat: knowledge fusion of chat models", 2024, arXiv:2408.07990.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from operator import index
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .._texts import shorten
from ..layout import gather_objects, is_sharded
from ._averages import add_base, weighted_sum
from ._call import recipe
from ._coefficients import Coefficient, Coefficients, per_model
from ._driver import Buffers, Integers, ModelT, Recipe, Row
from ._models import MergeError
from ._ties import Elect, Fusion, count_kept, mask_greatest, merge_agreeing, view_real


@recipe
def dare(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient | Sequence[Coefficient],
    *,
    generator: torch.Generator | int | None = None,
    rescale: bool = True,
    then: Literal["linear", "ties"] = "linear",
    scale: Coefficient = 1.0,
    weights: Sequence[Coefficient] | None = None,
    normalize: bool = True,
    elect: Elect = "sum",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge task vectors of which random entries were dropped and the others rescaled (DARE).

    Each entry of δ_t = θ_t − θ_base is kept with probability `density`, and divided by it: δ̂_t has the expectation δ_t. Then

    * `then="linear"`: θ = θ_base + λ Σ_t w_t δ̂_t / Σ_t w_t;
    * `then="ties"`: signs are elected among the δ̂_t and those that agree are averaged, as in `ties` after its trimming.

    The dropped entries depend only on the seed, the name and the model's position in the list: not on the order of names, on
    other tensors, or on the device.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The probability to keep an entry, from 0 to 1, for all models or a sequence with one for each: a number, or
            numbers by glob pattern. With 0 everything is dropped, and the model has no weight.
        generator: A seed, or a generator from which one number is drawn; torch's default generator if None.
        rescale: Whether to divide by the density.
        then: The method that merges the sparse vectors.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        normalize: Whether to divide by the sum of the weights (for TIES, of the models with the elected sign).
        elect: For TIES, whether signs are elected by sum or by count.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, model = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
        >>> merge.dare(base, [model], 0.5, generator=0)["w"].unique()
        tensor([0., 2.])

    Reference:
        Yu et al., "Language models are Super Mario", ICML 2024, arXiv:2311.03099.
    """
    fusion, seed = Fusion(len(models), density, scale, weights, then, normalize, elect), draw_seed(generator, base)

    def sparse(name: str, place: int, delta: Tensor) -> None:
        share = fusion.densities[place](name)
        delta.mul_(draw_uniform(seed, name, place, delta) < share)  # (1), (2)
        if rescale and share > 0:
            delta.div_(share)  # (3)

    def kernel(name: str, row: Row) -> Tensor:
        if then == "linear" and all(density(name) == 1.0 for density in fusion.densities):
            return weighted_sum(row, add_base(fusion.factors(name)))  # rounds less if nothing is dropped
        return fusion.merge(sparse, name, row)

    return cast(ModelT, Recipe(kernel, fusion.coefficients))


def draw_seed(generator: torch.Generator | int | None, first: Any) -> int:
    """Return a seed, drawn from a generator unless it is a number; the same in all processes if the first model is sharded."""
    if generator is None or isinstance(generator, torch.Generator):
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    else:
        seed = index(generator)  # raises for non-integers
    tensors = (
        first.parameters() if isinstance(first, nn.Module) else first.values() if isinstance(first, Mapping) else ()
    )
    piece = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    return seed if piece is None else int(gather_objects(seed, [piece])[0])


def draw_uniform(seed: int, name: str, place: int, like: Tensor) -> Tensor:
    """Return a random number from 0 to 1 for each entry of a tensor, determined by seed, name and position of the model.

    Args:
        seed: The seed.
        name: The name of the tensor.
        place: The position of the model.
        like: The tensor.
    """
    key = blake2b(f"{seed}\0{place}\0{name}".encode(), digest_size=8).digest()
    # Drawn on the CPU, so that the same entries are dropped on every device.
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    return torch.rand(like.shape, generator=generator).to(like.device)


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
    """Merge task vectors after dropping entries at random, small ones more often (DELLA).

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The mean probability to keep an entry, from 0 to 1, for all models or a sequence with one for each.
        epsilon: The difference between the probabilities of the greatest and the least entry of a row, likewise.
        generator: A seed, or a generator from which one number is drawn; torch's default generator if None.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        then: "ties" to merge the vectors as in `ties`, "linear" to sum them.
        normalize: Whether to divide by the sum of the weights (for "ties", of the models with the elected sign, the default).
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

    def sparse(name: str, place: int, delta: Tensor) -> None:
        density, epsilon = fusion.densities[place](name), widths[place](name)
        if density in (0.0, 1.0):
            delta.mul_(density)
            return
        if not epsilon / 2 <= density <= 1 - epsilon / 2:
            raise MergeError(
                f"density {density:g} of {shorten(name)} and epsilon {epsilon:g} give probabilities outside of 0 to 1; "
                f"choose epsilon of at most {2 * min(density, 1 - density):g}"
            )
        rows = delta.abs().reshape(-1, delta.shape[-1] if delta.ndim else 1)
        ranks = rows.argsort(dim=-1, stable=True).argsort(dim=-1).to(rows.dtype)
        # A row of one entry has the mean probability.
        centred = ranks / (rows.shape[-1] - 1) - 0.5 if rows.shape[-1] > 1 else ranks * 0
        chance = (density + epsilon * centred).reshape(delta.shape)
        delta.mul_(draw_uniform(seed, name, place, delta) < chance).div_(chance)

    return cast(ModelT, Recipe(partial(fusion.merge, sparse), (*fusion.coefficients, *widths)))


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
        density: The share of entries to keep, from 0 to 1, for all models or a sequence with one for each.
        gamma: The share of the largest entries to drop first, likewise.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        then: "linear" to sum the sparse vectors, "ties" to merge them as in `ties`.
        normalize: Whether to divide by the sum of the weights (for "ties", of the models with the elected sign, the default).
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

    def sparse(name: str, place: int, delta: Tensor) -> None:
        share, largest, entries = fusion.densities[place](name), outliers[place](name), view_real(delta)
        if share + largest > 1 + 1e-9:
            raise MergeError(
                f"density {share:g} and gamma {largest:g} of {shorten(name)} are more than all entries; lower one of them"
            )
        drop, size = round(largest * entries.numel()), entries.abs()
        keep = min(round(share * entries.numel()), entries.numel() - drop)
        entries.mul_(mask_greatest(size, drop + keep) & ~mask_greatest(size, drop))

    return cast(ModelT, Recipe(partial(fusion.merge, sparse), (*fusion.coefficients, *outliers)))


@recipe
def sce(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient = 1.0,
    *,
    scale: Coefficient = 1.0,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge the entries of task vectors that vary most between models and agree in sign, weighted by their squares (SCE).

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The share of entries to select, from 0 to 1: a number, or numbers by glob pattern.
        scale: λ: a number, or numbers by glob pattern.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base = {"w": torch.zeros(2)}
        >>> merge.sce(base, [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([-1.0, 1.0])}])
        {'w': tensor([3., 1.])}

    Reference:
        Wan et al., "FuseChat", 2024, arXiv:2408.07990.
    """
    share, factor = Coefficients(density, "density", low=0.0, high=1.0), Coefficients(scale, "scale")
    count = len(models)

    def kernel(name: str, row: Row) -> Tensor:
        base = view_real(row[0])
        total, squares = torch.zeros_like(base), torch.zeros_like(base)
        for place in range(count):
            vector = view_real(row[place + 1]) - base
            total.add_(vector)
            squares.addcmul_(vector, vector)
        # A single model has no variance: all of its entries are selected, or none for a share of 0.
        keep = count_kept(share(name), base.numel()) if count > 1 else base.numel() * (share(name) > 0)
        selected = mask_greatest(squares - total.square() / count, keep)  # S

        def make_vector(place: int) -> Tensor:
            return (view_real(row[place + 1]) - base).mul_(selected)

        sizes = [make_vector(place).square_().sum().item() for place in range(count)]  # C
        shares = [size / (sum(sizes) or 1.0) for size in sizes]
        vector = merge_agreeing(row[0], shares, make_vector, total, normalize=True)  # E
        return vector.mul_(factor(name)).add_(row[0])

    return cast(ModelT, Recipe(kernel, (share, factor)))
