"""Computing derived values, and reusing them inside `with cached():`.

Outside a scope a derived value is computed whenever it is read. Inside one it is reused while the tensors it was computed
from, the containers that hold them and the state of torch are unchanged.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_not
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from moduli._torch import guard_tensors
from moduli.labels import Tensor

from ._recorder import Ambient, Container, Recorder, ambient, attributes, locate


@contextmanager
def cached() -> Iterator[None]:
    """Reuse virtual tensors, and the gradient graphs behind them, until the end of the `with` block.

    Outside, a virtual tensor is computed whenever it is read. Inside, it is computed again only after an operation in
    place on a tensor it read or on the value itself, a step of an optimizer, an assignment to its module or to a module
    that holds such a tensor, a backward pass through it, or a change of gradient mode, autocast or default dtype.
    After a change of anything else it depends on, call `invalidate`: random draws,
    configurations, closures, class attributes and attributes of other modules, and memory written without torch's version
    counters, that is through `.data`, NumPy, DLPack, a tensor passed to `vector_to_parameters`, `torch.distributed`, or a
    fused step called without its optimizer.

    A value with a source that is not reachable from its module (only from a closure, say) is computed at every read. Scopes
    nest, and belong to the thread that opened them. Nothing is reused under function transforms,
    `functional_call`, modes that intercept operations, and compilation.

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
    if _local.scope is not None:
        yield
        return
    global _hook
    scope = _local.scope = Scope()
    with _lock:
        if not scopes:
            _hook = register_optimizer_step_post_hook(_on_step)
        scopes.append(scope)
    try:
        yield
    finally:
        _local.scope = None
        with _lock:
            scopes.remove(scope)
            scope.entries.clear()
            if not scopes:
                _hook.remove()


def invalidate(module: nn.Module | None = None) -> None:
    """Discard every value that is reused in an open `cached` scope, of any thread.

    Needed inside a scope only, after one of the undetected changes that `cached` lists. Since a virtual tensor may depend on
    any module, all virtual tensors are computed again at their next read.

    Args:
        module: The module that was written to; None if there is no single one.

    Raises:
        TypeError: If the argument is no module.

    Example:
        >>> import torch
        >>> from moduli.nn import Module, cached, invalidate, virtual
        >>> class Doubled(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.ones(2))
        ...     @virtual
        ...     def weight(self):
        ...         return 2 * self.a
        >>> m = Doubled()
        >>> with torch.no_grad(), cached():
        ...     before = m.weight
        ...     _ = m.a.data.fill_(5.0)
        ...     invalidate(m)
        ...     m.weight
        tensor([10., 10.])
    """
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"invalidate takes a module, or nothing to mean all of them; got a {type(module).__name__}")
    _drop()


Key: TypeAlias = tuple[int, object]
"""The id of the module that a value belongs to, and a token that identifies the value among those of the module."""


class ReusedValue:
    """A value, and the sources, containers and torch state that it was computed from."""

    def __init__(
        self,
        owner: weakref.ref[nn.Module],
        value: Any,
        sources: list[torch.Tensor],
        places: list[Container],
        surrounding: Ambient,
    ) -> None:
        leaf = _leaf(value)
        self.owner, self.value, self.sources, self.places, self.ambient = owner, value, sources, places, surrounding
        # Aliases keep the storages alive: the allocator could give a freed address to another tensor.
        self.aliases = [source.detach() for source in sources]
        # The value is watched too: a user may have changed it in place.
        self.watched = (*sources, leaf)
        self.states = [(tensor, tensor._version, tensor.data_ptr()) for tensor in self.watched]
        self.looks_alike = guard_tensors(self.watched)
        self.spent = spent = [False]
        if leaf.grad_fn is not None:
            # Backward frees the graph, and the next forward needs a new one.
            leaf.grad_fn.register_prehook(lambda _: spent.__setitem__(0, True))

    def holds(self, surrounding: Ambient) -> bool:
        """Whether everything that the value was computed from is unchanged."""
        if self.spent[0] or self.ambient != surrounding or not self.looks_alike(*self.watched):
            return False
        for tensor, version, address in self.states:
            if tensor._version != version or tensor.data_ptr() != address:
                return False
        for container, read, size, items in self.places:
            try:
                if len(container) != size or True in map(is_not, read(container), items):
                    return False
            except KeyError:
                return False
        return True


class Scope:
    """The values of one outermost `with cached():`."""

    def __init__(self) -> None:
        self.entries: dict[Key, ReusedValue] = {}
        # The recorders of the running computations, from the outermost to the innermost.
        self.recorders: list[Recorder] = []

    def forget(self, key: Key, _: object) -> None:
        """Remove the value of a module that was garbage-collected."""
        self.entries.pop(key, None)

    def pause(self, paused: bool) -> None:
        """Stop or resume recording."""
        for recorder in self.recorders:
            recorder.paused = paused


