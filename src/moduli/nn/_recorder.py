"""Records which tensors a computation reads, and locates the attributes and containers that hold them.

A recorder intercepts every torch function. An argument that is not the result of an earlier function is a *source*. A
value can be reused only if each of its sources is reachable from its owner, or from its function, through
attributes and containers: only then can a later check detect that it was replaced. The state of torch must be the same, too;
in some states (function transforms, tracing, modes) a tensor is more than its storage, and nothing is reused.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moduli._torch import (
    has_autocast,
    has_dispatch_mode,
    has_function_mode,
    has_mode_beside,
    has_saved_tensor_hooks,
    in_forward_ad,
    in_transform,
)
from moduli.labels import Tensor

Ambient: TypeAlias = tuple[object, ...]


class Transparent(TorchFunctionMode):
    """A mode that only observes: a value computed under it equals the value computed without it."""


def ambient() -> Ambient | None:
    """Return the torch state that a value depends on besides its sources; None in states where nothing may be reused."""
    if in_transform() or has_dispatch_mode() or has_saved_tensor_hooks() or in_forward_ad() or _is_tracing():
        return None
    if not has_function_mode() and not has_autocast():
        return torch.is_grad_enabled(), torch.get_default_dtype()
    if has_mode_beside(Transparent):
        return None
    device = torch.get_default_device()
    casts = ((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind))
    return torch.is_grad_enabled(), torch.get_default_dtype(), *casts, *([] if device == _CPU else [device])


_is_tracing: Final[Callable[[], bool]] = torch.jit.is_tracing  # type: ignore[attr-defined]
_CPU: Final = torch.device("cpu")
_AUTOCAST: Final = ("cpu", "cuda", "mps", "xpu")


_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
_SCALARS: Final = frozenset({int, float, bool, complex, str, type(None), torch.Size, torch.dtype, torch.device})
_NONE: Final[Mapping[str, Any]] = {}
# Attribute getters that return an existing tensor, which is a source too.
_HELD: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("grad", "_grad"))
_INTERNAL: Final = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}


class Recorder(Transparent):
    """A mode that records the sources of one computation.

    Attributes:
        sources: The tensors read that were not computed inside, each with its version when it was first read.
        places: The containers of the sources of values that were reused inside, by source.
        pure: Whether every tensor read has a version counter, so that changes can be detected.
        paused: Whether recording is off, for operations that are not part of the computation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[torch.Tensor, int]] = {}
        self.places: dict[int, list[Container]] = {}
        self.pure = True
        self.paused = False
        # Weak references, so that recording does not keep intermediate results alive.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or _NONE
        if self.paused:
            return func(*args, **kwargs)
        for tensor in _tensors(args):
            self._read(tensor)
        for tensor in _tensors(kwargs):
            self._read(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._read(tensor) if func in _HELD else self._make(tensor)
        return result

    def _read(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        reference = self._made.get(key)
        if key in self.sources or (reference is not None and reference() is tensor):
            return
        if getattr(tensor, "_moduli_constant", False):
            # An index computed from labels alone; the labels store it and it never changes.
            return
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_meta:
            self.pure = False
            return
        self.sources[key] = (tensor, tensor._version)

    def _make(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        if key not in self.sources:
            self._made[key] = weakref.ref(tensor)

    def absorb(self, value: torch.Tensor, sources: Iterable[torch.Tensor], places: "list[Container]") -> None:
        """Add the sources of a value that was reused inside the computation.

        Args:
            value: The reused value.
            sources: Its sources.
            places: The containers that hold them.
        """
        for source in sources:
            self._read(source)
            self.places.setdefault(id(source), places)
        self._make(value)

    def conclude(self, value: torch.Tensor) -> bool:
        """Whether all sources can be checked, and none was written since it was read."""
        self._read(value)
        return self.pure and all(tensor._version == version for tensor, version in self.sources.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for item in tree.values() if isinstance(tree, Mapping) else tree:
        if type(item) in _SCALARS:
            continue
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, Mapping)):
            yield from _tensors(item)
        elif isinstance(item, Tensor):
            yield item.data


class Container(NamedTuple):
    """A container on the path to a source, the function that reads it, and the items it had.

    The items are kept alive, so that no other object can have the id of one of them.
    """

    container: Collection[Any]
    read: Callable[[Any], Iterable[Any]]
    size: int
    held: tuple[Any, ...]


def attributes(module: nn.Module) -> Container:
    """Return the attributes of a module as a container, without torch's internal ones that hold no tensors."""
    state = module.__dict__
    return _place(state, itemgetter(*(key for key in state if key not in _INTERNAL)))


def locate(owner: nn.Module, before: Container, recorder: Recorder) -> list[Container] | None:
    """Return the containers that hold the sources of a computation; None if a source is in none of them.

    The search covers the owner, the modules below it, and then the containers in their attributes, until all sources are found.

    Args:
        owner: The module that the value belongs to.
        before: Its attributes before the computation, which may have set some.
        recorder: The recorder of the computation.
    """
    missing = dict(recorder.sources)
    searched: dict[int, Container] = {id(before.container): before}
    walk = _Walk(owner)
    while missing and (place := walk.pop()) is not None:
        searched.setdefault(id(place.container), place)
        for entry in place.held:
            if isinstance(entry, weakref.ref):
                entry = entry()
            if isinstance(entry, (torch.Tensor, Tensor)):
                missing.pop(id(entry.data if isinstance(entry, Tensor) else entry), None)
            else:
                walk.push(entry)
    reused = [recorder.places.get(key) for key in missing]
    if None in reused:
        return None
    return [*searched.values(), *(each for places in reused for each in places or ())]


class _Walk:
    """A walk over the containers below a module, each once: attributes and registries of modules first, then other containers."""

    def __init__(self, owner: nn.Module) -> None:
        self._visited: set[int] = set()
        self._modules: list[Container] = []
        self._others: list[Container] = []
        self._enter(owner)

    def pop(self) -> Container | None:
        """Return the next container; None at the end."""
        while self._modules or self._others:
            place = self._modules.pop(0) if self._modules else self._others.pop(0)
            if id(place.container) not in self._visited:
                self._visited.add(id(place.container))
                return place
        return None

    def push(self, entry: Any) -> None:
        """Add an item of a container to the walk if it is a module or a container itself."""
        if isinstance(entry, nn.Module):
            self._enter(entry)
        elif isinstance(entry, (list, tuple, dict)):
            self._others.append(_place(entry, dict.values if isinstance(entry, dict) else iter))

    def _enter(self, module: nn.Module) -> None:
        if not all(isinstance(each, (nn.Parameter, type(None))) for each in module._parameters.values()):
            # `functional_call` puts plain tensors there for the length of one call.
            self._visited.add(id(module._parameters))
        registries = (module._parameters, module._buffers, module._modules)
        self._modules.extend([attributes(module), *(_place(each, dict.values) for each in registries)])


def _place(container: Collection[Any], read: Callable[[Any], Iterable[Any]]) -> Container:
    return Container(container, read, len(container), tuple(read(container)))
