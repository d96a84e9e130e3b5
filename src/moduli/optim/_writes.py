"""Counting what is written, so that a step can see by one number that nothing was."""

from __future__ import annotations

from typing import Any


class Writes:
    """The number of changes to groups, defaults and links of one optimizer."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class CountedDict(dict[str, Any]):
    """A dictionary that counts its changes.

    Attributes:
        writes: Where they are counted; None for a dictionary of no optimizer.
    """

    writes: Writes | None = None

    def _note(self) -> None:
        if self.writes is not None:
            self.writes.count += 1

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
        """Return an entry, made where it is missing; count it."""
        value = super().setdefault(key, default)
        self._note()
        return value

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
