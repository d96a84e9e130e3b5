"""The representation of labelled tensors: axes, the labels at their ends, and values.

Showing must never fail, whatever is shown: inside a function transform or a tracer there are no values to look at, and
only the axes are printed. It must not be slow either: of a long axis only the ends are ever touched.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from .._html import FRAME, write_frame, write_html_table
from .._torch import is_wrapped, run_outside
from ._axes import Axes, UnfitAxes
from ._space import Space

if TYPE_CHECKING:
    from ._tensor import Tensor


_WIDTH: Final = 110
_LABEL: Final = 18
_MOST: Final = 8
_ROWS: Final = 64


def text(t: Tensor) -> str:
    """Return the tensor as text, for ``repr``.

    Args:
        t: The tensor.

    Returns:
        One line for at most one axis; a header and a table for two; a header and nested brackets for more.

    Example:
        >>> import moduli as mo
        >>> print(mo.tensor([[1.0, 2.0], [3.0, 4.5]], row=["u", "v"], column=["a", "b"]))
        Tensor(row: ['u', 'v'], column: ['a', 'b'])
                a       b
        u  1.0000  2.0000
        v  3.0000  4.5000
    """
    data, axes = t._data, t._axes
    extras = _extras(data)
    if not _fits(data, axes):
        return _format_unfit(data, axes)
    if data.ndim == 0:
        cells = _cells(data.reshape(1, 1), (0,), (0,))
        return f"Tensor({', '.join(['...' if cells is None else _strip_zeros(cells[0][0]), *extras])})"
    if data.ndim == 1:
        inside = _line(data, axes)
        if inside is not None:
            return f"Tensor({', '.join([inside, *extras])})"
    header = f"Tensor({', '.join([*_axes(data, axes), *extras])})"
    if data.ndim == 1 or not data.numel():
        return header
    body = _table(data, axes) if data.ndim == 2 else _brackets(data)
    return header if body is None else f"{header}\n{body}"


# -- axes --------------------------------------------------------------------------------------------------------------


def _fits(data: torch.Tensor, axes: Axes) -> bool:
    if isinstance(axes, UnfitAxes) or data.ndim != axes.ndim:
        return False
    pairs = zip(axes.spaces, data.shape, strict=True)
    return all(space is None or len(space) == size for space, size in pairs)


def _format_unfit(data: torch.Tensor, axes: Axes) -> str:
    meant = axes.meant if isinstance(axes, UnfitAxes) else axes
    names = ", ".join(str(name) if name is not None else str(at) for at, name in enumerate(meant.names))
    return f"Tensor(data of shape {tuple(data.shape)} that no longer fits the axes ({names}))"


def _axes(data: torch.Tensor, axes: Axes) -> list[str]:
    """Each axis in a few words: its name, and its labels or its size."""
    return [
        (f"{name}: " if name is not None else "") + (str(size) if space is None else _space(space))
        for name, space, size in zip(axes.names, axes.spaces, data.shape, strict=True)
    ]


def _space(space: Space) -> str:
    if space.broadcast:
        return "BROADCAST"
    labels = space.labels
    if isinstance(labels, range) and len(labels) > 3:
        return repr(labels)
    words = ["..." if at is None else _label(labels[at], quoted=True) for at in _ends(len(labels), 6)]
    return f"[{', '.join(words)}]"


def _label(label: Hashable, quoted: bool = False) -> str:
    """Return a label, shortened; a string without quotes if it is unambiguous."""
    if isinstance(label, str) and not quoted and label and not any(c.isspace() or c in "=,:[]()'\"" for c in label):
        words = label if label.isprintable() else repr(label)
    elif isinstance(label, (np.datetime64, np.timedelta64)):
        return str(label)  # has at most 38 characters, none of which can be left out
    else:
        try:
            words = " ".join(repr(label).split())
        except Exception:  # noqa: BLE001 - a label is the user's object; showing a tensor must not fail with it
            words = f"<{type(label).__name__}>"
    return words if len(words) <= _LABEL else words[: _LABEL - 5] + "…" + words[-4:]


def _words(space: Space | None, positions: Sequence[int | None]) -> list[str]:
    """Return the labels at the printed positions, or the positions themselves."""
    if space is None or space.broadcast:
        return ["..." if at is None else str(at) for at in positions]
    return ["..." if at is None else _label(space.labels[at]) for at in positions]


def _ends(size: int, most: int) -> tuple[int | None, ...]:
    """Return all positions of a short axis, or those at the ends of a long one with None for the gap."""
    if size <= most:
        return tuple(range(size))
    tail = most // 2
    return (*range(most - tail), None, *range(size - tail, size))


def _extras(data: torch.Tensor) -> list[str]:
    """Return the unusual properties of data as torch prints them: dtype, device, gradients."""
    extras = []
    usual = torch.get_default_dtype()
    if data.dtype not in (usual, usual.to_complex(), torch.int64, torch.bool):
        extras.append(f"dtype={data.dtype}")
    if data.device.type != "cpu":
        extras.append(f"device={str(data.device)!r}")
    try:
        if data.grad_fn is not None:
            extras.append(f"grad_fn=<{type(data.grad_fn).__name__}>")
        elif data.requires_grad:
            extras.append("requires_grad=True")
    except RuntimeError:  # a view that was changed in place raises when its history is read
        pass
    return extras


# -- values ------------------------------------------------------------------------------------------------------------


def _cells(table: torch.Tensor, rows: Sequence[int | None], columns: Sequence[int | None]) -> list[list[str]] | None:
    """Return the values at the ends of two axes as text, with dots for a gap (None); None if values can't be read."""
    if type(table) is not torch.Tensor or table.is_meta or is_wrapped(table):
        return None
    try:
        # Reading values must not be recorded by an active tracer.
        values = run_outside(_values_at, table, *([at for at in each if at is not None] for each in (rows, columns)))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    words = iter(_format_numbers(values))
    return [["..." if None in (row, column) else next(words) for column in columns] for row in rows]


