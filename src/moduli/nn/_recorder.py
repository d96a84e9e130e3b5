"""What a computation reads, and where the tensors it reads live.

A recorder watches every torch function. A tensor that goes in and did not come out of an earlier one is a *source*. A
value can be reused only if each of its sources is found in the dictionaries of some module, because only there can a
later look tell whether it was replaced.
"""

import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from moduli.labels import Tensor

from ._ambient import Transparent

__all__ = ["Link", "Recorder", "attributes", "locate"]

Link: TypeAlias = tuple[Any, Any, Any]
"""(container, key, object): valid while `container[key] is object`."""

# Reading these couples the value to something that neither versions nor addresses show.
_UNTRACKED: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("grad", "_grad", "grad_fn"))
_FLAGS: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf"))
_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
_SCALARS: Final = frozenset({int, float, bool, complex, str, type(None), torch.Size, torch.dtype, torch.device})
_NONE: Final[Mapping[str, Any]] = {}
_REGISTRIES: Final = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS: Final = (list, tuple, dict)
_SEARCHED: Final = (torch.Tensor, Tensor, nn.Module, weakref.ref, *_CONTAINERS)
_INTERNAL: Final = frozenset(nn.Module().__dict__) | {"_virtual_cache"}


class Recorder(Transparent):
    """Watch one computation.

    Attributes:
        sources: The tensors read that were not made inside, each with its version when it was first read.
        pure: Whether nothing happened that makes the value unfit for reuse.
        flags: Whether the computation asked for `requires_grad`.
        links: Places of sources that are known already, from values that were reused inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[torch.Tensor, int]] = {}
        self.pure = True
        self.flags = False
        self.links: dict[int, Sequence[Link]] = {}
        # Weak, so that watching does not keep intermediate results alive.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._aliases: list[tuple[torch.Tensor, int]] = []
        self._random: list[torch.Tensor] = []

    def __enter__(self) -> "Recorder":
        with torch._C.DisableTorchFunction():
            self._random = _random_states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for arg in args:
            if type(arg) in _PLAIN:
                self._saw(arg)
            elif type(arg) not in _SCALARS:
                for tensor in _tensors(arg):
                    self._saw(tensor)
        if kwargs:
            for tensor in _tensors(kwargs):
                self._saw(tensor)
            if kwargs.get("generator") is not None:
                self.pure = False
        else:
            kwargs = _NONE
        if func in _UNTRACKED:
            self.pure = False
        elif func in _FLAGS:
            self.flags = True
        result = func(*args, **kwargs)
        if type(result) in _PLAIN:
            self.made(result)
            if func == _DATA:
                self._aliases.append((result, result._version))
        elif type(result) not in _SCALARS:
            for tensor in _tensors(result):
                self.made(tensor)
        return result

    def _saw(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        made = self._made.get(key)
        if key in self.sources or (made is not None and made() is tensor):
            return
        if getattr(tensor, "_moduli_constant", False):
            # An index that follows from labels alone; it is kept by the labels and never changes.
            return
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_inference():
            self.pure = False
            return
        self.sources[key] = (tensor, tensor._version)

    def made(self, tensor: torch.Tensor) -> None:
        """Note a tensor as a result of this computation."""
        key = id(tensor)
        if key not in self.sources:
            self._made[key] = weakref.ref(tensor)

    def absorb(self, tensor: torch.Tensor, sources: Sequence[torch.Tensor], links: Sequence[Link]) -> None:
        """Note a value that was reused inside: its sources are ours too."""
        for source in sources:
            self._saw(source)
            self.links.setdefault(id(source), links)
        self.made(tensor)

    def conclude(self, value: torch.Tensor) -> bool:
        """Whether the value may be reused as long as its sources stay the same."""
        self._saw(value)
        return (
            self.pure
            and all(tensor._version == version for tensor, version in self.sources.values())
            and all(alias._version == version for alias, version in self._aliases)
            and all(map(torch.equal, self._random, _random_states()))
        )


def _random_states() -> list[torch.Tensor]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
    elif isinstance(tree, Tensor):
        yield tree.data


class _Cell:
    """A variable of an enclosing function, as a container with one entry."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents


