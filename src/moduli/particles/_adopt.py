"""Making particles of modules that were not written to be any."""

from __future__ import annotations

import copy
import inspect
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from moduli.layout import LayoutError

from ._history import begin_here
from ._particle import ParticleMethods
from ._record import build, record_of
from ._skeleton import RECORD
from ._species import adopt_children
from .base import NytoModuleBase

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


P = TypeVar("P", bound=NytoModuleBase)


@overload
def adopt(module: P) -> P: ...
@overload
def adopt(module: nn.Module) -> Any: ...  # its class and the operators, which Python has no type for
def adopt(module: nn.Module) -> Any:
    """Make a particle of an existing module, in place: nothing in it is renamed, moved or copied.

    The module stays an instance of its class; it is given the operators and methods of `NytoModule`.

    Args:
        module: Any module.

    Returns:
        The module.

    Raises:
        TypeError: If it is no module, or one compiled by TorchScript.
        LayoutError: If it is lazy.

    Example:
        >>> from moduli.particles import adopt
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> keys = list(net.state_dict())
        >>> adopt(net) is net, isinstance(net, nn.Sequential), list(net.state_dict()) == keys
        (True, True, True)
        >>> torch.equal((net + net)[0].weight, 2 * net[0].weight)
        True
    """
    if isinstance(module, NytoModuleBase):
        return module
    if not isinstance(module, nn.Module):
        raise TypeError(f"adopt makes a particle of a torch.nn.Module, not of a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("a module compiled by TorchScript cannot be rebuilt; adopt the module it was compiled from")
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise LayoutError(
            f"this {type(module).__name__} is lazy: it becomes a module of another class when it has seen data; run one "
            "forward pass first"
        )
    made: Any = make_adopted_class(type(module))
    module.__class__ = made
    record_of(module)
    adopt_children(module)
    return module


def make_adopted_class(kind: type[nn.Module]) -> Any:
    """The class of adopted modules of a class: itself, with the methods of particles."""
    known = _classes.get(kind)
    if known is None:
        names: dict[str, Any] = {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__qualname__": kind.__qualname__,
            "_adopted": kind,
        }
        if hasattr(kind, "history"):  # what a class calls so itself has the name
            names["history"] = inspect.getattr_static(kind, "history")
        if hasattr(kind, "__deepcopy__"):
            names["__deepcopy__"] = _deepcopy
        if "_wrapped_call" in vars(kind):
            # A graph module that is recompiled calls what its class says, which would be the call that it wraps already.
            names["__call__"] = nn.Module.__call__
        known = type(kind.__name__, (_Adopted, kind), names)
        _classes[kind] = known
    return known


class _Adopted(ParticleMethods):
    """Lets adopted modules be copied and pickled, although their class has no name to be found under."""

    _adopted: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._adopted.__reduce__ is not object.__reduce__:
            return _readopt, (_abandon(self), record_of(self))
        return _empty, (self._adopted,), self.__getstate__()


# Graph modules of torch.fx have ways of their own to be copied and pickled: their particles are, without what makes them one.


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    twin = memo[id(self)] = _readopt(copy.deepcopy(_abandon(self), memo), copy.deepcopy(record_of(self), memo))
    return twin


def _abandon(particle: Any) -> Any:
    """An object of the adopted class around what a particle holds."""
    build(particle)
    plain: Any = object.__new__(particle._adopted)
    plain.__dict__.update({key: held for key, held in particle.__dict__.items() if key != RECORD})
    return plain


def _readopt(plain: nn.Module, record: Any) -> Any:
    made: Any = adopt(plain)
    made.__dict__[RECORD] = record
    begin_here(made, record)
    if record.version is not None:
        record.version.species.members.add(made)
    adopt_children(made)
    return made


def _empty(kind: type[nn.Module]) -> nn.Module:
    made: nn.Module = object.__new__(make_adopted_class(kind))
    return made