@torch.no_grad()
def _values_at(table: torch.Tensor, rows: list[int], columns: list[int]) -> list[Any]:
    return table.detach()[rows][:, columns].reshape(-1).tolist()


def _line(data: torch.Tensor, axes: Axes) -> str | None:
    """Return one axis on one line: label=value, or the values in brackets."""
    space, name = axes.spaces[0], axes.names[0]
    labelled = space is not None and not space.broadcast
    for most in (10, 6, 4):
        positions = _ends(data.shape[0], most)
        grid = _cells(data.unsqueeze(0), (0,), positions)
        if grid is None:
            return None
        cells = grid[0]
        if labelled and cells:
            words = _words(space, positions)
            cells = ["..." if w == c == "..." else f"{w}={c}" for w, c in zip(words, cells, strict=True)]
            inside = ", ".join(cells)
        else:
            inside = f"[{', '.join(cells)}]"
        if len(inside) <= _WIDTH:
            break
    if space is not None and space.broadcast:
        name = "BROADCAST" if name is None else f"{name}: BROADCAST"
    return inside if name is None else f"{name}: {inside}"


def _grid(data: torch.Tensor, axes: Axes, most: int) -> tuple[list[str], list[str], list[list[str]]] | None:
    """Return the labels of the rows, of the columns, and the cells of a table; a vector is one row."""
    table = data if data.ndim == 2 else data.unsqueeze(0)
    rows, columns = _ends(table.shape[0], _MOST), _ends(table.shape[1], most)
    cells = _cells(table, rows, columns)
    if cells is None:
        return None
    return _words(axes.spaces[0], rows) if data.ndim == 2 else [""], _words(axes.spaces[-1], columns), cells


