"""Running a recipe over models: which names are merged, which are the first model's, and in which precision.

Every name is processed separately: its tensors are read, converted to the dtype of the accumulation, merged, converted back and
yielded, before the next name is read. DTensors are gathered: every process merges whole tensors, and slices its shard of
the result.
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
from ..layout import Guard, any_sharded, copy_module, cut_like, make_whole, recompute_weights
from ..particles import copy_unwrapped
from ._coefficients import Coefficients, check_patterns, find_by_pattern
from ._models import COUNTER, MergeError, View, check, check_choice, compare, has_averages, is_extra, ties, view
from ._whole import try_sum

ModelT = TypeVar("ModelT", bound=nn.Module | Mapping[str, Any])

Policy: TypeAlias = Literal["first", "merge"]
"""The treatment of a buffer of floating dtype: the first model's is copied, or it is merged like a parameter."""

Buffers: TypeAlias = Policy | Mapping[str, Policy]
"""A `Policy` for every buffer, or policies by glob pattern of their names; the first pattern that matches wins."""

Integers: TypeAlias = Literal["equal", "first"]
"""The treatment of tensors of integers and truth values, of which the first model's are copied: whether all must be equal."""

# The number of entries that an elementwise recipe merges at once: small enough for the processor's caches.
_PIECE = 1 << 18


