"""Running a recipe over models: what is merged, what is taken from the first, and in which precision.

Every name is handled by itself: its tensors are read, brought to the dtype of the accumulation, merged, brought back and
handed on, before the next name is looked at.
"""

import cmath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from ..layout import cut_like, is_sharded, make_whole, piece_like, piece_of
from ._errors import MergeError
from ._processes import hold_together, raise_together
from ._rebuild import rebuild
from ._recipe import Recipe
from ._views import COUNTER, Model, ModelT, View, check, compare, ties, view

__all__ = ["Buffers", "Integers", "Policy", "run", "stream"]

# How many entries are merged at once, where a recipe allows it: with what is made of them they stay in the caches.
_PIECE = 1 << 18

Policy: TypeAlias = Literal["first", "merge"]
"""What happens to a buffer of floating dtype: the first model's is taken, or it is merged as a parameter is."""

Buffers: TypeAlias = Policy | Mapping[str, Policy]
"""A `Policy` for every buffer, or policies by glob pattern of their names; the first pattern that matches wins."""

Integers: TypeAlias = Literal["equal", "first"]
"""What happens to tensors of integers and truth values, which have no averages: they must be equal, or need not be."""


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
    with torch.no_grad():
        views = _views(models, labels)
        return cast(ModelT, rebuild(views[0], _merged(recipe, views, buffers, integers)))


