"""Running a recipe over models: what is merged, what is taken from the first, and in which precision.

Every name is handled by itself: its tensors are read, brought to the dtype of the accumulation, merged, brought back and
handed on, before the next name is looked at. Of DTensors every process merges whole tensors, with one result, and keeps its
piece.
"""

import cmath
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from .._texts import shorten
from ..layout import Guard, any_sharded, cut_like, make_whole
from ..particles import copy_unwrapped
from ._coefficients import Coefficients, check_patterns, find_by_pattern
from ._models import COUNTER, MergeError, View, check, check_choice, compare, has_averages, is_extra, ties, view
from ._whole import try_sum

ModelT = TypeVar("ModelT", bound=nn.Module | Mapping[str, Any])

Policy: TypeAlias = Literal["first", "merge"]
"""What happens to a buffer of floating dtype: the first model's is taken, or it is merged as a parameter is."""

Buffers: TypeAlias = Policy | Mapping[str, Policy]
"""A `Policy` for every buffer, or policies by glob pattern of their names; the first pattern that matches wins."""

Integers: TypeAlias = Literal["equal", "first"]
"""What happens to tensors of integers and truth values, which have no averages: they must be equal, or need not be."""

# How many entries are merged at once, where a recipe allows it: with what is made of them they stay in the caches.
_PIECE = 1 << 18


