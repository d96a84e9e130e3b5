"""TIES: trim task vectors, elect signs, merge the values of the elected sign.

The equations, in the order of section 4.2 and Algorithm 1 of the paper, with τ_t = θ_t − θ_base:

    (1) trim:   τ̂_t holds the k entries of τ_t of largest magnitude, and 0 elsewhere;
    (2) elect:  γ = sgn(Σ_t τ̂_t), entry by entry;
    (3) merge:  τ = the mean of those τ̂_t with sgn(τ̂_t) = γ, entry by entry;
    (4) θ = θ_base + λ τ.

Reference:
    Yadav et al., "TIES-Merging: resolving interference when merging models", NeurIPS 2023, arXiv:2306.01708.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from ._averages import share_out
from ._call import recipe
from ._coefficients import Coefficient, Coefficients, per_model
from ._driver import Buffers, Integers, Kernel, ModelT, Recipe, Row
from ._models import check_choice

# The number of bits in the lower half of a nonnegative float32's bits, and the number of entries that are counted at once.
_LOW = 15
_CHUNK = 1 << 20

Elect: TypeAlias = Literal["sum", "count"]
"""The method of electing a sign: by the sum of the entries, as in the paper, or by one vote per model."""

Sparse: TypeAlias = Callable[[str, int, Tensor], None]
"""A function that makes a task vector sparse, in place; called with its name and its model's index."""


