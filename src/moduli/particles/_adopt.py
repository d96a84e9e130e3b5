"""`adopt`: turns an existing torch module into a particle, in place."""

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
    """Turn an existing module into a particle, in place: nothing in it is renamed, moved or copied.

    The module stays an instance of its class; it gets the operators and methods of `NytoModule`.

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
    module.__class__ = make_adopted_class(type(module))
    record_of(module)
    adopt_children(module)
    return module


def make_adopted_class(kind: type[nn.Module]) -> Any:
    """Return the class of adopted modules of a class: a subclass of it with the methods of particles."""
    adopted = _classes.get(kind)
    if adopted is None:
        names: dict[str, Any] = {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__qualname__": kind.__qualname__,
            "_adopted": kind,
        }
        if hasattr(kind, "history"):  # the class's own attribute takes precedence over that of particles
            names["history"] = inspect.getattr_static(kind, "history")
        if hasattr(kind, "__deepcopy__"):
            names["__deepcopy__"] = _deepcopy
        if "_wrapped_call" in vars(kind):
            # `__call__` of a compiled graph module wraps that of its class; looked up on the subclass, it would wrap itself.
            names["__call__"] = nn.Module.__call__
        adopted = type(kind.__name__, (_Adopted, kind), names)
        _classes[kind] = adopted
    return adopted


class _Adopted(ParticleMethods):
    """Copying and pickling of adopted modules, whose class cannot be imported by name."""

    _adopted: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._adopted.__reduce__ is not object.__reduce__:
            return _readopt, (_abandon(self), record_of(self))
        return _empty, (self._adopted,), self.__getstate__()


# Modules with their own `__deepcopy__` or `__reduce__`, such as graph modules of torch.fx, are copied and pickled as plain
# modules, and adopted again afterwards.


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    twin = memo[id(self)] = _readopt(copy.deepcopy(_abandon(self), memo), copy.deepcopy(record_of(self), memo))
    return twin


def _abandon(particle: Any) -> Any:
    """Return an object of the plain class with the attributes of a particle."""
    build(particle)
    plain: Any = object.__new__(particle._adopted)
    plain.__dict__.update({key: value for key, value in particle.__dict__.items() if key != RECORD})
    return plain


def _readopt(plain: nn.Module, record: Any) -> Any:
    particle: Any = adopt(plain)
    particle.__dict__[RECORD] = record
    begin_here(particle, record)
    if record.version is not None:
        record.version.species.members.add(particle)
    adopt_children(particle)
    return particle


def _empty(kind: type[nn.Module]) -> nn.Module:
    particle: nn.Module = object.__new__(make_adopted_class(kind))
    return particle
