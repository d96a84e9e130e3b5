"""What operations on models record: nothing, or a graph inside `differentiable`."""

from __future__ import annotations

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
    """Let operations on models keep the graph, so that gradients reach operands and coefficients.

    The parameters of a result are then tensors with a history instead of new leaves. Operations in place are refused.

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
    """Whether operations on models keep the graph, inside `differentiable`.

    Example:
        >>> from moduli.particles import differentiable, is_differentiable
        >>> with differentiable():
        ...     print(is_differentiable())
        True
    """
    return _mode.graph


def is_composing() -> bool:
    """Whether operations are only composed of torch's own, for gradients or transforms to follow."""
    return _mode.graph or is_watched()


class LeafMode:
    """A block in which results are leaves that can be trained, whatever mode the caller is in."""

    __slots__ = ("_inference", "_recording")

    def __enter__(self) -> None:
        # Every operation begins one: torch's own blocks take longer than small operations do.
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._recording = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._recording)
        if self._inference is not None:
            self._inference.__exit__(*error)


def record_nothing() -> AbstractContextManager[None]:
    """A block in which no gradients are recorded, except where `differentiable` asks for them."""
    return nullcontext() if is_composing() else LeafMode()


def refuse_graph() -> None:
    """Refuse operations in place where a graph is kept.

    Raises:
        RuntimeError: Inside `differentiable`.
    """
    if _mode.graph:
        raise RuntimeError("inside differentiable() operations in place are refused: write a = a + b instead of a += b")


def is_watched() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return in_transform() or bool(has_dispatch_mode())
