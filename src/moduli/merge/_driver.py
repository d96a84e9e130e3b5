"""Running a recipe over models: what is merged, what is taken from the first, and in which precision.

Every name is handled by itself: its tensors are read, brought to the dtype of the accumulation, merged, brought back and
handed on, before the next name is looked at. On a device, where a launch costs more than a small tensor, names that are merged
alike entry by entry are one vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from ..layout import cut_like, is_sharded, make_whole, piece_like, piece_of
from ._checks import Checks
from ._errors import MergeError
from ._processes import hold_together, raise_together
from ._rebuild import rebuild
from ._recipe import Recipe
from ._views import COUNTER, Model, ModelT, View, check, compare, ties, view

# How many entries are merged at once, where a recipe allows it: with what is made of them they stay in the caches.
_PIECE = 1 << 18
# How many entries of a device are one vector.
_PACK = 1 << 26

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
        checks = Checks(at_once=recipe.survey is not None)
        made = rebuild(views[0], _merge_groups(recipe, views, buffers, integers, checks))
        if checks.fail():
            # Which name it is, and what is wrong with it, is found out by asking at once.
            for _ in _merge_groups(recipe, views, buffers, integers, Checks(at_once=True)):
                pass
            raise MergeError("a value of these models is NaN or infinite, or two of them that must be equal differ")
        return cast(ModelT, made)


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
        values = _merge_groups(recipe, views, buffers, integers, Checks(at_once=True))
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


def _merge_groups(
    recipe: Recipe, views: list[View], buffers: Buffers, integers: Integers, checks: Checks
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
        rows = [(name, _ModelRow(views, name, checks)) for name in merged if not _keeps(recipe, views, name)]
        kernel = recipe.survey(rows)
    return _values(replace(recipe, kernel=kernel), views, groups, frozenset(merged), kept, integers, checks)


def _values(
    recipe: Recipe,
    views: list[View],
    groups: list[tuple[str, ...]],
    merged: frozenset[str],
    kept: set[str],
    integers: Integers,
    checks: Checks,
) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    packs: dict[Any, list[tuple[str, ...]]] = {}
    sizes: dict[Any, int] = {}
    for names in groups:
        name = names[0]
        if name not in merged:
            if name not in kept and integers == "equal":
                _check_equal(views, name, checks)
            yield names, None
        elif checks.defers(views[0].look(name)) and not any(is_sharded(view.look(name)) for view in views[1:]):
            key = _describe_pack(recipe, views, name)
            if key is None:
                yield names, _merge_whole(recipe, views, name, checks)
                continue
            packs.setdefault(key, []).append(names)
            sizes[key] = sizes.get(key, 0) + views[0].look(name).numel()
            if sizes[key] >= _PACK:
                yield from _merge_pack(recipe, views, packs.pop(key), checks)
                sizes[key] = 0
        elif _keeps(recipe, views, name):
            yield names, None
        else:
            yield names, _merge_name(recipe, views, name, checks)
    for waiting in packs.values():
        yield from _merge_pack(recipe, views, waiting, checks)


def _merge_name(recipe: Recipe, views: list[View], name: str, checks: Checks) -> Tensor:
    like = views[0].look(name)
    if not is_sharded(like):
        return _merge_tensors(recipe, views, name, like, checks)
    if not recipe.elementwise:
        # Every process merges whole tensors, with one result, and keeps its piece.
        return cast(Tensor, cut_like(_merge_tensors(recipe, views, name, like, checks), like))
    with raise_together(like):
        piece = _merge_tensors(recipe, views, name, piece_of(like), checks)
    return cast(Tensor, piece_like(piece, like))


def _merge_tensors(recipe: Recipe, views: list[View], name: str, like: Tensor, checks: Checks) -> Tensor:
    buffer = name in views[0].buffers
    row = _ModelRow(views, name, checks, pieces=recipe.elementwise)
    if not recipe.elementwise or like.numel() < 2 * _PIECE:
        return _finish_value(recipe.kernel(name, row), like.dtype, name, buffer, checks)
    device = torch.device("cpu") if like.is_meta else like.device
    merged = torch.empty(like.shape, dtype=like.dtype, device=device)
    flat = merged.view(-1)
    for start in range(0, like.numel(), _PIECE):
        row.place = slice(start, start + _PIECE)
        flat[row.place] = _finish_value(recipe.kernel(name, row), like.dtype, name, buffer, checks)
    return merged


# -- on a device -------------------------------------------------------------------------------------------------------


def _merge_whole(recipe: Recipe, views: list[View], name: str, checks: Checks) -> Tensor:
    """One name; whether it is kept is decided where it lies."""
    first, buffer = views[0].read(name), name in views[0].buffers
    made = _finish_value(recipe.kernel(name, _ModelRow(views, name, checks)), first.dtype, name, buffer, checks)
    if not _may_keep(recipe, views, name):
        return made
    same = torch.ones((), dtype=torch.bool, device=first.device)
    for other in views[1:]:
        same &= (other.read(name) == first).all()
    return torch.where(same, first, made)


def _merge_pack(
    recipe: Recipe, views: list[View], pack: list[tuple[str, ...]], checks: Checks
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Names that are merged alike, as one vector. Entries that all models agree on are kept as they are."""
    chosen = [names[0] for names in pack]
    row = _PackedRow(views, chosen, checks)
    first, buffer = views[0].read(chosen[0]), chosen[0] in views[0].buffers
    made = _finish_value(recipe.kernel(chosen[0], row), first.dtype, chosen[0], buffer, checks)
    if _may_keep(recipe, views, chosen[0]):
        held = row.read(0)
        same = torch.ones_like(held, dtype=torch.bool)
        for index in range(1, len(views)):
            same &= row.read(index) == held
        made = torch.where(same, held, made)
    shapes = [views[0].look(name).shape for name in chosen]
    copy: Any = torch.split_with_sizes_copy  # of tensors with memory of their own
    parts = copy(made, [shape.numel() for shape in shapes])
    for names, part, shape in zip(pack, parts, shapes, strict=True):
        yield names, part.view(shape)