class Row:
    """The tensors of one name, one per model, in the dtype of the accumulation and on the device of the first.

    Each is read when it is asked for and not kept, so a kernel that takes them one at a time needs one at a time in
    memory. They may be the models' own: a kernel never writes into them.

    Args:
        views: The models.
        name: The name.

    Attributes:
        place: The piece, of the tensors as vectors. They are then read once for all pieces.
        dtype: The dtype of the accumulation.
        checks: Whether values that are NaN or infinite are refused when a tensor is read.
    """

    def __init__(self, views: list[View], name: str) -> None:
        self._views, self._name = views, name
        self.place: slice | None = None
        self.checks = True
        self._held: dict[int, Tensor] = {}
        self.like = views[0].look(name)
        self.device = torch.device("cpu") if self.like.is_meta else self.like.device
        kind = torch.complex64 if self.like.is_complex() else torch.float32
        self.dtype = self.like.dtype if self.like.dtype in (torch.float64, torch.complex128) else kind

    def __len__(self) -> int:
        return len(self._views)

    def reorder(self, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor that was computed for a model, such as its Fisher information, in the order of the first's labels."""
        reorder = self._views[index].reorders.get(self._name)
        return tensor if reorder is None else reorder(tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> Tensor:
        found = self._held.get(index)
        if found is None:
            raw = self._views[index].read(self._name)
            compare(self._name, self._views[0], self.like, self._views[index], raw)
            found = make_whole(raw)
        if self.place is not None:
            self._held[index] = found.contiguous()
            found = self._held[index].view(-1)[self.place]
        tensor = found.to(device=self.device, dtype=self.dtype)
        if self.checks and not _is_finite(tensor):
            told = (
                "has values that are NaN or infinite; repair it, or take the first's of a buffer with buffers='first'"
            )
            raise MergeError(f"{shorten(self._name)} of {self._views[index].label} {told}")
        return tensor


Kernel: TypeAlias = Callable[[str, Row], Tensor]
"""From a name and its row to the merged tensor: a new one, of the row's dtype and shape."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way of merging, with its coefficients.

    Attributes:
        kernel: Merges one name; it looks at nothing else, so names may come in any order and from anywhere.
        coefficients: What to check against the names before any is merged.
        keeps: Whether models that agree on a name give what they agree on, for a name. Then it is copied bit for bit.
        elementwise: Whether every entry of the result depends on the entries in its place alone. Large tensors are then merged
            piece by piece, in the processor's caches.
        survey: For a recipe that must see every row before it merges the first one: makes the kernel to use. Names that
            are copied are not among them.
        weights: For a weighted sum, the weights for a name.
    """

    kernel: Kernel
    coefficients: tuple[Coefficients, ...] = ()
    keeps: Callable[[str], bool] = lambda _: True
    elementwise: bool = False
    survey: Callable[[Sequence[tuple[str, Row]]], Kernel] | None = None
    weights: Callable[[str], list[float]] | None = None


def run(
    recipe: Recipe,
    models: Sequence[ModelT],
    labels: Sequence[str] | None = None,
    *,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge models with a recipe.

    Args:
        recipe: What to do with each name.
        models: Modules or state dicts. The first decides the form and the structure of the result.
        labels: What to call each model in errors; `models[0]`, `models[1]` and so on by default.
        buffers: What to do with buffers of floating dtype.
        integers: What to do with tensors of integers and truth values.

    Returns:
        A new model; it shares no memory with any of the models.

    Raises:
        MergeError: If structures, values or coefficients do not fit. Nothing has changed then.
    """
    if recipe.weights is not None and buffers == "first" and all(each.is_number for each in recipe.coefficients):
        with Guard(grad=False):
            whole = try_sum(models, recipe.weights, recipe.keeps, integers)
        if whole is not None:
            return cast(ModelT, whole)
    values = stream(recipe, cast(Any, models), labels, buffers=buffers, integers=integers)
    rebuild: Callable[[Any, Any], Any] = _rebuild if isinstance(models[0], nn.Module) else _restate
    with Guard():  # puts grad mode back, wherever an interrupt arrives
        return cast(ModelT, rebuild(models[0], values))


def stream(
    recipe: Recipe,
    models: Sequence[Mapping[str, Tensor]],
    labels: Sequence[str] | None = None,
    *,
    buffers: Buffers = "first",
    integers: Integers = "equal",
    piece: int | None = None,
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Merge mappings name by name, without ever holding a whole result: for writing it to a file.

    Args:
        recipe: What to do with each name.
        models: Mappings from names to tensors. They may read a tensor each time it is asked for; those they return
            are not kept.
        labels: As for `run`.
        buffers: As for `run`.
        integers: As for `run`.
        piece: How many entries of a tensor are merged at once, where the recipe allows it. The values do not depend on it.

    Returns:
        An iterator over the names of one tensor, several if it is tied, and its merged value.

    Raises:
        MergeError: As for `run`; differences of names at once, others when a name is reached.
    """
    check_choice("integers", integers, "equal", "first")
    called = labels if labels is not None else [f"models[{index}]" for index in range(len(models))]
    views = [view(model, name) for model, name in zip(models, called, strict=True)]
    groups = ties(views)
    names = [group[0] for group in groups]
    floating = [name for name in names if has_averages(views[0].look(name))]
    kept = _buffers_to_keep(buffers, views[0], floating)
    averaged = {name: None for name in floating if name not in kept}
    for other in views[1:]:
        check(views[0], other, [name for name in names if name not in kept])
    for coefficient in recipe.coefficients:
        coefficient.check(list(averaged))
    if recipe.survey is not None:
        with torch.no_grad():
            merged = [name for name in averaged if not _is_copied(recipe, views, name)]
            recipe = replace(recipe, kernel=recipe.survey([(name, Row(views, name)) for name in merged]))
    # Only the counters of batch normalisation are expected to differ.
    equal = {name for name in names if integers == "equal" and name.rpartition(".")[2] != COUNTER} - set(floating)
    size = _PIECE if piece is None else piece
    return ((group, _take(recipe, views, group[0], group[0] in averaged, group[0] in equal, size)) for group in groups)


@torch.no_grad()
def _take(recipe: Recipe, views: list[View], name: str, averaged: bool, equal: bool, piece: int) -> Tensor:
    """The tensor of a name in the result: merged, or the first's where the models agree or it is not merged."""
    other = _find_other(views, name) if equal else None
    if other is not None:
        told = f"differs between {views[0].label} and {other.label}; take the first's with integers='first'"
        raise MergeError(f"{shorten(name)} ({views[0].look(name).dtype}) {told}")
    if averaged and not _is_copied(recipe, views, name):
        return _merge(recipe, views, name, piece)
    return views[0].read(name).clone()


def _is_copied(recipe: Recipe, views: list[View], name: str) -> bool:
    """Whether what all models agree on is taken as it is."""
    return recipe.keeps(name) and _find_other(views, name) is None


def _find_other(views: list[View], name: str) -> View | None:
    """The first model that has something else under a name than the first of all."""
    first = make_whole(views[0].read(name))
    for other in views[1:]:
        tensor = make_whole(other.read(name))
        if tensor.dtype != first.dtype or not torch.equal(tensor.to(first.device), first):
            return other
    return None


def _merge(recipe: Recipe, views: list[View], name: str, piece: int) -> Tensor:
    """The merged tensor of a name, as the first model would hold it."""
    row = Row(views, name)
    if not recipe.elementwise or row.like.numel() < 2 * piece:
        merged = _compute(recipe, name, row, None)
    else:
        merged = torch.empty(row.like.shape, dtype=row.like.dtype, device=row.device)
        for start in range(0, row.like.numel(), piece):
            row.place = slice(start, start + piece)
            _compute(recipe, name, row, merged.view(-1)[row.place])
    if name in views[0].buffers and name.rpartition(".")[2] == "running_var" and bool((merged < 0).any()):
        raise MergeError(
            f"the merged {shorten(name)} has negative variances; use buffers='first', then reestimate_batch_norm"
        )
    return cast(Tensor, cut_like(merged, row.like))


def _compute(recipe: Recipe, name: str, row: Row, out: Tensor | None) -> Tensor:
    """The merged value of a row, or of a piece of it, in the dtype of the first model; written into `out` if there is one.

    Raises:
        MergeError: If a value is NaN or infinite, or the merged one does not fit the dtype.
    """
    # A weighted sum is finite only if every term is: what is read is looked at only if the sum is not.
    row.checks = recipe.weights is None
    value = recipe.kernel(name, row)
    result = value.to(row.like.dtype) if out is None else out.copy_(value)
    if _is_finite(result):
        return result
    row.checks = True
    value = recipe.kernel(name, row)
    told = f"its largest magnitude is {value.abs().max().item():g}; use smaller coefficients, or a wider dtype"
    raise MergeError(f"the merged {shorten(name)} does not fit {row.like.dtype}: {told}")


def _is_finite(tensor: Tensor) -> bool:
    # A sum is one pass without a second tensor, and finite only if every term is; sums may overflow by themselves.
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.complex32:  # these have no sums
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return cmath.isfinite(tensor.sum(dtype=wide).item()) or bool(torch.isfinite(tensor).all())


def _buffers_to_keep(policy: Buffers, first: View, floating: list[str]) -> set[str]:
    """The names of buffers of which the first model's are taken, whatever the others have.

    Raises:
        MergeError: If a policy is none, or a pattern matches nothing: one misspelt would go unnoticed.
    """
    patterns = dict(policy) if isinstance(policy, Mapping) else {"*": policy}
    if not set(patterns.values()) <= {"first", "merge"}:
        raise MergeError(f"buffers is {shorten(policy)}; a policy is 'first' or 'merge'")
    # Patterns for a state dict declare what is a buffer; in a module that is known, and others are as without patterns.
    if isinstance(first.model, nn.Module):
        names, default = first.buffers, "first"
    else:
        names, default = first.keys if isinstance(policy, Mapping) else first.buffers, "merge"
    check_patterns(patterns, list(names), "buffers")
    return {name for name in floating if name in names and (find_by_pattern(patterns, name) or default) == "first"}


@torch.no_grad()
def _rebuild(first: nn.Module, values: Iterable[tuple[tuple[str, ...], Tensor]]) -> nn.Module:
    """A copy of a module with other values."""
    result: nn.Module = copy_unwrapped(first) if any_sharded(first.parameters()) else copy.deepcopy(first)
    tensors = {
        **dict(result.named_parameters(remove_duplicate=False)),
        **dict(result.named_buffers(remove_duplicate=False)),
    }
    for names, value in values:
        kept = tensors[names[0]]
        kept.copy_(value)
        for name in names[1:]:
            # Copying keeps a Parameter with two names one Parameter, but not two Parameters on one storage.
            if tensors[name] is not kept:
                tensors[name].data = kept.data
    return result


def _restate(first: Mapping[str, Tensor], values: Iterable[tuple[tuple[str, ...], Tensor]]) -> dict[str, Any]:
    """A state dict with the keys of another, in their order; what is tied stays one tensor."""
    merged = {name: value for names, value in values for name in names}
    metadata = getattr(first, "_metadata", None)
    result: dict[str, Any] = {} if metadata is None else OrderedDict()
    for name in first:
        result[name] = copy.deepcopy(first[name]) if is_extra(name) else merged[name]
    if metadata is not None:
        result._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return result
