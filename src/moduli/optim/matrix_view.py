"""Parameters as batches of matrices, by the axes of their model.

`matrix_view` says which axes of a parameter are rows, columns and batch. `MatrixLink` is the part of a link that takes the words
`batch=` and `matrix=`: its hooks then see one matrix of the batch, under `torch.vmap` over all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..axes import Factors, ModelAxes, ParameterAxes, Segments, from_labels, list_names, measure, parse
from ..layout import suggest_name
from .forms.members import OutOfPlace, flatten_tensors, unflatten_tensors

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer

__all__ = ["MatrixLink", "MatrixView", "matrix_view"]

Words = str | Sequence[str] | None
"""Names of axes: one, or several."""

_USES = ("out", "in", "index", "batch", "kernel", "segment")


def matrix_view(axes: ParameterAxes, batch: Words = None, matrix: str | None = None) -> MatrixView | None:
    """Return a view of a parameter as batches of matrices.

    By default axes that its layer sums over (inputs, and positions of kernels) are columns, output axes are rows, and axes
    that only select a matrix (experts) are a batch. An axis is given by its name, the last part of it ("head" for
    "0.attn.qkv.head"), or a use ("out", "in", "kernel", "batch"). A concatenation is split where a batch axis is inside of it;
    "segment" splits all.

    Args:
        axes: The axes of the parameter, `ax.of(name)`.
        batch: Axes that become a batch, each of whose entries is a matrix by itself.
        matrix: Rows and columns, in the notation of einops: "out in", "out (in kernel)"; axes in neither are a batch.

    Returns:
        The view; None for a vector.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Conv2d(3, 8, 5)
        >>> axes = mo.axes.trace(net, torch.zeros(1, 3, 9, 9)).of("weight")
        >>> mo.optim.matrix_view(axes).shapes, mo.optim.matrix_view(axes, matrix="out in").shapes
        (((1, 8, 75),), ((25, 8, 3),))
    """
    if sum(size != 1 for size in axes.shape) < 2:
        return None
    words = _list_words(batch)
    pieces = [_cut_dim(factors, use, words, axes.sizes) for factors, use in zip(axes.dims, axes.uses, strict=True)]
    roles = None if matrix is None else _parse_matrix(matrix)
    grid = {}
    for place in itertools.product(*(range(len(segments)) for segments in pieces)):
        chosen = [pieces[axis][position] for axis, position in enumerate(place)]
        grid[place] = _lay_out(chosen, words, roles)
    if any(piece is None for piece in grid.values()):
        return None
    return MatrixView(axes.shape, {place: piece for place, piece in grid.items() if piece is not None})


class _Factor(NamedTuple):
    names: tuple[str, ...]
    use: str
    size: int


class _Segment(NamedTuple):
    """A part of one axis of a parameter: where it starts, and its factors."""

    start: int
    size: int
    factors: tuple[_Factor, ...]


class _Block(NamedTuple):
    """A part of a parameter that is a batch of matrices."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    factors: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, int, int]


