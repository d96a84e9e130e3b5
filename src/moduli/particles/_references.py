"""References from the plain attributes of a model to the model itself, which a copy of the model must not share.

An attribute from which no part of the model is reachable is shared by the copy. Otherwise every object on the path to that
part is rebuilt with the copy's part instead: containers, partials, bound methods, closures, weak references,
dataclasses, namespaces and other objects. An object that cannot be rebuilt raises an error with the attribute's name.

The search goes through at most `_MOST_STEPS` objects in a row. A container whose first 256 items lead to no part
of the model holds data, and is not searched further. Classes, other models and global variables are not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ._anatomy import SCALARS, Anatomy, choose_dissection
from .errors import StructureError

_MOST_STEPS = 6


class ModelPlace(NamedTuple):
    """A module (kind 0), parameter (1) or buffer (2) of the model itself, by its key."""

    kind: int
    key: Any


class Rebuilding:
    """A plan for rebuilding an object that refers to a model, without a reference to the model itself.

    Attributes:
        start: Returns an empty object, to which others may refer before it is filled; None for immutable objects.
        finish: Takes that object and the parts, and returns the object.
        parts: The parts of the object: values, places in the model, and other plans.
    """

    __slots__ = ("finish", "parts", "start")

    def __init__(self, start: Callable[[], Any] | None, finish: Callable[[Any, list[Any]], Any]) -> None:
        self.start = start
        self.finish = finish
        self.parts: list[Any] = []


class References:
    """Replaces references to parts of a model by places, in any value.

    Args:
        places: The parts of the model by `id`.
        strict: Whether references that a copy cannot have raise; otherwise the value is unmodified.
    """

    def __init__(self, places: Mapping[int, ModelPlace], strict: bool = True) -> None:
        self.places = places
        self.strict = strict
        # By `id`; values are stored so that no other object takes their place in memory.
        self._values: dict[int, Any] = {}
        self._anatomies: dict[int, Anatomy] = {}
        self._reaching: set[int] = set()
        self._plans: dict[int, Rebuilding] = {}

    def link(self, value: Any, owner: str) -> Any:
        """Return a place or a plan for a value that refers to the model, and any other value unmodified.

        Args:
            value: The value of an attribute.
            owner: The attribute, for errors.

        Raises:
            StructureError: If it refers to the model through an object that cannot be rebuilt.
        """
        place = self.places.get(id(value))
        if place is not None:
            return place
        if self.strict and isinstance(value, torch.ScriptObject):
            raise StructureError(
                f"{owner} is a TorchScript object, such as the packed weights of a quantized layer: operations would not act on "
                "the numbers in it. Operate on the model before it is quantized, and quantize the result"
            )
        self._search([value])
        return self._plan(value, owner) if id(value) in self._reaching else value

    def _search(self, values: list[Any]) -> None:
        """Find the objects from which the model is reachable."""
        steps = 0
        while values and steps < _MOST_STEPS:
            steps += 1
            following: list[Any] = []
            for value in values:
                kind: Any = type(value)
                if kind in SCALARS or id(value) in self._values:
                    continue
                dissect = choose_dissection(kind)
                anatomy = None if dissect is None else dissect(value)
                if anatomy is not None and anatomy.parts:
                    self._values[id(value)], self._anatomies[id(value)] = value, anatomy
                    following += anatomy.parts
            values = following
        self._mark()
        for key in self._reaching:
            anatomy = self._anatomies[key]
            if anatomy.rest is not None:
                self._anatomies[key] = anatomy._replace(parts=[*anatomy.parts, *anatomy.rest], rest=None)
                self._search(anatomy.rest)
                return

    def _mark(self) -> None:
        reaching = self._reaching
        count = -1
        while count != len(reaching):
            count = len(reaching)
            # The objects found last are nearest to the model.
            for key, anatomy in reversed(self._anatomies.items()):
                if key not in reaching and any(id(p) in self.places or id(p) in reaching for p in anatomy.parts):
                    reaching.add(key)

    def _plan(self, value: Any, owner: str) -> Any:
        key = id(value)
        if key in self.places:
            return self.places[key]
        if key not in self._reaching:
            return value
        plan = self._plans.get(key)
        if plan is None:
            parts, start, finish, _ = self._anatomies[key]
            if finish is None:
                if not self.strict:
                    return value
                raise StructureError(
                    f"{owner} refers to the model itself through an object of class {type(value).__qualname__}, for which a "
                    "copy of the model cannot have one of its own; keep it outside of the model, or refer to the "
                    "model's parts by name"
                )
            plan = self._plans[key] = Rebuilding(start, finish)
            plan.parts = [self._plan(part, owner) for part in parts]
        return plan


def resolve(value: Any, tables: Any) -> Any:
    """Return the object of a place or plan in another model; other values unmodified.

    Args:
        value: A result of `References.link`.
        tables: The modules, parameters and buffers of the model by key, and a dict of the objects made so far.
    """
    if type(value) is ModelPlace:
        return tables[value.kind][value.key]
    if type(value) is not Rebuilding:
        return value
    objects: dict[Rebuilding, Any] = tables[3]
    if value not in objects:
        twin = None
        if value.start is not None:
            twin = objects[value] = value.start()
        objects[value] = value.finish(twin, [resolve(part, tables) for part in value.parts])
    return objects[value]


def list_places(value: Any, seen: set[int] | None = None) -> set[ModelPlace]:
    """Return the places that a place or plan refers to."""
    if type(value) is ModelPlace:
        return {value}
    seen = set() if seen is None else seen
    if type(value) is dict:
        return set[ModelPlace]().union(*(list_places(part, seen) for part in value.values()))
    if type(value) is not Rebuilding or id(value) in seen:
        return set()
    seen.add(id(value))
    return set[ModelPlace]().union(*(list_places(part, seen) for part in value.parts))
