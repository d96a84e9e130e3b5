"""Per-parameter state of a link: dictionaries keyed by tensor that know when they were changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


class ParamState(dict[str, Any]):
    """The state that a link keeps for one parameter; an ordinary dictionary that counts its changes.

    Lists of state tensors are cached between steps, so a change made by hand has to be noticed.
    """

    __slots__ = ("_changes",)

    def __init__(self, changes: list[int], *args: Any) -> None:
        super().__init__(*args)
        self._changes = changes

    def __setitem__(self, key: str, value: Any) -> None:
        self._changes[0] += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._changes[0] += 1
        super().__delitem__(key)

    def clear(self) -> None:
        self._changes[0] += 1
        super().clear()

    def pop(self, *args: Any) -> Any:
        self._changes[0] += 1
        return super().pop(*args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._changes[0] += 1
        super().update(*args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def set_counter(self, key: str, value: Any) -> None:
        """Set a number that no cached list holds (a counter)."""
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return (_state, (self._changes, dict(self)))


def _state(changes: list[int], values: dict[str, Any]) -> ParamState:
    return ParamState(changes, values)


class StateStore(dict[Tensor, ParamState]):
    """`link.state`: maps a parameter to its state, made empty at first use.

    Where hooks are shown a parameter in another form (in single precision, as pairs of reals, as part of a vector, as a
    symbol), that form maps to the same state while it is `shown`.
    """

    #: For a population: the block of parameters that a leaf (or a name) belongs to, and its place there.
    columns: Callable[[Any], tuple[Any, int] | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.changes = [0]
        self.shown: dict[Tensor, Any] = {}

    def __missing__(self, key: Tensor | str) -> Any:
        if key in self.shown:
            return self.shown[key]  # type: ignore[index]
        found = None if self.columns is None else self._column(key)
        if found is not None:
            return found
        if isinstance(key, str):
            raise KeyError(key)
        return self._make_state(key)

    def _column(self, key: Tensor | str) -> ParamState | None:
        place = None if self.columns is None else self.columns(key)
        return None if place is None else place[0].find(self, place[1])

    def _make_state(self, key: Tensor) -> ParamState:
        self.changes[0] += 1
        found = ParamState(self.changes)
        super().__setitem__(key, found)
        return found

    def __setitem__(self, key: Tensor, value: dict[str, Any]) -> None:
        self.changes[0] += 1
        super().__setitem__(key, ParamState(self.changes, value))

    def __delitem__(self, key: Tensor) -> None:
        self.changes[0] += 1
        super().__delitem__(key)

    def clear(self) -> None:
        self.changes[0] += 1
        super().clear()

    def pop(self, *args: Any) -> Any:
        self.changes[0] += 1
        return super().pop(*args)

    def __reduce__(self) -> Any:
        return (_store, (), None, None, iter([(key, dict(value)) for key, value in self.items()]))

    def tensors(self) -> Iterator[Tensor]:
        """The parameters that have state."""
        return iter(self.keys())


def _store() -> StateStore:
    return StateStore()
