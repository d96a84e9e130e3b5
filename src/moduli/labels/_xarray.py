"""To and from xarray: labels become index coordinates, and index coordinates labels.

xarray is an optional dependency, imported when it is used. Coordinates that are no index follow their axes; the name and the
attributes of an array are stored with the tensor and restored. The names of BROADCAST axes, which xarray does not have, are stored
in the attribute ``moduli_broadcast`` of the array.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ._axes import axes_of
from ._coords import About, AxisCoordinates, Coordinate
from ._dates import as_nanoseconds
from ._label_sequences import ArrayLabels
from ._space import BROADCAST, Space
from ._tensor import Tensor, finish, method

if TYPE_CHECKING:
    import xarray


_BROADCAST: Final = "moduli_broadcast"


class _ArrayCoordinates:
    """The coordinates of an array; hashable, and equal if xarray's `identical` says so."""

    def __init__(self, array: xarray.DataArray) -> None:
        self.coords = array.coords.to_dataset()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ArrayCoordinates):
            return NotImplemented
        return bool(self.coords.identical(other.coords))

    def __hash__(self) -> int:
        return hash(tuple(self.coords.sizes))


@method
def to_xarray(t: Any, name: str | None = None) -> Any:
    """Convert the tensor to an `xarray.DataArray` with a copy of the values, or several tensors to a `Dataset`.

    Labels become the index coordinate of their axis; positional axes have none. An axis without a name is called
    ``axis_0``, ``axis_1`` and so on by its position (with underscores appended if that name is taken), as xarray has no
    unnamed ones. BROADCAST axes have size 1 and are listed in the attribute ``moduli_broadcast``. A tensor whose axes
    all have names comes back exactly from `from_xarray`, and an array from a tensor that has kept its axes. Its name, its
    attributes and its further coordinates go back from results, too.

    Args:
        t: The tensor. It may live on any device. Or a mapping of names to tensors, as `Module.export_all` gives one: axes of
            one name must then have the same labels in all of them.
        name: The name of the array; by default the one it had.

    Returns:
        The array, or the dataset.

    Raises:
        ImportError: If xarray is not installed.
        RuntimeError: If gradients are recorded for the tensor; call ``t.detach()`` first.
        TypeError: If NumPy has no such dtype, as for bfloat16.
        ValueError: If axes of one name differ between the tensors of a dataset.

    Example:
        >>> import moduli as mo
        >>> array = mo.tensor([[1.0, 2.0]], time=None, channel=["r", "g"]).to_xarray()
        >>> array.dims, array.coords["channel"].values.tolist()
        (('time', 'channel'), ['r', 'g'])
        >>> sorted(mo.to_xarray({"a": mo.zeros(x=["p", "q"]), "b": mo.ones(x=["p", "q"])}).data_vars)
        ['a', 'b']
    """
    if isinstance(t, Mapping):
        return _dataset(t)
    return _array(t, name, "axis_")


def _array(t: Tensor, name: str | None, prefix: str) -> xarray.DataArray:
    module = _xarray()
    if t._data.requires_grad:
        raise RuntimeError("an xarray can't carry gradients, and this tensor records them; use t.detach().to_xarray()")
    data = t._data.detach().cpu().resolve_conj().resolve_neg().numpy().copy()
    coordinates = t._axes.coordinates
    about = About() if coordinates is None or coordinates.about is None else coordinates.about
    name = name if name is not None else about.name  # type: ignore[assignment]
    attrs = {key: value for key, value in copy.deepcopy(dict(about.attrs)).items() if key != _BROADCAST}
    stretched = [axis for axis, space in enumerate(t.dims) if space.broadcast]
    dims = _name_dims(t.names, prefix)
    if stretched:
        attrs[_BROADCAST] = [dims[axis] for axis in stretched]
    origin = None if coordinates is None else coordinates.origin
    coords = origin.coords.coords if isinstance(origin, _ArrayCoordinates) else _list_coords(t, dims)
    return module.DataArray(data, coords, dims, name, attrs)  # type: ignore[no-any-return]


