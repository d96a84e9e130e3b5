"""One module that takes the parameters and buffers of any member for the time of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Swap:
    """Every place in a module tree that holds one of its tensors, so that others can be put there and taken out again.

    Parameters and buffers are registered under one or more names; some modules also keep them in lists (an LSTM does, in
    `_flat_weights`), where they are exchanged too.
    """

    __slots__ = ("_buffers", "_lists", "_parameters", "module")

    def __init__(self, module: nn.Module, entries: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self.module = module
        places = {id(tensor): place for place, tensor in enumerate(entries)}
        kept = {id(tensor): place for place, tensor in enumerate(buffers)}
        self._parameters: list[tuple[dict[str, Any], str, int]] = []
        self._buffers: list[tuple[dict[str, Any], str, int]] = []
        self._lists: list[tuple[dict[str, Any], str, Any, list[int]]] = []
        for each in module.modules():
            for slots, known, found in (
                (each._parameters, places, self._parameters),
                (each._buffers, kept, self._buffers),
            ):
                found += [(slots, name, known[id(held)]) for name, held in slots.items() if id(held) in known]
            for key, held in each.__dict__.items():
                if isinstance(held, list | tuple) and any(id(item) in places for item in held):
                    self._lists.append((each.__dict__, key, held, [places.get(id(item), -1) for item in held]))

    def put(self, parameters: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
        """Put tensors in; returns what was there, for `restore`."""
        before = [slots[name] for slots, name, _ in self._parameters] + [
            slots[name] for slots, name, _ in self._buffers
        ]
        before += [state[key] for state, key, _, _ in self._lists]
        for slots, name, place in self._parameters:
            slots[name] = parameters[place]
        for slots, name, place in self._buffers:
            slots[name] = buffers[place]
        for state, key, held, places in self._lists:
            filled = [item if place < 0 else parameters[place] for item, place in zip(held, places, strict=True)]
            state[key] = filled if isinstance(held, list) else tuple(filled)
        return before

    def find_rebound(self, buffers: Sequence[Any]) -> dict[int, Any]:
        """The buffers that a call replaced by other tensors, by place."""
        found: dict[int, Any] = {}
        for slots, name, place in self._buffers:
            held = slots.get(name)
            if held is not buffers[place] and held is not None:
                found.setdefault(place, held)
        return found

    def restore(self, before: list[Any]) -> None:
        """Take the tensors out again."""
        items = iter(before)
        for slots, name, _ in (*self._parameters, *self._buffers):
            slots[name] = next(items)
        for state, key, _, _ in self._lists:
            state[key] = next(items)
