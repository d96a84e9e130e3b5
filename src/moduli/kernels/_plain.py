"""The function itself, tensor by tensor: the form that takes everything, and the meaning of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._graph import Graph

__all__ = ["apply_one", "compiled", "run_plain", "write"]

_HALF = (torch.float16, torch.bfloat16)


def apply_one(
    fn: Callable[..., Any],
    template: Sequence[Any],
    graph: Graph | None,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[Any],
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Call `fn` on one tensor per role: what it returns, and the roles it changed.

    Roles that the function changes are given as clones, so that nothing is changed before everything was computed.
    """
    shapes = {tensor.shape for tensor in tensors}
    changed = {role for role, _ in graph.mutated} if graph is not None else set(range(len(tensors)))
    roles = []
    for position, tensor in enumerate(tensors):
        value = tensor if len(shapes) == 1 else tensor.reshape(-1)
        if value.dtype in _HALF:
            value = value.float()
        if position in changed and value.dtype is tensor.dtype:
            value = value.clone()
        roles.append(value)
    # Numbers wrapped as torch wraps them in a trace; integer tensors promote by the kind of Python number instead.
    floating = any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)
    values: list[Any] = []
    remaining, numbers = iter(roles), iter(scalars)
    for mark in template:
        if mark == "role":
            values.append(next(remaining))
        elif mark == "scalar":
            number = next(numbers)
            values.append(torch.tensor(float(number), dtype=torch.float64, device="cpu") if floating else number)
        else:
            values.append(mark[1])
    result = fn(*values)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return results, {role: roles[role] for role in changed}


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Put a value where it belongs, in the shape it has there."""
    target.copy_(value if value.shape == target.shape else value.reshape(target.shape))


def run_plain(
    fn: Callable[..., Any],
    template: Sequence[Any],
    graphs: Callable[[int], Graph],
    lists: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Any],
    values_of: Callable[[Graph, list[torch.Tensor], dict[int, torch.Tensor]], list[torch.Tensor]],
    scalars: Sequence[Any],
    indices: Sequence[int],
    *,
    at_once: bool,
) -> None:
    """Run over these elements of the lists, in order.

    With `at_once` everything is computed before anything is written: for kinds of tensors whose operations may fail.
    """
    waiting: list[tuple[int, list[torch.Tensor]]] = []
    for i in indices:
        graph = graphs(i)
        returned, changed = apply_one(fn, template, graph, [tensors[i] for tensors in lists], scalars)
        waiting.append((i, values_of(graph, returned, changed)))
        if not at_once:
            _store(waiting.pop(), targets)
    for item in waiting:
        _store(item, targets)


def _store(item: tuple[int, list[torch.Tensor]], targets: Sequence[Any]) -> None:
    i, values = item
    # All values exist before the first is written, so results that overwrite arguments can't disturb each other.
    for target, value in zip(targets, values, strict=True):
        if isinstance(target, tuple):
            vector, offsets = target
            write(vector.narrow(0, offsets[i], value.numel()), value)
        elif target[i] is None:
            target[i] = value
        else:
            write(target[i], value)


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of a whole pass over lists, for accelerators, where one launch per tensor is the cost."""
    return torch.compile(step, dynamic=False)
