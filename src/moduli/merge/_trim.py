"""Keeping the entries of largest magnitude, of one tensor or of a whole task vector that is never in memory at once.

For a whole vector the cut is found by counting. The bits of a nonnegative float32 read as an integer are in the order of the
numbers, so a histogram of their upper half tells in which bin the cut lies, and a histogram of the lower half within that bin
tells the number itself: two readings and some 100,000 counters, whatever the size of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import is_elsewhere
from ._recipe import Row

_LOW = 15
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """Which entries of a task vector are kept.

    Attributes:
        bits: Magnitudes above this one, as the integer with the bits of the float32, are kept.
        quota: How many of those that equal it are kept, by name.
    """

    bits: int
    quota: Mapping[str, int]


def view_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a real one with pairs in its last dimension; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def count_kept(density: float, count: int) -> int:
    """How many of a number of entries a density keeps."""
    return max(1, round(density * count)) if density > 0 and count > 0 else 0


def mask_greatest(values: Tensor, keep: int) -> Tensor:
    """Which entries of a real tensor are the greatest: exactly `keep` of them, among equal ones the first."""
    if not 0 < keep < values.numel():
        return torch.full_like(values, keep > 0, dtype=torch.bool)
    flat = values.reshape(-1)
    threshold = flat.kthvalue(len(flat) - keep + 1).values
    mask, equal = flat > threshold, flat == threshold
    left = keep - mask.sum()
    if is_elsewhere(values):
        mask |= equal & (equal.cumsum(0) <= left)  # without asking the device
    else:
        mask[equal.nonzero().reshape(-1)[: int(left)]] = True
    return mask.view_as(values)


def cut_whole(rows: Sequence[tuple[str, Row]], place: int, density: float) -> Cut:
    """Find the cut that keeps a fraction of all entries of a task vector.

    Args:
        rows: Every name with the base and the models.
        place: Which model.
        density: The fraction to keep.
    """

    def chunks() -> Iterator[Tensor]:
        for _, row in rows:
            yield from torch.split(_bits(view_real(row[place]) - view_real(row[0])), _CHUNK)

    upper = torch.zeros(1 << (31 - _LOW), dtype=torch.int64)
    for chunk in chunks():
        upper += torch.bincount(chunk >> _LOW, minlength=len(upper)).cpu()
    total = int(upper.sum())
    keep = count_kept(density, total)
    if keep >= total:
        return Cut(-1, {})
    if keep == 0:
        return Cut(2**31 - 1, {})
    bin_, above = _locate_bin(upper, keep)
    lower = torch.zeros(1 << _LOW, dtype=torch.int64)
    for chunk in chunks():
        inside = chunk[(chunk >> _LOW) == bin_] & (len(lower) - 1)
        lower += torch.bincount(inside, minlength=len(lower)).cpu()
    low, more = _locate_bin(lower, keep - above)
    bits, left = bin_ << _LOW | low, keep - above - more
    quota: dict[str, int] = {}
    for name, row in rows if bits > 0 else ():  # whether a zero is kept makes no difference
        if left > 0:
            quota[name] = min(left, int((_bits(view_real(row[place]) - view_real(row[0])) == bits).sum()))
            left -= quota[name]
    return Cut(bits, quota)


def trim_below(delta: Tensor, cut: Cut, name: str) -> Tensor:
    """Keep the entries of a name that are above a cut; changes the tensor, and returns it."""
    bits = _bits(delta)
    mask = bits > cut.bits
    if cut.quota.get(name, 0) > 0:
        equal = (bits == cut.bits).nonzero().reshape(-1)
        mask[equal[: cut.quota[name]]] = True
    return delta.mul_(mask.view_as(delta))


def _bits(delta: Tensor) -> Tensor:
    return delta.abs().reshape(-1).to(torch.float32).view(torch.int32)


def _locate_bin(counts: Tensor, keep: int) -> tuple[int, int]:
    """The bin that holds the `keep`-th largest entry, and how many entries are in the bins above it."""
    tail = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(tail, keep))
    found = len(counts) - 1 - place
    return found, int(tail[place] - counts[found])
