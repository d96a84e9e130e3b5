"""The state of a link: a row for each parameter, by slot, global state for all parameters, and random generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ._link_settings import LinkSettings
from ._settings import Binding
from ._vector_state import VECTOR
from ._writes import CountedDict, RowWrites
from .slots import describe_params

ProjectedBuffer = Literal["grad", "grad_sq", "grad_cu", "covariance", "inverse"]
"""The rule by which a buffer transforms when the basis changes."""

# The seed of links without one, if several processes have to draw the same numbers.
COMMON_SEED = 0x6D6F64756C69

PER_PARAMETER = "modules "
"""The prefix of keys of tensors that a link derives from one parameter; its name follows."""

Rows = dict[int, dict[str, Any]]
"""The state of a link for each parameter, by slot."""


class StateView(MutableMapping[Tensor, dict[str, Any]]):
    """`link.state`: maps a parameter, in any of its forms, to its row, which is created empty at first use.

    A parameter's name is a key, too.
    """

    __slots__ = ("_link",)

    def __init__(self, link: LinkState) -> None:
        self._link = link

    def __getitem__(self, key: Tensor | str) -> dict[str, Any]:
        link = self._link
        temporary = link.settings.temporary
        if key in temporary:
            return temporary[key][0]  # type: ignore[index,no-any-return]
        row = self._find(key)
        if row is not None:
            return row
        if isinstance(key, str):
            raise KeyError(key)
        return link.get_row(link.settings.binding.slots.number(key))

    def _find(self, key: Tensor | str) -> dict[str, Any] | None:
        binding, rows = self._link.settings.binding, self._link.rows
        self._link.row_writes.share()
        slot = binding.slots.find(key)
        if slot is None or slot in rows or binding.read_row is None:
            return None if slot is None else rows.get(slot)
        row: dict[str, Any] | None = binding.read_row(rows, slot)
        return row

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the row of a parameter; `default` if there is none."""
        row = self._find(key)
        return default if row is None else row

    def __contains__(self, key: object) -> bool:
        return isinstance(key, Tensor | str) and self._find(key) is not None

    def __setitem__(self, key: Tensor, value: Mapping[str, Any]) -> None:
        link = self._link
        link.rows[link.settings.binding.slots.number(key)] = link.make_row(value)
        link.row_writes.add()

    def __delitem__(self, key: Tensor) -> None:
        slot = self._link.settings.binding.slots.find(key)
        if slot is None or slot not in self._link.rows:
            raise KeyError(key)
        del self._link.rows[slot]
        self._link.row_writes.add()

    def __iter__(self) -> Iterator[Tensor]:
        params = self._link.settings.binding.slots.params
        return (params[slot] for slot in list(self._link.rows))

    def __len__(self) -> int:
        return len(self._link.rows)

    def clear(self) -> None:
        """Remove the rows of all parameters."""
        self._link.rows.clear()
        self._link.row_writes.add()

    def __repr__(self) -> str:
        return repr(dict(self))


