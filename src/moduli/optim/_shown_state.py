"""`Optimizer.state`: a read-only view of the per-parameter state of all links. Writes would be lost, so they raise TypeError."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")

KEEP_ELSEWHERE = (
    "opt.state shows what the links keep, and what is written into it is not kept. To keep and save more for a parameter, write "
    "a link that has it in link.state[param]; otherwise use a dictionary of your own. opt.reset() clears what links keep, and "
    "opt.load_state_dict() restores it"
)

PLACEHOLDER = "moduli"
"""The entry that portable state dicts have for a parameter without tensors, which torch's tools write back."""


class ShownDict(dict[K, V]):
    """A read-only dictionary that accepts its own values, which trainers write back when they move state to a device."""

    def __setitem__(self, key: K, value: V) -> None:
        if not _is_same(self.get(key, ShownDict()), value):
            raise TypeError(KEEP_ELSEWHERE)

    def setdefault(self, key: K, default: Any = None) -> Any:
        """Return the existing value; raise TypeError if there is none."""
        if key not in self:
            raise TypeError(KEEP_ELSEWHERE)
        return self[key]

    def update(self, *others: Any, **named: Any) -> None:
        """Raise TypeError unless every value is the existing one."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def _refuse(self, *args: Any) -> NoReturn:
        """Raise TypeError: nothing can be removed."""
        raise TypeError(KEEP_ELSEWHERE)

    __delitem__ = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return (dict, (dict(self),))


class ShownState(ShownDict[Tensor, ShownDict[str, Any]]):
    """The rows by parameter; a parameter without state has an empty row."""

    def __missing__(self, key: Tensor) -> ShownDict[str, Any]:
        return ShownDict()


def _is_same(stored: Any, value: Any) -> bool:
    """Return whether a written value is the existing one."""
    if stored is value:
        return True
    if isinstance(stored, ShownDict) and isinstance(value, dict):
        keys = value.keys() - {PLACEHOLDER}
        return stored.keys() == keys and all(_is_same(stored[key], value[key]) for key in stored)
    if isinstance(stored, Tensor) or isinstance(value, Tensor):
        return False
    return type(stored) is type(value) and bool(stored == value)
