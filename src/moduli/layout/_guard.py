"""`Guard`: a block that restores tensors and states if it raises, and defers signals until its end.

A block of writes can end half way for two reasons: an exception, or a signal whose handler raises one (Ctrl-C) between
any two instructions. Against the first, a `Guard` copies what will be written before the first write. Against the second, it
defers signals (`deferred=True`): handlers run at the end of the block, or inside `allow_interrupts()`, where user code
runs. Deferring needs no copies, so it costs two microseconds instead of a pass over memory.

Python's signal handlers are replaced during the block by one that records the signal. Masking signals in the main thread is
not enough: the system then delivers a signal to another thread, and Python still runs its handler in the main thread. In
other threads nothing is done, since handlers never run there. Replacing a handler is a system call, which in a step of small
tensors costs more than the rest of the guard; blocks that run often therefore leave the recording handler installed, and
outside of blocks it calls the handler that it replaced.
"""

from __future__ import annotations

import operator
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from .._torch import get_handler, is_fake, set_grad_enabled, set_handler
from ._pieces import is_sharded

# The signals for which programs install handlers that raise.
_NAMES = ("INT", "TERM", "ALRM", "USR1", "USR2", "BREAK")
_NUMBERS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))


_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


class Guard:
    """A block that restores everything registered with it if it raises: register first, then write.

    Grad mode is restored in any case.

    Args:
        deferred: Whether signal handlers are deferred to the end of the block; otherwise an interrupt inside it is an exception
            like any other, and the block is undone. "often" leaves the deferring handler installed at the end.
        grad: The grad mode of the block; None for the current one.

    Example:
        >>> import torch
        >>> from moduli.layout import Guard
        >>> w, row = torch.ones(2), {"step": 1}
        >>> try:
        ...     with Guard() as guard:
        ...         guard.tensors([w])
        ...         guard.mappings(row)
        ...         row["step"] = w.mul_(2).sum().item()
        ...         raise ValueError("no")
        ... except ValueError:
        ...     w, row
        (tensor([1., 1.]), {'step': 1})
    """

    __slots__ = ("_actions", "_deferred", "_grad", "_held", "_known", "_mode")

    def __init__(self, *, deferred: bool | Literal["often"] = False, grad: bool | None = None) -> None:
        self._deferred, self._grad, self._held = deferred, grad, 0
        self._actions: list[Callable[[], object]] = []
        self._known: dict[Tensor, Tensor] = {}

    # -- what is protected -------------------------------------------------------------------------------------------

    def tensors(self, tensors: Iterable[Tensor], values: Sequence[Tensor] | None = None) -> None:
        """Protect the values that tensors have when they are first registered.

        Args:
            tensors: The tensors.
            values: Existing copies of them that are never written, to be used instead of new copies.
        """
        copies, entries = self._known, []
        for i, tensor in enumerate(tensors):
            if tensor not in copies:
                alias = tensor.detach()
                copies[tensor] = alias.clone() if values is None else values[i]
                entries.append((tensor, alias, copies[tensor]))
        if entries:
            self._actions.append(lambda: _put_values(entries))

    def mappings(self, *mappings: MutableMapping[Any, Any] | set[Any]) -> None:
        """Protect the items of mappings (or sets) by identity; the contents of the items are not protected."""
        for mapping in mappings:
            self._actions.append(_make_refill(mapping))

    def states(self, *values: Any, unwritten: Sequence[Tensor] = ()) -> None:
        """Protect nested values, such as the state of links: mappings, lists, deques, tensors and random generators.

        Args:
            *values: The values.
            unwritten: Tensors among them that need no copy, because they are not written, or protected in part.
        """
        tensors: dict[Tensor, Tensor] = {}
        for value in values:
            self._capture(value, tensors)
        for tensor in unwritten:
            tensors.pop(tensor, None)
        entries = [(tensor, tensor, value) for tensor, value in zip(tensors, map(_copy, tensors), strict=True)]
        if entries:
            self._actions.append(lambda: _put_values(entries))

    def gradients(self, params: Sequence[Tensor]) -> None:
        """Protect the `grad` attributes of parameters by identity; the values of gradients are not protected."""
        grads = [param.grad for param in params]
        self._actions.append(lambda: _put_gradients(params, grads))

    def add(self, undo: Callable[[], object]) -> None:
        """Register a function that restores something else. Functions run in reverse order of registration."""
        self._actions.append(undo)

    def _capture(self, value: Any, tensors: dict[Tensor, Tensor]) -> None:
        items: Iterable[Any] = ()
        if isinstance(value, Tensor):
            tensors[value] = value
        elif isinstance(value, dict):
            self._actions.append(_make_refill(value))
            items = value.values()
        elif isinstance(value, list | deque):
            items = before = list(value)
            self._actions.append(lambda: _refill_list(value, before))
        elif isinstance(value, tuple):
            items = value
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._actions.append(lambda: value.set_state(state))
        for item in items:
            if type(item) not in _PLAIN:
                self._capture(item, tensors)

    # -- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._deferred:
            self._held = _interrupts.hold()
        self._mode = torch.is_grad_enabled()
        if self._grad is not None:
            set_grad_enabled(self._grad)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None and self._actions:
                for failure in self.restore():
                    error.add_note(f"not everything could be put back: {type(failure).__name__}: {failure}")
            set_grad_enabled(self._mode)
        finally:
            if self._held:
                _interrupts.release(self._held == _INSTALLED and self._deferred is True)

    def restore(self) -> list[Exception]:
        """Restore everything now, clear the registrations, and return the exceptions raised while restoring."""
        failures: list[Exception] = []
        hold = _interrupts.hold()
        try:
            while self._actions:
                try:
                    self._actions.pop()()
                except Exception as failure:  # noqa: BLE001 - so that the rest is put back in any case
                    failures.append(failure)
            self._known.clear()
        finally:
            if hold:
                _interrupts.release(hold == _INSTALLED)
        return failures

    def commit(self) -> None:
        """Clear the registrations, so that nothing is restored at the end."""
        self._actions.clear()
        self._known.clear()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.requires_grad else tensor.clone()