class StandIns:
    """Placeholder parameters for the children of a link: the same objects at every step, so that they have slots."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    @contextmanager
    def point_at(
        self, tensors: Sequence[Tensor], binding: Binding, sources: Sequence[Tensor] | None
    ) -> Iterator[list[Tensor]]:
        """Give the placeholders the shapes and the memory of tensors for a block.

        Args:
            tensors: The tensors.
            binding: The link's binding.
            sources: The parameters whose settings apply to the tensors, in order; the last one applies to all further tensors.
        """
        while len(self.tensors) < len(tensors):
            like = tensors[len(self.tensors)]
            self.tensors.append(torch.empty(0, dtype=like.dtype, device=like.device))
        placeholders = self.tensors[: len(tensors)]
        for i, (placeholder, tensor) in enumerate(zip(placeholders, tensors, strict=True)):
            placeholder.data = tensor.detach()
            binding.slots.number(placeholder, sources[min(i, len(sources) - 1)] if sources else None)
        try:
            yield placeholders
        finally:
            for placeholder in placeholders:
                placeholder.grad = None  # its size would not match the emptied data
                placeholder.data = torch.empty(0, dtype=placeholder.dtype, device=placeholder.device)


class LinkState(LinkSettings):
    """State of a link, by slot, and `global_state`; both are saved, copied and restored with the optimizer.

    Attributes:
        rows: The state for each parameter, by slot.
        row_writes: Counts changes of rows, and references to them, while a fused pass stores the addresses of their tensors.
    """

    global_state: dict[str, Any]
    rows: Rows
    row_writes: RowWrites
    _projected: dict[str, list[str]]

    @property
    def state(self) -> StateView:
        """Per-parameter state: `state[param][key]`."""
        return StateView(self)

    def make_row(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a row with these values, which counts writes into it."""
        row = CountedDict(values or {})
        row.writes = self.row_writes
        return row

    def get_row(self, slot: int) -> dict[str, Any]:
        """Return the row of a slot; an empty one is created if there is none."""
        row = self.rows.get(slot)
        if row is None:
            row = self.rows[slot] = self.make_row()
        return row

    def find_rows(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the row of each parameter, in any of its forms."""
        number, temporary = self.settings.binding.slots.number, self.settings.temporary
        return [temporary[param][0] if param in temporary else self.get_row(number(param)) for param in params]

    def use_binding(self, binding: Binding) -> None:
        """Use the parameter numbers of an optimizer; rows stay with their parameters."""
        before = self.settings.binding
        if before is binding:
            return
        params, number = before.slots.params, binding.slots.number
        self.rows = {number(params[slot]): row for slot, row in self.rows.items()}
        self.settings.binding = binding

    def get_state(
        self,
        params: Sequence[Tensor],
        key: str | list[str] | tuple[str, ...],
        key2: str | None = None,
        *keys: str,
        must_exist: bool = False,
        init: Any = torch.zeros_like,
        cls: type = list,
    ) -> Any:
        """Return state values for each parameter; missing ones are created.

        Args:
            params: The parameters.
            key: One key gives one list; several (or a list of keys) give a list of lists.
            key2: A second key.
            *keys: More keys.
            must_exist: Whether a missing value raises KeyError.
            init: The value if it is missing: a function of the parameter, "param" or "grad" for a copy of those, a
                tensor (copied) or any other value; a list for each parameter (one key) or for each key (several keys).
            cls: The type of the lists.
        """
        names = [key] if isinstance(key, str) else list(key)
        names += [name for name in (key2, *keys) if name is not None]
        several = len(names) > 1 or not isinstance(key, str)
        columns = []
        for position, name in enumerate(names):
            start = init[position] if isinstance(init, list | tuple) and several else init
            rows = [self.state[param] for param in params]
            for i, (row, param) in enumerate(zip(rows, params, strict=True)):
                if name not in row and must_exist:
                    raise KeyError(f"{type(self).__name__} has no state {name!r} for parameter {i}")
                if name not in row:
                    row[name] = _initial(start[i] if isinstance(start, list | tuple) else start, param)
            columns.append(cls(row[name] for row in rows))
        return columns if several else columns[0]

    @contextmanager
    def shown(self, params: Sequence[Any], states: Sequence[Any], settings: Sequence[Any]) -> Iterator[None]:
        """Give temporary tensors that hooks get in place of parameters a state and settings, for a block.

        Args:
            params: The temporary tensors.
            states: The state of each.
            settings: The settings of each.
        """
        temporary = self.settings.temporary
        temporary.update(zip(params, zip(states, settings, strict=True), strict=True))
        try:
            yield
        finally:
            for param in params:
                del temporary[param]

    def store(self, params: Sequence[Tensor], keys: str | Sequence[str], values: Any) -> None:
        """Write one value for each parameter (one key), or one list of values for each key.

        Args:
            params: The parameters.
            keys: The key, or keys.
            values: The values.
        """
        if isinstance(keys, str):
            keys, values = [keys], [values]
        for key, column in zip(keys, values, strict=True):
            for row, value in zip(self.find_rows(params), column, strict=True):
                row[key] = value

    def clear_state_keys(self, *keys: str) -> None:
        """Remove these entries for every parameter."""
        for row in self.rows.values():
            for key in keys:
                row.pop(key, None)

    def increment_counter(self, key: str, start: int) -> int:
        """Return a count that grows by one at each call; the first is `start`."""
        value: int = self.global_state[key] + 1 if key in self.global_state else start
        self.global_state[key] = value
        return value

    def get_generator(self, device: torch.device | str | None, seed: int | None) -> torch.Generator | None:
        """Return the random generator for this seed and device, created at first use; None (torch's own) if seed is None.

        If several processes train one model they have to draw the same numbers, so a fixed seed replaces None.
        """
        if seed is None:
            if not self.settings.binding.draws_alike:
                return None
            seed = COMMON_SEED
        key = f"generator/{torch.device(device or 'cpu')}/{seed}"
        if key not in self.global_state:
            self.global_state[key] = torch.Generator(device or "cpu").manual_seed(seed)
        return self.global_state[key]  # type: ignore[no-any-return]

    def add_projected_keys(self, kind: ProjectedBuffer, *keys: str) -> None:
        """Declare that these buffers transform like a gradient, its square, its cube or a covariance."""
        self._projected.setdefault(kind, []).extend(keys)

    def reset(self) -> None:
        """Clear all state, in children too; random generators are not reset."""
        self.rows.clear()
        self.row_writes.add()
        generators = {key: value for key, value in self.global_state.items() if isinstance(value, torch.Generator)}
        self.global_state.clear()
        self.global_state.update(generators)
        for child in self.children.values():
            child.reset()

    def reset_for_online(self) -> None:
        """Clear the state about the last evaluation (previous gradient, previous loss), in children too."""
        for child in self.children.values():
            child.reset_for_online()

    def follow(self, params: Sequence[Tensor]) -> None:
        """Reset a link with `vector_state` if its parameters differ from those of the last step.

        Its state is over all parameters concatenated, so it is invalid once one is added, frozen or unfrozen.
        """
        before = self.global_state.get(VECTOR)
        now = describe_params(params, self.settings.binding.slots)
        if before != now:
            if before is not None:
                self.reset()
            self.global_state[VECTOR] = now


def _initial(init: Any, param: Tensor) -> Any:
    """Return the initial value of a state for a parameter; see `get_state`."""
    if isinstance(init, str) and init == "param":
        return param.detach().clone()
    if isinstance(init, str) and init == "grad":
        return torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
    if isinstance(init, Tensor):
        return init.clone()
    return init(param) if callable(init) else init


@contextmanager
def replace_state(links: Sequence[LinkState], states: Sequence[tuple[Rows, dict[str, Any]]]) -> Iterator[None]:
    """Replace the rows and the global state of links for a block."""
    before = [(link.rows, link.global_state) for link in links]
    try:
        for link, (rows, shared) in zip(links, states, strict=True):
            link.rows, link.global_state = {slot: link.make_row(row) for slot, row in rows.items()}, shared
        yield
    finally:
        for link, (rows, shared) in zip(links, before, strict=True):
            link.rows, link.global_state = rows, shared
