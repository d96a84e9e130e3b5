"""Checks, in microseconds, that a module still has the parameters it had, or the whole structure."""

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


class RegistrySwaps:
    """A count of the edits that replaced registries of modules, instead of entries in existing registries.

    Example:
        >>> from moduli.layout import RegistrySwaps
        >>> swaps = RegistrySwaps()
        >>> swaps.add()
        >>> swaps.count
        1
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Count one more."""
        self.count += 1


SWAPS = RegistrySwaps()
"""The replacements in all models."""

# The number of checks between two readings of the registries. Few programs other than particles ever replace registries.
_TRUSTED = 64


class ParameterWatch:
    """The parameters and modules of a live tree by identity, to be compared with the tree later.

    `read` compares sizes, buffers and classes as well, which takes ten times as long; a step of an optimizer only needs to know
    that the tensors it moves are those of the model. Values may change, also by `.data = ...`.

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

    __slots__ = (
        *(
            "_children",
            "_exact",
            "_inside",
            "_leaves",
            "_looks",
            "_named",
            "_parameters",
            "_parents",
            "_registries",
            "_root",
        ),
        *("_states", "_swaps"),
    )

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        modules = list(root.modules())
        self._states: list[dict[str, Any]] = [module.__dict__ for module in modules]
        #: The named parameters, where modules compute their registries on access (TorchScript).
        self._named: list[tuple[str, Tensor]] | None = None
        registries = [state.get(kind) for state in self._states for kind in ("_parameters", "_modules")]
        if not all(isinstance(registry, dict) for registry in registries):
            self._named = list(root.named_parameters())
            return
        self._parameters: list[dict[str, Any]] = [dict(state["_parameters"]) for state in self._states]
        # Most modules have no children: that they still have none is checked without a comparison.
        self._leaves = [state for state in self._states if not state["_modules"]]
        self._parents = [state for state in self._states if state["_modules"]]
        self._children: list[dict[str, Any]] = [dict(state["_modules"]) for state in self._parents]
        self._hold_registries()
        #: Objects that may compare equal to others, so are compared by identity: module state, kind, name, object.
        self._exact = [
            (state, kind, name, value)
            for state in self._states
            for kind in ("_parameters", "_modules")
            for name, value in state[kind].items()
            if _may_equal_others(value)
        ]

    def has_changed(self) -> bool:
        """Whether a parameter or module was added, removed, replaced or renamed since.

        Registries are compared with copies of them. The interpreter compares values by identity first, so unchanged registries
        cost one pass; a replaced tensor is compared by value, which raises, and counts as a change.
        """
        if self._named is not None:
            now = list(self._root.named_parameters())
            pairs = zip(now, self._named, strict=False)
            return len(now) != len(self._named) or any(a[0] != b[0] or a[1] is not b[1] for a, b in pairs)
        self._looks -= 1
        try:
            if not self._looks or self._swaps != SWAPS.count:
                self._hold_registries()
            if self._registries != self._parameters or any(self._inside[0]) or self._inside[1] != self._children:
                return True
        except (KeyError, RuntimeError, TypeError, ValueError):
            return True
        return any(_find(state[kind], name) is not value for state, kind, name, value in self._exact)

    def _hold_registries(self) -> None:
        """Store the current registries of the modules, so that the next checks need not look them up."""
        self._swaps, self._looks = SWAPS.count, _TRUSTED
        self._registries: list[dict[str, Any]] = list(map(_read_parameters, self._states))
        self._inside: tuple[list[Any], list[Any]] = (
            list(map(_read_children, self._leaves)),
            list(map(_read_children, self._parents)),
        )


def _find(registry: Mapping[str, Any], name: str) -> Any:
    return registry.get(name, registry)


def _may_equal_others(value: Any) -> bool:
    """Whether `==` with another object may be true: tensors of at most one element, and modules that define `__eq__`."""
    if isinstance(value, Tensor):
        return is_lazy(value) or value.numel() <= 1 or type(value).__eq__ is not Tensor.__eq__
    own: Any = type(value).__eq__
    return value is not None and own is not object.__eq__


class TreeWatch:
    """A reading of a live module tree, and the check that it is still current, in half of the time that `read` takes.

    Every registry is compared with a copy of it, and every tensor's dtype, shape and device with the former ones, so the check
    detects whatever `read` would, also edits of the registries themselves. The watch refers to everything below the root, and
    is meant to be stored in the root; the root is passed at every call, so that there is no reference cycle.

    Args:
        reading: The last reading; `TreeWatch.of` checks that it is still current once the watch exists.

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
        #: Objects that may compare equal to others, so are compared by identity: position of the registry, name, object.
        self._exact = [
            (place, name, value)
            for place, registry in enumerate(self._registries)
            for name, value in registry.items()
            if _may_equal_others(value)
        ]
        #: The positions of modules with labels, or with buffers, which may be non-persistent.
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
        """Return a reading of the tree if it is unchanged, otherwise None."""
        modules = [root, *self._below]
        try:
            registries = list(chain.from_iterable(map(_read_registries, map(vars, modules))))
            if registries != self._registries or list(chain.from_iterable(registries)) != self._names:
                return None
            if self._owners and any(_read_owned(modules[place]) != owned for place, owned in self._owners):
                return None
        except (KeyError, RuntimeError, TypeError, ValueError):  # a replaced tensor is compared by value, which raises
            return None
        if list(map(type, modules)) != self._kinds:
            return None
        if list(map(_read_sizes, self._tensors)) != self._sizes:
            return None
        if self._exact and any(registries[place].get(name) is not value for place, name, value in self._exact):
            return None
        return Reading(*self._seen, modules)


def _read_owned(module: nn.Module) -> tuple[set[str], list[Any]]:
    """Return the parts of a module that a structure contains beside its registries: non-persistent names and labels."""
    labelled: dict[str, Any] = vars(module).get("_labelled") or {}
    return set(module._non_persistent_buffers_set), list(labelled.values())
