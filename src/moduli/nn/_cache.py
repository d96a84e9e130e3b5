"""Reuse of derived values: one entry per virtual tensor, checked against everything it was made from.

An entry is used again only if nothing that its computation read has changed. Sources are compared by place, version,
address, shape, strides and dtype. What these do not show (plain attributes, registrations, fused optimizer steps) moves
one process-wide *epoch*, and an entry of another epoch is never used. A correct answer beats a reused one: whatever
cannot be checked is computed again.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from moduli.labels import Tensor

from ._ambient import Ambient, ambient
from ._entry import LOOK, LOOK_AND_FLAG, Entry, Scope, states
from ._recorder import Link, Recorder, attributes, locate

__all__ = [
    "bump",
    "bump_compiled",
    "cached",
    "compute",
    "evaluate",
    "forget",
    "invalidate",
    "recording",
    "reuse",
    "right",
]

_CACHE: Final = "_virtual_cache"

_numbers: Final = itertools.count(1)
_epoch = 0


def bump() -> None:
    """Start another epoch: no value computed before is used again."""
    global _epoch
    # Taken from one counter, so that two threads can never both go on in an epoch that one of them has left.
    _epoch = next(_numbers)


# Set by compiled code, which can write to a list but not count on; the next look starts another epoch.
_changed: Final = [False]


def bump_compiled() -> None:
    """`bump`, from inside code that is being compiled."""
    _changed[0] = True


class _Local(threading.local):
    """What belongs to one thread: the computations under way, their recorders, and the scope of `cached`."""

    def __init__(self) -> None:
        self.active: list[tuple[nn.Module, str]] = []
        self.recorders: list[Recorder] = []
        self.scope: Scope | None = None


_local: Final = _Local()

# One entry per recorder of any thread: asking this first spares most reads the look at thread-local state.
recording: Final[list[None]] = []


_version: Final = attrgetter("_version")
_pointer: Final = torch.Tensor.data_ptr
_grad: Final = torch.is_grad_enabled
_dtype: Final = torch.get_default_dtype
_function_modes: Final = torch._C._len_torch_function_stack


class _Cache(dict[str, Entry]):
    """The entries of one module. A copy of the module starts with none, since it computes from its own sources."""

    __slots__ = ("carries_graph",)

    def __init__(self) -> None:
        super().__init__()
        self.carries_graph: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cache, ()

    def __copy__(self) -> "_Cache":
        return _Cache()

    def __deepcopy__(self, memo: Any) -> "_Cache":
        return _Cache()


def reuse(owner: nn.Module, name: str) -> Entry | None:
    """The entry of a virtual tensor, if its value is still right."""
    if not recording or not _local.recorders:
        return right(owner, name)
    # Looking at tensors is not part of the computation that is being recorded.
    with torch._C.DisableTorchFunction():
        entry = right(owner, name)
        if entry is not None:
            for recorder in _local.recorders:
                recorder.absorb(entry.leaf, entry.sources, entry.links)
    return entry


def right(owner: nn.Module, name: str) -> Entry | None:
    """The entry of a virtual tensor, if its value is still right and no computation is being recorded."""
    if _changed[0]:
        _changed[0] = False
        bump()
    home = owner.__dict__
    cache = home.get(_CACHE)
    if cache is None:
        return None
    entry: Entry | None = cache.get(name)
    if (
        entry is None
        or entry.epoch != _epoch
        # A shallow copy of a module shares this cache but may have other sources.
        or entry.home is not home
        or entry.grad is not _grad()
        or entry.dtype is not _dtype()
        or entry.leaf.requires_grad is not entry.requires
    ):
        return None
    sources, guard = entry.sources, entry.guard
    try:
        for container, key, obj in entry.links:
            if container[key] is not obj:
                return None
    except (KeyError, IndexError, ValueError):
        return None
    if list(map(_version, entry.watched)) != entry.versions or list(map(_pointer, sources)) != entry.pointers:
        return None
    if guard is None or _function_modes() or forward_ad._current_level >= 0 or not guard.check(*sources):
        if not entry.holds():
            return None
        if entry.scope is not None and (entry.scope is not _local.scope or entry.spent[0]):
            return None
    return entry


def evaluate(owner: nn.Module, name: str, function: Any, call: Callable[[], Any]) -> Any:
    """Compute a virtual tensor, and keep the value if it can be told when it is no longer right."""
    surrounding = ambient()
    cache = _cache_of(owner)
    if surrounding is None or (surrounding[0] and _local.scope is None and name in cache.carries_graph):
        value = compute(owner, name, call)
        # What carried a graph may have been frozen since; then the next read is worth recording again.
        if not _leaf(owner, name, value).requires_grad:
            cache.carries_graph.discard(name)
        return value
    if torch.is_inference_mode_enabled():
        if any(map(_is_inference, (*owner._parameters.values(), *owner._buffers.values()))):
            return compute(owner, name, call)
        # Inference tensors have no version, so a change made to a reused one would go unseen.
        with torch.inference_mode(False), torch.no_grad():
            return _record(owner, name, function, call, surrounding, cache)
    return _record(owner, name, function, call, surrounding, cache)


def compute(owner: nn.Module, name: str, call: Callable[[], Any]) -> Any:
    """Compute a virtual tensor, refusing one that needs itself.

    Raises:
        RecursionError: If the value is being computed already, with the path that leads back to it.
        RuntimeError: If the computation fails for a missing attribute.
    """
    active = _local.active
    for at, (other, called) in enumerate(active):
        if other is owner and called == name:
            path = [_path(module, attribute) for module, attribute in [*active[at:], (owner, name)]]
            raise RecursionError(
                f"the virtual tensor {path[0]} needs its own value: {' -> '.join(path)}. "
                "Let one of them read stored tensors only"
            )
    active.append((owner, name))
    try:
        return call()
    except AttributeError as error:
        # An AttributeError that leaves a descriptor is reported as if the virtual tensor itself did not exist.
        raise RuntimeError(f"computing {_path(owner, name)} failed: {error}") from error
    finally:
        active.pop()


def _record(
    owner: nn.Module, name: str, function: Any, call: Callable[[], Any], surrounding: Ambient, cache: _Cache
) -> Any:
    _install_hooks()
    epoch, before = _epoch, attributes(owner.__dict__)
    recorder = Recorder()
    _local.recorders.append(recorder)
    recording.append(None)
    try:
        with recorder:
            value = compute(owner, name, call)
    finally:
        recording.pop()
        _local.recorders.pop()
    # What follows looks at tensors, which an outer recorder must not take for computation.
    with torch._C.DisableTorchFunction():
        if _unchanged(before):
            _store(owner, name, function, value, recorder, epoch, surrounding, cache)
    return value


def _unchanged(links: list[Link]) -> bool:
    try:
        return all(container[key] is obj for container, key, obj in links)
    except KeyError:
        return False


def _store(
    owner: nn.Module,
    name: str,
    function: Any,
    value: Any,
    recorder: Recorder,
    epoch: int,
    surrounding: Ambient,
    cache: _Cache,
) -> None:
    """Keep a value that was just computed, if it can be told when it is no longer right."""
    leaf = _leaf(owner, name, value)
    carries_graph = leaf.grad_fn is not None
    if carries_graph:
        cache.carries_graph.add(name)
    scope = _local.scope
    if (
        epoch != _epoch
        or (carries_graph and scope is None)
        or leaf.is_inference()
        or not recorder.conclude(leaf)
        or (links := locate(owner, function, recorder)) is None
    ):
        cache.pop(name, None)
        return
    entry = Entry()
    entry.value, entry.leaf, entry.requires = value, leaf, leaf.requires_grad
    entry.epoch, entry.home, entry.links = epoch, owner.__dict__, links
    entry.ambient, (entry.grad, entry.dtype) = surrounding, surrounding[:2]
    entry.sources = [tensor for tensor, _ in recorder.sources.values()]
    # The value is watched too: a user may have changed it in place.
    entry.watched = [*entry.sources, leaf]
    entry.versions = list(map(_version, entry.watched))
    entry.pointers = list(map(_pointer, entry.sources))
    # Without gradients the guard can vouch for the sources; with them, and where flags were read, all is looked at.
    entry.look = LOOK_AND_FLAG if recorder.flags or carries_graph or surrounding[0] else LOOK
    entry.state = states(entry.sources, entry.look)
    entry.guard = None
    # They keep the storages alive: an address given back to the allocator could return under another tensor.
    entry.aliases = [tensor.detach() for tensor in entry.sources]
    entry.scope, entry.spent = None, [False]
    if carries_graph and scope is not None:
        spent = entry.spent
        entry.scope = scope
        scope.entries[id(cache), name] = cache
        # Backward frees the graph, and the next forward needs a new one.
        leaf.grad_fn.register_prehook(lambda _: spent.__setitem__(0, True))  # type: ignore[union-attr]
    cache[name] = entry
    # A computation around this one read the same sources, and may not know where they live.
    for outer in _local.recorders:
        outer.absorb(leaf, entry.sources, links)


def _cache_of(owner: nn.Module) -> _Cache:
    cache = owner.__dict__.get(_CACHE)
    if cache is None:
        cache = owner.__dict__[_CACHE] = _Cache()
    return cache


def _leaf(owner: nn.Module, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, torch.Tensor):
        return value
    raise TypeError(
        f"the virtual tensor {_path(owner, name)} must be a tensor, but its function returned a {type(value).__name__}"
    )


def _path(owner: nn.Module, name: str) -> str:
    # What follows the mark tells apart virtual tensors that were given one name.
    return f"{type(owner).__name__}.{name.partition('#')[0]}"


def forget(owner: nn.Module, name: str) -> None:
    """Drop the entry of a virtual tensor that no longer exists."""
    owner.__dict__.get(_CACHE, {}).pop(name, None)


def _is_inference(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_inference()


_hooks_installed = False


def _install_hooks() -> None:
    # Not at import: a program that never derives a tensor should not pay for hooks on every registration.
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True

    def on_registration(module: nn.Module, name: str, value: Any) -> None:
        if not torch.compiler.is_compiling():
            bump()

    def on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Fused steps do not move the versions of the parameters they change.
        if not torch.compiler.is_compiling():
            bump()

    torch_module.register_module_parameter_registration_hook(on_registration)
    torch_module.register_module_buffer_registration_hook(on_registration)
    torch_module.register_module_module_registration_hook(on_registration)
    register_optimizer_step_post_hook(on_step)


@contextmanager
def cached() -> Iterator[None]:
    """Reuse virtual tensors that carry a gradient graph, until the end of the `with` block.

    Outside, a virtual tensor that needs gradients is computed at every read, so that any number of forward and
    backward passes can be interleaved. Inside, forward passes share one computation and one graph as long as no
    source changes; a backward pass through it ends the sharing, as the graph is then gone. Scopes nest, and belong to
    the thread that opened them.

    Example:
        >>> import torch
        >>> from moduli.nn import Module, cached, virtual
        >>> class Symmetric(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.eye(2))
        ...     @virtual
        ...     def weight(self):
        ...         return self.a + self.a.T
        >>> m = Symmetric()
        >>> with cached():
        ...     m.weight is m.weight
        True
        >>> m.weight is m.weight
        False
    """
    scope = _local.scope
    if scope is None:
        scope = _local.scope = Scope()
    scope.depth += 1
    try:
        yield
    finally:
        scope.depth -= 1
        if not scope.depth:
            _local.scope = None
            for (_, name), entries in scope.entries.items():
                entry = entries.get(name)
                if entry is not None and entry.scope is scope:
                    del entries[name]


def invalidate(module: nn.Module | None = None) -> None:
    """Forget every value computed from a module's tensors, its own virtual tensors and those of others.

    Needed only after a change that leaves no trace: writes through `tensor.data` or through a NumPy array that shares
    the memory, and numbers changed in place in a list, a dict or another object that a virtual tensor reads. Since any
    module may derive from any other, all virtual tensors are computed again at their next read.

    Args:
        module: The module that was written to; None if there is no single one.

    Raises:
        TypeError: If the argument is no module.

    Example:
        >>> import torch
        >>> from moduli.nn import Module, invalidate, virtual
        >>> class Doubled(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.ones(2))
        ...     @virtual
        ...     def weight(self):
        ...         return 2 * self.a
        >>> m = Doubled()
        >>> with torch.no_grad():
        ...     before = m.weight
        ...     _ = m.a.data.fill_(5.0)
        ...     invalidate(m)
        ...     m.weight
        tensor([10., 10.])
    """
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"invalidate takes a module, or nothing to mean all of them; got a {type(module).__name__}")
    bump()