def _describe_pack(recipe: Recipe, views: list[View], name: str) -> Any:
    """What names have in common that are merged as one vector; None for a name that is merged by itself."""
    if not recipe.elementwise or not all(view.held for view in views):
        return None
    like = views[0].look(name)
    numbers = tuple([coefficient(name) for coefficient in recipe.coefficients])
    # Only of variances it is asked whether they are negative.
    variance = name in views[0].buffers and name.rpartition(".")[2] == "running_var"
    return like.device, like.dtype, numbers, _may_keep(recipe, views, name), variance


def _may_keep(recipe: Recipe, views: list[View], name: str) -> bool:
    """Whether a name, or entries of it, are kept where the models agree."""
    first = views[0].look(name)
    alike = all(view.look(name).dtype is first.dtype and view.look(name).device == first.device for view in views)
    return alike and recipe.keeps(name)


class _PackedRow:
    """The tensors of many names as one vector for each model; see `Row`."""

    def __init__(self, views: list[View], names: list[str], checks: Checks) -> None:
        self._views, self._names, self._checks = views, names, checks
        like = views[0].look(names[0])
        self._device, self._dtype = like.device, _accumulation(like.dtype)

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def read(self, index: int) -> Tensor:
        """The vector of a model in its own dtype."""
        parts = [self._views[index].read(name).reshape(-1) for name in self._names]
        return torch.cat([part.to(self._device) for part in parts])

    def __getitem__(self, index: int, /) -> Tensor:
        vector = self.read(index).to(self._dtype)
        self._checks.are_finite(vector)
        return vector


# ----------------------------------------------------------------------------------------------------------------------


class _ModelRow:
    """The tensors of one name, or a piece of each; see `Row`.

    Args:
        views: The models.
        name: The name.
        pieces: Whether of DTensors what this process holds is enough; otherwise all processes gather them.

    Attributes:
        place: The piece, of the tensors as vectors. They are then read once for all pieces.
    """

    def __init__(self, views: list[View], name: str, checks: Checks, pieces: bool = False) -> None:
        like = views[0].look(name)
        self._views, self._name, self._checks, self._pieces = views, name, checks, pieces
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
        if not self._checks.are_finite(tensor):
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


def _check_equal(views: list[View], name: str, checks: Checks) -> None:
    """Refuse integers that differ. Only the counter of batch normalisation is expected to."""
    if name.rpartition(".")[2] == COUNTER:
        return
    first = views[0].read(name)
    for other in views[1:]:
        tensor = other.read(name)
        compare(name, views[0], first, other, tensor)
        if not checks.are_equal(make_whole(tensor).to(first.device), make_whole(first)):
            raise MergeError(
                f"{name!r} ({first.dtype}) differs between {views[0].label} and {other.label}, and {first.dtype} has no "
                "averages; make them equal, or take the first's with integers='first'"
            )


def _finish_value(value: Tensor, dtype: torch.dtype, name: str, buffer: bool, checks: Checks) -> Tensor:
    """A merged value as the first model would hold it."""
    result = value.to(dtype)
    if not checks.are_finite(result.to(value.dtype)):
        raise MergeError(
            f"the merged {name!r} does not fit {dtype}: its largest magnitude is {value.abs().max().item():g}; "
            "use smaller coefficients, or convert the first model to a wider dtype"
        )
    if buffer and name.rpartition(".")[2] == "running_var" and not checks.are_nonnegative(result):
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