def stream(
    recipe: Recipe,
    models: Sequence[Mapping[str, Tensor]],
    labels: Sequence[str] | None = None,
    *,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Merge mappings name by name, without ever holding a whole result: for writing it to a file.

    Args:
        recipe: What to do with each name.
        models: Mappings from names to tensors. They may read a tensor each time it is asked for; those they return
            are not kept.
        labels: As for `run`.
        buffers: As for `run`.
        integers: As for `run`.

    Yields:
        The names of one tensor, several if it is tied, and its merged value.

    Raises:
        MergeError: As for `run`; differences of names before anything is yielded, others when a name is reached.
    """
    with torch.no_grad():
        views = _views(models, labels)
        values = _merged(recipe, views, buffers, integers)
    while True:
        # Not around the yield: what the consumer does in between has its own gradient mode.
        with torch.no_grad():
            item = next(values, None)
            if item is None:
                return
            names, value = item
            value = views[0].read(names[0]).clone() if value is None else value
        yield names, value


def _views(models: Sequence[Model], labels: Sequence[str] | None) -> list[View]:
    names = labels if labels is not None else [f"models[{index}]" for index in range(len(models))]
    return [view(model, name) for model, name in zip(models, names, strict=True)]


def _merged(
    recipe: Recipe, views: list[View], buffers: Buffers, integers: Integers
) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """The groups of tied names with their merged values; None where the first's is taken.

    Everything that can be checked without reading all values is checked before this returns.
    """
    if integers not in ("equal", "first"):
        raise MergeError(f"integers is {integers!r}; it must be 'equal' or 'first'")
    policy = _BufferPolicy(buffers, views[0])
    groups = ties(views)
    floating = [names[0] for names in groups if _has_averages(views[0].look(names[0]))]
    kept = {name for name in floating if policy.takes_first(name)}
    merged = [name for name in floating if name not in kept]
    for other in views[1:]:
        check(views[0], other, [names[0] for names in groups if names[0] not in kept])
    policy.check()
    for coefficient in recipe.coefficients:
        coefficient.check(merged)
    kernel = recipe.kernel
    if recipe.survey is not None:
        kernel = recipe.survey([(name, _ModelRow(views, name)) for name in merged if not _keeps(recipe, views, name)])
    return _values(replace(recipe, kernel=kernel), views, groups, frozenset(merged), kept, integers)


def _values(
    recipe: Recipe,
    views: list[View],
    groups: list[tuple[str, ...]],
    merged: frozenset[str],
    kept: set[str],
    integers: Integers,
) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    for names in groups:
        name = names[0]
        if name not in merged:
            if name not in kept and integers == "equal":
                _check_equal(views, name)
            yield names, None
        elif _keeps(recipe, views, name):
            yield names, None
        else:
            yield names, _merge_name(recipe, views, name)


def _merge_name(recipe: Recipe, views: list[View], name: str) -> Tensor:
    like = views[0].look(name)
    if not is_sharded(like):
        return _merge_tensors(recipe, views, name, like)
    if not recipe.elementwise:
        # Every process merges whole tensors, with one result, and keeps its piece.
        return cast(Tensor, cut_like(_merge_tensors(recipe, views, name, like), like))
    with raise_together(like):
        piece = _merge_tensors(recipe, views, name, piece_of(like))
    return cast(Tensor, piece_like(piece, like))


def _merge_tensors(recipe: Recipe, views: list[View], name: str, like: Tensor) -> Tensor:
    buffer = name in views[0].buffers
    row = _ModelRow(views, name, pieces=recipe.elementwise)
    if not recipe.elementwise or like.numel() < 2 * _PIECE:
        return _finished(recipe.kernel(name, row), like.dtype, name, buffer)
    device = torch.device("cpu") if like.is_meta else like.device
    merged = torch.empty(like.shape, dtype=like.dtype, device=device)
    flat = merged.view(-1)
    for start in range(0, like.numel(), _PIECE):
        row.place = slice(start, start + _PIECE)
        flat[row.place] = _finished(recipe.kernel(name, row), like.dtype, name, buffer)
    return merged


class _ModelRow:
    """The tensors of one name, or a piece of each; see `Row`.

    Args:
        views: The models.
        name: The name.
        pieces: Whether of DTensors what this process holds is enough; otherwise all processes gather them.

    Attributes:
        place: The piece, of the tensors as vectors. They are then read once for all pieces.
    """

    def __init__(self, views: list[View], name: str, pieces: bool = False) -> None:
        like = views[0].look(name)
        self._views, self._name, self._pieces = views, name, pieces
        self.place: slice | None = None
        self._held: dict[int, Tensor] = {}
        self._device = torch.device("cpu") if like.is_meta else like.device
        # Only what it is like: a row may be kept, what was read for it from a file may not.
        self._like = torch.empty(like.shape, dtype=like.dtype, device="meta")

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> Tensor:
        source = self._views[index]
        raw = self._held.get(index)
        if raw is None:
            raw = source.read(self._name)
            compare(self._name, self._views[0], self._like, source, raw)
            if is_sharded(raw):
                raw = piece_of(raw) if self._pieces else make_whole(raw)
        if self.place is not None:
            held = self._held[index] = raw.contiguous()
            raw = held.view(-1)[self.place]
        tensor = raw.to(device=self._device, dtype=_accumulation(self._like.dtype))
        if not _is_finite(tensor):
            raise MergeError(
                f"{self._name!r} of {source.label} has values that are NaN or infinite; repair it, or, if it is a "
                "buffer, take the first's with buffers='first'"
            )
        return tensor


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are combined."""
    if dtype in (torch.float64, torch.complex128):
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def _has_averages(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_finite(tensor: Tensor) -> bool:
    # A sum is one pass without a second tensor, and finite only if every term is; sums may overflow by themselves.
    return cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _keeps(recipe: Recipe, views: list[View], name: str) -> bool:
    """Whether a name is kept as it is, because every model has the same under it."""
    if not recipe.keeps(name):
        return False
    first = views[0].read(name)
    if not is_sharded(first):
        return all(_is_same(other.read(name), first) for other in views[1:])
    return hold_together(all(_is_same(piece_of(other.read(name)), piece_of(first)) for other in views[1:]), first)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and _are_equal(a, b)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; those that are not usually differ in their first entries."""
    if a.shape != b.shape or not (a.is_contiguous() and b.is_contiguous()):
        return torch.equal(a, b)
    pairs = zip(torch.split(a.view(-1), _PIECE), torch.split(b.view(-1), _PIECE), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def _check_equal(views: list[View], name: str) -> None:
    """Refuse integers that differ. Only the counter of batch normalisation is expected to."""
    if name.rpartition(".")[2] == COUNTER:
        return
    first = views[0].read(name)
    for other in views[1:]:
        tensor = other.read(name)
        compare(name, views[0], first, other, tensor)
        if not torch.equal(make_whole(tensor).to(first.device), make_whole(first)):
            raise MergeError(
                f"{name!r} ({first.dtype}) differs between {views[0].label} and {other.label}, and {first.dtype} has no "
                "averages; make them equal, or take the first's with integers='first'"
            )


def _finished(value: Tensor, dtype: torch.dtype, name: str, buffer: bool) -> Tensor:
    """A merged value as the first model would hold it."""
    result = value.to(dtype)
    if not _is_finite(result.to(value.dtype)):
        raise MergeError(
            f"the merged {name!r} does not fit {dtype}: its largest magnitude is {value.abs().max().item():g}; "
            "use smaller coefficients, or convert the first model to a wider dtype"
        )
    if buffer and name.rpartition(".")[2] == "running_var" and bool((result < 0).any()):
        raise MergeError(
            f"the merged {name!r} has negative variances, because this merge extrapolates; use buffers='first', "
            "then reestimate_batch_norm"
        )
    return result


class _BufferPolicy:
    """The policy for buffers, looked up by name."""

    def __init__(self, policy: Buffers, first: View) -> None:
        self._first = first
        self._patterns = list(policy.items()) if isinstance(policy, Mapping) else [("*", policy)]
        self._declared = isinstance(policy, Mapping)
        for _, value in self._patterns:
            if value not in ("first", "merge"):
                raise MergeError(f"buffers is {policy!r}; a policy is 'first' or 'merge'")

    def takes_first(self, name: str) -> bool:
        """Whether a name is a buffer of which the first model's is taken, whatever the others have."""
        # Patterns for a state dict declare what is a buffer; in a module that is known.
        state_dict = isinstance(self._first.model, Mapping)
        if name not in self._first.buffers and not (self._declared and state_dict):
            return False
        for pattern, value in self._patterns:
            if fnmatchcase(name, pattern):
                return value == "first"
        if state_dict:
            return False
        raise MergeError(
            f"buffers has no policy for {name!r}: none of its patterns matches; add one that does, such as '*'"
        )

    def check(self) -> None:
        """Refuse patterns that match nothing: one misspelt would go unnoticed."""
        names: Any = self._first.tensors if isinstance(self._first.model, Mapping) else self._first.buffers
        for pattern, _ in self._patterns:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                raise MergeError(f"the pattern {pattern!r} of buffers matches no buffer; correct or remove it")
