"""To and from xarray: labels become index coordinates, and index coordinates labels.

xarray is an optional dependency, imported when it is used. What xarray can't say is kept in the attribute
``moduli_broadcast`` of the array: the names of the axes that are BROADCAST.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ._axes import axes_of
from ._space import BROADCAST, Space
from ._tensor import Tensor, finish, method

if TYPE_CHECKING:
    import xarray

__all__ = ["from_xarray", "to_xarray"]

_BROADCAST: Final = "moduli_broadcast"


@method
def to_xarray(t: Tensor, name: str | None = None) -> xarray.DataArray:
    """The tensor as an `xarray.DataArray`, with its own copy of the values.

    Labels become the index coordinate of their axis; positional axes have none. An axis without a name is called
    ``axis_0``, ``axis_1`` and so on by its position (with underscores appended if that name is taken), as xarray has no
    unnamed ones. BROADCAST axes have size 1 and are listed in the attribute ``moduli_broadcast``. A tensor whose axes
    all have names comes back exactly from `from_xarray`.

    Args:
        t: The tensor. It may live on any device.
        name: The name of the array.

    Returns:
        The array.

    Raises:
        ImportError: If xarray is not installed.
        RuntimeError: If gradients are recorded for the tensor; call ``t.detach()`` first.
        TypeError: If NumPy has no such dtype, as for bfloat16.

    Example:
        >>> import moduli as mo
        >>> array = mo.tensor([[1.0, 2.0]], time=None, channel=["r", "g"]).to_xarray()
        >>> array.dims, array.coords["channel"].values.tolist()
        (('time', 'channel'), ['r', 'g'])
    """
    module = _xarray()
    if t._data.requires_grad:
        raise RuntimeError("an xarray can't carry gradients, and this tensor records them; use t.detach().to_xarray()")
    values = t._data.detach().cpu().resolve_conj().resolve_neg().numpy().copy()
    taken = {known for known in t.names if known is not None}
    dims: list[str] = []
    for axis, known in enumerate(t.names):
        called = known if known is not None else f"axis_{axis}"
        while known is None and called in taken:
            called += "_"
        taken.add(called)
        dims.append(called)
    coords = {d: (d, _coordinate(space.labels)) for d, space in zip(dims, t.dims, strict=True) if space.labelled}
    stretched = [d for d, space in zip(dims, t.dims, strict=True) if space.broadcast]
    attrs = {_BROADCAST: stretched} if stretched else {}
    made: xarray.DataArray = module.DataArray(values, dims=dims, coords=coords, name=name, attrs=attrs)
    return made


def from_xarray(array: xarray.DataArray) -> Tensor:
    """An `xarray.DataArray` as a labelled tensor, with its own copy of the values.

    Dimensions become names, and the index coordinate of a dimension its labels; a dimension without one is positional.
    Other coordinates and attributes have no place in a tensor and are left behind. Axes of size 1 that the attribute
    ``moduli_broadcast`` lists are BROADCAST.

    Args:
        array: The array.

    Returns:
        The tensor.

    Raises:
        ImportError: If xarray is not installed.
        TypeError: If the argument is not a DataArray, or torch has no such dtype.
        ValueError: If a coordinate has a value twice or a NaN, or a dimension can't name an axis.

    Example:
        >>> import moduli as mo, xarray as xr
        >>> mo.from_xarray(xr.DataArray([1.0, 2.0], dims="x", coords={"x": ["a", "b"]}))
        Tensor(x: a=1., b=2., dtype=torch.float64)
    """
    module = _xarray()
    if not isinstance(array, module.DataArray):
        hint = "; choose one of its variables, as in dataset['name']" if isinstance(array, module.Dataset) else ""
        raise TypeError(f"from_xarray takes an xarray.DataArray, not a {type(array).__name__}{hint}")
    listed = array.attrs.get(_BROADCAST, ())
    stretched = {listed} if isinstance(listed, str) else set(listed)
    spaces: list[Space] = []
    for dim, size in zip(array.dims, array.shape, strict=True):
        if not isinstance(dim, str):
            raise TypeError(f"the name of an axis is a string, but the array has a dimension {dim!r}")
        if dim in stretched and size == 1 and dim not in array.indexes:
            spaces.append(BROADCAST.rename(dim))
        elif dim in array.indexes:
            try:
                spaces.append(Space(_labels(array, dim), dim))
            except ValueError as error:
                raise ValueError(f"the coordinate {dim!r} of the array can't label an axis: {error}") from None
        else:
            spaces.append(Space(size, dim))
    data = torch.from_numpy(np.array(array.values, order="C"))
    return finish(data, axes_of(spaces))


def _xarray() -> ModuleType:
    try:
        import xarray
    except ImportError as error:
        raise ImportError("this needs xarray, which is not installed: pip install moduli[xarray]") from error
    return xarray


def _coordinate(labels: Sequence[Hashable]) -> np.ndarray[Any, Any]:
    """Labels as an array that gives the very same labels back."""
    if isinstance(labels, range):
        return np.arange(labels.start, labels.stop, labels.step)
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        found = np.array(labels)
        # An integer beyond 64 bits, or a string that ends in the zero byte, would come back as something else.
        if found.tolist() == list(labels):
            return found
    boxed: np.ndarray[Any, Any] = np.empty(len(labels), dtype=object)
    for at, label in enumerate(labels):  # np.array would turn labels that are tuples into further axes
        boxed[at] = label
    return boxed


def _labels(array: xarray.DataArray, dim: str) -> list[Hashable]:
    """The values of an index coordinate as Python objects."""
    index = array.indexes[dim]
    values = array.coords[dim].values
    if values.dtype.kind in "mM":
        whole = values.astype(f"{values.dtype.kind}8[us]")
        # Python's own dates are exact to the microsecond; finer ones stay what pandas has.
        return list(whole.tolist()) if bool((whole == values).all()) else list(index)
    return list(index) if values.dtype.kind == "O" else list(values.tolist())
