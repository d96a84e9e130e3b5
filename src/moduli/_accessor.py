"""The accessor that xarray's arrays have once both libraries are imported, in either order: ``array.moduli.tensor``."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class XarrayAccessor:
    """The attribute ``moduli`` of an array or a dataset of xarray.

    Example:
        >>> import moduli as mo, xarray as xr
        >>> xr.DataArray([1.0, 2.0], dims="x", coords={"x": ["a", "b"]}).moduli.tensor
        Tensor(x: a=1., b=2., dtype=torch.float64)
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def tensor(self) -> Any:
        """The array as a labelled tensor, a dataset as a dict of them: `moduli.from_xarray` of it."""
        from .labels import from_xarray

        return from_xarray(self._array)


def watch_xarray() -> None:
    """Register the accessor: now if xarray is imported, otherwise when a program imports it. Nothing here imports it."""
    if sys.modules.get("xarray") is not None:
        _register(sys.modules["xarray"])
    if not any(isinstance(finder, _XarrayFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _XarrayFinder())


class _XarrayFinder(MetaPathFinder):
    """A finder that leaves the search for xarray to the other finders, and registers the accessor after each load."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "xarray":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: Any) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register(xarray: Any) -> None:
    if hasattr(xarray.DataArray, "moduli"):
        return
    xarray.register_dataarray_accessor("moduli")(XarrayAccessor)
    xarray.register_dataset_accessor("moduli")(XarrayAccessor)
