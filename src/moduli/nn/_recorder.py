"""What a computation reads, and where the tensors it reads are kept.

A recorder watches every torch function. A tensor that goes in and did not come out of an earlier one is a *source*. A
value can be reused only if each of its sources is found on a way that leads from its owner, or from its function, over
attributes and containers: only then can a later look tell whether it was replaced. The state of torch must agree, too: some
states (function transforms, tracing, modes) make a tensor mean something else than its storage, and nothing is reused.
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
    """A mode that only watches, so that a value computed under it is the value computed without it."""


def ambient() -> Ambient | None:
    """What a value computed now depends on besides its sources, or None where nothing may be reused."""
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
# These give a tensor that exists already; it is as much a source as the one it is asked of.
_HELD: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("grad", "_grad"))
_INTERNAL: Final = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}


class Recorder(Transparent):
    """Watch one computation.

    Attributes:
        sources: The tensors read that were not made inside, each with its version when it was first read.
        places: Where sources of values that were reused inside are kept.
        pure: Whether nothing was read whose changes torch does not count.
        paused: Whether what runs is not part of the computation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[torch.Tensor, int]] = {}
        self.places: dict[int, list[Container]] = {}
        self.pure = True
        self.paused = False
        # Weak, so that watching does not keep intermediate results alive.
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
        made = self._made.get(key)
        if key in self.sources or (made is not None and made() is tensor):
            return
        if getattr(tensor, "_moduli_constant", False):
            # An index that follows from labels alone; it is kept by the labels and never changes.
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
        """Note a value that was reused inside: its sources are ours too."""
        for source in sources:
            self._read(source)
            self.places.setdefault(id(source), places)
        self._make(value)

    def conclude(self, value: torch.Tensor) -> bool:
        """Whether the value was computed from sources that are as they were when they were read."""
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
    """A container that leads to a source, how it is read, and what it held, kept alive so that nothing can pass for it."""

    container: Collection[Any]
    read: Callable[[Any], Iterable[Any]]
    size: int
    held: tuple[Any, ...]


def attributes(module: nn.Module) -> Container:
    """The attributes of a module as a place, without the score of internal ones that say nothing about tensors."""
    state = module.__dict__
    return _place(state, itemgetter(*(key for key in state if key not in _INTERNAL)))


def locate(owner: nn.Module, before: Container, recorder: Recorder) -> list[Container] | None:
    """The containers in which the sources of a computation were found; None if a source is nowhere to be found.

    Searched are the owner, the modules below it, and then what their attributes hold, until all sources are found.

    Args:
        owner: The module that the value belongs to.
        before: Its attributes before the computation, which may have set some.
        recorder: What it read.
    """
    missing = dict(recorder.sources)
    found: dict[int, Container] = {id(before.container): before}
    visited: set[int] = set()
    modules: list[Container] = []
    others: list[Container] = []

    def enter(module: nn.Module) -> None:
        if not all(isinstance(each, (nn.Parameter, type(None))) for each in module._parameters.values()):
            # What is registered as a parameter but is none was put there for the length of one functional call.
            visited.add(id(module._parameters))
        registries = (module._parameters, module._buffers, module._modules)
        modules.extend([attributes(module), *(_place(each, dict.values) for each in registries)])

    enter(owner)
    while missing and (modules or others):
        place = modules.pop(0) if modules else others.pop(0)
        if id(place.container) in visited:
            continue
        visited.add(id(place.container))
        found.setdefault(id(place.container), place)
        for entry in place.held:
            if isinstance(entry, weakref.ref):
                entry = entry()
            if isinstance(entry, (torch.Tensor, Tensor)):
                missing.pop(id(entry.data if isinstance(entry, Tensor) else entry), None)
            elif isinstance(entry, nn.Module):
                enter(entry)
            elif isinstance(entry, (list, tuple, dict)):
                others.append(_place(entry, dict.values if isinstance(entry, dict) else iter))
    known = [recorder.places.get(key) for key in missing]
    if None in known:
        return None
    return [*found.values(), *(each for places in known for each in places or ())]


def _place(container: Collection[Any], read: Callable[[Any], Iterable[Any]]) -> Container:
    return Container(container, read, len(container), tuple(read(container)))
