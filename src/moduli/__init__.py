"""Models as values: tensors that know their axes, and what is built from them.

A `Space` is the ordered labels of one axis, a `Tensor` is data with one Space per axis, and `moduli.labels` explains what
can be done with them. A `Module` owns such tensors, derives virtual ones (`moduli.nn`), and is a value that can be added,
scaled and merged, with versions of its structure (`moduli.particles`); a `Population` is many of them as one matrix
(`moduli.population`). `Device` says where things live, `moduli.layout` turns the structure of any module into numbers,
`moduli.kernels` runs one function over many tensors in one pass, and `moduli.linalg` has linear operators and the solvers
for them.

An `Optimizer` is a chain of links (`moduli.optim`), which are in `moduli.m`; finished chains are in `moduli.presets`.
`minimize` is the functional form, `curve_fit` fits a model to data, `search` works without gradients (`moduli.evolve`),
`save`, `load` and `Checkpointer` keep everything (`moduli.io`), `moduli.lab` races optimizers, and `moduli.testing` checks
links of your own.

A room is imported when one of its names is first used, so that `import moduli` costs little more than `import torch`.
"""

import gc as _gc
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import axes as axes
    from . import device as device
    from . import evolve as evolve
    from . import io as io
    from . import kernels as kernels
    from . import lab as lab
    from . import labels as labels
    from . import layout as layout
    from . import linalg as linalg
    from . import m as m
    from . import merge as merge
    from . import nn as nn
    from . import optim as optim
    from . import particles as particles
    from . import population as population
    from . import presets as presets
    from . import testing as testing
    from ._minimize import Result as Result
    from ._minimize import curve_fit as curve_fit
    from ._minimize import minimize as minimize
    from ._minimize import scipy_method as scipy_method
    from .device import Device as Device
    from .device import DeviceBounded as DeviceBounded
    from .evolve import search as search
    from .io import Checkpointer as Checkpointer
    from .io import CheckpointError as CheckpointError
    from .io import load as load
    from .io import save as save
    from .labels import *
    from .nn import VirtualTensor as VirtualTensor
    from .nn import cached as cached
    from .nn import invalidate as invalidate
    from .nn import nograd_tensors as nograd_tensors
    from .nn import virtual as virtual
    from .optim import Optimizer as Optimizer
    from .optim import closure as closure
    from .particles import Module as Module
    from .particles import adopt as adopt
    from .particles import differentiable as differentiable
    from .population import Population as Population


# The `moduli` command does not import torch until it needs it; any other program registers labelled tensors with torch here.
# While Python imports this package for `python -m moduli`, the first argument is still "-m". It is also "-m" if the package of
# another `python -m` imports this one, hence the second condition.
_is_command = "moduli_command" in _sys.modules or (
    _sys.argv[:1] == ["-m"] and ("-m", "moduli") in zip(_sys.orig_argv, _sys.orig_argv[1:], strict=False)
)
if not _is_command:
    from ._accessor import watch_xarray as _watch_xarray
    from ._loading import allow_labels as _allow_labels
    from ._torch import require_torch as _require_torch

    _require_torch()
    _allow_labels()
    _watch_xarray()

# The room of each public name that is not in `labels`; "room.name" if the name is another one there.
_PLACES = {
    "Checkpointer": "io",
    "CheckpointError": "io",
    "Device": "device",
    "DeviceBounded": "device",
    "Module": "particles",
    "Optimizer": "optim",
    "Population": "population",
    "Result": "_minimize",
    "VirtualTensor": "nn",
    "adopt": "particles",
    "cached": "nn",
    "closure": "optim",
    "curve_fit": "_minimize",
    "differentiable": "particles",
    "invalidate": "nn",
    "load": "io",
    "minimize": "_minimize",
    "nograd_tensors": "nn",
    "save": "io",
    "scipy_method": "_minimize",
    "search": "evolve",
    "virtual": "nn",
}
_ROOMS = {
    *("axes", "device", "evolve", "io", "kernels", "lab", "labels", "layout", "linalg"),
    *("m", "merge", "nn", "optim", "particles", "population", "presets", "testing"),
}


if not TYPE_CHECKING:  # with a module `__getattr__`, a type checker would accept any name

    def _load(room: str) -> _Any:
        """Import a room with the garbage collector off: its objects stay, and a collection visits all objects of torch."""
        collects = _gc.isenabled()
        _gc.disable()
        try:
            return _import_module(f"{__name__}.{room}")
        finally:
            if collects:
                _gc.enable()

    def __getattr__(name: str) -> _Any:
        if name in _ROOMS:
            return _load(name)
        if name == "__all__":
            return ["__version__", *sorted({*_ROOMS, *_PLACES, *_load("labels").__all__})]
        room, _, original = _PLACES.get(name, "labels").partition(".")
        if name.startswith("_") or (room == "labels" and name not in _load(room).__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = getattr(_load(room), original or name)
        globals()[name] = value  # the next access does not call `__getattr__`
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