def _table(data: torch.Tensor, axes: Axes) -> str | None:
    lines: list[str] = []
    for most in (_MOST, 6, 4, 2):
        grid = _grid(data, axes, most)
        if grid is None:
            return None
        rows, columns, cells = grid
        widths = [max(len(row[j]) for row in [columns, *cells]) for j in range(len(columns))]
        left = max(map(len, rows))
        lines = [
            label.ljust(left) + "".join("  " + cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for label, row in zip(["", *rows], [columns, *cells], strict=True)
        ]
        if len(lines[0]) <= _WIDTH:
            break
    return "\n".join(lines)


def _brackets(data: torch.Tensor) -> str | None:
    """Return more than two axes as nested brackets: as torch prints them, or with fewer entries if that is too long."""
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.is_meta or is_wrapped(data):
        return None
    # Torch prints all entries of up to 1000, and otherwise at most 3 at each end of an axis.
    if _count_rows(data, 7 if data.numel() > 1000 else data.numel()) <= _ROWS:
        text: str = run_outside(str, data.detach())
        if text.count("\n") < 2 * _ROWS:  # long rows take several lines
            return text[len("tensor(") : text.rindex("]") + 1].replace("\n       ", "\n")
    most = next((most for most in (6, 4, 2) if _count_rows(data, most + 1) <= _ROWS), None)
    return None if most is None else run_outside(_nest, data.detach(), most)


def _count_rows(data: torch.Tensor, most: int) -> int:
    """Return the number of rows that are printed with at most this many lines of each axis."""
    return math.prod(min(size, most) for size in data.shape[:-1])


def _nest(data: torch.Tensor, most: int) -> str:
    """Return nested brackets with at most `most` entries of each axis, and dots for a gap."""
    positions = [_ends(size, most) for size in data.shape]
    for axis, ends in enumerate(positions):
        data = data[(slice(None),) * axis + ([at for at in ends if at is not None],)]
    words = _format_numbers(data.reshape(-1).tolist())
    cells = iter([word.rjust(max(map(len, words))) for word in words])

    def join(axis: int) -> str:
        last = axis == len(positions) - 1
        parts = ["..." if at is None else next(cells) if last else join(axis + 1) for at in positions[axis]]
        separator = ", " if last else "," + "\n" * (len(positions) - 1 - axis) + " " * (axis + 1)
        return f"[{separator.join(parts)}]"

    return join(0)


# -- HTML --------------------------------------------------------------------------------------------------------------


def html(t: Tensor) -> str:
    """Return the tensor as HTML, for notebooks: the axes in a header, and a table of values with their labels.

    Args:
        t: The tensor.

    Returns:
        HTML with inline styles only; labels are escaped.

    Example:
        >>> import moduli as mo
        >>> "<table" in mo.tensor([1.0, 2.0], x=["a", "b"])._repr_html_()
        True
    """
    data, axes = t._data, t._axes
    if not _fits(data, axes) or not data.ndim:
        return f'<pre style="{FRAME}">{escape(text(t))}</pre>'
    header = f"Tensor({', '.join([*_axes(data, axes), *_extras(data)])})"
    body: str | None = None
    if data.numel() and data.ndim <= 2:
        grid = _grid(data, axes, _MOST)
        if grid is not None:
            rows, columns, cells = grid
            lines = [[label, *row] for label, row in zip(rows, cells, strict=True)]
            body = write_html_table(["", *columns], lines, labelled=True)
    elif data.numel():
        values = _brackets(data)
        body = None if values is None else f"<pre>{escape(values)}</pre>"
    return write_frame(header, body or "")


# -- numbers, the way torch prints them ----------------------------------------------------------------------------------


def _format_numbers(values: Sequence[Any]) -> list[str]:
    """Each value as text; floats share one notation, chosen from all of them."""
    if any(isinstance(value, complex) for value in values):
        real = _floats([complex(value).real for value in values])
        imaginary = _floats([complex(value).imag for value in values])
        return [r + (i if i.startswith("-") else "+" + i) + "j" for r, i in zip(real, imaginary, strict=True)]
    if any(isinstance(value, float) for value in values):
        return _floats([float(value) for value in values])
    return [str(value) for value in values]


def _strip_zeros(word: str) -> str:
    """Return one real number without the zeros that only align it with others."""
    return word.rstrip("0") if "." in word and "e" not in word and not word.endswith("j") else word


def _floats(values: list[float]) -> list[str]:
    finite = [abs(value) for value in values if math.isfinite(value) and value != 0]
    largest, smallest = max(finite, default=1.0), min(finite, default=1.0)
    integers = all(value == math.floor(value) for value in finite)
    # Divided, because 1000 * smallest could overflow.
    if largest / 1000.0 > smallest or largest > 1.0e8 or (not integers and smallest < 1.0e-4):
        return [f"{value:.4e}" if math.isfinite(value) else str(value) for value in values]
    if integers:
        return [f"{value:.0f}." if math.isfinite(value) else str(value) for value in values]
    return [f"{value:.4f}" if math.isfinite(value) else str(value) for value in values]