class MatrixView:
    """A split of a parameter into batches of matrices, and its inverse.

    Attributes:
        shape: The shape of the parameter.
        shapes: The shapes (batch, rows, columns) of the batches.
    """

    def __init__(self, shape: Sequence[int], grid: Mapping[tuple[int, ...], _Block]) -> None:
        self.shape = tuple(shape)
        self._grid = dict(grid)
        kinds: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for place, block in grid.items():
            kinds.setdefault(block.shape[1:], []).append(place)
        self._groups = list(kinds.values())
        self.shapes = tuple(
            (sum(self._grid[place].shape[0] for place in places), *size) for size, places in kinds.items()
        )

    def __repr__(self) -> str:
        return f"MatrixView({self.shape} as {' and '.join(map(str, self.shapes))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MatrixView) and (self.shape, self._grid) == (other.shape, other._grid)

    def __hash__(self) -> int:
        return hash(self.shape)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the batches of matrices of a tensor, one for each size of matrix: (batch, rows, columns)."""
        batches = []
        for places in self._groups:
            parts = []
            for block in map(self._grid.__getitem__, places):
                part = tensor
                for axis, (start, size) in enumerate(zip(block.starts, block.sizes, strict=True)):
                    if size != self.shape[axis]:
                        part = part.narrow(axis, start, size)
                parts.append(part.reshape(block.factors).permute(block.order).reshape(block.shape))
            batches.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return batches

    def join(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which these are the batches."""
        parts = {}
        for places, batch in zip(self._groups, batches, strict=True):
            start = 0
            for place in places:
                block = self._grid[place]
                part = batch.narrow(0, start, block.shape[0])
                start += block.shape[0]
                sizes = [block.factors[axis] for axis in block.order]
                back = sorted(range(len(block.order)), key=block.order.__getitem__)
                parts[place] = part.reshape(sizes).permute(back).reshape(block.sizes)
        return self._assemble(parts, ())

    def _assemble(self, parts: Mapping[tuple[int, ...], Tensor], place: tuple[int, ...]) -> Tensor:
        if len(place) == len(self.shape):
            return parts[place]
        count = 1 + max(each[len(place)] for each in parts)
        rows = [self._assemble(parts, (*place, position)) for position in range(count)]
        return rows[0] if count == 1 else torch.cat(rows, len(place))


def _list_words(words: Words) -> tuple[str, ...]:
    return () if words is None else tuple(words.split()) if isinstance(words, str) else tuple(words)


def _match(factor: _Factor, word: str) -> bool:
    if word in _USES:  # not as the last part of a name, where it is the use of the axis in another layer
        return word == factor.use
    return any(_names(name, word) for name in factor.names)


def _names(name: str, word: str) -> bool:
    """Return whether a word is a name or the end of it, apart from a number: "head" is "0.attn.q.head" and "0.attn.q.head.1"."""
    last = name.rpartition(".")
    plain = last[0] if last[2].isdecimal() else name
    return any(each == word or each.endswith(f".{word}") for each in (name, plain))


def _cut_dim(factors: Factors, use: str, words: Sequence[str], sizes: Mapping[str, int]) -> list[_Segment]:
    """Return the segments of one axis: one, or those of a concatenation that the words split."""
    if len(factors) == 1 and isinstance(factors[0], Segments):
        parts = factors[0].parts
        inside = [_Factor((name,), "", 0) for part in parts if len(part) > 1 for name in list_names(part)]
        if "segment" in words or any(_match(factor, word) for factor in inside for word in words):
            segments, start = [], 0
            for part in parts:
                size = measure(part, sizes)
                segments.append(_Segment(start, size, _list_factors(part, use, sizes)))
                start += size
            return segments
    return [_Segment(0, measure(factors, sizes), _list_factors(factors, use, sizes))]


def _list_factors(factors: Factors, use: str, sizes: Mapping[str, int]) -> tuple[_Factor, ...]:
    return tuple(
        _Factor((factor,), use, sizes[factor])
        if isinstance(factor, str)
        else _Factor(tuple(list_names((factor,))), use, measure((factor,), sizes))
        for factor in factors
    ) or (_Factor((), use, 1),)


def _parse_matrix(matrix: str) -> tuple[list[str], list[str]]:
    groups = parse(matrix)
    if len(groups) != 2:
        raise ValueError(
            f"matrix={matrix!r} names {len(groups)} axes; write the rows and the columns: 'out (in kernel)'"
        )
    return [word for word, _ in groups[0]], [word for word, _ in groups[1]]


def _lay_out(
    segments: Sequence[_Segment], words: Sequence[str], roles: tuple[list[str], list[str]] | None
) -> _Block | None:
    """Sort the factors of a part of a parameter into batch, rows and columns; None where there are no rows or columns."""
    factors = [factor for segment in segments for factor in segment.factors]
    sides: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position, factor in enumerate(factors):
        sides[_find_side(factor, words, roles)].append(position)
    if roles is not None and not (sides[1] and sides[2]):
        return _lay_out(segments, words, None)  # the words do not name axes of this parameter
    batch, rows, columns = sides
    if not rows or not columns:
        rows, columns = _divide(factors, [*rows, *columns])
    sizes = [factor.size for factor in factors]
    shape = tuple(math.prod(sizes[position] for position in side) for side in (batch, rows, columns))
    if not rows or not columns:
        return None
    return _Block(
        tuple(segment.start for segment in segments),
        tuple(segment.size for segment in segments),
        tuple(sizes),
        (*batch, *rows, *columns),
        shape,  # type: ignore[arg-type]
    )


