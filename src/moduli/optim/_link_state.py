"""What a link remembers: for each parameter, for all of them, and random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ._settings import Binding, LinkSettings
from ._vector_state import VECTOR, describe_params

ProjectedBuffer = Literal["grad", "grad_sq", "grad_cu", "covariance", "inverse"]
"""How a buffer transforms when the basis changes."""

# Of links without a seed of their own, where several processes have to draw the same numbers.
COMMON_SEED = 0x6D6F64756C69


class StateStore(dict[Tensor, dict[str, Any]]):
    """`link.state`: maps a parameter to its state, made empty at first use.

    Where hooks are shown a parameter in another form (in single precision, as pairs of reals, as part of a vector, as a
    symbol), that form maps to the same state while it is `shown`.
    """

    #: Finds the state of a parameter (or its name) that links see in another form: as part of a matrix, or as its piece.
    find: Callable[[StateStore, Any], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
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

    def __reduce__(self) -> Any:
        return (StateStore, (), None, None, iter(self.items()))


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
        for i, (fake, tensor) in enumerate(zip(fakes, tensors, strict=True)):
            fake.data = tensor.detach()
            if binding is not None and sources:
                binding.sources[fake] = sources[min(i, len(sources) - 1)]
        try:
            yield fakes
        finally:
            for fake in fakes:
                fake.grad = None  # of another size than what follows, so that it could not be copied
                fake.data = torch.empty(0, dtype=fake.dtype, device=fake.device)


class LinkState(LinkSettings):
    """State of a link, keyed by parameter, and `global_state`; both are saved, copied and restored with the optimizer."""

    global_state: dict[str, Any]
    _state: StateStore
    _projected: dict[str, list[str]]
    #: The token of the fused run that stepped it last; None once its state was shown.
    _seen_by: object = None

    @property
    def state(self) -> StateStore:
        """Per-parameter state: `state[param][key]`."""
        self._seen_by = None
        return self._state

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
        """State values for each parameter, made where they are missing.

        Args:
            params: The parameters.
            key: One key gives one list; several (or a list of keys) give a list of lists.
            key2: A second key.
            *keys: More keys.
            must_exist: Raise a KeyError where a value is missing.
            init: How to make a missing value: a function of the parameter, "param" or "grad" for a copy of those, a
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
        """A block in which hooks see parameters in another form: it has the state and settings of the parameters."""
        rows, chosen = self._state.shown, self.settings.shown
        for param, state, setting in zip(params, states, settings, strict=True):
            rows[param], chosen[param] = state, setting
        try:
            yield
        finally:
            for param in params:
                del rows[param], chosen[param]

    def store(self, params: Sequence[Tensor], keys: str | Sequence[str], values: Any) -> None:
        """Write one value for each parameter (one key), or one list of values for each key."""
        if isinstance(keys, str):
            keys, values = [keys], [values]
        for key, column in zip(keys, values, strict=True):
            for param, value in zip(params, column, strict=True):
                self.state[param][key] = value

    def clear_state_keys(self, *keys: str) -> None:
        """Forget these entries for every parameter."""
        for row in self.state.values():
            for key in keys:
                row.pop(key, None)

    def increment_counter(self, key: str, start: int) -> int:
        """A number that grows by one at each call; the first is `start`."""
        value: int = self.global_state[key] + 1 if key in self.global_state else start
        self.global_state[key] = value
        return value

    def get_generator(self, device: torch.device | str | None, seed: int | None) -> torch.Generator | None:
        """The random generator for this seed and device, made at first use; None (torch's own) where seed is None.

        Where several processes train one model they have to draw alike, so that there None is one fixed seed.
        """
        if seed is None:
            binding = self.settings.binding
            if binding is None or not binding.draws_alike:
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
        """Forget everything learnt, in children too; random generators go on from where they are."""
        self.state.clear()
        kept = {key: value for key, value in self.global_state.items() if isinstance(value, torch.Generator)}
        self.global_state.clear()
        self.global_state.update(kept)
        for child in self.children.values():
            child.reset()

    def reset_for_online(self) -> None:
        """Forget what belongs to the last evaluation (previous gradient, previous loss), in children too."""
        for child in self.children.values():
            child.reset_for_online()

    def follow(self, params: Sequence[Tensor]) -> None:
        """For links with `vector_state`: start afresh where the parameters are others than at the last step.

        Their state is over all parameters concatenated, so it means nothing once one is added, frozen or thawed.
        """
        held = self.global_state.get(VECTOR)
        binding = self.settings.binding
        here = describe_params(params, {} if binding is None else binding.names)
        if held != here:
            if held is not None:
                self.reset()
            self.global_state[VECTOR] = here


def _initial(init: Any, param: Tensor) -> Any:
    if isinstance(init, str) and init == "param":
        return param.detach().clone()
    if isinstance(init, str) and init == "grad":
        return torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
    if isinstance(init, Tensor):
        return init.clone()
    return init(param) if callable(init) else init


@contextmanager
def lend_state(
    links: Sequence[LinkState], kept: Sequence[tuple[Mapping[Tensor, Any], dict[str, Any]]]
) -> Iterator[None]:
    """A block in which links have other state: for each of them that of parameters, and what it keeps for all."""
    before = [(link._state, link.global_state) for link in links]
    try:
        for link, (rows, shared) in zip(links, kept, strict=True):
            link._state, link.global_state = StateStore(), shared
            link._state.update(rows)
        yield
    finally:
        for link, (state, shared) in zip(links, before, strict=True):
            link._state, link.global_state = state, shared
