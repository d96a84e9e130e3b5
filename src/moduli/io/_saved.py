"""The module part of a file, checked."""

from typing import Any, Final

import numpy as np

from ..particles import CONFIG_KEY as CONFIG
from ..particles import POLICIES, Event
from ._errors import CheckpointError, DamagedFileError
from ._json import has_form
from ._match import public_name
from ._read import Reader
from ._tree import decode, tensor_names

LABELS = "labels"
EXTRA = "_extra_state"
PARTS = ("optimizer", "population", "scheduler")
"""The parts of a checkpoint that are objects with a state dict, besides the module."""

_FORM: Final = {
    "module": {
        "extra_state": dict,
        "ties": {str: str},
        "history": [(int, str, [str], [str])],
        "policies": {str: [(str, POLICIES.__contains__)]},
        "virtual": [str],
        "frozen": [str],
    },
    **{part: {"many": {str: dict}} for part in PARTS},
}


class Saved:
    """The module part of a file.

    Raises:
        DamagedFileError: If what the file says about it makes no sense.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.content: dict[str, Any] = reader.content or {}
        for key, form in _FORM.items():
            if key in self.content and not has_form(self.content[key], form):
                raise DamagedFileError(f"what it says about {key} is malformed")
        self.present = reader.content is None or "module" in self.content
        part = self.content.get("module", {})
        self.extra: dict[str, Any] = part.get("extra_state", {})
        others = set(tensor_names([value for key, value in self.content.items() if key != "module"]))
        # The tensors of extra state and metadata, which belong to the module and have no name in its state dict.
        self.carried = list(dict.fromkeys(tensor_names([self.extra, part.get("metadata")])))
        for name in self.carried:
            reader.slot(name)
        others.update(self.carried)
        self.names = [name for name in reader.slots if name not in others] if self.present else []
        self.ties: dict[str, str] = part.get("ties", {})
        own = set(self.names)
        for name, first in self.ties.items():
            if name in own or first not in own:
                raise DamagedFileError(f"{name!r} is tied to {first!r}, which is not so")
        self.metadata: dict[str, dict[str, Any]] = self.decode(part.get("metadata", {}))
        self.labels = self._read_labels()
        self.history = [Event(n, told, frozenset(a), frozenset(r)) for n, told, a, r in part.get("history", [])]
        self.policies: dict[str, list[list[str]]] = part.get("policies", {})
        self.virtual: list[str] = part.get("virtual", [])
        self.frozen: list[str] = part.get("frozen", [])
        self.kind = str(part.get("class", ""))

    def require(self, part: str) -> None:
        """Refuse to load a part that is not in the file."""
        if part not in self.content:
            has = [each for each in ("module", *PARTS, "extra", "rng") if each in self.content] or ["tensors"]
            raise CheckpointError(f"{self.reader.path!r} has no {part}; it has {', '.join(has)}")

    def objects(self, part: str) -> dict[str | None, dict[str, Any]]:
        """What the file says of the objects of a part, by name; under None if there is one, without a name."""
        found = self.content.get(part, {})
        many: dict[str | None, dict[str, Any]] = found.get("many", {None: found} if found else {})
        return many

    def decode(self, node: Any) -> Any:
        """The tree that JSON of the file stands for."""
        return decode(node, self.reader.copy)

    @property
    def every(self) -> list[str]:
        """Every name, of tensors and of extra state."""
        return [*self.names, *self.ties, *self.extra]

    def source(self, name: str) -> str:
        """The name under which the tensor of a name is in the file."""
        return self.ties.get(name, name)

    def _read_labels(self) -> dict[str, list[dict[str, Any]]]:
        """The axes of labelled tensors by public name, checked.

        Raises:
            DamagedFileError: If they are malformed, or not as many as their axes are long: a range may claim any number
                without writing it.
        """
        if not has_form(self.metadata, {str: {LABELS: {str: [_is_axis]}, CONFIG: {str: dict}}}):
            raise DamagedFileError("its metadata, labels or configurations are malformed")
        shapes = {public_name(name): self.reader.shape(self.source(name)) for name in [*self.names, *self.ties]}
        found: dict[str, list[dict[str, Any]]] = {}
        for path, entry in self.metadata.items():
            for name, axes in entry.get(LABELS, {}).items():
                place = f"{path}.{name}" if path else name
                counts = [_length(axis) for axis in axes]
                # What is not in the file, as buffers that are not persistent, is not loaded either.
                shape = shapes.get(place, counts)
                if len(counts) != len(shape) or any(
                    c not in (None, size) for c, size in zip(counts, shape, strict=True)
                ):
                    raise DamagedFileError(f"the labels of {name!r} are not those of a tensor of shape {shape}")
                found[place] = axes
        return found


def _length(axis: dict[str, Any]) -> int | None:
    """How many labels an axis has; None if it has none."""
    if "range" in axis:
        start, stop, step = map(int, axis["range"])
        return max(0, (stop - start + step - (1 if step > 0 else -1)) // step)
    return len(axis["labels"]) if "labels" in axis else None


def _is_axis(axis: Any) -> bool:
    """Whether it is an axis: with a name, or None for it, and perhaps labels or a range."""
    if not has_form(axis, {"labels": [_is_label], "range": (_is_small, _is_small, _is_small)}):
        return False
    return isinstance(axis.get("name", 0), str | None) and axis.get("range", [1])[-1] != 0


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_label(label: Any) -> bool:
    """Whether a value can be a label: one that can be hashed, compared and printed."""
    if isinstance(label, list | tuple | frozenset):
        return all(map(_is_label, label))
    return label is None or isinstance(label, str | bytes | int | float | complex | np.generic)
