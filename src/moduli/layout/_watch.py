"""Knowing at every step, in microseconds, that a module still has the parameters it had."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_read_parameters = itemgetter("_parameters")
_read_children = itemgetter("_modules")


class RegistrySwaps:
    """Counts how often edits have given modules other registries, in place of other entries in those they had.

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
"""Those of all models."""

# How many looks trust that modules have the registries they had. Few programs other than particles ever exchange these.
_TRUSTED = 64


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
        self._hold_registries()
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
        """Take the registries that the modules have now, so that the next looks need not find them in their dictionaries."""
        self._swaps, self._looks = SWAPS.count, _TRUSTED
        self._registries: list[dict[str, Any]] = list(map(_read_parameters, self._states))
        self._inside: tuple[list[Any], list[Any]] = (
            list(map(_read_children, self._leaves)),
            list(map(_read_children, self._parents)),
        )


def _find(registry: Mapping[str, Any], name: str) -> Any:
    return registry.get(name, registry)


def _may_equal_others(value: Any) -> bool:
    """Whether `==` with another object may be true: tensors with one element, and modules that define it."""
    if isinstance(value, Tensor):
        return is_lazy(value) or value.numel() <= 1 or type(value).__eq__ is not Tensor.__eq__
    own: Any = type(value).__eq__
    return value is not None and own is not object.__eq__
