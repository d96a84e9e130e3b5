"""The modes of operations on models: whether gradients are recorded, and the block in which results are new leaves."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from moduli._torch import has_dispatch_mode, in_transform, set_grad_enabled


class _Mode(threading.local):
    graph = False


_mode = _Mode()


@contextmanager
def differentiable() -> Iterator[None]:
    """Record gradients in operations on models, so that they reach operands and coefficients.

    The parameters of a result are then tensors with a graph instead of new leaves. Operations in place raise.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt, differentiable
        >>> a, b = adopt(torch.nn.Linear(1, 1)), adopt(torch.nn.Linear(1, 1))
        >>> t = torch.tensor(0.5, requires_grad=True)
        >>> with differentiable():
        ...     merged = a + t * (b - a)
        >>> merged(torch.ones(1)).sum().backward()
        >>> t.grad is not None
        True
    """
    before = _mode.graph
    _mode.graph = True
    try:
        yield
    finally:
        _mode.graph = before


def is_differentiable() -> bool:
    """Whether operations on models record gradients, as inside `differentiable`.

    Example:
        >>> from moduli.particles import differentiable, is_differentiable
        >>> with differentiable():
        ...     print(is_differentiable())
        True
    """
    return _mode.graph


def is_composing() -> bool:
    """Whether results must be composed of torch operations, because gradients or function transforms follow them."""
    return _mode.graph or is_watched()


class LeafMode:
    """A block in which results are trainable leaves, whatever the caller's grad and inference modes.

    Cyclic garbage collection is paused: with thousands of new modules it would traverse all of them many times.
    """

    __slots__ = ("_collecting", "_inference", "_recording")

    def __enter__(self) -> None:
        self._collecting = gc.isenabled()
        gc.disable()
        # Written out, because every operation enters this block and torch's context managers cost more than small operations.
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._recording = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._recording)
        if self._inference is not None:
            self._inference.__exit__(*error)
        if self._collecting:
            gc.enable()


def record_nothing() -> AbstractContextManager[None]:
    """Return a context in which no gradients are recorded, unless inside `differentiable` or a function transform."""
    return nullcontext() if is_composing() else LeafMode()


def refuse_graph() -> None:
    """Raise if gradients are recorded, for operations in place.

    Raises:
        RuntimeError: Inside `differentiable`.
    """
    if _mode.graph:
        raise RuntimeError("inside differentiable() operations in place are refused: write a = a + b instead of a += b")


def is_watched() -> bool:
    """Whether a function transform or a dispatch mode intercepts operations."""
    return in_transform() or bool(has_dispatch_mode())
