"""What a link remembers: for each parameter, for all of them, and random generators; and all of it as plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..layout import map_tensors
from ._groups import clean_name
from ._settings import Binding, LinkSettings

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


# ---------------------------------------------------------------------- as plain data, under other names and in another order


class MemberValues(dict[int, Any]):
    """What members keep that has not one shape for all of them, by their numbers; one that is missing keeps nothing."""


_SIMPLE = (bool, int, float, complex, str, type(None))


def encode(value: Any, where: str) -> Any:
    """Plain data for a value; what it can't be made of is refused, with the place."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Generator):
        return {"__kind__": "generator", "device": str(value.device), "state": value.get_state()}
    if isinstance(value, MemberValues):
        return {"__kind__": "members", "items": {i: encode(item, where) for i, item in value.items()}}
    if isinstance(value, deque):
        return {"__kind__": "deque", "maxlen": value.maxlen, "items": [encode(item, where) for item in value]}
    if isinstance(value, list | tuple):
        items = [encode(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f"{where}: a dictionary has the key {key!r}; saved state has keys that are strings")
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which can't be saved; see _extra_pack and _extra_unpack")


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
        if kind == "members":
            return MemberValues((i, decode(item, device)) for i, item in value["items"].items())
        if kind == "deque":
            return deque([decode(item, device) for item in value["items"]], maxlen=value["maxlen"])
        return {key: decode(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item, device) for item in value)
    return value


VECTOR = "vector of"
"""Where a link over all parameters concatenated remembers which they are."""


def describe_params(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> list[str]:
    """Parameters as plain text, to be compared."""
    return [f"{names.get(param, '?')}:{param.numel()}" for param in params]


class Vector:
    """Where the elements of a saved vector are now.

    Args:
        parts: The parameters that the vector was made of, as `describe_params`; None where the link had not stepped.
        saved: The names of all that were trained.
        by_name: The parameters here by the names that they were saved with.
        active: Those that are trained.
        stacked: Whether they are stacked over members; each member then has a vector.

    Attributes:
        order: The parameters of the vector, as they are ordered here.
        fresh: Whether the vector can't be followed: a parameter is gone, or one was added to all of them.
    """

    def __init__(
        self, parts: list[str] | None, saved: list[str], by_name: dict[str, Tensor], active: list[Tensor], stacked: bool
    ) -> None:
        self.stacked = int(stacked)
        split = [part.rpartition(":") for part in parts or ()]
        names, self.sizes = [name for name, _, _ in split], [int(size) for _, _, size in split]
        self.params = [by_name.get(name) for name in names]
        self.order = [param for param in active if any(param is known for known in self.params)]
        numels = [-1 if param is None else param.shape[self.stacked :].numel() for param in self.params]
        # A link in one branch of a chain has a vector of its own parameters, which others do not change.
        grown = sorted(names) == sorted(saved) and len(active) != len(names)
        self.fresh = numels != self.sizes or len(self.order) != len(names) or (grown and parts is not None)

    def keep_shared(self, state: dict[str, Any], binding: Binding) -> dict[str, Any]:
        """The link's global state for the new order; what belongs to no parameter survives a fresh start."""
        if self.fresh:
            return {key: value for key, value in state.items() if isinstance(value, torch.Generator)}
        order = [f"{binding.names.get(p, '?')}:{p.shape[self.stacked :].numel()}" for p in self.order]
        return {**self.permute(state), **({VECTOR: order} if order else {})}

    def permute(self, value: Any) -> Any:
        """A value with every axis as long as the vector in the new order."""
        if all(a is b for a, b in zip(self.order, self.params, strict=True)):
            return value
        pieces = dict(zip(self.params, torch.split(torch.arange(sum(self.sizes)), self.sizes), strict=True))
        index = torch.cat([pieces[param] for param in self.order])

        def permute_axes(tensor: Tensor, stacked: int) -> Tensor:
            for dim, size in enumerate(tensor.shape):
                if dim >= stacked and size == index.numel() and size > 0:
                    tensor = tensor.index_select(dim, index.to(tensor.device))
            return tensor

        if isinstance(value, MemberValues):
            return MemberValues((i, map_tensors(item, partial(permute_axes, stacked=0))) for i, item in value.items())
        if isinstance(value, dict):
            return {key: self.permute(item) for key, item in value.items()}
        return map_tensors(value, partial(permute_axes, stacked=self.stacked))


_WRAPPER = "module."


def match_names(shapes: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The names that saved parameters have here.

    What `torch.compile`, FSDP and checkpointing put into names is left out; `module.` before all names (that of
    DistributedDataParallel) is added or left out; where only one side has names, the order decides.

    Args:
        shapes: The saved shapes by name.
        here: The shapes of the parameters here by name, in order.
    """
    if shapes and _are_positions(shapes) != _are_positions(here):  # no names are those of no parameters
        if [shape and tuple(shape) for shape in shapes.values()] != list(here.values()):
            what = f"saved {list(shapes.values())}, here {list(here.values())}"
            raise ValueError(f"only one side has names of parameters, and their shapes differ in order: {what}")
        return dict(zip(shapes, here, strict=True))
    new = {name: clean_name(name) for name in shapes}
    if not any(name in here for name in new.values()):
        if all(name.startswith(_WRAPPER) for name in new.values()):
            return {old: name.removeprefix(_WRAPPER) for old, name in new.items()}
        if here and all(name.startswith(_WRAPPER) for name in here):
            return {old: _WRAPPER + name for old, name in new.items()}
    return new


def _are_positions(names: Iterable[str]) -> bool:
    return all(name == str(i) for i, name in enumerate(names))