class Row:
    """The tensors of one name, one per model, in the dtype of the accumulation and on the device of the first.

    Each is read when it is indexed and not stored, so a kernel that takes them one at a time needs one at a time in
    memory. They may be the models' own tensors: a kernel never writes into them.

    Args:
        views: The models.
        name: The name.

    Attributes:
        place: The chunk of the flattened tensors to return; None for whole tensors. With chunks, tensors are read once for all.
        dtype: The dtype of the accumulation.
        checks: Whether NaN and infinite values raise when a tensor is read.
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
        """Return a tensor that belongs to a model, such as its Fisher information, in the order of the first model's labels."""
        reorder = self._views[index].reorders.get(self._name)
        return tensor if reorder is None else reorder(tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> Tensor:
        whole = self._held.get(index)
        if whole is None:
            raw = self._views[index].read(self._name)
            compare(self._name, self._views[0], self.like, self._views[index], raw)
            whole = make_whole(raw)
        if self.place is not None:
            self._held[index] = whole.contiguous()
            whole = self._held[index].view(-1)[self.place]
        tensor = whole.to(device=self.device, dtype=self.dtype)
        if self.checks and not _is_finite(tensor):
            advice = (
                "has values that are NaN or infinite; repair it, or take the first's of a buffer with buffers='first'"
            )
            raise MergeError(f"{shorten(self._name)} of {self._views[index].label} {advice}")
        return tensor


Kernel: TypeAlias = Callable[[str, Row], Tensor]
"""A function from a name and its row to the merged tensor: a new one, of the row's dtype and shape."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One method of merging, with its coefficients.

    Attributes:
        kernel: Merges one name; it uses nothing else, so names may be merged in any order.
        coefficients: The coefficients, which are checked against the names before any is merged.
        keeps: Whether equal tensors give the same tensor, by name. They are then copied bit for bit.
        elementwise: Whether every entry of the result depends only on the entries at its position. Large tensors are then
            merged in chunks, in the processor's caches.
        survey: For a recipe that must read every row before it merges the first one: makes the kernel. Names that
            are copied are not among the rows.
        weights: For a weighted sum, the weights by name.
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
        recipe: The recipe.
        models: Modules or state dicts. The first decides the form and the structure of the result.
        labels: The name of each model in errors; `models[0]`, `models[1]` and so on by default.
        buffers: The treatment of buffers of floating dtype.
        integers: The treatment of tensors of integers and truth values.

    Returns:
        A new model; it shares no memory with any of the models.

    Raises:
        MergeError: If structures, values or coefficients do not fit. Nothing is changed then.
    """
    if recipe.weights is not None and buffers == "first" and all(each.is_number for each in recipe.coefficients):
        with Guard(grad=False):
            whole = try_sum(models, recipe.weights, recipe.keeps, integers)
        if whole is not None:
            return cast(ModelT, whole)
    values = stream(recipe, cast(Any, models), labels, buffers=buffers, integers=integers)
    rebuild: Callable[[Any, Any], Any] = _rebuild if isinstance(models[0], nn.Module) else _restate
    with Guard():  # restores grad mode, also after an interrupt
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
    """Merge mappings name by name, without ever storing a whole result: for writing it to a file.

    Args:
        recipe: The recipe.
        models: Mappings from names to tensors. They may read a tensor each time it is indexed; the tensors
            are not stored.
        labels: As for `run`.
        buffers: As for `run`.
        integers: As for `run`.
        piece: The number of entries of a tensor that an elementwise recipe merges at once. The values do not depend on it.

    Returns:
        An iterator over the names of one tensor, several if it is tied, and its merged value.

    Raises:
        MergeError: As for `run`; differences of names at once, others when a name is reached.
    """
    check_choice("integers", integers, "equal", "first")
    labels = labels if labels is not None else [f"models[{index}]" for index in range(len(models))]
    views = [view(model, label) for model, label in zip(models, labels, strict=True)]
    groups = ties(views)
    averaged, equal = _sort_names([group[0] for group in groups], views, buffers)
    for coefficient in recipe.coefficients:
        coefficient.check(list(averaged))
    if recipe.survey is not None:
        with torch.no_grad():
            merged = [name for name in averaged if not _is_copied(recipe, views, name)]
            recipe = replace(recipe, kernel=recipe.survey([(name, Row(views, name)) for name in merged]))
    if integers == "first":
        equal = set()
    size = _PIECE if piece is None else piece
    return ((group, _take(recipe, views, group[0], group[0] in averaged, group[0] in equal, size)) for group in groups)


def _sort_names(names: list[str], views: list[View], buffers: Buffers) -> tuple[dict[str, None], set[str]]:
    """Return the names that are merged, and those that must be equal; raise if the models' structures differ."""
    floating = [name for name in names if has_averages(views[0].look(name))]
    copied = _buffers_to_keep(buffers, views[0], floating)
    for other in views[1:]:
        check(views[0], other, [name for name in names if name not in copied])
    # Only the counters of batch normalisation are expected to differ.
    equal = {name for name in names if name.rpartition(".")[2] != COUNTER} - set(floating)
    return {name: None for name in floating if name not in copied}, equal


@torch.no_grad()
def _take(recipe: Recipe, views: list[View], name: str, averaged: bool, equal: bool, piece: int) -> Tensor:
    """Return the tensor of a name in the result: merged, or a copy of the first if all are equal or it is not merged.

    Args:
        recipe: The recipe.
        views: The models.
        name: The name.
        averaged: Whether it is merged.
        equal: Whether it must be equal in all models.
        piece: The number of entries that are merged at once.
    """
    other = _find_other(views, name) if equal else None
    if other is not None:
        advice = f"differs between {views[0].label} and {other.label}; take the first's with integers='first'"
        raise MergeError(f"{shorten(name)} ({views[0].look(name).dtype}) {advice}")
    if averaged and not _is_copied(recipe, views, name):
        return _merge(recipe, views, name, piece)
    return views[0].read(name).clone()


def _is_copied(recipe: Recipe, views: list[View], name: str) -> bool:
    """Whether a tensor is equal in all models, and the recipe copies such tensors."""
    return recipe.keeps(name) and _find_other(views, name) is None


def _find_other(views: list[View], name: str) -> View | None:
    """Return the first model whose tensor of a name differs from that of the first model; None if there is none."""
    first = make_whole(views[0].read(name))
    for other in views[1:]:
        tensor = make_whole(other.read(name))
        if tensor.dtype != first.dtype or not torch.equal(tensor.to(first.device), first):
            return other
    return None


def _merge(recipe: Recipe, views: list[View], name: str, piece: int) -> Tensor:
    """Return the merged tensor of a name, with the dtype, device and sharding of the first model's."""
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
    """Return the merged value of a row, or of a chunk of it, in the dtype of the first model; written into `out` if not None.

    Raises:
        MergeError: If a value is NaN or infinite, or the merged one does not fit the dtype.
    """
    # A weighted sum is finite only if every term is: terms are checked only if the sum is not.
    row.checks = recipe.weights is None
    value = recipe.kernel(name, row)
    result = value.to(row.like.dtype) if out is None else out.copy_(value)
    if _is_finite(result):
        return result
    row.checks = True
    value = recipe.kernel(name, row)
    advice = f"its largest magnitude is {value.abs().max().item():g}; use smaller coefficients, or a wider dtype"
    raise MergeError(f"the merged {shorten(name)} does not fit {row.like.dtype}: {advice}")


def _is_finite(tensor: Tensor) -> bool:
    # A sum needs no second tensor, and is finite only if every term is; since it may overflow, `isfinite` decides then.
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.complex32:  # torch has no sums for these
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return cmath.isfinite(tensor.sum(dtype=wide).item()) or bool(torch.isfinite(tensor).all())


def _buffers_to_keep(policy: Buffers, first: View, floating: list[str]) -> set[str]:
    """Return the names of the buffers that are copied from the first model.

    Raises:
        MergeError: If a policy is invalid, or a pattern matches nothing.
    """
    patterns = dict(policy) if isinstance(policy, Mapping) else {"*": policy}
    if not set(patterns.values()) <= {"first", "merge"}:
        raise MergeError(f"buffers is {shorten(policy)}; a policy is 'first' or 'merge'")
    # Patterns for a state dict declare its buffers, other names are merged; in a module, other buffers are copied.
    if isinstance(first.model, nn.Module):
        names, default = first.buffers, "first"
    else:
        names, default = first.keys if isinstance(policy, Mapping) else first.buffers, "merge"
    check_patterns(patterns, list(names), "buffers")
    return {name for name in floating if name in names and (find_by_pattern(patterns, name) or default) == "first"}


@torch.no_grad()
def _rebuild(first: nn.Module, values: Iterable[tuple[tuple[str, ...], Tensor]]) -> nn.Module:
    """Return a copy of a module with other values."""
    result: nn.Module = copy_unwrapped(first) if any_sharded(first.parameters()) else copy_module(first)
    tensors = {
        **dict(result.named_parameters(remove_duplicate=False)),
        **dict(result.named_buffers(remove_duplicate=False)),
    }
    for names, value in values:
        tensor = tensors[names[0]]
        tensor.copy_(value)
        for name in names[1:]:
            # A deep copy preserves Parameters with two names, but not two Parameters that share storage.
            if tensors[name] is not tensor:
                tensors[name].data = tensor.data
    recompute_weights(result)
    return result


def _restate(first: Mapping[str, Tensor], values: Iterable[tuple[tuple[str, ...], Tensor]]) -> dict[str, Any]:
    """Return a state dict with the keys of another, in their order; tied names share one tensor."""
    merged = {name: value for names, value in values for name in names}
    metadata = getattr(first, "_metadata", None)
    result: dict[str, Any] = {} if metadata is None else OrderedDict()
    for name in first:
        result[name] = copy.deepcopy(first[name]) if is_extra(name) else merged[name]
    if metadata is not None:
        result._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return result
