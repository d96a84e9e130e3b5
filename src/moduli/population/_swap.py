"""One module that takes the parameters and buffers of any member for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Swap:
    """Every place in a module tree that holds one of its tensors, so that others can be put there and taken out again.

    Parameters and buffers are registered under one or more names; some modules also keep them in lists (an LSTM does, in
    `_flat_weights`), where they are exchanged too.
    """

    def __init__(self, module: nn.Module, entries: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
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

    @contextmanager
    def exchange(self, parameters: Sequence[Any], buffers: Sequence[Any]) -> Iterator[None]:
        """A block in which the module holds other tensors."""
        slots = [(held, name, parameters[place]) for held, name, place in self._parameters]
        slots += [(held, name, buffers[place]) for held, name, place in self._buffers]
        for state, key, held, places in self._lists:
            filled = [item if place < 0 else parameters[place] for item, place in zip(held, places, strict=True)]
            slots.append((state, key, filled if isinstance(held, list) else tuple(filled)))
        before = [held[name] for held, name, _ in slots]
        for held, name, value in slots:
            held[name] = value
        try:
            yield
        finally:
            for (held, name, _), value in zip(slots, before, strict=True):
                held[name] = value

    def find_rebound(self, buffers: Sequence[Any]) -> dict[int, Any]:
        """The buffers that a call replaced by other tensors, by place."""
        found: dict[int, Any] = {}
        for slots, name, place in self._buffers:
            held = slots.get(name)
            if held is not buffers[place] and held is not None:
                found.setdefault(place, held)
        return found
