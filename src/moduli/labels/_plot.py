"""Figures of labelled tensors, with names and labels on the axes.

matplotlib is an optional dependency, imported when it is used. Figures are made without pyplot: nothing is shown, no window or
global state is touched, and what is returned is saved with ``figure.savefig`` or displayed by a notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ._axes import DimLike
from ._gaps import as_numbers
from ._instants import get_dates
from ._space import Space
from ._tensor import Tensor, method
from ._xarray import find_name, find_units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: Final = ("line", "image", "hist")


@method
def plot(t: Tensor, kind: str | None = None, *, x: DimLike | None = None, ax: Any = None, **options: Any) -> Figure:
    """Draw the tensor: one axis as a line, two as an image, more as a histogram of all values.

    The axes of the figure have the names of the tensor's axes, with units if xarray gave them, and its labels: numbers and dates
    where they are, others one beside the other. NaN is left out.

    Args:
        t: The tensor; gradients are not followed.
        kind: ``"line"`` (a tensor of two axes gives one line per label of the other), ``"image"`` or ``"hist"``.
        x: The axis that goes to the right; the last one by default, for lines the first.
        ax: Axes of matplotlib to draw into; by default those of a new figure.
        options: Passed to matplotlib's ``plot``, ``pcolormesh`` or ``hist``.

    Returns:
        The figure. It is not shown.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If the tensor is complex.
        ValueError: If the kind is unknown or does not fit the number of axes.

    Example:
        >>> import moduli as mo
        >>> figure = mo.tensor([1.0, 3.0, 2.0], year=[2000, 2001, 2003]).plot()
        >>> figure.axes[0].get_xlabel(), figure.axes[0].lines[0].get_xdata().tolist()
        ('year', [2000.0, 2001.0, 2003.0])
    """
    kind = kind or {1: "line", 2: "image"}.get(t.ndim, "hist")
    if kind not in KINDS:
        raise ValueError(f"the kind of a plot is one of {', '.join(KINDS)}, not {kind!r}")
    if kind != "hist" and t.ndim != 2 and not (kind == "line" and t.ndim == 1):
        wanted = "one or two axes" if kind == "line" else "two axes"
        raise ValueError(
            f"a plot of kind {kind!r} has {wanted}, but {t._axes.listing()}; select or reduce the others first"
        )
    if t._data.is_complex():
        raise TypeError("complex numbers have no place on an axis; plot t.real, t.imag or t.abs()")
    if ax is None:
        ax = _new_figure().add_subplot()
    values = t._data.detach().cpu().double().numpy()
    if kind == "hist":
        ax.hist(values[~np.isnan(values)].reshape(-1), **options)
        ax.set(xlabel=_describe_values(t), ylabel="count")
    elif kind == "line":
        _draw_lines(t, values, ax, 0 if x is None else t._axes.axis(x), options)
    else:
        _draw_image(t, values, ax, 1 if x is None else t._axes.axis(x), options)
    return ax.figure  # type: ignore[no-any-return]


def _draw_lines(t: Tensor, values: np.ndarray[Any, Any], ax: Any, at: int, options: dict[str, Any]) -> None:
    space = t.dims[at]
    lines = ax.plot(_place(space), np.moveaxis(values, at, 0), **options)
    _label_axis(t, at, ax.xaxis)
    ax.set_ylabel(_describe_values(t))
    if t.ndim == 2:
        other = t.dims[1 - at]
        ax.legend(lines, [_show(label) for label in other], title=_describe(t, 1 - at))


def _draw_image(t: Tensor, values: np.ndarray[Any, Any], ax: Any, at: int, options: dict[str, Any]) -> None:
    across, upwards = t.dims[at], t.dims[1 - at]
    drawn = values if at == 1 else values.T
    mesh = ax.pcolormesh(
        _place(across), _place(upwards), np.ma.masked_invalid(drawn), **{"shading": "nearest", **options}
    )
    _label_axis(t, at, ax.xaxis)
    _label_axis(t, 1 - at, ax.yaxis)
    ax.figure.colorbar(mesh, ax=ax, label=_describe_values(t))


def _place(space: Space) -> np.ndarray[Any, Any]:
    """Return where the labels of an axis go: numbers and dates where they are, others at 0, 1, 2, ..."""
    dates = get_dates(space) if space.labelled else None
    if dates is not None:
        return dates if dates.dtype.kind == "M" else dates / np.timedelta64(1, "D")
    numbers = as_numbers(space)
    return np.arange(len(space), dtype=np.float64) if numbers is None else numbers


def _label_axis(t: Tensor, at: int, axis: Any) -> None:
    space = t.dims[at]
    dates = get_dates(space) if space.labelled else None
    duration = " [days]" if dates is not None and dates.dtype.kind == "m" else ""
    axis.set_label_text(_describe(t, at) + duration)
    if dates is None and as_numbers(space) is None:
        axis.set_ticks(range(len(space)), [_show(label) for label in space])


def _describe(t: Tensor, at: int) -> str:
    name = t.names[at]
    units = None if name is None else find_units(t, name)
    return (name or f"axis {at}") + (f" [{units}]" if units else "")


def _describe_values(t: Tensor) -> str:
    units = find_units(t)
    return (find_name(t) or "") + (f" [{units}]" if units else "")


def _show(label: Any) -> str:
    return f"{label[0]} to {label[1]}" if isinstance(label, tuple) and len(label) == 2 else str(label)


def _new_figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("this needs matplotlib, which is not installed: pip install moduli[plot]") from error
    return Figure(layout="constrained")
