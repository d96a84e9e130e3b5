"""Parameters as batches of matrices: `matrix_view` chooses which of their axes are rows, columns and batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import Factors, ParameterAxes, Segments, list_names, measure, parse

__all__ = ["MatrixView", "matrix_view"]

Words = str | Sequence[str] | None
"""Names of axes: one, or several."""

USES = ("out", "in", "index", "batch", "kernel", "segment")


def matrix_view(axes: ParameterAxes, batch: Words = None, matrix: str | None = None) -> MatrixView | None:
    """Return a view of a parameter as batches of matrices.

    By default axes that its layer sums over (inputs, and positions of kernels) are columns, output axes are rows, and axes
    that only select a matrix (experts) are a batch. An axis is named by its name, the last part of it ("head" for
    "0.attn.qkv.head"), or a use ("out", "in", "kernel", "batch"). A concatenation is split if a batch axis is inside of it;
    "segment" splits all.

    Args:
        axes: The axes of the parameter, `ax.of(name)`.
        batch: Axes that become a batch: each of their entries is a separate matrix.
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
    words = list_words(batch)
    segments = [_cut_dim(factors, use, words, axes.sizes) for factors, use in zip(axes.dims, axes.uses, strict=True)]
    roles = None if matrix is None else parse_matrix(matrix)
    grid: dict[tuple[int, ...], _Block] = {}
    for place in itertools.product(*(range(len(of_axis)) for of_axis in segments)):
        block = _lay_out([segments[axis][position] for axis, position in enumerate(place)], words, roles)
        if block is None:
            return None
        grid[place] = block
    return MatrixView(axes.shape, grid)


class _Factor(NamedTuple):
    """A factor of an axis that may become batch, rows or columns: its names, its use and its size."""

    names: tuple[str, ...]
    use: str
    size: int


class _Segment(NamedTuple):
    """A part of one axis of a parameter: its start, its size and its factors."""

    start: int
    size: int
    factors: tuple[_Factor, ...]


class _Block(NamedTuple):
    """A part of a parameter that is a batch of matrices.

    Attributes:
        starts: Its start on each axis of the parameter.
        sizes: Its size on each axis.
        factors: The sizes of all factors of its axes.
        order: The positions of the factors: batch, then rows, then columns.
        shape: The size of the batch, the number of rows and of columns.
    """

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


def list_words(words: Words) -> tuple[str, ...]:
    """Return names of axes as a tuple; a string is split at spaces."""
    return () if words is None else tuple(words.split()) if isinstance(words, str) else tuple(words)


def _match(factor: _Factor, word: str) -> bool:
    """Return whether a word is the use of a factor, or names it."""
    if word in USES:  # not compared with the last part of a name, which is the use of the axis in another layer
        return word == factor.use
    return any(is_named(name, word) for name in factor.names)


def is_named(name: str, word: str) -> bool:
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


def parse_matrix(matrix: str) -> tuple[list[str], list[str]]:
    """Return the words for the rows and for the columns."""
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
    batch, rows, columns = _sort_factors(factors, words, roles)
    if roles is not None and not (rows and columns):
        return _lay_out(segments, words, None)  # the words do not name axes of this parameter
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


def _sort_factors(
    factors: Sequence[_Factor], words: Sequence[str], roles: tuple[list[str], list[str]] | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the positions of the factors of the batch, of the rows and of the columns.

    Args:
        factors: The factors.
        words: The words for the batch.
        roles: The words for the rows and for the columns; None to sort by the use of the axes.
    """
    sides: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position, factor in enumerate(factors):
        sides[_find_side(factor, words, roles)].append(position)
    return sides


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
