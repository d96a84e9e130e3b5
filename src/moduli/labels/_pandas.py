"""To and from pandas: a vector is a Series, a matrix a DataFrame, more axes an index of several levels.

pandas is an optional dependency, imported when it is used.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ._axes import axes_of
from ._space import Space
from ._tensor import Tensor, finish, method
from ._xarray import as_coordinate, find_name

if TYPE_CHECKING:
    import pandas as pd


@method
def to_pandas(t: Tensor, name: str | None = None) -> Any:
    """Convert the tensor to a `pandas.Series` (one axis) or a `pandas.DataFrame` (two), with a copy of the values.

    Labels become an index of the name of the axis; a positional axis has a RangeIndex.

    Args:
        t: The tensor, on any device.
        name: The name of a Series; by default the one that it had in xarray.

    Returns:
        The Series or DataFrame; a number for a tensor without axes.

    Raises:
        ImportError: If pandas is not installed.
        RuntimeError: If gradients are recorded for the tensor; call ``t.detach()`` first.
        ValueError: If there are more than two axes; `to_dataframe` takes any number.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], city=["Rome", "Paris"]).to_pandas().to_dict()
        {'Rome': 1.0, 'Paris': 2.0}
    """
    values = _values(t, "to_pandas")
    if t.ndim > 2:
        raise ValueError(f"pandas has no table of {t.ndim} axes; t.to_dataframe() has one row per entry")
    pandas = _pandas()
    indices = [_index(pandas, space) for space in t.dims]
    if not indices:
        return values.item()
    if len(indices) == 1:
        return pandas.Series(values, index=indices[0], name=name if name is not None else find_name(t))
    return pandas.DataFrame(values, index=indices[0], columns=indices[1])


@method
def to_dataframe(t: Tensor, name: str | None = None) -> pd.DataFrame:
    """Convert the tensor to a `pandas.DataFrame` with one row per entry, indexed by the labels of all axes.

    Further coordinates along axes are columns of their own.

    Args:
        t: The tensor, on any device.
        name: The name of the column; by default the one that it had in xarray, or ``"value"``.

    Raises:
        ImportError: If pandas is not installed.
        RuntimeError: If gradients are recorded for the tensor; call ``t.detach()`` first.
        ValueError: If the tensor has no axes.

    Example:
        >>> import moduli as mo
        >>> table = mo.tensor([[1.0, 2.0]], row=["a"], column=["p", "q"]).to_dataframe("height")
        >>> table["height"].to_dict()
        {('a', 'p'): 1.0, ('a', 'q'): 2.0}
    """
    values = _values(t, "to_dataframe")
    if not t.ndim:
        raise ValueError("a tensor without axes has no rows; use t.item()")
    pandas = _pandas()
    indices = [_index(pandas, space) for space in t.dims]
    index = indices[0] if t.ndim == 1 else pandas.MultiIndex.from_product(indices, names=list(t.names))
    columns: dict[Any, Any] = {}
    for further, entry in {} if t._axes.coordinates is None else t._axes.coordinates.entries.items():
        if entry.values is not None:
            own = entry.values.transpose(sorted(range(len(entry.dims)), key=lambda at: t.names.index(entry.dims[at])))
            shape = [size if dim in entry.dims else 1 for dim, size in zip(t.names, t.shape, strict=True)]
            columns[further] = np.broadcast_to(own.reshape(shape), t.shape).reshape(-1)
    columns[name or find_name(t) or "value"] = values.reshape(-1)
    table: pd.DataFrame = pandas.DataFrame(columns, index=index)
    return table


def from_pandas(data: Any, fill: float | None = None) -> Tensor:
    """Convert a `pandas.Series` or `pandas.DataFrame` of numbers to a labelled tensor, with a copy of the values.

    The index becomes the first axis and the columns the second, by their names; the levels of a MultiIndex become one axis
    each. A RangeIndex from 0 in steps of 1, which pandas gives to rows without labels, is positional.

    Args:
        data: The Series or DataFrame.
        fill: What stands for combinations of levels that do not occur; NaN by default, integers need one.

    Raises:
        ImportError: If pandas is not installed.
        TypeError: If the argument is neither, a column does not hold numbers, or integers would need NaN.
        ValueError: If a label occurs twice or is missing.

    Example:
        >>> import moduli as mo, pandas as pd
        >>> mo.from_pandas(pd.Series([1.0, 2.0], index=pd.Index(["a", "b"], name="x")))
        Tensor(x: a=1., b=2., dtype=torch.float64)
    """
    pandas = _pandas()
    if not isinstance(data, (pandas.Series, pandas.DataFrame)):
        raise TypeError(f"from_pandas takes a Series or a DataFrame, not a {type(data).__name__}")
    values = _read_numbers(pandas, data)
    spaces: list[Space] = []
    for axis, index in enumerate(data.axes):
        if isinstance(index, pandas.MultiIndex):
            levels, values = _unstack(pandas, index, values, len(spaces), fill)
            spaces += levels
        else:
            spaces.append(_read_space(pandas, index, f"the {'columns' if axis else 'index'}"))
    return finish(torch.from_numpy(np.array(values, order="C")), axes_of(spaces))


def _read_numbers(pandas: ModuleType, data: Any) -> np.ndarray[Any, Any]:
    columns = [(None, data)] if isinstance(data, pandas.Series) else list(data.items())
    for column, series in columns:
        if not (pandas.api.types.is_numeric_dtype(series.dtype) or pandas.api.types.is_bool_dtype(series.dtype)):
            called = "the series" if column is None else f"column {column!r}"
            raise TypeError(
                f"{called} holds {series.dtype}, which torch has no numbers for; make it an index, or drop it"
            )
    missing = any(pandas.api.types.is_extension_array_dtype(series.dtype) and series.hasnans for _, series in columns)
    values: np.ndarray[Any, Any] = data.to_numpy(dtype=np.float64, na_value=math.nan) if missing else data.to_numpy()
    if values.dtype == object:  # columns of booleans and numbers
        values = data.astype(np.float64).to_numpy()
    return values


def _unstack(
    pandas: ModuleType, index: Any, values: np.ndarray[Any, Any], axis: int, fill: float | None
) -> tuple[list[Space], np.ndarray[Any, Any]]:
    """Return the levels of an index as Spaces, and the values with an axis for each in place of one."""
    codes, spaces = [], []
    for level in range(index.nlevels):
        numbers, labels = pandas.factorize(index.get_level_values(level))
        if (numbers < 0).any():
            raise ValueError(f"level {index.names[level]!r} of the index has a missing label")
        codes.append(numbers)
        spaces.append(_read_space(pandas, labels.rename(index.names[level]), f"level {index.names[level]!r}"))
    if not index.is_unique:
        raise ValueError(f"the index has {index[index.duplicated()][0]!r} more than once, and labels are distinct")
    shape = [len(space) for space in spaces]
    if math.prod(shape) != len(index) and fill is None:
        if not np.issubdtype(values.dtype, np.inexact):
            raise TypeError(
                f"some combinations of levels do not occur, and {values.dtype} has no NaN for them; give fill=0"
            )
        fill = math.nan
    table = np.full(
        (*values.shape[:axis], *shape, *values.shape[axis + 1 :]), 0 if fill is None else fill, values.dtype
    )
    table[(slice(None),) * axis + tuple(codes)] = values
    return spaces, table


def _read_space(pandas: ModuleType, index: Any, called: str) -> Space:
    name = None if index.name is None else str(index.name)
    if isinstance(index, pandas.RangeIndex) and (index.start, index.step) == (0, 1):
        return Space(len(index), name)
    # A date with a time zone is an object, for which Space raises.
    labels = index if index.dtype.kind == "O" or getattr(index.dtype, "tz", None) is not None else index.to_numpy()
    try:
        return Space(labels.tolist() if labels is index else labels, name)
    except ValueError as error:
        raise ValueError(f"{called} can't label an axis: {error}") from None


def _values(t: Tensor, what: str) -> np.ndarray[Any, Any]:
    if t._data.requires_grad:
        raise RuntimeError(f"pandas can't carry gradients, and this tensor records them; use t.detach().{what}()")
    values: np.ndarray[Any, Any] = t._data.cpu().resolve_conj().resolve_neg().numpy().copy()
    return values


def _index(pandas: ModuleType, space: Space) -> Any:
    if space.labelled:
        return pandas.Index(as_coordinate(space), name=space.name, tupleize_cols=False)
    return pandas.RangeIndex(len(space), name=space.name)


def _pandas() -> ModuleType:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError("this needs pandas, which is not installed: pip install moduli[pandas]") from error
