"""Parameters that an edit has removed from a model, so that an optimizer which still has them can raise."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn


class RemovedParameters:
    """The parameters that edits have removed from models, with their former names; references are weak.

    Attributes:
        count: How often parameters were marked; an unchanged count means that none were.

    Example:
        >>> import torch
        >>> from moduli.layout import RemovedParameters
        >>> removed, net = RemovedParameters(), nn.Linear(2, 1)
        >>> before = list(net.named_parameters())
        >>> net.bias = None
        >>> removed.mark(before, net)
        >>> removed.find([param for _, param in before])
        ['bias']
    """

    def __init__(self) -> None:
        self.count = 0
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def mark(self, before: Iterable[tuple[str, Tensor]], root: nn.Module) -> None:
        """Mark those parameters that a model had before an edit and does not have now."""
        here = {id(param) for _, param in list_registered(root)}
        for name, param in before:
            if id(param) not in here:
                self.count += 1
                self._names[id(param)] = weakref.ref(param), name
        for key, (reference, _) in list(self._names.items()):
            if reference() is None or key in here:
                del self._names[key]

    def discard(self, params: Iterable[Tensor]) -> None:
        """Remove the marks of parameters that were passed to an optimizer on purpose."""
        for param in params if self._names else ():
            self._names.pop(id(param), None)

    def find(self, params: Iterable[Tensor]) -> list[str]:
        """Return the former names of those parameters that were removed."""
        entries = [(param, self._names.get(id(param))) for param in params] if self._names else []
        return [entry[1] for param, entry in entries if entry is not None and entry[0]() is param]


def list_registered(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters in the registries of a tree by name, also while a module in it is still being built.

    `named_parameters` of a `moduli.nn.Module` warns of declared names that were not assigned.
    """
    return [
        (f"{path}.{name}" if path else name, param)
        for path, module in root.named_modules()
        for name, param in module._parameters.items()
        if param is not None
    ]


REMOVED = RemovedParameters()
"""The removed parameters of all models."""
