"""Weighted sums of modules of one structure: all tensors in a few calls, instead of name by name.

The values are those of the general path, bit for bit. All unusual cases, errors included, are left to it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout, Reading, any_sharded, read, show_pieces
from ..particles import copy_plain
from ._models import COUNTER

_FLOATING = (torch.float32, torch.float64)
# The number of elements that are summed at once.
_CHUNK = 1 << 16


def try_sum(
    models: Sequence[Any], choose_weights: Callable[[str], list[float]], keeps: Callable[[str], bool], integers: str
) -> nn.Module | None:
    """Return the weighted sum of modules of one structure, without recording gradients.

    Args:
        models: The modules; the buffers of the result are the first one's.
        choose_weights: The weights, which are the same for all names. Models of weight 0 are not read.
        keeps: Whether tensors that are equal in all models are copied bit for bit, either all of them or none.
        integers: `"equal"` if tensors of integers must be equal.

    Returns:
        The module; None if the general path is needed.
    """
    readings = _read_alike(models, integers)
    if readings is None:
        return None
    first = readings[0]
    layout = first.structure.layout

    def compute() -> tuple[list[Tensor], list[Tensor]] | None:
        name, tensors = layout.entries[0].name, [each.parameters for each in readings]
        values = _sum_weighted(layout, tensors, choose_weights(name))
        if values is None:
            return None
        if keeps(name):
            for place, row in enumerate(zip(*tensors, strict=True)):
                if all(torch.equal(row[0], other) for other in row[1:]):
                    values[place] = row[0].detach().clone()
        return values, [buffer.clone() for buffer in first.buffers]

    return copy_plain(models[0], first, compute) if layout.entries else None


def _read_alike(models: Sequence[Any], integers: str) -> list[Reading] | None:
    """Return the readings of modules of one ordinary structure, with equal integers if required; otherwise None."""
    if not all(isinstance(model, nn.Module) for model in models):
        return None
    readings = [read(model) for model in models]
    if "torch.distributed.fsdp" in sys.modules and any(show_pieces(each.modules) for each in readings):
        return None
    first = readings[0]
    layout = first.structure.layout
    if any(each.structure is not first.structure for each in readings) or not _is_ordinary(layout, first.parameters):
        return None
    if integers == "equal" and not _agree_on_integers(layout, [each.buffers for each in readings]):
        return None
    return readings


def _is_ordinary(layout: Layout, parameters: Sequence[Tensor]) -> bool:
    """Whether all parameters are plain, float32 or float64, with separate memory."""
    if not all(group.dtype in _FLOATING and group.device.type != "meta" for group in layout.groups):
        return False
    if any(type(param) is not nn.Parameter or param.layout is not torch.strided for param in parameters):
        return False
    if any_sharded(parameters):
        return False
    return len({param.data_ptr() for param in parameters}) == len(parameters)


def _agree_on_integers(layout: Layout, buffers: Sequence[Sequence[Tensor]]) -> bool:
    for place, entry in enumerate(layout.buffers):
        if entry.dtype.is_floating_point or entry.dtype.is_complex or entry.name.rpartition(".")[2] == COUNTER:
            continue
        if not all(torch.equal(buffers[0][place], other[place]) for other in buffers[1:]):
            return False
    return True


def _sum_weighted(layout: Layout, models: Sequence[list[Tensor]], weights: Sequence[float]) -> list[Tensor] | None:
    """Return the weighted sums of the tensors of models, in runs small enough for the processor's caches.

    None if the norm of a sum is not finite.
    """
    terms = [(weight, tensors) for weight, tensors in zip(weights, models, strict=True) if weight != 0]
    if not terms:
        return [torch.zeros_like(tensor) for tensor in models[0]]
    values: list[Tensor] = []
    norms: list[Tensor] = []
    for part in _cut_runs(layout):
        sums = list(torch._foreach_mul(terms[0][1][part], terms[0][0]))
        for weight, tensors in terms[1:]:
            torch._foreach_add_(sums, tensors[part], alpha=weight)
        norms += torch._foreach_norm(sums)
        values += sums
    return values if all(math.isfinite(norm.item()) for norm in norms) else None


def _cut_runs(layout: Layout) -> list[slice]:
    """Return runs of entries that have `_CHUNK` elements or a few more."""
    if layout.numel < _CHUNK:
        return [slice(None)]
    stops, count = [0], 0
    for stop, entry in enumerate(layout.entries, 1):
        count += entry.numel
        if count >= _CHUNK or stop == len(layout):
            stops.append(stop)
            count = 0
    return [slice(*pair) for pair in pairwise(stops)]
