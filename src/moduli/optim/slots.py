"""Slots: the numbers under which links store state and look up settings.

An optimizer numbers its parameters once; the number is the parameter's slot. Every form in which a link may get a parameter
(its local shard, the whole of a sharded tensor, one member of a population) has the same slot. Tensors that links create
for their children (projections, concatenations, matrices of members) have new slots, with the settings of the
parameter that they are derived from. Links store state by slot, so nothing is copied or renamed when a parameter changes its form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Slots:
    """The numbering of the tensors that the links of one optimizer work on.

    Attributes:
        params: The tensor of each slot.
        names: Its name in saved state and errors; None for tensors of links, and for parameters that are in no group.
        groups: The position of the optimizer's group that it is in; -1 for none.
        sources: The slot whose settings apply: the slot itself for parameters.

    Example:
        >>> import torch
        >>> from moduli.optim.slots import Slots
        >>> slots, weight = Slots(), torch.zeros(2, 3)
        >>> slots.number(weight)
        0
        >>> with slots.show([weight[0]], [0]) as rows:
        ...     slots.find(rows[0])
        0
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.names: list[str | None] = []
        self.groups: list[int] = []
        self.sources: list[int] = []
        self._numbers: dict[Tensor, int] = {}

    def find(self, key: Tensor | str) -> int | None:
        """Return the slot of a tensor, or of the parameter with a name; None if there is none."""
        if isinstance(key, str):
            return self.names.index(key) if key in self.names else None
        return self._numbers.get(key)

    def number(self, tensor: Tensor, source: Tensor | None = None) -> int:
        """Return the slot of a tensor, a new one if it has none.

        Args:
            tensor: The tensor.
            source: The parameter whose settings apply, for a tensor of a link; None keeps the stored source.
        """
        slot = self._numbers.get(tensor)
        if slot is None:
            slot = self._numbers[tensor] = len(self.params)
            self.params.append(tensor)
            self.names.append(None)
            self.groups.append(-1)
            self.sources.append(slot)
        if source is not None:
            self.sources[slot] = self.number(source)
        return slot

    def alias(self, form: Tensor, slot: int) -> None:
        """Give another form of a parameter the same slot."""
        self._numbers[form] = slot

    def release(self, slot: int) -> None:
        """Remove the tensor of a link from its slot; the number is not used again."""
        self._numbers.pop(self.params[slot], None)

    def replace(self, before: Tensor, after: Tensor) -> int:
        """Give the slot of a parameter, with its state and name, to another tensor; return the slot."""
        slot = self.number(before)
        del self._numbers[before]
        self._numbers[after], self.params[slot] = slot, after
        return slot

    def remove(self, param: Tensor) -> None:
        """Remove a parameter; its slot is not used again."""
        self.params[self._numbers.pop(param)] = torch.empty(0)  # so that its memory is free

    def copy_tables(self) -> tuple[list[Tensor], dict[Tensor, int]]:
        """Return a copy of the tables that `replace` and `remove` change, for `restore_tables`."""
        return list(self.params), dict(self._numbers)

    def restore_tables(self, tables: tuple[list[Tensor], dict[Tensor, int]]) -> None:
        """Undo changes since `copy_tables`; slots that were added stay, unused."""
        self.params[: len(tables[0])], self._numbers = tables

    @contextmanager
    def show(self, forms: Sequence[Tensor], slots: Sequence[int]) -> Iterator[Sequence[Tensor]]:
        """Give temporary tensors the slots of parameters for a block."""
        self._numbers.update(zip(forms, slots, strict=True))
        try:
            yield forms
        finally:
            for form in forms:
                del self._numbers[form]

    def find_source(self, slot: int) -> int:
        """Return the slot of the parameter from which a link derived a tensor; the slot itself for a parameter."""
        while self.sources[slot] != slot:
            slot = self.sources[slot]
        return slot

    def find_param(self, tensor: Tensor) -> Tensor:
        """Return the parameter of which a tensor is a form, or from which a link derived it."""
        slot = self._numbers.get(tensor)
        return tensor if slot is None else self.params[self.find_source(slot)]

    def find_name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter of which a tensor is a form; None for tensors of links and unknown ones."""
        slot = self._numbers.get(tensor)
        return None if slot is None else self.names[slot]

    def name_params(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Number the parameters of an optimizer's groups, and name them by `param_names`, or by position."""
        self.names, self.groups = [None] * len(self.params), [-1] * len(self.params)
        position = 0
        for i, group in enumerate(groups):
            names = list(group.get("param_names") or ())
            names += [None] * (len(group["params"]) - len(names))  # parameters that a program added to the list itself
            for param, name in zip(group["params"], names, strict=True):
                slot = self.number(param)
                self.groups[slot], self.names[slot] = i, str(position) if name is None else name
                position += 1

    def __getstate__(self) -> dict[str, Any]:
        # The hash of a tensor is its identity, which a copy does not have.
        return {**self.__dict__, "_numbers": list(self._numbers.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_numbers": dict(state["_numbers"])})


def describe_params(params: Sequence[Tensor], slots: Slots) -> list[str]:
    """Return the names and sizes of parameters as plain text, to be compared and saved."""
    return [f"{slots.find_name(param) or '?'}:{param.numel()}" for param in params]