def _find_side(factor: _Factor, words: Sequence[str], roles: tuple[list[str], list[str]] | None) -> int:
    """Return 0 for a batch, 1 for rows, 2 for columns."""
    if any(_match(factor, word) for word in words):
        return 0
    if roles is not None:
        return next((side for side in (1, 2) if any(_match(factor, word) for word in roles[side - 1])), 0)
    return {"batch": 0, "out": 1}.get(factor.use, 2)


def _divide(factors: Sequence[_Factor], positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first axis that is longer than one as rows and the rest as columns, for layers with one side only."""
    first = next((i for i, position in enumerate(positions) if factors[position].size > 1), None)
    if first is None:
        return [], []
    return list(positions[: first + 1]), list(positions[first + 1 :])


# ---------------------------------------------------------------------- links


class MatrixLink:
    """The part of a link that treats parameters as batches of matrices, where its optimizer was given axes.

    Its hooks are called with one matrix, under `torch.vmap` over the batch; its state has one more axis in front, and is in
    "blocks", by the size of matrices. The link declares the arguments `batch` and `matrix`, which are `attributes`.
    """

    if TYPE_CHECKING:
        settings: Any
        uses_params: ClassVar[bool]
        members: ClassVar[Any]
        batch: str | tuple[str, ...] | None
        matrix: str | None

    def attached(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `batch` or `matrix` is given without axes, or names none of them."""
        super().attached(optimizer)  # type: ignore[misc]
        check_words(type(self).__name__, self.batch, self.matrix, optimizer.binding.axes)

    def stacks_alike(self, hook: str) -> bool:
        """Return whether matrices of one shape are stacked for one call, like members of a population; not to create state."""
        return self.members == "batched" and hook != "single_tensor_initialize"

    def find_kind(self, param: Tensor) -> Any:
        """Return the view of a parameter as batches of matrices."""
        return self.find_view(param)

    def find_view(self, param: Tensor) -> MatrixView | None:
        """Return the view of a parameter as batches of matrices; None if its shape alone decides."""
        binding = self.settings.binding
        axes: ModelAxes | None = binding.axes
        words = self.batch is not None or self.matrix is not None
        if axes is None:
            if words:
                check_words(type(self).__name__, self.batch, self.matrix, None)
            return None
        name = binding.slots.find_name(param)
        if name is None:
            if words:
                raise ValueError(
                    f"{type(self).__name__}: batch= and matrix= are about parameters, and here are tensors that another link made"
                )
            return None
        cache = self.__dict__.setdefault("_views", {})
        if cache.get("axes") is not axes:
            cache.clear()
            cache["axes"] = axes
        if name not in cache:
            own = axes.of(name)
            plain = not words and own.uses[:1] in (("out",), ("index",)) and "batch" not in own.uses
            cache[name] = None if plain else matrix_view(own, self.batch, self.matrix)
        return cache[name]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {key: value for key, value in state.items() if key != "_views"}

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Create the state for each matrix."""
        hook = super().single_tensor_initialize  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            hook(tensor, param, grad, loss, state, setting)
        else:
            _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Learn from each matrix."""
        hook = super().single_tensor_update  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            hook(tensor, param, grad, loss, state, setting)
        else:
            _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """Return the parameter's update with each matrix transformed."""
        hook = super().single_tensor_apply  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            return hook(tensor, param, grad, loss, state, setting)  # type: ignore[no-any-return]
        blocks = _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)
        return view.join([block for block in blocks if block is not None]).to(tensor.dtype)


