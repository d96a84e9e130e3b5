"""Running a recipe over models: what is merged, what is taken from the first, and in which precision.

Every name is handled by itself: its tensors are read, brought to the dtype of the accumulation, merged, brought back and
handed on, before the next name is looked at. On a device, where a launch costs more than a small tensor, names that are merged
alike entry by entry are one vector.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor

from ..layout import cut_like, gather_objects, is_sharded, make_whole, piece_like, piece_of
from ._checks import Checks
from ._errors import MergeError
from ._rebuild import rebuild
from ._recipe import Buffers, Integers, ModelT, Recipe, Row
from ._views import COUNTER, Model, View, check, compare, ties, view

# How many entries are merged at once, where a recipe allows it: with what is made of them they stay in the caches.
_PIECE = 1 << 18
# How many entries of a device are one vector.
_PACK = 1 << 26


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
        made = rebuild(views[0], _Merge(recipe, views, buffers, integers, checks).values())
        if checks.fail():
            # Which name it is, and what is wrong with it, is found out by asking at once.
            for _ in _Merge(recipe, views, buffers, integers, Checks(at_once=True)).values():
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
        values = _Merge(recipe, views, buffers, integers, Checks(at_once=True)).values()
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


class _Merge:
    """One merge: everything that can be checked without reading all values is checked when it is made.

    Args:
        recipe: What to do with each name.
        views: The models.
        buffers: What to do with buffers of floating dtype.
        integers: What to do with tensors of integers and truth values.
        checks: What asks whether values are as they have to be.
    """

    def __init__(self, recipe: Recipe, views: list[View], buffers: Buffers, integers: Integers, checks: Checks) -> None:
        if integers not in ("equal", "first"):
            raise MergeError(f"integers is {integers!r}; it must be 'equal' or 'first'")
        self._views, self._integers, self._checks = views, integers, checks
        self._groups = ties(views)
        names = [group[0] for group in self._groups]
        floating = [name for name in names if _has_averages(views[0].look(name))]
        self._kept = _buffers_to_keep(buffers, views[0], floating)
        merged = [name for name in floating if name not in self._kept]
        self._merged = frozenset(merged)
        for other in views[1:]:
            check(views[0], other, [name for name in names if name not in self._kept])
        for coefficient in recipe.coefficients:
            coefficient.check(merged)
        self._recipe = recipe
        if recipe.survey is not None:
            rows = [(name, Row(views, [name], checks)) for name in merged if not self._keeps(name)]
            self._recipe = replace(recipe, kernel=recipe.survey(rows))

    def values(self) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
        """The groups of tied names with their merged values; None where the first's is taken."""
        packs: dict[Any, list[tuple[str, ...]]] = {}
        sizes: Counter[Any] = Counter()
        for names in self._groups:
            name, like = names[0], self._views[0].look(names[0])
            if name not in self._merged:
                if name not in self._kept and self._integers == "equal":
                    self._check_equal(name)
                yield names, None
            elif self._checks.defers(like) and not any(is_sharded(view.look(name)) for view in self._views[1:]):
                key = self._describe_pack(name)
                packs.setdefault(key, []).append(names)
                sizes[key] += like.numel()
                if key is None or sizes[key] >= _PACK:
                    yield from self._merge_pack(packs.pop(key))
                    sizes[key] = 0
            elif self._keeps(name):
                yield names, None
            else:
                yield names, self._merge_name(name, like)
        for waiting in packs.values():
            yield from self._merge_pack(waiting)

    def _merge_name(self, name: str, like: Tensor) -> Tensor:
        if not is_sharded(like):
            return self._merge_tensors(name, like)
        if not self._recipe.elementwise:
            # Every process merges whole tensors, with one result, and keeps its piece.
            return cast(Tensor, cut_like(self._merge_tensors(name, like), like))
        with _raise_together(like):
            piece = self._merge_tensors(name, piece_of(like))
        return cast(Tensor, piece_like(piece, like))

    def _merge_tensors(self, name: str, like: Tensor) -> Tensor:
        row = Row(self._views, [name], self._checks, pieces=self._recipe.elementwise)
        if not self._recipe.elementwise or like.numel() < 2 * _PIECE:
            return self._merge_row(name, row, like.dtype)
        device = torch.device("cpu") if like.is_meta else like.device
        merged = torch.empty(like.shape, dtype=like.dtype, device=device)
        flat = merged.view(-1)
        for start in range(0, like.numel(), _PIECE):
            row.place = slice(start, start + _PIECE)
            flat[row.place] = self._merge_row(name, row, like.dtype)
        return merged

    def _merge_row(self, name: str, row: Row, dtype: torch.dtype) -> Tensor:
        """A merged value as the first model would hold it."""
        value = self._recipe.kernel(name, row)
        result = value.to(dtype)
        if not self._checks.are_finite(result.to(value.dtype)):
            raise MergeError(
                f"the merged {name!r} does not fit {dtype}: its largest magnitude is {value.abs().max().item():g}; "
                "use smaller coefficients, or convert the first model to a wider dtype"
            )
        if self._is_variance(name) and not self._checks.are_nonnegative(result):
            raise MergeError(
                f"the merged {name!r} has negative variances, because this merge extrapolates; use buffers='first', "
                "then reestimate_batch_norm"
            )
        return result

    def _merge_pack(self, pack: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """One name on a device, or names that are merged alike as one vector. What all models agree on is kept there."""
        chosen = [names[0] for names in pack]
        row = Row(self._views, chosen, self._checks)
        looks = [self._views[0].look(name) for name in chosen]
        made = self._merge_row(chosen[0], row, looks[0].dtype)
        if self._may_keep(chosen[0]):
            held = row.read(0)
            same = torch.ones_like(held, dtype=torch.bool)
            for index in range(1, len(row)):
                same &= row.read(index) == held
            made = torch.where(same if self._recipe.elementwise else same.all(), held, made)
        copy: Any = torch.split_with_sizes_copy  # of tensors with memory of their own
        parts = [made] if len(pack) == 1 else copy(made, [look.numel() for look in looks])
        for names, part, look in zip(pack, parts, looks, strict=True):
            yield names, part.view(look.shape)

    def _describe_pack(self, name: str) -> Any:
        """What names have in common that are merged as one vector; None for a name that is merged by itself."""
        if not self._recipe.elementwise or not all(view.held for view in self._views):
            return None
        like = self._views[0].look(name)
        numbers = tuple([coefficient(name) for coefficient in self._recipe.coefficients])
        return like.device, like.dtype, numbers, self._may_keep(name), self._is_variance(name)

    def _is_variance(self, name: str) -> bool:
        return name in self._views[0].buffers and name.rpartition(".")[2] == "running_var"

    def _may_keep(self, name: str) -> bool:
        """Whether a name, or entries of it, are kept where the models agree."""
        looks = [view.look(name) for view in self._views]
        alike = all(look.dtype is looks[0].dtype and look.device == looks[0].device for look in looks)
        return alike and self._recipe.keeps(name)

    def _keeps(self, name: str) -> bool:
        """Whether a name is kept as it is, because every model has the same under it."""
        if not self._recipe.keeps(name):
            return False
        first = self._views[0].read(name)
        others = (other.read(name) for other in self._views[1:])
        if not is_sharded(first):
            return all(_is_same(other, first) for other in others)
        return all(gather_objects(all(_is_same(piece_of(other), piece_of(first)) for other in others), [first]))

    def _check_equal(self, name: str) -> None:
        """Refuse integers that differ. Only the counter of batch normalisation is expected to."""
        if name.rpartition(".")[2] == COUNTER:
            return
        first = self._views[0].read(name)
        for other in self._views[1:]:
            tensor = other.read(name)
            compare(name, self._views[0], first, other, tensor)
            if not self._checks.are_equal(make_whole(tensor).to(first.device), make_whole(first)):
                raise MergeError(
                    f"{name!r} ({first.dtype}) differs between {self._views[0].label} and {other.label}, and "
                    f"{first.dtype} has no averages; make them equal, or take the first's with integers='first'"
                )


def _has_averages(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@contextmanager
def _raise_together(tensor: Any) -> Iterator[None]:
    """A block that ends with an error in every process that has a piece of a tensor, if it does in one of them.

    Raises:
        MergeError: What the first process found.
    """
    failure: MergeError | None = None
    try:
        yield
    except MergeError as error:
        failure = error
    told = gather_objects(None if failure is None else str(failure), [tensor])
    found = next((text for text in told if text is not None), None)
    if found is not None:
        raise MergeError(found) from failure


def _buffers_to_keep(policy: Buffers, first: View, floating: list[str]) -> set[str]:
    """The names of buffers of which the first model's are taken, whatever the others have.

    Raises:
        MergeError: If there is no policy for a buffer, or a pattern matches nothing: one misspelt would go unnoticed.
    """
    patterns = dict(policy) if isinstance(policy, Mapping) else {"*": policy}
    if not set(patterns.values()) <= {"first", "merge"}:
        raise MergeError(f"buffers is {policy!r}; a policy is 'first' or 'merge'")
    # Patterns for a state dict declare what is a buffer; in a module that is known.
    state_dict = isinstance(first.model, Mapping)
    declared = state_dict and isinstance(policy, Mapping)
    kept: set[str] = set()
    for name in floating:
        if name in first.buffers or declared:
            found = next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)
            if found is None and not state_dict:
                raise MergeError(
                    f"buffers has no policy for {name!r}: none of its patterns matches; add one that does, such as '*'"
                )
            if found == "first":
                kept.add(name)
    names: Any = first.tensors if state_dict else first.buffers
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise MergeError(f"the pattern {pattern!r} of buffers matches no buffer; correct or remove it")
    return kept