@recipe
def ties(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient | Sequence[Coefficient] = 0.2,
    *,
    scale: Coefficient = 1.0,
    weights: Sequence[Coefficient] | None = None,
    normalize: bool = True,
    elect: Elect = "sum",
    trim: Literal["tensor", "model"] = "tensor",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge task vectors after trimming small changes and resolving conflicts of sign (TIES-Merging).

    Of each task vector τ_t = θ_t − θ_base only the entries of largest magnitude are kept. For each entry a sign is elected,
    and the values of that sign are averaged: θ = θ_base + λ · mean of w_t τ̂_t over the models with the elected sign.

    With weights, w_t τ̂_t replaces τ̂_t both in the election and in the mean, which divides by Σ |w_t| over the models with the
    elected sign: a model of weight 0 has no effect. If the votes cancel, the result is the base. Complex entries count as two
    real ones.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The fraction of entries to keep, from 0 to 1, for all models or a sequence with one for each: a number, or
            numbers by glob pattern. Of n entries round(density · n) are kept, and at least one unless it is 0; among equal
            magnitudes the first ones.
        scale: λ: a number, or numbers by glob pattern.
        weights: One coefficient per model. Equal by default.
        normalize: Whether to divide by the weights of the models with the elected sign.
        elect: Whether signs are elected by sum or by count.
        trim: "tensor" to keep a share of each tensor's entries, "model" to keep a share of the entries of the whole task
            vector, as in the paper. The latter takes one density per model, and reads the models four times.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base = {"w": torch.zeros(4)}
        >>> a, b = {"w": torch.tensor([4.0, 3.0, 0.1, 0.0])}, {"w": torch.tensor([2.0, -1.0, 0.0, 0.2])}
        >>> merge.ties(base, [a, b], density=0.5)
        {'w': tensor([3., 3., 0., 0.])}

    Reference:
        Yadav et al., "TIES-Merging: resolving interference when merging models", NeurIPS 2023, arXiv:2306.01708.
    """
    check_choice("trim", trim, "tensor", "model")
    fusion = Fusion(len(models), density, scale, weights, "ties", normalize, elect)
    densities = fusion.densities

    def sparse(name: str, index: int, delta: Tensor) -> None:
        entries = view_real(delta)
        keep = count_kept(densities[index](name), entries.numel())
        entries.mul_(mask_greatest(entries.abs(), keep))  # (1)

    def survey(rows: Sequence[tuple[str, Row]]) -> Kernel:
        cuts = [cut_whole(rows, place, density.number) for place, density in enumerate(densities, 1)]

        def trim_whole(name: str, index: int, delta: Tensor) -> None:
            bits, (cut, quota) = _read_bits(delta), cuts[index]
            mask = bits > cut
            mask[(bits == cut).nonzero().reshape(-1)[: quota.get(name, 0)]] = True
            entries = view_real(delta)
            entries.mul_(mask.view_as(entries))  # (1)

        return partial(fusion.merge, trim_whole)

    kernel = partial(fusion.merge, sparse)
    return cast(ModelT, Recipe(kernel, fusion.coefficients, survey=survey if trim == "model" else None))


class Fusion:
    """The addition of sparse task vectors to their base: θ = θ_base + λ Σ_t w_t δ̂_t, or as in TIES.

    Args:
        count: The number of models, without the base.
        density: The share of each vector that is kept.
        scale: λ.
        weights: One per model; equal by default.
        then: "linear" to sum the vectors, "ties" to elect signs first.
        normalize: Whether to divide by the sum of the weights (for "ties", of the models with the elected sign); None if "ties".
        elect: The method of electing signs.

    Raises:
        MergeError: If a coefficient or an option is invalid.
    """

    def __init__(
        self,
        count: int,
        density: Coefficient | Sequence[Coefficient],
        scale: Coefficient,
        weights: Sequence[Coefficient] | None,
        then: Literal["linear", "ties"],
        normalize: bool | None,
        elect: Elect = "sum",
    ) -> None:
        check_choice("then", then, "linear", "ties")
        check_choice("elect", elect, "sum", "count")
        self.densities = per_model(density, count, "density", low=0.0, high=1.0)
        self.scale, self.weights = Coefficients(scale, "scale"), per_model(weights, count, "weights")
        self.then, self.elect = then, elect
        self.normalize = then == "ties" if normalize is None else normalize

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """All coefficients, to be checked against the names."""
        return *self.densities, self.scale, *self.weights

    def factors(self, name: str) -> list[float]:
        """Return λ w_t for a name, for vectors that are summed.

        Raises:
            MergeError: If the weights are to be normalised and add up to 0.
        """
        shares = share_out([weight(name) for weight in self.weights], name, self.normalize)
        return [self.scale(name) * share for share in shares]

    def merge(self, sparse: Sparse, name: str, row: Row) -> Tensor:
        """Return the merged tensor of one name.

        Args:
            sparse: Makes its task vectors sparse.
            name: The name.
            row: The tensors of the base and the models.
        """

        def make_vector(place: int) -> Tensor:
            delta = row[place + 1] - row[0]
            sparse(name, place, delta)
            return delta

        if self.then == "ties":
            weights = [weight(name) for weight in self.weights]
            vector = merge_agreeing(row[0], weights, make_vector, self.elect, self.normalize)
            return vector.mul_(self.scale(name)).add_(row[0])  # (4)
        result = row[0].clone()
        for place, factor in enumerate(self.factors(name)):
            if factor != 0:
                result.add_(make_vector(place), alpha=factor)
        return result


def merge_agreeing(
    base: Tensor, weights: Sequence[float], make_vector: Callable[[int], Tensor], elect: Elect | Tensor, normalize: bool
) -> Tensor:
    """Merge the values of task vectors that have the elected signs, in one pass over the models.

    Positive and negative values are summed separately, so neither the signs nor all vectors are needed at once.
    Complex numbers are pairs of real ones.

    Args:
        base: The tensor of the base.
        weights: The weights of the models.
        make_vector: Returns the task vector of a model.
        elect: The method of electing signs, or a tensor with the signs.
        normalize: Whether to divide by the weights of the models with the elected sign.
    """
    positive, negative, for_positive, for_negative = (torch.zeros_like(view_real(base)) for _ in range(4))
    sign = torch.zeros_like(positive) if elect == "count" else None
    for index, weight in enumerate(weights):
        if weight == 0:
            continue
        vector = view_real(make_vector(index)).mul_(weight)
        if sign is not None:
            sign.add_(vector.sign())
        for_positive.add_(vector > 0, alpha=abs(weight))
        for_negative.add_(vector < 0, alpha=abs(weight))
        positive.add_(vector.clamp(min=0))
        negative.add_(vector.clamp_(max=0))
        del vector  # before the next one is made
    if sign is None:
        sign = elect if isinstance(elect, Tensor) else positive + negative  # (2); only its sign counts
    # In place from here on, so that no more memory is needed.
    merged = torch.where(sign > 0, positive, negative, out=positive).mul_(sign != 0)  # (3), the sum
    if normalize:
        agreeing = torch.where(sign > 0, for_positive, for_negative, out=for_positive)
        merged.div_(agreeing.masked_fill_(agreeing == 0, 1.0))  # (3), the mean
    return torch.view_as_complex(merged) if base.is_complex() else merged


def view_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with pairs in its last dimension; real ones unmodified."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def count_kept(density: float, count: int) -> int:
    """Return the number of entries that a density keeps: at least one unless it is 0."""
    return max(1, round(density * count)) if density > 0 and count > 0 else 0


def mask_greatest(values: Tensor, keep: int) -> Tensor:
    """Return the mask of the greatest entries of a real tensor: exactly `keep` of them, among equal ones the first."""
    if not 0 < keep < values.numel():
        return torch.full_like(values, keep > 0, dtype=torch.bool)
    flat = values.reshape(-1)
    threshold = flat.kthvalue(len(flat) - keep + 1).values
    mask = flat > threshold
    mask[(flat == threshold).nonzero().reshape(-1)[: keep - int(mask.sum())]] = True
    return mask.view_as(values)


def cut_whole(rows: Sequence[tuple[str, Row]], place: int, density: float) -> tuple[int, dict[str, int]]:
    """Return the magnitude above which a fraction of the entries of a whole task vector lies, without storing the vector.

    The bits of nonnegative float32 numbers, read as integers, have the same order as the numbers. A histogram of their upper half
    gives the bin of the cut, and a histogram of the lower half within that bin gives the cut itself: two passes
    and some 100,000 counters, whatever the size of the model.

    Args:
        rows: Every name with the base and the models.
        place: The position of the model.
        density: The fraction to keep.

    Returns:
        The magnitude above which entries are kept, as the integer with the bits of the float32, and the number of entries equal
        to it that are kept, by name.
    """
    cut, left = 0, -1
    for low, high in ((_LOW, 31), (0, _LOW)):
        counts = torch.zeros(1 << (high - low), dtype=torch.int64)
        for _, row in rows:
            for chunk in torch.split(_read_bits(row[place] - row[0]), _CHUNK):
                inside = chunk[(chunk >> high) == (cut >> high)] >> low
                counts += torch.bincount(inside & (len(counts) - 1), minlength=len(counts)).cpu()
        if left < 0:
            left = count_kept(density, int(counts.sum()))
            if left in (0, int(counts.sum())):
                return -1 if left else 2**31 - 1, {}
        # `tail` has the number of entries in each bin and above; the cut is in the first bin that has enough.
        tail = counts.flip(0).cumsum(0)
        position = len(counts) - 1 - int(torch.searchsorted(tail, left))
        left -= int(tail[len(counts) - 1 - position] - counts[position])
        cut |= position << low
    quota: dict[str, int] = {}
    for name, row in rows if cut > 0 else ():  # kept and dropped zeros are equal
        quota[name] = min(left, int((_read_bits(row[place] - row[0]) == cut).sum()))
        left -= quota[name]
    return cut, quota


def _read_bits(delta: Tensor) -> Tensor:
    return view_real(delta).abs().reshape(-1).to(torch.float32).view(torch.int32)