class _Size:
    """How many attributes a module has, as a container: `True` under their number."""

    __slots__ = ("_state",)

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def __getitem__(self, size: int) -> bool:
        return len(self._state) == size


def attributes(state: dict[str, Any]) -> list[Link]:
    """Links to the plain attributes of a module that tells nobody when they are assigned."""
    links: list[Link] = [(_Size(state), len(state), True)]
    links.extend((state, key, value) for key, value in state.items() if key == "training" or key not in _INTERNAL)
    return links


def locate(owner: nn.Module, function: Any, recorder: Recorder) -> list[Link] | None:
    """Where every source of a computation lives, as links to check before reuse; None if one is nowhere to be found.

    Searched are the owner and the modules below it, what its attributes hold, and the variables that the function
    refers to. A source counts as found in the first place met.
    """
    missing = dict(recorder.sources)
    found: dict[tuple[int, Any], Link] = {}
    visited: set[int] = set()

    def keep(path: Sequence[Link]) -> None:
        for link in path:
            found[id(link[0]), link[1]] = link

    def visit(obj: Any, path: tuple[Link, ...], depth: int) -> None:
        if not missing:
            return
        if isinstance(obj, torch.Tensor):
            if missing.pop(id(obj), None) is not None:
                keep(path)
        elif isinstance(obj, Tensor):
            visit(obj.data, path, depth)
        elif isinstance(obj, nn.Module):
            if id(obj) in visited:
                return
            visited.add(id(obj))
            state = obj.__dict__
            for registry in ("_parameters", "_buffers"):
                entries = state[registry]
                for key, entry in entries.items():
                    if missing.pop(id(entry), None) is not None:
                        keep((*path, (state, registry, entries), (entries, key, entry)))
            if not missing:
                return
            entries = state["_modules"]
            for key, entry in list(entries.items()):
                visit(entry, (*path, (state, "_modules", entries), (entries, key, entry)), 0)
            for key, entry in list(state.items()):
                if key not in _INTERNAL and isinstance(
                    entry, (torch.Tensor, Tensor, nn.Module, weakref.ref, *_CONTAINERS)
                ):
                    visit(entry, (*path, (state, key, entry)), 0)
        elif isinstance(obj, weakref.ref):
            target = obj()
            if isinstance(target, nn.Module):
                visit(target, path, depth)
        elif isinstance(obj, _CONTAINERS) and depth < 2:
            for key, entry in list(obj.items() if isinstance(obj, dict) else enumerate(obj)):
                if isinstance(entry, _SEARCHED):
                    visit(entry, (*path, (obj, key, entry)), depth + 1)

    visit(owner, (), 0)
    if missing:
        for container, key, entry in _variables(function):
            visit(entry, ((container, key, entry),), 0)
    for key in list(missing):
        known = recorder.links.get(key)
        if known is not None:
            del missing[key]
            keep(known)
    if missing:
        return None
    registries = {id(obj) for _, key, obj in found.values() if key == "_parameters"}
    states = {id(owner.__dict__): owner.__dict__}
    states.update((id(container), container) for container, key, _ in found.values() if key in _REGISTRIES)
    for container, _, obj in found.values():
        # What is registered as a parameter but is none was put there for the length of one functional call.
        if id(container) in registries and not isinstance(obj, nn.Parameter):
            return None
    links = list(found.values())
    for state in states.values():
        # Modules of ours start another epoch when an attribute is assigned; of others each one is looked at.
        if "_labelled" not in state:
            links.extend(attributes(state))
    return links


def _variables(function: Any) -> Iterator[Link]:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _Cell(cell), name, cell.cell_contents
        except ValueError:
            continue  # the enclosing function has not assigned it yet, so it cannot have been read either
    for name in code.co_names:
        if name in function.__globals__:
            yield function.__globals__, name, function.__globals__[name]