def take_axes(optimizer: Optimizer, axes: ModelAxes | None) -> ModelAxes | None:
    """Return the axes of an optimizer's parameters: those given, or those of labelled tensors; None if there are none.

    Raises:
        ValueError: If the axes are of another model: a parameter is missing, or has another shape.
    """
    links = [link for _, link in optimizer._links]
    if axes is None:
        axes = find_own_axes(links)
    if axes is None:
        words = [link for link in links if isinstance(link, MatrixLink)]
        named = any(link.batch is not None or link.matrix is not None for link in words)
        named = named or any(link.reads_axes for link in links)
        return from_labels(optimizer.model) if named and optimizer.model is not None else None
    slots = optimizer.binding.slots
    for param in optimizer.list_params():
        name = slots.find_name(param) or ""
        shape = tuple(param.shape if optimizer.population is None else param.shape[1:])
        try:
            own = axes.of(name)
        except KeyError as error:
            raise ValueError(f"Optimizer: the axes are of another model: {error.args[0]}") from error
        if own.shape != shape:
            raise ValueError(f"Optimizer: {name!r} has shape {shape}, and the axes are of shape {own.shape}")
    return axes


def find_own_axes(links: Sequence[Module]) -> ModelAxes | None:
    """Return the axes that one of the links was given; None if none was."""
    return next((each for each in map(_find_own_axes, links) if each is not None), None)


def _find_own_axes(link: Module) -> ModelAxes | None:
    """Return the axes that a link, or its filter function, was given."""
    for holder in (link, getattr(link, "filter", None)):
        axes = getattr(holder, "axes", None)
        if isinstance(axes, ModelAxes):
            return axes
    return None


def check_words(link: str, batch: Words, matrix: str | None, axes: ModelAxes | None) -> None:
    """Raise ValueError if words name no axis of the model, or there are no axes.

    Args:
        link: The name of the link.
        batch: Its argument `batch`.
        matrix: Its argument `matrix`.
        axes: The axes of the model.
    """
    words = [*_list_words(batch), *(word for side in (_parse_matrix(matrix) if matrix else ()) for word in side)]
    if words and axes is None:
        raise ValueError(
            f"{link}: {', '.join(map(repr, words))} are axes, which the optimizer has to know: "
            "Optimizer(net, ..., axes=mo.axes.trace(net, example))"
        )
    for word in words:
        if axes is not None and word not in _USES and not any(_names(name, word) for name in axes):
            parts = {part for name in axes for part in (name, name.rpartition(".")[2])}
            raise ValueError(f"{link}: the model has no axis {word!r}.{suggest_name(word, sorted(parts))}")


def _map_blocks(
    link: MatrixLink,
    hook: Callable[..., Any],
    view: MatrixView,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    loss: Tensor | None,
    state: Any,
    setting: Any,
) -> list[Tensor | None]:
    """Call a hook for every matrix of a parameter, with one call per size of matrix, and store its state in "blocks"."""
    tensor, param, grad = tensors
    numbers = {key: value for key, value in state.items() if key != "blocks"}
    blocks = view.split(tensor)
    params = view.split(param) if link.uses_params and param.shape == tensor.shape else blocks
    grads = [None] * len(blocks) if grad is None else view.split(grad)
    stored = state.get("blocks") or [{} for _ in blocks]
    results, rows = [], []
    for block, own, slope, row in zip(blocks, params, grads, stored, strict=True):
        leaves, rest = flatten_tensors(row)
        left: list[Any] = []

        def call(
            one: Tensor,
            at: Tensor,
            slope: Tensor | None,
            leaves: list[Tensor],
            rest: Any = rest,
            left: list[Any] = left,
        ) -> tuple[Any, list[Tensor]]:
            inner = {**numbers, **unflatten_tensors(leaves, rest)}
            with OutOfPlace():
                result = hook(one, at, slope, loss, inner, setting)
            changed, left[:] = flatten_tensors({key: value for key, value in inner.items() if key not in numbers})
            return () if result is None else result, changed

        mapped = torch.vmap(call, (0, 0, None if slope is None else 0, 0), randomness="same")
        result, states = mapped(block, own, slope, [leaf.clone() for leaf in leaves])
        results.append(result if isinstance(result, Tensor) else None)
        # Results that do not depend on the batch are expanded views, but states are written to.
        rows.append(unflatten_tensors([each.contiguous() for each in states], left))
    if any(rows):
        state["blocks"] = rows
    return results