scopes: Final[list[Scope]] = []
"""The open scopes of all threads: if there are none, reads need no lookup of thread-local state."""


class _Local(threading.local):
    """The state of one thread: its scope, and the values being computed."""

    def __init__(self) -> None:
        self.scope: Scope | None = None
        self.active: dict[Key, tuple[nn.Module, str]] = {}


_local: Final = _Local()


def compute(owner: nn.Module, token: object, name: str, call: Callable[[Any], Any]) -> Any:
    """Compute a derived value; raise if it depends on itself.

    Args:
        owner: The module it belongs to.
        token: Identifies the value among those of the module.
        name: Its name in errors.
        call: Computes it from the owner.

    Raises:
        RecursionError: If the value is being computed already, with the path that leads back to it.
        RuntimeError: If the computation fails for a missing attribute.
        TypeError: If the result is not a tensor.
    """
    active, key = _local.active, (id(owner), token)
    if key in active:
        path = list(active.values())[list(active).index(key) :]
        names = [f"{type(module).__name__}.{called}" for module, called in (*path, path[0])]
        raise RecursionError(
            f"the virtual tensor {names[0]} needs its own value: {' -> '.join(names)}. "
            "Let one of them read stored tensors only"
        )
    active[key] = (owner, name)
    try:
        value = call(owner)
    except AttributeError as error:
        # An AttributeError that leaves a descriptor is reported as if the virtual tensor itself did not exist.
        raise RuntimeError(f"computing {type(owner).__name__}.{name} failed: {error}") from error
    finally:
        del active[key]
    if not isinstance(value, (torch.Tensor, Tensor)):
        raise TypeError(
            f"the virtual tensor {type(owner).__name__}.{name} must be a tensor, but its function returned a "
            f"{type(value).__name__}"
        )
    return value


def reuse(owner: nn.Module, token: object, name: str, call: Callable[[Any], Any]) -> Any:
    """Return the stored value of this thread's scope if it is valid; otherwise compute it, and store it if changes are detectable.

    Args:
        owner: The module it belongs to.
        token: Identifies the value among those of the module.
        name: Its name in errors.
        call: Computes it from the owner.
    """
    scope = _local.scope
    surrounding = None if scope is None else ambient()
    if scope is None or surrounding is None:
        return compute(owner, token, name, call)
    key = (id(owner), token)
    # Read before the computation: `invalidate` during it replaces the dict, and the result must not enter the new one.
    entries = scope.entries
    entry = entries.get(key)
    if entry is not None and entry.owner() is owner:
        nested = scope.recorders  # mostly empty: then nothing has to be paused
        if nested:
            scope.pause(True)
        holds = entry.holds(surrounding)
        if nested:
            if holds:
                _absorb(scope, entry)
            scope.pause(False)
        if holds:
            return entry.value
    before, recorder = attributes(owner), Recorder()
    scope.recorders.append(recorder)
    try:
        with recorder:
            value = _compute_countable(owner, token, name, call)
    finally:
        scope.recorders.pop()
    scope.pause(True)
    places = locate(owner, before, recorder) if recorder.conclude(_leaf(value)) else None
    if places is None:
        entries.pop(key, None)
    else:
        home = weakref.ref(owner, functools.partial(scope.forget, key))
        sources = [tensor for tensor, _ in recorder.sources.values()]
        entries[key] = ReusedValue(home, value, sources, places, surrounding)
        _absorb(scope, entries[key])
    scope.pause(False)
    return value


def _absorb(scope: Scope, entry: ReusedValue) -> None:
    """Add the sources of a value, and their containers, to the enclosing computations that are being recorded."""
    for recorder in scope.recorders:
        recorder.absorb(entry.watched[-1], entry.sources, entry.places)


def _compute_countable(owner: nn.Module, token: object, name: str, call: Callable[[Any], Any]) -> Any:
    """Compute a value outside of inference mode, in which tensors have no version counter, unless the sources have none either."""
    if torch.is_inference_mode_enabled() and not any(map(torch.is_inference, (*owner.parameters(), *owner.buffers()))):
        with torch.inference_mode(False), torch.no_grad():
            return compute(owner, token, name, call)
    return compute(owner, token, name, call)


def _leaf(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, Tensor) else value


def _drop() -> None:
    for scope in list(scopes):
        scope.entries = {}


_lock: Final = threading.Lock()
# Fused steps do not increase the versions of the parameters they write, so a hook on all optimizers discards the values. It
# is registered while a scope is open.
_hook: Any = None


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _drop()
