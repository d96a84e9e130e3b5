"""`Optimizer.state`: for each parameter what the links keep of it, beside what users put there."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import Optimizer


class OptimizerState(MutableMapping[Tensor, "ParamEntries"]):
    """A view by parameter: `opt.state[p]["1.Adam/exp_avg"]` is what the link at that path keeps under that name.

    What is written goes to the link; under any other name it is kept and saved for the user.
    """

    def __init__(self, optimizer: Optimizer, own: dict[Tensor, dict[str, Any]]) -> None:
        self.optimizer = optimizer
        #: What users put there.
        self.own = own

    def rows(self, param: Tensor) -> dict[str, dict[str, Any]]:
        """What each link keeps, by its path."""
        out: dict[str, dict[str, Any]] = {}
        for path, link in self.optimizer._links:
            store = link.state
            row = store.get(param) or (None if store.find is None else store.find(store, param))
            if row:
                out[path] = row
        return out

    def __getitem__(self, param: Tensor) -> ParamEntries:
        entries = {f"{path}/{key}": value for path, row in self.rows(param).items() for key, value in row.items()}
        return ParamEntries({**entries, **self.own.get(param, {})}, self, param)

    def __setitem__(self, param: Tensor, entries: Any) -> None:
        for key, value in entries.items():
            self.write(param, key, value)

    def __delitem__(self, param: Tensor) -> None:
        self.own.pop(param, None)

    def write(self, param: Tensor, key: str, value: Any) -> None:
        """Set one entry."""
        path, _, field = key.rpartition("/")
        row = self.rows(param).get(path)
        if row is None:
            self.own.setdefault(param, {})[key] = value
        elif row.get(field) is not value:
            row[field] = value

    def __iter__(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if self.own.get(param) or self.rows(param):
                    yield param

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        names = self.optimizer.binding.names
        return f"OptimizerState({ {names.get(param, '?'): list(self[param]) for param in self} })"


class ParamEntries(dict[str, Any]):
    """What is kept of one parameter; what is written goes to where it is kept."""

    def __init__(self, entries: Any = (), state: OptimizerState | None = None, param: Tensor | None = None) -> None:
        super().__init__(entries)
        self._state = state
        self._param = param

    def __setitem__(self, key: str, value: Any) -> None:
        if self._state is not None and self._param is not None:
            self._state.write(self._param, key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        if self._state is not None and self._param is not None:
            self._state.own.get(self._param, {}).pop(key, None)
        super().__delitem__(key)

    # Each by way of the two above.
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