def _name_dims(names: Sequence[str | None], prefix: str) -> list[str]:
    """Return a distinct name for each axis: its own, or the prefix and its position."""
    taken = {name for name in names if name is not None}
    dims: list[str] = []
    for axis, name in enumerate(names):
        called = f"{prefix}{axis}" if name is None else name
        while name is None and called in taken:
            called += "_"
        taken.add(called)
        dims.append(called)
    return dims


def _list_coords(t: Tensor, dims: list[str]) -> dict[str, Any]:
    """Return the labels of axes and the further coordinates of a tensor, as xarray takes them."""
    coords: dict[str, Any] = {
        d: (d, as_coordinate(space)) for d, space in zip(dims, t.dims, strict=True) if space.labelled
    }
    entries = {} if t._axes.coordinates is None else t._axes.coordinates.entries
    for name, entry in entries.items():
        if entry.values is not None or name in coords:
            values = coords[name][1] if entry.values is None else entry.values
            coords[name] = (entry.dims, values, dict(entry.attrs))
    return coords


def _dataset(tensors: Mapping[str, Tensor]) -> xarray.Dataset:
    module = _xarray()
    for variable, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"a dataset is made of labelled tensors, but {variable!r} is a {type(t).__name__}")
    arrays = [_array(t, variable, f"{variable}_axis_") for variable, t in tensors.items()]
    datasets = [None if (about := _about(t)) is None else about.dataset for t in tensors.values()]
    attrs = datasets[0] if datasets and all(each == datasets[0] for each in datasets) else None
    # Different labels raise; another join would fill with NaN.
    dataset: xarray.Dataset = module.merge(arrays, join="exact", compat="broadcast_equals")
    dataset.attrs = copy.deepcopy(attrs or {})
    return dataset


def from_xarray(array: Any) -> Any:
    """Convert an `xarray.DataArray` to a labelled tensor with a copy of the values, or a `Dataset` to a dict of tensors.

    Dimensions become names, and the index coordinate of a dimension its labels; a dimension without one is positional.
    The name, the attributes and the other coordinates stay with the tensor, also through selections and reductions (all but
    those over all axes), unless operands disagree on them: `to_xarray` gives an array that is ``identical``. Coordinates
    follow the axes that they are along, and `groupby` finds them by name. Axes of size 1 that the
    attribute ``moduli_broadcast`` lists are BROADCAST.

    Args:
        array: The array, or the dataset.

    Returns:
        The tensor, or a tensor for each data variable.

    Raises:
        ImportError: If xarray is not installed.
        TypeError: If the argument is neither, or torch has no such dtype.
        ValueError: If a coordinate has a value twice or a NaN, or a dimension can't name an axis.

    Example:
        >>> import moduli as mo, xarray as xr
        >>> array = xr.DataArray([1.0, 2.0], dims="x", coords={"x": ["a", "b"]}, name="length", attrs={"unit": "m"})
        >>> mo.from_xarray(array)
        Tensor(x: a=1., b=2., dtype=torch.float64)
        >>> (2 * mo.from_xarray(array)).to_xarray().identical((2 * array).assign_attrs(unit="m"))
        True
    """
    module = _xarray()
    if isinstance(array, module.Dataset):
        return {str(name): _tensor(array[name], dict(array.attrs)) for name in array.data_vars}
    if not isinstance(array, module.DataArray):
        raise TypeError(f"from_xarray takes an xarray.DataArray or a Dataset, not a {type(array).__name__}")
    return _tensor(array, None)


def open_dataset(*args: Any, **options: Any) -> Any:
    """Raise TypeError, since files are read by xarray, and `from_xarray` converts the result.

    Args:
        args: Those of `xarray.open_dataset`.
        options: Likewise.

    Raises:
        TypeError: Always, and says what to write instead.

    Example:
        >>> import moduli as mo
        >>> try:
        ...     mo.open_dataset("rain.nc")
        ... except TypeError as error:
        ...     print(error)
        moduli reads no data files; use xarray, then from_xarray: mo.from_xarray(xarray.open_dataset('rain.nc'))
    """
    call = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())])
    raise TypeError(
        f"moduli reads no data files; use xarray, then from_xarray: mo.from_xarray(xarray.open_dataset({call}))"
    )


