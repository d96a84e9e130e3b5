"""Counters of writes, so that a step can detect by one comparison that nothing has changed."""

from __future__ import annotations

from numbers import Real
from typing import Any


class Writes:
    """Counters of changes to the groups, defaults and links of one optimizer.

    Attributes:
        count: Changes after which a step has to be planned again.
        numbers: All changes, also those of numbers alone (a learning rate that a scheduler writes).
    """

    __slots__ = ("count", "numbers")

    def __init__(self) -> None:
        self.count = self.numbers = 0

    def add(self) -> None:
        """Count a change after which a step has to be planned again."""
        self.count += 1
        self.numbers += 1


class RowWrites:
    """A counter of changes to the rows of a link, active while a fused pass has stored the addresses of their tensors.

    Attributes:
        watcher: The counters; None while no pass has. Unfused links write into their rows at every step.
        shared: Whether a caller has a reference to a row, and may replace the memory of its tensors at any time.
    """

    __slots__ = ("shared", "watcher")

    def __init__(self) -> None:
        self.watcher: Writes | None = None
        self.shared = False

    def share(self) -> None:
        """Record that a caller gets a reference to a row."""
        if not self.shared:
            self.shared = True
            self.add()

    def add(self) -> None:
        """Count a change after which a step has to be planned again."""
        if self.watcher is not None:
            self.watcher.add()


class CountedDict(dict[str, Any]):
    """A dictionary that counts its changes.

    Attributes:
        writes: The counters; None for a dictionary of no optimizer.
    """

    writes: Writes | RowWrites | None = None

    def _note(self) -> None:
        if self.writes is not None:
            self.writes.add()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._note()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._note()

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Change several entries, and count it."""
        super().update(*args, **kwargs)
        self._note()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an entry, made and counted if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Remove an entry and return it; count it."""
        value = super().pop(key, *default)
        self._note()
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and return it; count it."""
        item = super().popitem()
        self._note()
        return item

    def clear(self) -> None:
        """Remove everything, and count it."""
        super().clear()
        self._note()


class CountedSettings(CountedDict):
    """Settings that count their changes; replacing a number by a number does not invalidate the plan of a step."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(self.writes, Writes) and _is_number(value) and _is_number(self.get(key)):
            dict.__setitem__(self, key, value)
            self.writes.numbers += 1
        else:
            super().__setitem__(key, value)


def _is_number(value: Any) -> bool:
    """Return whether a setting is a number or a tuple of numbers (`betas`)."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, Real) and not isinstance(value, bool)
