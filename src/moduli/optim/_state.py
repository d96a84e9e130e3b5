"""Per-parameter state of a link: dictionaries keyed by tensor that know when they were changed; and as plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._settings import Binding


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

    def pop(self, key: str, *default: Any) -> Any:
        self._changes[0] += 1
        return super().pop(key, *default)

    # Each by way of those above.
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __reduce__(self) -> Any:
        return (ParamState, (self._changes, dict(self)))


class StateStore(dict[Tensor, ParamState]):
    """`link.state`: maps a parameter to its state, made empty at first use.

    Where hooks are shown a parameter in another form (in single precision, as pairs of reals, as part of a vector, as a
    symbol), that form maps to the same state while it is `shown`.
    """

    #: Finds the state of a parameter (or its name) that links see in another form: as part of a matrix, or as its piece.
    find: Callable[[StateStore, Any], ParamState | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.changes = [0]
        self.shown: dict[Tensor, Any] = {}

    def __missing__(self, key: Tensor | str) -> Any:
        if key in self.shown:
            return self.shown[key]  # type: ignore[index]
        found = None if self.find is None else self.find(self, key)
        if found is not None:
            return found
        if isinstance(key, str):
            raise KeyError(key)
        self[key] = {}
        return self[key]

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
        return (StateStore, (), None, None, iter([(key, dict(value)) for key, value in self.items()]))


class StandIns:
    """The same tensor objects at every step, so that a child can key its state by them; their storage is borrowed."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    @contextmanager
    def point_at(
        self, tensors: Sequence[Tensor], binding: Binding | None, sources: Sequence[Tensor] | None
    ) -> Iterator[list[Tensor]]:
        """Inside the block the stand-ins have the shapes and values of these tensors."""
        while len(self.tensors) < len(tensors):
            like = tensors[len(self.tensors)]
            self.tensors.append(torch.empty(0, dtype=like.dtype, device=like.device))
        fakes = self.tensors[: len(tensors)]
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                fakes[i].data = tensor.detach()
        if binding is not None and sources:
            for i, fake in enumerate(fakes):
                binding.sources[fake] = sources[min(i, len(sources) - 1)]
        try:
            yield fakes
        finally:
            for fake in fakes:
                fake.grad = None  # of another size than what follows, so that it could not be copied
                fake.data = torch.empty(0, dtype=fake.dtype, device=fake.device)


# ---------------------------------------------------------------------- as plain data


_SIMPLE = (bool, int, float, complex, str, type(None))


def encode(value: Any, where: str) -> Any:
    """Plain data for a value; what it can't be made of is refused, with the place."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Generator):
        return {"__kind__": "generator", "device": str(value.device), "state": value.get_state()}
    if isinstance(value, deque):
        return {"__kind__": "deque", "maxlen": value.maxlen, "items": [encode(item, where) for item in value]}
    if isinstance(value, set | frozenset):
        return {"__kind__": "set", "items": [encode(item, where) for item in sorted(value)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"__kind__": type(value).__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        items = [encode(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f"{where}: a dictionary has the key {key!r}; saved state has keys that are strings")
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which can't be saved; keep tensors, numbers, strings, generators, and "
        "lists and dictionaries of those, or override _extra_pack and _extra_unpack"
    )


def decode(value: Any, device: torch.device | None) -> Any:
    """The value again; tensors are copies, on this device."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None or copied.device == device else copied.to(device)
    if isinstance(value, dict):
        kind = value.get("__kind__")
        if kind == "generator":
            generator = torch.Generator(value["device"])
            generator.set_state(value["state"].cpu())
            return generator
        if kind == "deque":
            return deque([decode(item, device) for item in value["items"]], maxlen=value["maxlen"])
        if kind == "set":
            return {decode(item, device) for item in value["items"]}
        if kind == "dtype":
            return getattr(torch, value["name"])
        if kind == "device":
            return torch.device(value["name"])
        return {key: decode(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item, device) for item in value)
    return value


@contextmanager
def lend_state(links: Sequence[Any], params: Sequence[Tensor], kept: Sequence[Any]) -> Iterator[None]:
    """A block in which links have other state: for each of them a row for each parameter, and what it keeps for all."""
    before = [(link._state, link.global_state) for link in links]
    try:
        for link, (rows, shared) in zip(links, kept, strict=True):
            link._state, link.global_state = StateStore(), shared
            for param, row in zip(params, rows, strict=True):
                link._state[param] = row
        yield
    finally:
        for link, (state, shared) in zip(links, before, strict=True):
            link._state, link.global_state = state, shared
