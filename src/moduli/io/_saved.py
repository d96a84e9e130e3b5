"""The module part of a file, checked."""

from typing import Any

import numpy as np

from moduli.nn import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX
from moduli.particles import CONFIG_KEY as CONFIG
from moduli.particles import POLICIES, Event

from ._errors import CheckpointError, DamagedFileError
from ._read import Reader
from ._tree import decode, tensor_names

LABELS = "labels"
EXTRA = "_extra_state"
PARTS = ("optimizer", "population", "scheduler")
"""The parts of a checkpoint that are objects with a state dict, besides the module."""
PREFIXES = (TENSOR_PARAM_PREFIX, TENSOR_BUFFER_PREFIX, "")


class Saved:
    """The module part of a file.

    Raises:
        DamagedFileError: If what the file says about it makes no sense.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.content: dict[str, Any] = reader.content or {}
        part = self.content.get("module", {} if reader.content is None else None)
        self.present = part is not None
        part = {} if part is None else part
        if not isinstance(part, dict):
            raise DamagedFileError("what it says about a module is not a mapping")
        self.extra: dict[str, Any] = _mapping(part, "extra_state")
        others = set(tensor_names([value for key, value in self.content.items() if key != "module"]))
        # The tensors of extra state and metadata, which belong to the module and have no name in its state dict.
        self.carried = list(dict.fromkeys(tensor_names([self.extra, part.get("metadata")])))
        for name in self.carried:
            reader.slot(name)
        others.update(self.carried)
        self.names = [name for name in reader.slots if name not in others] if self.present else []
        self.ties = self._ties(_mapping(part, "ties"))
        self.metadata = self._metadata(part.get("metadata", {}))
        self.history = self._history(part.get("history", []))
        self.policies = self._policies(_mapping(part, "policies"))
        self.virtual = self._strings(part.get("virtual", []))
        self.frozen = self._strings(part.get("frozen", []))
        self.kind = str(part.get("class", ""))

    def require(self, part: str) -> None:
        """Refuse to load a part that is not in the file."""
        if part not in self.content:
            has = [each for each in ("module", *PARTS, "extra", "rng") if each in self.content] or ["tensors"]
            raise CheckpointError(f"{self.reader.path!r} has no {part}; it has {', '.join(has)}")

    def objects(self, part: str) -> dict[str | None, dict[str, Any]]:
        """What the file says of the objects of a part, by name; under None if there is one, without a name."""
        found = self.content.get(part, {})
        if not isinstance(found, dict):
            raise DamagedFileError(f"what it says about {part} is not a mapping")
        many = found.get("many", {None: found} if found else {})
        if not isinstance(many, dict) or not all(isinstance(each, dict) for each in many.values()):
            raise DamagedFileError(f"what it says about {part} is not a mapping of mappings")
        return many

    def decode(self, node: Any) -> Any:
        """The tree that JSON of the file stands for."""
        return decode(node, self.reader.copy)

    @property
    def every(self) -> list[str]:
        """Every name, of tensors and of extra state."""
        return [*self.names, *self.ties, *self.extra]

    @property
    def labels(self) -> dict[str, list[dict[str, Any]]]:
        """The axes of labelled tensors, by each name under which one may be registered."""
        return {
            place: axes
            for path, entry in self.metadata.items()
            for name, axes in entry.get(LABELS, {}).items()
            for place in _places(path, name)
        }

    def source(self, name: str) -> str:
        """The name under which the tensor of a name is in the file."""
        return self.ties.get(name, name)

    def _ties(self, ties: dict[str, Any]) -> dict[str, str]:
        own = set(self.names)
        for name, first in ties.items():
            if name in own or not isinstance(first, str) or first not in own:
                raise DamagedFileError(f"{name!r} is tied to {first!r}, which is not so")
        return ties

    def _metadata(self, node: Any) -> dict[str, dict[str, Any]]:
        found = self.decode(node)
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise DamagedFileError("its metadata is not a mapping of mappings")
        for path, entry in found.items():
            settings = entry.get(CONFIG, {})
            right = isinstance(settings, dict) and all(isinstance(each, dict) for each in settings.values())
            if not right or not _are_labels(entry.get(LABELS, {})):
                raise DamagedFileError(f"its labels or configurations of {path!r} are malformed")
            self._check_labels(path, entry.get(LABELS, {}))
        return found

    def _check_labels(self, path: str, labels: dict[str, Any]) -> None:
        """Refuse labels that are not as many as their axes are long: a range may claim any number without writing it."""
        own = {*self.names, *self.ties}
        for name, axes in labels.items():
            place = next((self.source(place) for place in _places(path, name) if place in own), None)
            # What is not in the file, as buffers that are not persistent, is not loaded either.
            shape = tuple(map(_length, axes)) if place is None else self.reader.shape(place)
            counts = [_length(axis) for axis in axes]
            if len(counts) != len(shape) or any(
                count not in (None, size) for count, size in zip(counts, shape, strict=True)
            ):
                raise DamagedFileError(f"the labels of {name!r} are not those of a tensor of shape {shape}")

    def _history(self, found: Any) -> list[Event]:
        try:
            return [Event(n, s, frozenset(map(_text, a)), frozenset(map(_text, r))) for n, s, a, r in found]
        except (TypeError, ValueError):
            raise DamagedFileError("its history is malformed") from None

    def _policies(self, found: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
        try:
            return {
                path: [(_text(pattern), _one_of(policy, POLICIES)) for pattern, policy in each]
                for path, each in found.items()
            }
        except (TypeError, ValueError):
            raise DamagedFileError("its policies for buffers are malformed") from None

    def _strings(self, found: Any) -> list[str]:
        try:
            return [_text(each) for each in found]
        except TypeError:
            raise DamagedFileError("a list of names in it is malformed") from None


def _places(path: str, name: str) -> list[str]:
    """The names under which the tensor of an attribute may be registered."""
    return [f"{path}.{prefix}{name}" if path else prefix + name for prefix in PREFIXES]


def _mapping(part: dict[str, Any], key: str) -> dict[str, Any]:
    found = part.get(key, {})
    if not isinstance(found, dict):
        raise DamagedFileError(f"its {key} is not a mapping")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{value!r} is none of {choices}")
    return _text(value)


def _length(axis: dict[str, Any]) -> int | None:
    """How many labels an axis has; None if it has none."""
    if "range" in axis:
        start, stop, step = map(int, axis["range"])
        return max(0, (stop - start + step - (1 if step > 0 else -1)) // step)
    return len(axis["labels"]) if "labels" in axis else None


def _are_labels(labels: Any) -> bool:
    """Whether labels are lists of axes, each with a name and perhaps labels or a range."""
    if not isinstance(labels, dict):
        return False
    for axes in labels.values():
        if not isinstance(axes, list):
            return False
        for axis in axes:
            if not isinstance(axis, dict) or not isinstance(axis.get("name", 0), str | None):
                return False
            found, bounds = axis.get("labels", []), axis.get("range", [0, 0, 1])
            if not isinstance(found, list) or not all(map(_is_label, found)):
                return False
            if not isinstance(bounds, list) or len(bounds) != 3 or bounds[2] == 0:
                return False
            if not all(type(each) is int and abs(each) < 2**63 for each in bounds):
                return False
    return True


def _is_label(label: Any) -> bool:
    """Whether a value can be a label: one that can be hashed, compared and printed."""
    if isinstance(label, list | tuple | frozenset):
        return all(map(_is_label, label))
    return label is None or isinstance(label, str | bytes | int | float | complex | np.generic)