def _put_values(entries: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, alias, value in entries:
            if _is_exchanged(tensor, alias):
                tensor.data = alias
            if not value.is_meta and not (_can_compare(tensor) and torch.equal(tensor, value)):
                tensor.copy_(value)


def _can_compare(tensor: Tensor) -> bool:
    """Whether comparing values first is cheap: an unwritten tensor then keeps its version, and graphs through it stay valid."""
    return tensor.device.type == "cpu" and not is_sharded(tensor) and not is_fake(tensor)


def _is_exchanged(tensor: Tensor, alias: Tensor) -> bool:
    """Whether a tensor was given other storage, or another shape or dtype, under the same object."""
    if tensor.shape != alias.shape or tensor.dtype != alias.dtype:
        return True
    plain = tensor.layout is torch.strided and not is_sharded(tensor)
    return plain and tensor.data_ptr() != alias.data_ptr()


def _put_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _make_refill(mapping: Any) -> Callable[[], None]:
    before: Any = mapping.copy() if isinstance(mapping, set) else dict(mapping)

    def refill() -> None:
        if len(mapping) != len(before) or not all(map(operator.is_, mapping, before)):
            mapping.clear()  # to restore the order of keys, too
        mapping.update(before)

    return refill


def _refill_list(target: Any, items: list[Any]) -> None:
    target.clear()
    target.extend(items)


# -- signals that wait ---------------------------------------------------------------------------------------------------


_HELD: Final = 1
_INSTALLED: Final = 2


class _Interrupts:
    """The handler that replaces those of the program while signals are deferred; only the main thread uses it.

    While installed outside of a block (depth 0), it calls the handler that it replaced.
    """

    __slots__ = ("_handlers", "_placed", "depth", "pending")

    def __init__(self) -> None:
        self.depth = 0
        self.pending: list[int] = []
        self._handlers: dict[int, Callable[[int, Any], object]] = {}
        self._placed: list[Any] = []

    def __call__(self, number: int, frame: Any) -> None:
        if not self.depth:
            self._handlers[number](number, frame)
        elif number not in self.pending:
            self.pending.append(number)

    def hold(self) -> int:
        """Defer signals until `release`. Returns 0 in a thread where no handlers run, `_INSTALLED` if it had to be installed."""
        if _get_ident() != _main_ident:
            return 0
        if self.depth:
            self.depth += 1
            return _HELD
        outcome = _HELD
        if [*map(get_handler, _NUMBERS)] != self._placed:
            outcome = _INSTALLED
            try:
                self._install()
            except BaseException:
                self._uninstall()
                raise
        # Nothing is interrupted after this assignment; an interrupt before it means that the block has not begun.
        self.depth = 1
        return outcome

    def release(self, uninstall: bool) -> None:
        """Leave a block; at the end of the outermost one, run the handlers of the deferred signals."""
        if self.depth > 1:
            self.depth -= 1
            return
        try:
            if uninstall:
                self._uninstall()
        finally:
            self.depth = 0
        if self.pending:
            self.deliver()

    def _install(self) -> None:
        handlers = [(number, get_handler(number)) for number in _NUMBERS]
        for number, handler in handlers:
            if callable(handler) and handler is not self:
                self._handlers[number] = handler
                set_handler(number, self)
        self._placed = [self if callable(handler) else handler for _, handler in handlers]

    def _uninstall(self) -> None:
        self._placed = []
        for number, handler in self._handlers.items():
            if get_handler(number) is self:  # the program may have installed another one meanwhile
                set_handler(number, handler)

    def deliver(self) -> None:
        """Raise the deferred signals; every handler runs, even if an earlier one raises."""
        while self.pending:
            try:
                signal.raise_signal(self.pending.pop(0))
            finally:
                if self.pending:
                    self.deliver()


_interrupts = _Interrupts()


def _find_main() -> None:
    """Store the identity of the thread that runs handlers; in the child of a fork it is the one that forked."""
    global _main_ident
    _main_ident = threading.main_thread().ident


_get_ident = threading.get_ident
_main_ident: int | None = None
_find_main()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_main)


class allow_interrupts:
    """A block of user code inside a deferred `Guard`, in which signals are handled when they arrive.

    If a handler raises, the guard restores what was registered with it.

    Example:
        >>> from moduli.layout import Guard, allow_interrupts
        >>> with Guard(deferred=True):
        ...     with allow_interrupts():
        ...         answer = 6 * 7
        >>> answer
        42
    """

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = 0
        if not _interrupts.depth or _get_ident() != _main_ident:
            return
        depth = self._depth = _interrupts.depth
        try:
            _interrupts.depth = 0
            if _interrupts.pending:
                _interrupts.deliver()
        except BaseException:
            _interrupts.depth = depth
            raise

    def __exit__(self, *error: Any) -> None:
        if self._depth:
            _interrupts.depth = self._depth