def _tensor(array: xarray.DataArray, dataset: dict[Hashable, Any] | None) -> Tensor:
    listed = array.attrs.get(_BROADCAST, ())
    stretched = {listed} if isinstance(listed, str) else set(listed)
    data = torch.from_numpy(np.array(array.values, order="C"))
    sizes = zip(array.dims, array.shape, strict=True)
    axes = axes_of([_read_space(array, dim, size, dim in stretched) for dim, size in sizes])
    indexed = {dim: coord for dim, coord in array.coords.items() if dim in array.dims}
    plain = len(indexed) == len(array.coords) and not any(coord.attrs for coord in indexed.values())
    if not plain or array.name is not None or set(array.attrs) - {_BROADCAST} or dataset is not None:
        about = About(array.name, copy.deepcopy(array.attrs), dataset)
        axes = axes.mark(AxisCoordinates(_read_coordinates(array), about, _ArrayCoordinates(array)))
    return finish(data, axes)


def _read_space(array: xarray.DataArray, dim: Hashable, size: int, stretched: bool) -> Space:
    """Return the Space of a dimension: its labels, BROADCAST, or its size."""
    if not isinstance(dim, str):
        raise TypeError(f"the name of an axis is a string, but the array has a dimension {dim!r}")
    if dim not in array.indexes:
        return BROADCAST.rename(dim) if stretched and size == 1 else Space(size, dim)
    try:
        return Space(_labels(array, dim), dim)
    except ValueError as error:
        raise ValueError(f"the coordinate {dim!r} of the array can't label an axis: {error}") from None


def _read_coordinates(array: xarray.DataArray) -> dict[str, Coordinate]:
    """Return the coordinates that are no index, and the attributes of those that are."""
    entries = {}
    for name, coord in array.coords.items():
        index = name in array.dims
        if isinstance(name, str) and (coord.attrs or not index):
            values = None if index else np.array(coord.values)
            entries[name] = Coordinate(tuple(map(str, coord.dims)), values, copy.deepcopy(coord.attrs))
    return entries


def _about(t: Tensor) -> About | None:
    return None if t._axes.coordinates is None else t._axes.coordinates.about


def _xarray() -> ModuleType:
    try:
        import xarray
    except ImportError as error:
        raise ImportError("this needs xarray, which is not installed: pip install moduli[xarray]") from error
    return xarray


def find_name(t: Tensor) -> str | None:
    """Return the name that a tensor had in xarray, or None."""
    about = _about(t)
    return None if about is None or about.name is None else str(about.name)


def find_units(t: Tensor, name: str | None = None) -> str | None:
    """Return the unit of a coordinate, or of the tensor itself, from the attribute ``units``; None if there is none."""
    coordinates, about = t._axes.coordinates, _about(t)
    if name is None:
        attrs: Mapping[Hashable, Any] = {} if about is None else about.attrs
    else:
        attrs = {} if coordinates is None or name not in coordinates.entries else coordinates.entries[name].attrs
    return None if attrs.get("units") is None else str(attrs["units"])


def as_coordinate(space: Space) -> np.ndarray[Any, Any]:
    """Return the labels of a Space as an array that can be converted back to the same labels."""
    labels = space._labels
    if isinstance(labels, range):
        return np.arange(labels.start, labels.stop, labels.step)
    if isinstance(labels, ArrayLabels):
        return as_nanoseconds(labels.values) if labels.kind in "mM" else labels.values.copy()
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        values = np.array(labels)
        # Integers beyond 64 bits and strings that end in a zero byte would be changed.
        if values.tolist() == list(labels):
            return values
    boxed: np.ndarray[Any, Any] = np.empty(len(labels), dtype=object)
    for at, label in enumerate(labels):  # np.array would turn labels that are tuples into further axes
        boxed[at] = label
    return boxed


def _labels(array: xarray.DataArray, dim: str) -> Any:
    """Return the values of an index coordinate."""
    values = array.coords[dim].values
    return list(array.indexes[dim]) if values.dtype.kind == "O" else values
