"""Knowing at every step, in microseconds, that a module still has the parameters it had, or the whole structure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._structure import OWNS_LABELS, Reading, read

_read_sizes = attrgetter("dtype", "shape", "device")
_read_registries = itemgetter("_parameters", "_buffers", "_modules")
_read_parameters = itemgetter("_parameters")
_read_children = itemgetter("_modules")


class ParameterWatch:
    """The parameters and modules of a live tree by identity, to be compared with what is there later.

    `read` compares sizes, buffers and classes as well, which takes ten times as long; a step of an optimizer only has to know that
    the tensors it moves are those of the model. Values may change, also by `.data = ...`.

    Args:
        root: The module.

    Example:
        >>> from torch import nn
        >>> from moduli.layout import ParameterWatch
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> watch = ParameterWatch(net)
        >>> watch.has_changed()
        False
        >>> _ = net.append(nn.Linear(2, 1))
        >>> watch.has_changed()
        True
    """

    __slots__ = ("_children", "_exact", "_leaves", "_named", "_parameters", "_parents", "_root", "_states")

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        modules = list(root.modules())
        self._states: list[dict[str, Any]] = [module.__dict__ for module in modules]
        #: The named parameters, where modules make their registries only when asked for them (TorchScript).
        self._named: list[tuple[str, Tensor]] | None = None
        registries = [state.get(kind) for state in self._states for kind in ("_parameters", "_modules")]
        if not all(isinstance(registry, dict) for registry in registries):
            self._named = list(root.named_parameters())
            return
        self._parameters: list[dict[str, Any]] = [dict(state["_parameters"]) for state in self._states]
        # Most modules have no children: to see that they still have none takes no comparison.
        self._leaves = [state for state in self._states if not state["_modules"]]
        self._parents = [state for state in self._states if state["_modules"]]
        self._children: list[dict[str, Any]] = [dict(state["_modules"]) for state in self._parents]
        #: What may be equal to something else: the registry (by module and kind), the name, and the object.
        self._exact = [
            (state, kind, name, value)
            for state in self._states
            for kind in ("_parameters", "_modules")
            for name, value in state[kind].items()
            if _may_equal_others(value)
        ]

    def has_changed(self) -> bool:
        """Whether a parameter or module was added, removed, replaced or renamed since.

        Mappings are compared with copies of them: the interpreter compares their values by identity first, so that nothing else
        is looked at where nothing has changed. A tensor that was replaced is compared by value then, which raises.
        """
        if self._named is not None:
            now = list(self._root.named_parameters())
            pairs = zip(now, self._named, strict=False)
            return len(now) != len(self._named) or any(a[0] != b[0] or a[1] is not b[1] for a, b in pairs)
        try:
            if list(map(_read_parameters, self._states)) != self._parameters:
                return True
            if any(map(_read_children, self._leaves)) or list(map(_read_children, self._parents)) != self._children:
                return True
        except (KeyError, RuntimeError, TypeError, ValueError):
            return True
        return any(_find(state[kind], name) is not value for state, kind, name, value in self._exact)


def _find(registry: Mapping[str, Any], name: str) -> Any:
    return registry.get(name, registry)


def _may_equal_others(value: Any) -> bool:
    """Whether `==` with another object may be true: tensors with one element, and modules that define it."""
    if isinstance(value, Tensor):
        return is_lazy(value) or value.numel() <= 1 or type(value).__eq__ is not Tensor.__eq__
    own: Any = type(value).__eq__
    return value is not None and own is not object.__eq__


class TreeWatch:
    """A reading of a live module tree that can be checked to still hold, in half of the time that `read` takes.

    Every registry is compared with a copy of it, and every tensor's dtype, shape and device with what they were, so whatever
    `read` would notice is noticed, also edits of registries themselves. It refers to everything below the root and belongs to
    whatever the root owns; the root is passed at every call, so that there is no cycle.

    Args:
        reading: What was just read; `TreeWatch.of` checks that it still holds when the watch has been made.

    Example:
        >>> from torch import nn
        >>> from moduli.layout import TreeWatch, read
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> watch = TreeWatch.of(net, read(net))
        >>> watch.read(net).structure is read(net).structure
        True
        >>> net[0]._parameters["bias"] = None
        >>> watch.read(net) is None
        True
    """

    __slots__ = ("_below", "_exact", "_kinds", "_names", "_owners", "_registries", "_seen", "_sizes", "_tensors")

    def __init__(self, reading: Reading) -> None:
        modules = reading.modules
        self._seen = reading.structure, reading.parameters, reading.buffers
        self._below = modules[1:]
        self._kinds = list(map(type, modules))
        self._registries = list(map(dict, chain.from_iterable(map(_read_registries, map(vars, modules)))))
        # Equal dictionaries may differ in order.
        self._names = list(chain.from_iterable(self._registries))
        self._tensors = [*reading.parameters, *reading.buffers]
        self._sizes = list(map(_read_sizes, self._tensors))
        #: What may be equal to something else: the place of the registry, the name, and the object.
        self._exact = [
            (place, name, value)
            for place, registry in enumerate(self._registries)
            for name, value in registry.items()
            if _may_equal_others(value)
        ]
        #: The places of modules that have more: labels, or buffers that may not be saved.
        self._owners = [
            (place, _read_owned(module))
            for place, module in enumerate(modules)
            if module._buffers or (vars(module).get("_labelled") and hasattr(type(module), OWNS_LABELS))
        ]

    @classmethod
    def of(cls, root: nn.Module, reading: Reading) -> TreeWatch | None:
        """Return the watch of a tree that was just read; None if it cannot be watched, or another thread edits it meanwhile.

        Args:
            root: The tree.
            reading: The reading of it.
        """
        try:
            watch = cls(reading)
        except (KeyError, RuntimeError):  # TorchScript has no registries in `__dict__`
            return None
        parts = {id(part) for registry in watch._registries for part in registry.values() if part is not None}
        same = parts <= set(map(id, chain(reading.modules, reading.parameters, reading.buffers)))
        return watch if same and read(root).structure is reading.structure and watch.read(root) is not None else None

    def read(self, root: nn.Module) -> Reading | None:
        """Return a reading of the tree if it is what it was, otherwise None."""
        modules = [root, *self._below]
        try:
            registries = list(chain.from_iterable(map(_read_registries, map(vars, modules))))
            if registries != self._registries or list(chain.from_iterable(registries)) != self._names:
                return None
            if self._owners and any(_read_owned(modules[place]) != owned for place, owned in self._owners):
                return None
        except (KeyError, RuntimeError, TypeError, ValueError):  # as a tensor that was replaced is compared by value
            return None
        if list(map(type, modules)) != self._kinds:
            return None
        if list(map(_read_sizes, self._tensors)) != self._sizes:
            return None
        if self._exact and any(registries[place].get(name) is not value for place, name, value in self._exact):
            return None
        return Reading(*self._seen, modules)


def _read_owned(module: nn.Module) -> tuple[set[str], list[Any]]:
    """Return what a structure contains of a module beside its registries."""
    labelled: dict[str, Any] = vars(module).get("_labelled") or {}
    return set(module._non_persistent_buffers_set), list(labelled.values())
