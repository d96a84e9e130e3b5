"""The form that defines the results of all others: the function itself, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._forms import Form, Work
from ._graph import Graph
from ._squares import collect_squares
from ._trace import fill_arguments, list_results

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Fused
    from ._plan import CallPlan

_HALF = (torch.float16, torch.bfloat16)


class PlainForm(Form):
    """The function itself; torch runs its operations."""

    name = "plain"
    sentence = "the function itself, tensor by tensor"

    def run(self, work: Work) -> bool:
        """Run the function over the tensors of a piece."""
        run_plain(work.request, work.plan, work.targets, work.piece.indices)
        return True


def run_plain(request: Request, plan: CallPlan, targets: Sequence[Any], indices: Sequence[int]) -> None:
    """Run the function over these elements of the lists, in order. A target of None is replaced by the value itself.

    For tensors whose operations may fail, everything is computed before anything is written.

    Args:
        request: The call.
        plan: Its plan.
        targets: For each output the tensors that it is written to.
        indices: The positions in the lists.
    """
    fused, marks = request.fused, request.marks
    for group in [[i] for i in indices] if plan.opaque is None else [indices]:
        computed = []
        for i in group:
            tensors = [role[i] for role in request.roles]
            graph = fused.trace(marks, tuple(tensor.dtype for tensor in tensors)).graph
            with collect_squares(None if request.squares is None else request.squares[i]):
                values = _apply(request, graph, tensors)
            computed.append([v.to(graph.nodes[node].dtype) for v, (node, _) in zip(values, graph.outputs, strict=True)])
        # All values exist before the first is written, so results that overwrite arguments can't disturb each other.
        for i, values in zip(group, computed, strict=True):
            for target, value in zip(targets, values, strict=True):
                if target[i] is None:
                    target[i] = value
                else:
                    target[i].copy_(value if value.shape == target[i].shape else value.reshape(target[i].shape))


def _apply(request: Request, graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of the graph, by a call of the function on one tensor per role.

    Roles that the function changes are passed as clones, so that nothing is changed before everything was computed.
    """
    shape = tensors[0].shape
    # A 0-d tensor would promote with scalars differently.
    alike = all(tensor.shape == shape for tensor in tensors) and shape != ()
    changed = [role for _, role in graph.outputs[: graph.mutated] if role is not None]
    roles = []
    for position, tensor in enumerate(tensors):
        value = tensor if alike else tensor.reshape(-1)
        if value.dtype in _HALF:
            value = value.float()
        elif position in changed:
            value = value.clone()
        roles.append(value)
    result = request.fused.fn(*fill_arguments(request.marks, roles, _wrap_numbers(request.scalars, tensors)))
    results = list_results(result)
    if not alike:
        results = [value.reshape(shape) for value in results]
    kinds = zip(results, graph.results, strict=True)
    return [roles[role] for role in changed] + [value for value, (kind, _) in kinds if kind == "output"]


def _wrap_numbers(scalars: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return numbers as a trace has them, 0-d doubles; integer tensors promote by the kind of Python number instead."""
    if not any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors):
        return scalars
    return [
        value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
        for value in scalars
    ]


def run_directly(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None) -> Any:
    """Return the result of the function itself, for torch.compile, torch.func and forward mode, which trace its operations.

    Args:
        fused: The function.
        args: Its arguments.
        out: As in a call; must be None.
        flat: As in a call.
        offsets: As in a call; must be None.
    """
    if out is not None or offsets is not None:
        raise ValueError(
            f"{fused.where} was called with out= or offsets= inside torch.compile or a torch.func transform; call it "
            "without, the transform decides where results live"
        )
    lists = [position for position, value in enumerate(args) if isinstance(value, list | tuple)]
    if not lists:
        raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
    columns: list[list[Any]] = []
    result: Any = None
    for i in range(len(args[lists[0]])):
        result = fused.fn(*(value[i] if position in lists else value for position, value in enumerate(args)))
        results = list(list_results(result))
        for position, name in enumerate(fused.inplace):
            if name is not None:
                results[position] = args[fused.names.index(name)][i].copy_(results[position])
        columns.append(results)
    gathered: list[Any] = [list(column) for column in zip(*columns, strict=True)]
    if flat:
        gathered = [torch.cat([value.reshape(-1) for value in column]) for column in gathered]
    return arrange_results(gathered, isinstance(result, torch.Tensor))


def arrange_results(values: Sequence[Any], single: bool) -> Any:
    """Return values as a function returns them: a single one itself, several as a tuple, None if there are none."""
    return values[0] if single else tuple(values) or None
