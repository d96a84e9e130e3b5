"""The function itself, tensor by tensor: the form that takes everything, and the meaning of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._graph import Graph

if TYPE_CHECKING:
    from ._fuse import Fused


_HALF = (torch.float16, torch.bfloat16)


def run_plain(
    fused: Fused,
    marks: Sequence[Any],
    graph_of: Callable[[int], Graph],
    lists: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Any],
    scalars: Sequence[Any],
    indices: Sequence[int],
    *,
    at_once: bool,
) -> None:
    """Run over these elements of the lists, in order. A target without a tensor is given the value itself.

    With `at_once` everything is computed before anything is written: for kinds of tensors whose operations may fail.
    """
    waiting: list[tuple[int, list[torch.Tensor]]] = []
    for i in indices:
        graph = graph_of(i)
        returned, changed = _apply(fused.fn, marks, graph, [tensors[i] for tensors in lists], scalars)
        values = []
        for slot in fused.slots(marks, graph):
            value = changed[slot.position] if slot.mutated else returned[slot.position].to(graph.nodes[slot.node].dtype)
            values.append(value)
        waiting.append((i, values))
        if not at_once:
            _store(*waiting.pop(), targets)
    for item in waiting:
        _store(*item, targets)


def _apply(
    fn: Callable[..., Any],
    marks: Sequence[Any],
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[Any],
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Call `fn` on one tensor per role: what it returns, and the roles it changed.

    Roles that the function changes are given as clones, so that nothing is changed before everything was computed.
    """
    shape = tensors[0].shape
    # A tensor without axes would promote with numbers as no other does.
    alike = all(tensor.shape == shape for tensor in tensors) and shape != ()
    changed = {role for role, _ in graph.mutated}
    roles = []
    for position, tensor in enumerate(tensors):
        value = tensor if alike else tensor.reshape(-1)
        if value.dtype in _HALF:
            value = value.float()
        if position in changed and value.dtype is tensor.dtype:
            value = value.clone()
        roles.append(value)
    # Numbers wrapped as torch wraps them in a trace; integer tensors promote by the kind of Python number instead.
    floating = any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)
    values: list[Any] = []
    remaining, numbers = iter(roles), iter(scalars)
    for mark in marks:
        if mark == "role":
            values.append(next(remaining))
        elif mark == "scalar":
            number = next(numbers)
            if floating and not isinstance(number, torch.Tensor):
                number = torch.tensor(float(number), dtype=torch.float64, device="cpu")
            values.append(number)
        else:
            values.append(mark[1])
    result = fn(*values)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    if not alike:
        results = [value.reshape(shape) for value in results]
    return results, {role: roles[role] for role in changed}


def _store(i: int, values: Sequence[torch.Tensor], targets: Sequence[Any]) -> None:
    # All values exist before the first is written, so results that overwrite arguments can't disturb each other.
    for target, value in zip(targets, values, strict=True):
        if target[i] is None:
            target[i] = value
        else:
            target[i].copy_(value if value.shape == target[i].shape else value.reshape(target[i].shape))


def run_directly(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None) -> Any:
    """The function itself, for torch.compile, torch.func and forward mode, which see its operations."""
    if out is not None or offsets is not None:
        raise ValueError(
            f"{fused.where} was called with out= or offsets= inside torch.compile or a torch.func transform; call it "
            "without, the transform decides where results live"
        )
    lists = [position for position, value in enumerate(args) if isinstance(value, list | tuple)]
    if not lists:
        raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
    columns: list[list[Any]] = []
    single = False
    for i in range(len(args[lists[0]])):
        values = [value[i] if position in lists else value for position, value in enumerate(args)]
        result = fused.fn(*values)
        single = isinstance(result, torch.Tensor)
        results = [] if result is None else [result] if single else list(result)
        for position, name in enumerate(fused.inplace):
            if name is not None:
                place = args[fused.names.index(name)][i]
                place.copy_(results[position])
                results[position] = place
        columns.append(results)
    gathered: list[Any] = [list(column) for column in zip(*columns, strict=True)]
    if flat:
        gathered = [torch.cat([value.reshape(-1) for value in column]) for column in gathered]
    return gathered[0] if single else tuple(gathered) if gathered else None
