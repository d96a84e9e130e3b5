"""Coordinates of a tensor, labels and further values along axes: assigning them, and reading them as values or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._axes import Axes, cache_by_axes, split_names
from ._coords import AxisCoordinates, Coordinate
from ._groupby import find_values
from ._label_sequences import show_labels
from ._shape import relabel
from ._tensor import Tensor, finish, method


@method
def assign_coords(t: Tensor, coords: Mapping[str, Any] | None = None, /, **named: Any) -> Tensor:
    """Give axes other labels, or the tensor further coordinates along axes, which entries can be grouped by.

    Args:
        t: The tensor.
        coords: Name to values, as a mapping.
        named: The name of an axis to its labels (or to a function of the tensor that returns them); or the name of a
            further coordinate to its axis and its values, as in ``region=("station", ["north", "south"])``.

    Returns:
        The tensor with the same data.

    Raises:
        UnknownLabelError: If an axis does not exist.
        ValueError: If there is not one value per entry.
        TypeError: If a further coordinate has no axis.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0, 6.0], "station").assign_coords(station=["a", "b", "c"])
        >>> t.assign_coords(region=("station", ["north", "south", "north"])).groupby("region").mean()
        Tensor(region: north=3.5000, south=2.0000)
    """
    for name, entry in {**(coords or {}), **named}.items():
        values = entry(t) if callable(entry) else entry
        along, values = values if isinstance(values, tuple) and len(values) == 2 else (None, values)
        if along is None and name not in t._axes.names:
            raise TypeError(
                f"{name!r} is no axis of the tensor, so it is a further coordinate, which needs an axis: "
                f"assign_coords({name}=(axis, values)); {t._axes.listing()}"
            )
        dims = tuple(split_names(along)) if isinstance(along, str) else tuple(along or ())
        if along is None or dims == (name,):
            t = relabel(t, name, values)
            continue
        sizes = tuple(t._data.shape[t._axes.axis(dim)] for dim in dims)
        # A list becomes a hashable tuple, which can be a constant of compiled code; arrays are not cached.
        frozen = tuple(values) if isinstance(values, list) else values
        t = finish(t._data, t._axes.run(_mark_coordinate, name, dims, frozen, sizes))
    return t


def _mark_coordinate(axes: Axes, name: str, dims: tuple[str, ...], values: Any, sizes: tuple[int, ...]) -> Axes:
    array = np.array(values)
    if array.shape != sizes:
        raise ValueError(f"the coordinate {name!r} has shape {array.shape}, but its axes {dims} have sizes {sizes}")
    coordinates = axes.coordinates or AxisCoordinates({})
    return axes.mark(coordinates.replace({**coordinates.entries, name: Coordinate(dims, array, {})}))


class CoordinateDict(dict[str, Any]):
    """The coordinates of a tensor by name."""

    @property
    def variables(self) -> Any:
        """Refuse arithmetic of an array of xarray, which asks for this, with a tensor.

        Raises:
            TypeError: Always.
        """
        raise TypeError("an array of xarray and a tensor can't be combined; convert one of them: mo.from_xarray(array)")


def coords(t: Tensor) -> CoordinateDict:
    """The labels of named axes and the values of further coordinates, by name.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(x=["a", "b"]).assign_coords(mass=("x", [1.0, 2.0]))
        >>> {name: list(values) for name, values in t.coords.items()}
        {'x': ['a', 'b'], 'mass': [np.float64(1.0), np.float64(2.0)]}
    """
    labels = {name: space.labels for name, space in zip(t.names, t.dims, strict=True) if name and space.labelled}
    further = {} if t._axes.coordinates is None else t._axes.coordinates.entries
    values = {name: each.values.copy() for name, each in further.items() if each.values is not None}
    return CoordinateDict({**labels, **values})


Tensor.coords = property(coords, doc=coords.__doc__)  # type: ignore[attr-defined,method-assign,assignment,unused-ignore]


@method
def coordinate(t: Tensor, name: str) -> Tensor:
    """Return the values of a coordinate as a tensor with the axes that they lie along, for masks and weights.

    Args:
        t: The tensor.
        name: An axis whose labels are numbers, a further coordinate of numbers, or a component of dates (``"time.month"``).

    Returns:
        The values. Floating ones have the dtype of the tensor, or the default dtype if that is of half precision or integers.

    Raises:
        UnknownLabelError: If there is no such coordinate.
        TypeError: If its values are no numbers.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0, 4.0], lat=[-60.0, 0.0, 60.0])
        >>> weights = torch.cos(torch.deg2rad(t.coordinate("lat")))
        >>> round(((t * weights).sum() / weights.sum()).item(), 4), t.where(t.coordinate("lat") > -30, drop=True)
        (2.25, Tensor(lat: 0.0=2., 60.0=4.))
    """
    size = t._data.shape[t.names.index(name)] if name in t.names else None
    values, dtype, shape, axes = _read_coordinate(t._axes, name, size)
    if dtype.is_floating_point:  # half precision is too coarse for coordinates
        dtype = t.dtype if t.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()
    return finish(torch.tensor(values, dtype=dtype, device=t._data.device).reshape(shape), axes)


@cache_by_axes
def _read_coordinate(
    axes: Axes, name: str, size: int | None
) -> tuple[tuple[Any, ...], torch.dtype, tuple[int, ...], Axes]:
    entry = None if axes.coordinates is None or name in axes.names else axes.coordinates.entries.get(name)
    if entry is not None and entry.values is not None:
        array, dims = entry.values, entry.dims
    else:
        axis, listed, _ = find_values(axes, name, None, size)
        array, dims = np.array(listed), (axes.names[axis],)  # type: ignore[assignment]
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"the values of {name!r} are no numbers, such as {show_labels(array.reshape(-1)[:3].tolist())}; make a mask of "
            f"them in Python, as in mo.tensor([each == 'x' for each in t.coords[{name!r}]], t.dims[0])"
        )
    left = axes.drop_marks().take(axes.names.index(dim) for dim in dims)
    dtype = torch.from_numpy(array[:0].reshape(-1)).dtype
    return tuple(array.reshape(-1).tolist()), dtype, array.shape, left
